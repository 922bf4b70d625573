// window_attention's mma path for float16.
#include "window_attention/mma/kernel.cuh"

cuda_ops_status window_attention_mma_float16(const WindowWork &work, bool backward, int64_t slots, cudaStream_t stream)
{
    return launch_window_attention<__half>(work, backward, slots, stream);
}
