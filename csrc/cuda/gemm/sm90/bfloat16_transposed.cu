// gemm, sm90 path: bfloat16, A stored k x m.
#include "gemm/sm90/kernel.cuh"

cuda_ops_status gemm_sm90_bfloat16_transposed(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_either_b<__nv_bfloat16, true>(call, device, plan);
}
