// gemm, sm90_unaligned path: fp16.
#include "gemm/sm90_unaligned/kernel.cuh"

cuda_ops_status gemm_sm90_unaligned_float16(const GemmCall &call, GemmDevice, const GemmPlan &plan)
{
    return launch_orders<__half>(call, plan);
}
