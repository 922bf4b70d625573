// gemm, sm90 path: float16, A stored k x m.
#include "gemm/sm90/kernel.cuh"

cuda_ops_status gemm_sm90_float16_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_either_b<__half, true>(call, device, plan);
}
