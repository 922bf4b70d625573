// window_attention's mma path for bfloat16.
#include "window_attention/mma/kernel.cuh"

cuda_ops_status window_attention_mma_bfloat16(const WindowWork &work, bool backward, int64_t slots, cudaStream_t stream)
{
    return launch_window_attention<__nv_bfloat16>(work, backward, slots, stream);
}
