// Rung 13: D = activation(alpha * op(A) op(B) + bias) by TMA and wgmma in clusters, with a persistent grid.
#include "common.cuh"
#include "gemm/hopper.cuh"
#include "gemm/rungs.h"

bool gemm_cluster_persistent_supports(const GemmCall &call, GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (device.capability != 90 || p.k == 0 || p.dtype == CUDA_OPS_FLOAT64)
        return false;
    if (p.dtype == CUDA_OPS_FLOAT32 && !p.allow_tf32)
        return false;
    const int64_t size = p.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    return map_possible(call.a, size, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p.batch, p.lda,
                        p.stride_a) &&
           map_possible(call.b, size, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k, p.batch, p.ldb, p.stride_b);
#else
    (void)call, (void)device;
    return false;
#endif
}

int64_t gemm_cluster_persistent_planned_workspace(const cuda_ops_gemm_problem &p, const GemmPlan &plan)
{
    return gemm_pieces_bytes(p, plan.splits) +
           (p.dtype == CUDA_OPS_FLOAT32 ? gemm_cluster_persistent_tf32_bytes(p) : 0);
}

cuda_ops_status gemm_cluster_persistent_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (call.problem.dtype) {
    case CUDA_OPS_BFLOAT16:
        return call.problem.transpose_a ? gemm_cluster_persistent_bfloat16_transposed(call, device, plan)
                                        : gemm_cluster_persistent_bfloat16(call, device, plan);
    case CUDA_OPS_FLOAT16:
        return call.problem.transpose_a ? gemm_cluster_persistent_float16_transposed(call, device, plan)
                                        : gemm_cluster_persistent_float16(call, device, plan);
    case CUDA_OPS_FLOAT32:
        return gemm_cluster_persistent_tf32(call, device, plan);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

int64_t gemm_cluster_persistent_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return gemm_cluster_persistent_planned_workspace(problem, gemm_cluster_persistent_plan(problem, device));
}

cuda_ops_status gemm_cluster_persistent(const GemmCall &call, GemmDevice device)
{
    return gemm_cluster_persistent_planned(call, device, gemm_cluster_persistent_plan(call.problem, device));
}
