// gemm, sm90_skinny path: bfloat16.
#include "gemm/sm90_skinny/kernel.cuh"

cuda_ops_status gemm_sm90_skinny_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_halves<__nv_bfloat16>(call, device, plan);
}
