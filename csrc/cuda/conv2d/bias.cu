// conv2d's bias gradient: grad_bias[o] = sum over n, y, x of grad_output[n][o][y][x].
//
// channels_last: pixels are rows, so that it is linear's sum over rows. Contiguous: planes are cut into runs of 4096
// pixels and blocks take one channel each, or, where that leaves the device idle, one split of a channel's runs; a warp
// sums a run at a time by loads of 16 bytes, eight in flight. The splits are added in order by a second kernel. Bound
// by memory: one read of grad_output.
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "conv2d/split_k.h"
#include "cuda_ops/conv2d.h"
#include "cuda_ops/linear.h"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
static constexpr int64_t RUN = 4096;
// Four or so for every multiprocessor of a large GPU; a constant, so that sums are split alike everywhere.
static constexpr int64_t WANTED_BLOCKS = 1024;

// partial[split][channel] = sum over the split's runs of pixels of contiguous grad_output. VECTOR elements a load: 16
// bytes, or one.
template <typename T, int VECTOR>
__global__ void conv2d_bias_kernel(accumulate_type<T> *partial, const T *grad_output, int64_t batch, int64_t channels,
                                   int64_t pixels, int64_t run, int64_t splits)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, VECTOR> V;
    constexpr int IN_FLIGHT = 8;
    __shared__ A scratch[WARP_SIZE];
    const int64_t runs_per_plane = ceil_div(pixels, run), runs = batch * runs_per_plane;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t block = blockIdx.x; block < channels * splits; block += gridDim.x) {
        const int64_t channel = block % channels, split = block / channels;
        A sum = 0;
        for (int64_t r = split + warp * splits; r < runs; r += WARPS * splits) {
            const int64_t image = r / runs_per_plane, begin = r % runs_per_plane * run;
            const int64_t end = begin + run < pixels ? begin + run : pixels;
            const T *const plane = grad_output + (image * channels + channel) * pixels + begin;
            const int count = (int)((end - begin) / VECTOR);
            for (int i = lane; i < count; i += IN_FLIGHT * WARP_SIZE) {
                V vectors[IN_FLIGHT];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    if (i + k * WARP_SIZE < count)
                        vectors[k] = *reinterpret_cast<const V *>(plane + (i + k * WARP_SIZE) * VECTOR);
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    if (i + k * WARP_SIZE < count)
#pragma unroll
                        for (int e = 0; e < VECTOR; e++)
                            sum += element_of(vectors[k], e);
            }
        }
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0)
            partial[block] = sum;
    }
}

// Not so many that a block's warps have no run each.
static int64_t splits_of(int64_t batch, int64_t channels, int64_t pixels)
{
    const int64_t most = ceil_div(batch * ceil_div(pixels, RUN), WARPS);
    const int64_t wanted = WANTED_BLOCKS / (channels > 0 ? channels : 1);
    return wanted < 1 || most < 1 ? 1 : wanted < most ? wanted : most;
}

template <typename T>
static cuda_ops_status launch(accumulate_type<T> *partial, const T *grad_output, int64_t batch, int64_t channels,
                              int64_t pixels, int64_t splits, cudaStream_t stream)
{
    constexpr int VECTOR = vector16<T>::size;
    static_assert(RUN % VECTOR == 0, "a run is whole vectors");
    const bool aligned = pixels % VECTOR == 0 && is_aligned_16(grad_output);
    launch_dependent(aligned ? conv2d_bias_kernel<T, VECTOR> : conv2d_bias_kernel<T, 1>,
                     dim3(clamp_grid(channels * splits)), THREADS, 0, stream, partial, grad_output, batch, channels,
                     pixels, RUN, splits);
    return launch_status();
}

extern "C" size_t cuda_ops_conv2d_backward_bias_workspace_cuda(int64_t batch, int64_t channels, int64_t pixels,
                                                               int channels_last, cuda_ops_dtype dtype)
{
    if (channels_last)
        return (size_t)cuda_ops_linear_backward_bias_workspace_cuda(batch * pixels, channels, dtype);
    const size_t element = dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
    return (size_t)(splits_of(batch, channels, pixels) * channels) * element;
}

extern "C" cuda_ops_status cuda_ops_conv2d_backward_bias_cuda(void *grad_bias, const void *grad_output, int64_t batch,
                                                              int64_t channels, int64_t pixels, int channels_last,
                                                              void *workspace, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    if (channels == 0)
        return CUDA_OPS_SUCCESS;
    if (channels_last)
        return cuda_ops_linear_backward_bias_cuda(grad_bias, grad_output, workspace, batch * pixels, channels, dtype,
                                                  dtype, stream);
    const int64_t splits = splits_of(batch, channels, pixels);
    cuda_ops_status status = CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(dtype, T,
                      status = launch((accumulate_type<T> *)workspace, (const T *)grad_output, batch, channels, pixels,
                                      splits, stream));
    return status != CUDA_OPS_SUCCESS ? status
                                      : conv2d_sum_splits(grad_bias, workspace, channels, splits, dtype, stream);
}
