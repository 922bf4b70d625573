// max_pool2d: output = max over the window, indices = the position of that maximum; grad_input[i] = sum of grad_output
// over the windows whose maximum is at i. Maps one thread to one element written, in the order of memory, so that
// neighbours read neighbours in both layouts. backward gathers: each position looks at the windows over it, in a fixed
// order, and nothing is added by two threads. Bound by memory: forward reads the input once and writes 8 bytes of index
// beside each output; backward is the same the other way round (windows that overlap are read again, mostly from the
// caches).
#include "cuda_ops/max_pool2d.h"

#include "common/common.cuh"
#include "common/pool2d.cuh"

static constexpr int THREADS = 256;

template <typename T, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_forward_kernel(T *output, int64_t *indices, const T *input, cuda_ops_pool2d pool, int64_t count)
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
        A best = -INFINITY;
        int32_t index = -1;
        if (h_begin < h_end && w_begin < w_end)
            index = (h_start + h_begin * height.dilation) * width.input + w_start + w_begin * width.dilation;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int32_t offset = (h_start + h * height.dilation) * width.input + w_start + w * width.dilation;
                const A value = load_as_accumulate(in[offset * step]);
                if (value > best || value != value) {
                    best = value;
                    index = offset;
                }
            }
        output[i] = store_from_accumulate<T>(best);
        indices[i] = index;
    }
}

template <typename T, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_backward_kernel(T *grad_input, const T *grad_output, const int64_t *indices, cuda_ops_pool2d pool,
                               int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate<CHANNELS_LAST>(i, pool.channels, height.input, width.input);
        const int64_t step = CHANNELS_LAST ? pool.channels : 1;
        const int64_t base = plane_base<CHANNELS_LAST>(at, pool.channels, height.output, width.output);
        const int64_t position = (int64_t)at.h * width.input + at.w;
        const int32_t h_begin = cuda_ops_pool_first_window(height, at.h),
                      h_end = cuda_ops_pool_end_window(height, at.h);
        const int32_t w_begin = cuda_ops_pool_first_window(width, at.w), w_end = cuda_ops_pool_end_window(width, at.w);
        A sum = 0;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int64_t window = base + (h * width.output + w) * step;
                if (indices[window] == position)
                    sum += load_as_accumulate(grad_output[window]);
            }
        grad_input[i] = store_from_accumulate<T>(sum);
    }
}

template <typename T>
static cuda_ops_status max_pool2d_forward(T *output, int64_t *indices, const T *input, const cuda_ops_pool2d *pool,
                                          cudaStream_t stream)
{
    const int64_t count = pool->batch * pool->channels * pool->height.output * pool->width.output;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
    if (pool->channels_last)
        max_pool2d_forward_kernel<T, true><<<grid, THREADS, 0, stream>>>(output, indices, input, *pool, count);
    else
        max_pool2d_forward_kernel<T, false><<<grid, THREADS, 0, stream>>>(output, indices, input, *pool, count);
    return launch_status();
}

template <typename T>
static cuda_ops_status max_pool2d_backward(T *grad_input, const T *grad_output, const int64_t *indices,
                                           const cuda_ops_pool2d *pool, cudaStream_t stream)
{
    const int64_t count = pool->batch * pool->channels * pool->height.input * pool->width.input;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
    if (pool->channels_last)
        max_pool2d_backward_kernel<T, true>
            <<<grid, THREADS, 0, stream>>>(grad_input, grad_output, indices, *pool, count);
    else
        max_pool2d_backward_kernel<T, false>
            <<<grid, THREADS, 0, stream>>>(grad_input, grad_output, indices, *pool, count);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_max_pool2d_forward_cuda(void *output, int64_t *indices, const void *input,
                                                            const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
                                                            cuda_ops_stream stream)
{
    if (!cuda_ops_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(dtype, T, return max_pool2d_forward((T *)output, indices, (const T *)input, pool, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_max_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                             const int64_t *indices, const cuda_ops_pool2d *pool,
                                                             cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(dtype, T,
                      return max_pool2d_backward((T *)grad_input, (const T *)grad_output, indices, pool, stream));
    return CUDA_OPS_SUCCESS;
}
