// 16-bit tiles of the sm90 path in clusters of four and eight blocks. What bounds small tiles with a long k are the lines
// that an SM asks the L2 cache for, and a block of such a cluster asks for a quarter of one operand's and half or all of
// the other's. Fewer SMs than there are have room for them: 30 clusters of four, 15 of eight.
#ifndef CUDA_OPS_GEMM_SM90_LARGE_CLUSTERS_CUH
#define CUDA_OPS_GEMM_SM90_LARGE_CLUSTERS_CUH

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90/large_clusters.h"

template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_large_clusters(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                 M   N   cluster ping-pong stages
    case 22: return launch<Tile<T, 64, 64, 2, 4, true, 12, a_mn_major, b_mn_major>>(call, device, plan);
    case 23: return launch<Tile<T, 128, 80, 1, 4, false, b_mn_major ? 7 : 8, a_mn_major, b_mn_major, false, false, 1, true>>(call, device, plan);
    case 24: return launch<Tile<T, 128, 64, 2, 4, false, 8, a_mn_major, b_mn_major>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_large_clusters_of(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a)
        return p.transpose_b ? launch_large_clusters<T, true, false>(call, device, plan)
                             : launch_large_clusters<T, true, true>(call, device, plan);
    return p.transpose_b ? launch_large_clusters<T, false, false>(call, device, plan)
                         : launch_large_clusters<T, false, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
