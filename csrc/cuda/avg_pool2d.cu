// avg_pool2d: output = sum over the window / divisor; grad_input = sum over the windows of grad_output / divisor.
// Maps one thread to one element written, in the order of memory, so that neighbours read neighbours in both layouts.
// backward gathers from the windows over a position in a fixed order, so that nothing is added by two threads.
// Bound by memory: input and output moved once (windows that overlap are read again, mostly from the caches).
#include "cuda_ops/avg_pool2d.h"

#include "common/common.cuh"
#include "common/pool2d.cuh"

static constexpr int THREADS = 256;

// Divisor of the window that begins at row h_start and column w_start. Halves divide by a float: an integer above
// 2^24 is rounded, as the sum is.
__device__ __forceinline__ int64_t window_divisor(const cuda_ops_pool2d &pool, bool count_include_pad,
                                                  int64_t divisor_override, int32_t h_start, int32_t w_start)
{
    if (divisor_override != 0)
        return divisor_override;
    return (int64_t)cuda_ops_avg_pool_extent(pool.height, h_start, count_include_pad) *
           cuda_ops_avg_pool_extent(pool.width, w_start, count_include_pad);
}

template <typename T, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_forward_kernel(T *output, const T *input, cuda_ops_pool2d pool, bool count_include_pad,
                              int64_t divisor_override, int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate<CHANNELS_LAST>(i, pool.channels, height.output, width.output);
        const int64_t step = CHANNELS_LAST ? pool.channels : 1;
        const T *in = input + plane_base<CHANNELS_LAST>(at, pool.channels, height.input, width.input);
        const int32_t h_start = cuda_ops_pool_start(height, at.h), w_start = cuda_ops_pool_start(width, at.w);
        const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start),
                      h_end = cuda_ops_pool_end_tap(height, h_start);
        const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start), w_end = cuda_ops_pool_end_tap(width, w_start);
        A sum = 0;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++)
                sum += load_as_accumulate(in[((h_start + h) * width.input + w_start + w) * step]);
        output[i] = store_from_accumulate<T>(
            sum / (A)window_divisor(pool, count_include_pad, divisor_override, h_start, w_start));
    }
}

template <typename T, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_backward_kernel(T *grad_input, const T *grad_output, cuda_ops_pool2d pool, bool count_include_pad,
                               int64_t divisor_override, int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate<CHANNELS_LAST>(i, pool.channels, height.input, width.input);
        const int64_t step = CHANNELS_LAST ? pool.channels : 1;
        const int64_t base = plane_base<CHANNELS_LAST>(at, pool.channels, height.output, width.output);
        const int32_t h_begin = cuda_ops_pool_first_window(height, at.h),
                      h_end = cuda_ops_pool_end_window(height, at.h);
        const int32_t w_begin = cuda_ops_pool_first_window(width, at.w), w_end = cuda_ops_pool_end_window(width, at.w);
        A sum = 0;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int64_t divisor = window_divisor(pool, count_include_pad, divisor_override,
                                                       cuda_ops_pool_start(height, h), cuda_ops_pool_start(width, w));
                sum += load_as_accumulate(grad_output[base + (h * width.output + w) * step]) / (A)divisor;
            }
        grad_input[i] = store_from_accumulate<T>(sum);
    }
}

template <typename T>
static cuda_ops_status avg_pool2d_forward(T *output, const T *input, const cuda_ops_pool2d *pool,
                                          bool count_include_pad, int64_t divisor_override, cudaStream_t stream)
{
    const int64_t count = pool->batch * pool->channels * pool->height.output * pool->width.output;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
    if (pool->channels_last)
        avg_pool2d_forward_kernel<T, true>
            <<<grid, THREADS, 0, stream>>>(output, input, *pool, count_include_pad, divisor_override, count);
    else
        avg_pool2d_forward_kernel<T, false>
            <<<grid, THREADS, 0, stream>>>(output, input, *pool, count_include_pad, divisor_override, count);
    return launch_status();
}

template <typename T>
static cuda_ops_status avg_pool2d_backward(T *grad_input, const T *grad_output, const cuda_ops_pool2d *pool,
                                           bool count_include_pad, int64_t divisor_override, cudaStream_t stream)
{
    const int64_t count = pool->batch * pool->channels * pool->height.input * pool->width.input;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
    if (pool->channels_last)
        avg_pool2d_backward_kernel<T, true>
            <<<grid, THREADS, 0, stream>>>(grad_input, grad_output, *pool, count_include_pad, divisor_override, count);
    else
        avg_pool2d_backward_kernel<T, false>
            <<<grid, THREADS, 0, stream>>>(grad_input, grad_output, *pool, count_include_pad, divisor_override, count);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_avg_pool2d_forward_cuda(void *output, const void *input,
                                                            const cuda_ops_pool2d *pool, bool count_include_pad,
                                                            int64_t divisor_override, cuda_ops_dtype dtype,
                                                            cuda_ops_stream stream)
{
    if (!cuda_ops_pool2d_valid(pool) || pool->height.dilation != 1 || pool->width.dilation != 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(
        dtype, T,
        return avg_pool2d_forward((T *)output, (const T *)input, pool, count_include_pad, divisor_override, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_avg_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                             const cuda_ops_pool2d *pool, bool count_include_pad,
                                                             int64_t divisor_override, cuda_ops_dtype dtype,
                                                             cuda_ops_stream stream)
{
    if (!cuda_ops_pool2d_valid(pool) || pool->height.dilation != 1 || pool->width.dilation != 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(dtype, T,
                      return avg_pool2d_backward((T *)grad_input, (const T *)grad_output, pool, count_include_pad,
                                                 divisor_override, stream));
    return CUDA_OPS_SUCCESS;
}
