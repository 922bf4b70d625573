// gemm, sm90 path: bfloat16, A stored m x k.
#include "gemm/sm90/kernel.cuh"

cuda_ops_status gemm_sm90_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_either_b<__nv_bfloat16, false>(call, device, plan);
}
