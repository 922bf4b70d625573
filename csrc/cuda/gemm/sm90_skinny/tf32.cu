// gemm, sm90_skinny path: TF32.
#include "gemm/sm90_skinny/kernel.cuh"

cuda_ops_status gemm_sm90_skinny_tf32(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    return launch_tile<float, false, false>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
