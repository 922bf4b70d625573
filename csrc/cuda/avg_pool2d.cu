// avg_pool2d: output = sum over the window / divisor; grad_input = sum over the windows of grad_output / divisor.
// A thread writes one output of a plane (forward), four columns of one (backward), or 16 bytes of channels of a pixel.
// backward gathers from the windows over what it writes, in a fixed order, so that nothing is added by two threads.
// Bound by memory: input and output moved once (windows that overlap are read again, mostly from the caches). Element by
// element with 64-bit coordinates: what common/pool2d.cuh has no plan for.
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

// What the sums are divided by.
struct divisor_rule {
    int64_t override; // 0: none
    bool count_include_pad;
};

template <typename A>
__device__ __forceinline__ A divisor_of(const pool_plan &plan, const divisor_rule &rule, int32_t h_start,
                                        int32_t w_start)
{
    if (rule.override != 0)
        return (A)rule.override;
    return (A)((int64_t)cuda_ops_avg_pool_extent(plan.height, h_start, rule.count_include_pad) *
               cuda_ops_avg_pool_extent(plan.width, w_start, rule.count_include_pad));
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_forward_planes_kernel(T *output, const T *input, const __grid_constant__ pool_plan plan,
                                     divisor_rule rule)
{
    typedef accumulate_type<T> A;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<aligned_vector<T, 1>, false>(plan, i, plan.height.output, 1);
        const T *in = input + (uint32_t)(at.outer * plan.height.input) * (uint32_t)plan.width.input;
        const int32_t h_start = cuda_ops_pool_start(plan.height, at.h), w_start = cuda_ops_pool_start(plan.width, at.w);
        int32_t h_begin, h_end, w_begin, w_end;
        pool_taps(plan.height, h_start, &h_begin, &h_end);
        pool_taps(plan.width, w_start, &w_begin, &w_end);
        A sum = 0;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++)
                sum += load_as_accumulate(in[(h_start + h) * plan.width.input + w_start + w]);
        output[i] = store_from_accumulate<T>(sum / divisor_of<A>(plan, rule, h_start, w_start));
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_forward_channels_kernel(T *output, const T *input, const __grid_constant__ pool_plan plan,
                                       divisor_rule rule)
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
        A sum[V::size] = {};
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int32_t offset = (h_start + h) * plan.width.input + w_start + w;
                const V values = *reinterpret_cast<const V *>(in + (uint32_t)offset * (uint32_t)plan.channels);
#pragma unroll
                for (int e = 0; e < V::size; e++)
                    sum[e] += element_of(values, e);
            }
        const A divisor = divisor_of<A>(plan, rule, h_start, w_start);
#pragma unroll
        for (int e = 0; e < V::size; e++)
            sum[e] /= divisor;
        reinterpret_cast<V *>(output)[i] = vector_of<T>(sum);
    });
}

// whole_groups: rows are whole groups and so aligned, if the array is.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_backward_planes_kernel(T *grad_input, const T *grad_output, const __grid_constant__ pool_plan plan,
                                      divisor_rule rule, bool whole_groups)
{
    typedef accumulate_type<T> A;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<aligned_vector<T, 1>, false>(plan, i, plan.height.input, POOL_GROUP);
        const uint32_t base = (uint32_t)(at.outer * plan.height.output) * (uint32_t)plan.width.output;
        const int32_t left = plan.width.input - at.w, count = left < POOL_GROUP ? left : POOL_GROUP;
        int32_t h_begin, h_end, w_begin, w_end;
        pool_windows(plan.height, plan.by_stride_h, at.h, at.h, &h_begin, &h_end);
        pool_windows(plan.width, plan.by_stride_w, at.w, at.w + count - 1, &w_begin, &w_end);
        A sum[POOL_GROUP] = {};
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int32_t w_start = cuda_ops_pool_start(plan.width, w);
                const A divisor = divisor_of<A>(plan, rule, cuda_ops_pool_start(plan.height, h), w_start);
                const A share = load_as_accumulate(grad_output[base + (uint32_t)(h * plan.width.output + w)]) / divisor;
#pragma unroll
                for (int e = 0; e < POOL_GROUP; e++)
                    if (w_start <= at.w + e && at.w + e < w_start + plan.width.kernel)
                        sum[e] += share;
            }
        T *const out = grad_input + (uint32_t)(at.outer * plan.height.input + at.h) * (uint32_t)plan.width.input + at.w;
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
    avg_pool2d_backward_channels_kernel(T *grad_input, const T *grad_output, const __grid_constant__ pool_plan plan,
                                        divisor_rule rule)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<V, true>(plan, i, plan.height.input, 1);
        const uint32_t base = (uint32_t)(at.outer * plan.height.output * plan.width.output);
        int32_t h_begin, h_end, w_begin, w_end;
        pool_windows(plan.height, plan.by_stride_h, at.h, at.h, &h_begin, &h_end);
        pool_windows(plan.width, plan.by_stride_w, at.w, at.w, &w_begin, &w_end);
        A sum[V::size] = {};
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const uint32_t window =
                    (base + (uint32_t)(h * plan.width.output + w)) * (uint32_t)plan.channels + (uint32_t)at.channel;
                const V grads = *reinterpret_cast<const V *>(grad_output + window);
                const A divisor =
                    divisor_of<A>(plan, rule, cuda_ops_pool_start(plan.height, h), cuda_ops_pool_start(plan.width, w));
#pragma unroll
                for (int e = 0; e < V::size; e++)
                    sum[e] += element_of(grads, e) / divisor;
            }
        reinterpret_cast<V *>(grad_input)[i] = vector_of<T>(sum);
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_forward_kernel(T *output, const T *input, cuda_ops_pool2d pool, bool count_include_pad,
                              int64_t divisor_override, int64_t count)
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
        A sum = 0;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++)
                sum += load_as_accumulate(in[((h_start + h) * width.input + w_start + w) * step]);
        output[i] = store_from_accumulate<T>(
            sum / (A)window_divisor(pool, count_include_pad, divisor_override, h_start, w_start));
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    avg_pool2d_backward_kernel(T *grad_input, const T *grad_output, cuda_ops_pool2d pool, bool count_include_pad,
                               int64_t divisor_override, int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate(pool.channels_last, i, pool.channels, height.input, width.input);
        const int64_t step = pool.channels_last ? pool.channels : 1;
        const int64_t base = plane_base(pool.channels_last, at, pool.channels, height.output, width.output);
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
    pool_plan plan;
    if (!plan_pool<T>(&plan, pool, true, is_aligned_16(output) && is_aligned_16(input))) {
        avg_pool2d_forward_kernel<<<clamp_grid(ceil_div(count, THREADS)), THREADS, 0, stream>>>(
            output, input, *pool, count_include_pad, divisor_override, count);
        return launch_status();
    }
    const divisor_rule rule = {divisor_override, count_include_pad};
    const unsigned int grid = clamp_grid(ceil_div(plan.count, THREADS));
    if (pool->channels_last)
        avg_pool2d_forward_channels_kernel<<<grid, THREADS, 0, stream>>>(output, input, plan, rule);
    else
        avg_pool2d_forward_planes_kernel<<<grid, THREADS, 0, stream>>>(output, input, plan, rule);
    return launch_status();
}

template <typename T>
static cuda_ops_status avg_pool2d_backward(T *grad_input, const T *grad_output, const cuda_ops_pool2d *pool,
                                           bool count_include_pad, int64_t divisor_override, cudaStream_t stream)
{
    const int64_t count = pool->batch * pool->channels * pool->height.input * pool->width.input;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output);
    pool_plan plan;
    if (!plan_pool<T>(&plan, pool, false, aligned)) {
        avg_pool2d_backward_kernel<<<clamp_grid(ceil_div(count, THREADS)), THREADS, 0, stream>>>(
            grad_input, grad_output, *pool, count_include_pad, divisor_override, count);
        return launch_status();
    }
    const divisor_rule rule = {divisor_override, count_include_pad};
    const unsigned int grid = clamp_grid(ceil_div(plan.count, THREADS));
    if (pool->channels_last)
        avg_pool2d_backward_channels_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, plan, rule);
    else
        avg_pool2d_backward_planes_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, plan, rule,
                                                                        aligned && plan.width.input % POOL_GROUP == 0);
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
