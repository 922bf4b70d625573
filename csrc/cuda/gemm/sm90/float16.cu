// gemm, sm90 path: float16, A stored m x k.
#include "gemm/sm90/kernel.cuh"

cuda_ops_status gemm_sm90_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_either_b<__half, false>(call, device, plan);
}
