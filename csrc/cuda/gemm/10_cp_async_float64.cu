// gemm, rung 10 in float64: see 10_cp_async.cu. A vector of 16 bytes is two elements, and a thread's tile 8 x 4.
#include "gemm/10_cp_async.cuh"
#include "gemm/simt.cuh"

typedef SimtTile<4, 2, 1, 4, 8, 4, 16, 3, 1, 1> Large; // 128 x 64
typedef SimtTile<1, 1, 4, 4, 8, 4, 16, 3, 2, 1> Small; // 32 x 32
static const SimtChoice CHOICES[] = {{Large::M, Large::N, 1, 1}, {Small::M, Small::N, 0.5, 0.7}};

int64_t gemm_cp_async_float64_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return simt_workspace(problem, simt_plan(CHOICES, problem, device).pieces);
}

cuda_ops_status gemm_cp_async_float64(const GemmCall &call, GemmDevice device)
{
    const SimtPlan plan = simt_plan(CHOICES, call.problem, device);
    if (!simt_takes_vectors<double>(call))
        return simt_launch<double, Small, 1>(call, plan.pieces);
    return plan.tile == 0 ? simt_launch<double, Large, 2>(call, plan.pieces)
                          : simt_launch<double, Small, 2>(call, plan.pieces);
}
