// gemm, sm90_unaligned path: bf16.
#include "gemm/sm90_unaligned/kernel.cuh"

cuda_ops_status gemm_sm90_unaligned_bfloat16(const GemmCall &call, GemmDevice, const GemmPlan &plan)
{
    return launch_orders<__nv_bfloat16>(call, plan);
}
