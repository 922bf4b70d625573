// gemm, sm90_shared_k path: fp16.
#include "gemm/sm90_shared_k/kernel.cuh"

cuda_ops_status gemm_sm90_shared_k_float16(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return launch_orders<__half>(call, device, plan);
}
