// gemm, sm90 path: products with gelu behind them, in float16; the kernel is in gemm/sm90/gelu.cuh.
#include "gemm/sm90/gelu.cuh"

cuda_ops_status gemm_sm90_gelu_forward_float16(const GemmCall &call, GemmDevice device)
{
    return launch_gelu_forward_of<__half>(call, device);
}

cuda_ops_status gemm_sm90_gelu_backward_float16(const GemmCall &call, GemmDevice device, const void *preactivation)
{
    return launch_gelu_backward_of<__half>(call, device, preactivation);
}
