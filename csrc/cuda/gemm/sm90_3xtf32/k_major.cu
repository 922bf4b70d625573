// gemm, sm90_3xtf32 path: A stored m x k; see gemm/sm90_3xtf32/sm90_3xtf32.cu.
#include "gemm/sm90_3xtf32/kernel.cuh"

cuda_ops_status gemm_sm90_3xtf32_k_major(const GemmCall &call, const SplitOperand &b, GemmDevice device,
                                         const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    return launch_split_tiles<false>(call, b, device, plan);
#else
    (void)call, (void)b, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
