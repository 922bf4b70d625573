// max_pool2d: output = max over the window, indices = the position of that maximum; grad_input[i] = sum of grad_output
// over the windows whose maximum is at i. A thread writes one output of a plane (forward), four columns of one
// (backward), or 16 bytes of channels of a pixel; backward gathers: it looks at the windows over what it writes, in a
// fixed order, and nothing is added by two threads. Bound by memory: forward reads the input once and writes 8 bytes of
// index beside each output; backward is the same the other way round (windows that overlap are read again, mostly from
// the caches). Element by element with 64-bit coordinates: what common/pool2d.cuh has no plan for.
#include "cuda_ops/max_pool2d.h"

#include "common/common.cuh"
#include "common/pool2d.cuh"

static constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS) max_pool2d_forward_planes_kernel(T *output, int64_t *indices, const T *input,
                                                                            const __grid_constant__ pool_plan plan)
{
    typedef accumulate_type<T> A;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<aligned_vector<T, 1>, false>(plan, i, plan.height.output, 1);
        const T *in = input + (uint32_t)(at.outer * plan.height.input) * (uint32_t)plan.width.input;
        const int32_t h_start = cuda_ops_pool_start(plan.height, at.h), w_start = cuda_ops_pool_start(plan.width, at.w);
        int32_t h_begin, h_end, w_begin, w_end;
        pool_taps(plan.height, h_start, &h_begin, &h_end);
        pool_taps(plan.width, w_start, &w_begin, &w_end);
        A best = -INFINITY;
        int32_t index = -1;
        if (h_begin < h_end && w_begin < w_end)
            index =
                (h_start + h_begin * plan.height.dilation) * plan.width.input + w_start + w_begin * plan.width.dilation;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int32_t offset =
                    (h_start + h * plan.height.dilation) * plan.width.input + w_start + w * plan.width.dilation;
                const A value = load_as_accumulate(in[offset]);
                if (value > best || value != value) {
                    best = value;
                    index = offset;
                }
            }
        output[i] = store_from_accumulate<T>(best);
        indices[i] = index;
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_forward_channels_kernel(T *output, int64_t *indices, const T *input,
                                       const __grid_constant__ pool_plan plan)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<V, true>(plan, i, plan.height.output, 1);
        const T *in =
            input + (uint32_t)(at.outer * plan.height.input * plan.width.input) * (uint32_t)plan.channels + at.channel;
        const int32_t h_start = cuda_ops_pool_start(plan.height, at.h), w_start = cuda_ops_pool_start(plan.width, at.w);
        int32_t h_begin, h_end, w_begin, w_end;
        pool_taps(plan.height, h_start, &h_begin, &h_end);
        pool_taps(plan.width, w_start, &w_begin, &w_end);
        int32_t first = -1;
        if (h_begin < h_end && w_begin < w_end)
            first =
                (h_start + h_begin * plan.height.dilation) * plan.width.input + w_start + w_begin * plan.width.dilation;
        A best[V::size];
        int32_t index[V::size];
#pragma unroll
        for (int e = 0; e < V::size; e++) {
            best[e] = -INFINITY;
            index[e] = first;
        }
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int32_t offset =
                    (h_start + h * plan.height.dilation) * plan.width.input + w_start + w * plan.width.dilation;
                const V values = *reinterpret_cast<const V *>(in + (uint32_t)offset * (uint32_t)plan.channels);
#pragma unroll
                for (int e = 0; e < V::size; e++) {
                    const A value = element_of(values, e);
                    if (value > best[e] || value != value) {
                        best[e] = value;
                        index[e] = offset;
                    }
                }
            }
        reinterpret_cast<V *>(output)[i] = vector_of<T>(best);
        longlong2 *const pairs = reinterpret_cast<longlong2 *>(indices) + (uint64_t)i * (V::size / 2);
#pragma unroll
        for (int e = 0; e < V::size; e += 2)
            pairs[e / 2] = make_longlong2(index[e], index[e + 1]);
    });
}

// whole_groups: rows are whole groups and so aligned, if the array is.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_backward_planes_kernel(T *grad_input, const T *grad_output, const int64_t *indices,
                                      const __grid_constant__ pool_plan plan, bool whole_groups)
{
    typedef accumulate_type<T> A;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<aligned_vector<T, 1>, false>(plan, i, plan.height.input, POOL_GROUP);
        const uint32_t base = (uint32_t)(at.outer * plan.height.output) * (uint32_t)plan.width.output;
        const int64_t position = at.h * plan.width.input + at.w;
        const int32_t left = plan.width.input - at.w, count = left < POOL_GROUP ? left : POOL_GROUP;
        int32_t h_begin, h_end, w_begin, w_end;
        pool_windows(plan.height, plan.by_stride_h, at.h, at.h, &h_begin, &h_end);
        pool_windows(plan.width, plan.by_stride_w, at.w, at.w + count - 1, &w_begin, &w_end);
        A sum[POOL_GROUP] = {};
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const uint32_t window = base + (uint32_t)(h * plan.width.output + w);
                const int64_t column = indices[window] - position;
                const A grad = load_as_accumulate(grad_output[window]);
#pragma unroll
                for (int e = 0; e < POOL_GROUP; e++)
                    if (column == e)
                        sum[e] += grad;
            }
        T *const out = grad_input + (uint32_t)(at.outer * plan.height.input) * (uint32_t)plan.width.input + position;
        if (whole_groups) {
            *reinterpret_cast<aligned_vector<T, POOL_GROUP> *>(out) = vector_of<T>(sum);
        } else {
#pragma unroll
            for (int e = 0; e < POOL_GROUP; e++)
                if (e < count)
                    out[e] = store_from_accumulate<T>(sum[e]);
        }
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_backward_channels_kernel(T *grad_input, const T *grad_output, const int64_t *indices,
                                        const __grid_constant__ pool_plan plan)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<V, true>(plan, i, plan.height.input, 1);
        const uint32_t base = (uint32_t)(at.outer * plan.height.output * plan.width.output);
        const int64_t position = at.h * plan.width.input + at.w;
        int32_t h_begin, h_end, w_begin, w_end;
        pool_windows(plan.height, plan.by_stride_h, at.h, at.h, &h_begin, &h_end);
        pool_windows(plan.width, plan.by_stride_w, at.w, at.w, &w_begin, &w_end);
        A sum[V::size] = {};
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const uint32_t window =
                    (base + (uint32_t)(h * plan.width.output + w)) * (uint32_t)plan.channels + (uint32_t)at.channel;
                const V grads = *reinterpret_cast<const V *>(grad_output + window);
#pragma unroll
                for (int e = 0; e < V::size; e += 2) {
                    const longlong2 pair = *reinterpret_cast<const longlong2 *>(indices + window + e);
                    if (pair.x == position)
                        sum[e] += element_of(grads, e);
                    if (pair.y == position)
                        sum[e + 1] += element_of(grads, e + 1);
                }
            }
        reinterpret_cast<V *>(grad_input)[i] = vector_of<T>(sum);
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_forward_kernel(T *output, int64_t *indices, const T *input, cuda_ops_pool2d pool, int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate(pool.channels_last, i, pool.channels, height.output, width.output);
        const int64_t step = pool.channels_last ? pool.channels : 1;
        const T *in = input + plane_base(pool.channels_last, at, pool.channels, height.input, width.input);
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

template <typename T>
__global__ void __launch_bounds__(THREADS)
    max_pool2d_backward_kernel(T *grad_input, const T *grad_output, const int64_t *indices, cuda_ops_pool2d pool,
                               int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate(pool.channels_last, i, pool.channels, height.input, width.input);
        const int64_t step = pool.channels_last ? pool.channels : 1;
        const int64_t base = plane_base(pool.channels_last, at, pool.channels, height.output, width.output);
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
    pool_plan plan;
    if (!plan_pool<T>(&plan, pool, true, is_aligned_16(output) && is_aligned_16(indices) && is_aligned_16(input))) {
        const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
        max_pool2d_forward_kernel<<<grid, THREADS, 0, stream>>>(output, indices, input, *pool, count);
        return launch_status();
    }
    const unsigned int grid = clamp_grid(ceil_div(plan.count, THREADS));
    if (pool->channels_last)
        max_pool2d_forward_channels_kernel<<<grid, THREADS, 0, stream>>>(output, indices, input, plan);
    else
        max_pool2d_forward_planes_kernel<<<grid, THREADS, 0, stream>>>(output, indices, input, plan);
    return launch_status();
}

template <typename T>
static cuda_ops_status max_pool2d_backward(T *grad_input, const T *grad_output, const int64_t *indices,
                                           const cuda_ops_pool2d *pool, cudaStream_t stream)
{
    const int64_t count = pool->batch * pool->channels * pool->height.input * pool->width.input;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output) && is_aligned_16(indices);
    pool_plan plan;
    if (!plan_pool<T>(&plan, pool, false, aligned)) {
        const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
        max_pool2d_backward_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, indices, *pool, count);
        return launch_status();
    }
    const unsigned int grid = clamp_grid(ceil_div(plan.count, THREADS));
    if (pool->channels_last)
        max_pool2d_backward_channels_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, indices, plan);
    else
        max_pool2d_backward_planes_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, indices, plan,
                                                                        aligned && plan.width.input % POOL_GROUP == 0);
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
