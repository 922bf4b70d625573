// conv2d's mma path: backward_weight.
#include "conv2d/mma/kernel.cuh"

template <typename T, int M>
static cuda_ops_status launch(const MmaWeight &work, dim3 grid, cudaStream_t stream)
{
    constexpr int bytes = MMA_STAGES * (M + 128 + 2 * MMA_PAD) * 64;
    cudaFuncSetAttribute(conv2d_mma_weight_kernel<T, M>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    launch_dependent(conv2d_mma_weight_kernel<T, M>, grid, MMA_THREADS, bytes, stream, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_tile(const MmaWeight &work, int tile, dim3 grid, cudaStream_t stream)
{
    return tile == 128 ? launch<T, 128>(work, grid, stream) : launch<T, 64>(work, grid, stream);
}

cuda_ops_status conv2d_mma_weight(const MmaWeight &work, int tile, dim3 grid, cuda_ops_dtype dtype, cudaStream_t stream)
{
    switch (dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch_tile<__nv_bfloat16>(work, tile, grid, stream);
    case CUDA_OPS_FLOAT16:
        return launch_tile<__half>(work, tile, grid, stream);
    case CUDA_OPS_FLOAT32:
        return launch_tile<float>(work, tile, grid, stream);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
