// conv2d's mma path: forward and backward_input.
#include "conv2d/mma/kernel.cuh"

template <typename T>
static cuda_ops_status launch(const MmaForward &work, int tile, dim3 grid, cudaStream_t stream)
{
    const int bytes = MMA_STAGES * (128 + tile) * 64;
    const auto kernel = tile == 128 ? conv2d_mma_forward_kernel<T, 128> : conv2d_mma_forward_kernel<T, 64>;
    allow_shared_memory(kernel, bytes);
    launch_dependent(kernel, grid, MMA_THREADS, (size_t)bytes, stream, work);
    return launch_status();
}

cuda_ops_status conv2d_mma_forward(const MmaForward &work, int tile, dim3 grid, cuda_ops_dtype dtype,
                                   cudaStream_t stream)
{
    switch (dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16>(work, tile, grid, stream);
    case CUDA_OPS_FLOAT16:
        return launch<__half>(work, tile, grid, stream);
    case CUDA_OPS_FLOAT32:
        return launch<float>(work, tile, grid, stream);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
