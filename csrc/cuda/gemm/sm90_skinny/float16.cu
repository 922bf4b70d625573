// gemm, sm90_skinny path: float16.
#include "gemm/sm90_skinny/kernel.cuh"

cuda_ops_status gemm_sm90_skinny_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_halves<__half>(call, device, plan);
}
