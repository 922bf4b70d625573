// gemm, sm90_shared_k path: bf16.
#include "gemm/sm90_shared_k/kernel.cuh"

cuda_ops_status gemm_sm90_shared_k_bfloat16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_orders<__nv_bfloat16>(call, device, plan);
}
