// conv_bn_relu_pool for any sizes, with conv2d.h's convolution and batch_norm.h's statistics. What follows them, with
// scale = norm_weight / sqrt(variance + eps):
//     output[window] = max over the window of relu((conv_output - mean) * scale + norm_bias)
//     grad_conv_output = dz * scale + (conv_output - center) * slope + offset,  dz = grad_output at the argmax, else 0
// Forward: coefficients by channel, then a thread an output. Backward: partial sums of dz and dz * maximum from the
// pooled elements only; a warp a channel adds them in a fixed order, in double; then a thread an element of
// grad_conv_output gathers from the windows over it. No atomics: results repeat bitwise.
// Bound by memory at best: forward reads conv_output once and writes two values and a byte a window; backward reads
// these twice and conv_output once, and writes its gradient. Channels_last takes 16 bytes of channels a thread where
// common/pool2d.cuh has a plan; element by element, on an H200 with 1024 x 64 x 14 x 14 in bf16, forward reaches 0.22 of
// a copy's 4.3 TB/s and grad_conv_kernel 0.09 (benchmarks/notes/mnist.md).
#include "common/common.cuh"
#include "common/group_sums.cuh"
#include "common/pool2d.cuh"
#include "common/value.cuh"
#include "conv_bn_relu_pool/paths.h"
#include "cuda_ops/batch_norm.h"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
// The sums are split over at least so many blocks, if there is work for them, and further where a thread would add more
// than LONGEST_SUM values in float.
static constexpr int64_t WANTED_BLOCKS = 512;
static constexpr int64_t LONGEST_SUM = 64;

// How the sums are spread over `tiles` * `splits` blocks, `step` units each.
struct sums_partition {
    int lanes;             // neighbouring threads that read neighbouring elements
    int64_t tiles, splits; // planes: a tile is a channel; channels_last: `lanes` channels
    int64_t units, step;   // planes: images; channels_last: pixels
};

static sums_partition partition_of(const cuda_ops_pool2d &pool)
{
    const int64_t plane = (int64_t)pool.height.output * pool.width.output;
    const int64_t neighbours = pool.channels_last ? pool.channels : plane;
    sums_partition p;
    p.lanes = 1;
    while (p.lanes < WARP_SIZE && p.lanes < neighbours)
        p.lanes *= 2;
    const int64_t groups = THREADS / p.lanes;
    p.tiles = pool.channels_last ? ceil_div(pool.channels, p.lanes) : pool.channels;
    p.units = pool.channels_last ? pool.batch * plane : pool.batch;
    const int64_t values = pool.channels_last ? p.units * p.lanes : p.units * plane; // of a tile
    const int64_t to_fill = ceil_div(WANTED_BLOCKS, p.tiles);
    const int64_t to_stay_short = ceil_div(values, THREADS * LONGEST_SUM);
    const int64_t useful = ceil_div(p.units, pool.channels_last ? groups * 4 : groups);
    const int64_t wanted = to_fill > to_stay_short ? to_fill : to_stay_short;
    p.step = ceil_div(p.units, wanted < useful ? wanted : useful);
    p.splits = ceil_div(p.units, p.step);
    return p;
}

// The workspace: two doubles for each split and channel, then for each channel four coefficients with room for doubles.
static constexpr int PARTIAL = 2;
static constexpr int COEFFICIENTS = 4;

static void *coefficients_of(void *workspace, const sums_partition &p, int64_t channels)
{
    return (double *)workspace + p.splits * channels * PARTIAL;
}

static bool is_valid(const cuda_ops_pool2d &pool)
{
    return cuda_ops_pool2d_valid(&pool) && pool.height.dilation == 1 && pool.width.dilation == 1 &&
           (int64_t)pool.height.kernel * pool.width.kernel <= CUDA_OPS_POOL_LARGEST;
}

extern "C" int64_t cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(const cuda_ops_pool2d *pool)
{
    if (!is_valid(*pool) || pool->batch == 0 || pool->channels == 0)
        return 0;
    const sums_partition p = partition_of(*pool);
    return (p.splits * PARTIAL + COEFFICIENTS) * pool->channels * (int64_t)sizeof(double);
}

// center, scale and offset of z = (conv_output - center) * scale + offset. The mean is rounded to A; offset holds what
// the rounding left out.
template <typename A>
__global__ void prepare_forward_kernel(A *coefficients, cuda_ops_running_statistics running, const void *mean,
                                       const void *variance, cuda_ops_norm_parameters norm, int64_t channels,
                                       double unbiased, cuda_ops_dtype statistics_dtype)
{
    if (running.batches && global_thread_index() == 0)
        *running.batches += 1;
    for (int64_t c = global_thread_index(); c < channels; c += global_thread_count()) {
        const double m = load_value(mean, statistics_dtype, c), v = load_value(variance, statistics_dtype, c);
        const double scale = (norm.weight ? load_value(norm.weight, norm.dtype, c) : 1.0) / sqrt(v + norm.eps);
        const double shift = norm.bias ? load_value(norm.bias, norm.dtype, c) : 0.0;
        const A center = (A)m;
        coefficients[c] = center;
        coefficients[channels + c] = (A)scale;
        coefficients[2 * channels + c] = (A)(shift - (m - (double)center) * scale);
        if (running.mean) {
            const double old_mean = load_value(running.mean, running.dtype, c);
            const double old_variance = load_value(running.variance, running.dtype, c);
            store_value(running.mean, running.dtype, c, (1.0 - running.momentum) * old_mean + running.momentum * m);
            store_value(running.variance, running.dtype, c,
                        (1.0 - running.momentum) * old_variance + running.momentum * v * unbiased);
        }
    }
}

template <typename T, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    pool_kernel(T *output, uint8_t *argmax, T *maximum, const T *conv_output, const accumulate_type<T> *coefficients,
                cuda_ops_pool2d pool, int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate(CHANNELS_LAST, i, pool.channels, height.output, width.output);
        const int64_t c = CHANNELS_LAST ? at.channel : at.outer % pool.channels;
        const A center = coefficients[c], scale = coefficients[pool.channels + c],
                offset = coefficients[2 * pool.channels + c];
        const int64_t step = CHANNELS_LAST ? pool.channels : 1;
        const T *plane = conv_output + plane_base(CHANNELS_LAST, at, pool.channels, height.input, width.input);
        const int32_t h_start = cuda_ops_pool_start(height, at.h), w_start = cuda_ops_pool_start(width, at.w);
        const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start),
                      h_end = cuda_ops_pool_end_tap(height, h_start);
        const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start), w_end = cuda_ops_pool_end_tap(width, w_start);
        A best = -INFINITY;
        T raw = store_from_accumulate<T>(A(0));
        int32_t position = h_begin * width.kernel + w_begin;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const T y = plane[((h_start + h) * width.input + w_start + w) * step];
                const A z = (load_as_accumulate(y) - center) * scale + offset;
                if (z > best || z != z) {
                    best = z;
                    raw = y;
                    position = h * width.kernel + w;
                }
            }
        const bool inactive = best <= A(0);
        output[i] = store_from_accumulate<T>(inactive ? A(0) : best);
        if (argmax) {
            argmax[i] = (uint8_t)(inactive ? CUDA_OPS_POOL_INACTIVE : position);
            maximum[i] = raw;
        }
    }
}

// Coefficient `which` of the channels of a vector.
template <int COUNT, typename A>
__device__ __forceinline__ aligned_vector<A, COUNT> coefficients_at(const A *coefficients, int which,
                                                                    const pool_plan &plan, int32_t channel)
{
    return *reinterpret_cast<const aligned_vector<A, COUNT> *>(coefficients + which * plan.channels + channel);
}

// The same values by vectors of channels.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    pool_channels_kernel(T *output, uint8_t *argmax, T *maximum, const T *conv_output,
                         const accumulate_type<T> *coefficients, const __grid_constant__ pool_plan plan)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<V, true>(plan, i, plan.height.output, 1);
        const auto center = coefficients_at<V::size>(coefficients, 0, plan, at.channel),
                   scale = coefficients_at<V::size>(coefficients, 1, plan, at.channel),
                   offset = coefficients_at<V::size>(coefficients, 2, plan, at.channel);
        const T *image = conv_output +
                         (uint32_t)(at.outer * plan.height.input * plan.width.input) * (uint32_t)plan.channels +
                         at.channel;
        const int32_t h_start = cuda_ops_pool_start(plan.height, at.h), w_start = cuda_ops_pool_start(plan.width, at.w);
        int32_t h_begin, h_end, w_begin, w_end;
        pool_taps(plan.height, h_start, &h_begin, &h_end);
        pool_taps(plan.width, w_start, &w_begin, &w_end);
        A best[V::size], raw[V::size];
        int32_t position[V::size];
#pragma unroll
        for (int e = 0; e < V::size; e++) {
            best[e] = -INFINITY;
            raw[e] = A(0);
            position[e] = h_begin * plan.width.kernel + w_begin;
        }
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const uint32_t pixel = (uint32_t)((h_start + h) * plan.width.input + w_start + w);
                const V values = *reinterpret_cast<const V *>(image + pixel * (uint32_t)plan.channels);
#pragma unroll
                for (int e = 0; e < V::size; e++) {
                    const A y = element_of(values, e),
                            z = (y - center.element[e]) * scale.element[e] + offset.element[e];
                    if (z > best[e] || z != z) {
                        best[e] = z;
                        raw[e] = y;
                        position[e] = h * plan.width.kernel + w;
                    }
                }
            }
        aligned_vector<uint8_t, V::size> positions;
#pragma unroll
        for (int e = 0; e < V::size; e++) {
            const bool inactive = best[e] <= A(0);
            positions.element[e] = (uint8_t)(inactive ? CUDA_OPS_POOL_INACTIVE : position[e]);
            best[e] = inactive ? A(0) : best[e];
        }
        reinterpret_cast<V *>(output)[i] = vector_of<T>(best);
        if (argmax) {
            reinterpret_cast<aligned_vector<uint8_t, V::size> *>(argmax)[i] = positions;
            reinterpret_cast<V *>(maximum)[i] = vector_of<T>(raw);
        }
    });
}

// Sums of dz and of dz * (maximum - center) of one split of one channel.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sums_of_planes_kernel(double *partials, const T *grad_output, const uint8_t *argmax, const T *maximum,
                          const double *mean, int64_t channels, int64_t plane, sums_partition p)
{
    typedef accumulate_type<T> A;
    __shared__ A scratch[WARP_SIZE];
    const int64_t channel = blockIdx.x % channels, split = blockIdx.x / channels;
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = THREADS / p.lanes;
    const A center = (A)mean[channel];
    const int64_t end = split * p.step + p.step < p.units ? split * p.step + p.step : p.units;
    A sum = A(0), product = A(0);
    for (int64_t image = split * p.step + group; image < end; image += groups) {
        const int64_t base = (image * channels + channel) * plane;
        for (int64_t i = base + lane; i < base + plane; i += p.lanes) {
            const bool active = argmax[i] != CUDA_OPS_POOL_INACTIVE;
            const A dz = active ? load_as_accumulate(grad_output[i]) : A(0);
            sum += dz;
            product += dz * (load_as_accumulate(maximum[i]) - center);
        }
    }
    sum = block_sum(sum, scratch);
    product = block_sum(product, scratch);
    if (threadIdx.x == 0) {
        double *partial = partials + (split * channels + channel) * PARTIAL;
        partial[0] = (double)sum;
        partial[1] = (double)product;
    }
}

// The same of one split of `lanes` neighbouring channels, for channels_last.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sums_of_pixels_kernel(double *partials, const T *grad_output, const uint8_t *argmax, const T *maximum,
                          const double *mean, int64_t channels, sums_partition p)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[THREADS], products[THREADS];
    const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes, groups = THREADS / p.lanes;
    const int64_t channel = blockIdx.x % p.tiles * p.lanes + lane, split = blockIdx.x / p.tiles;
    const bool inside = channel < channels;
    const A center = inside ? (A)mean[channel] : A(0);
    const int64_t end = split * p.step + p.step < p.units ? split * p.step + p.step : p.units;
    A sum = A(0), product = A(0);
    // Threads beyond the last channel have no values, but take part in the barriers below.
#pragma unroll 4
    for (int64_t pixel = split * p.step + group; pixel < (inside ? end : 0); pixel += groups) {
        const int64_t i = pixel * channels + channel;
        const bool active = argmax[i] != CUDA_OPS_POOL_INACTIVE;
        const A dz = active ? load_as_accumulate(grad_output[i]) : A(0);
        sum += dz;
        product += dz * (load_as_accumulate(maximum[i]) - center);
    }
    sums[threadIdx.x] = sum;
    products[threadIdx.x] = product;
    add_groups(group, groups, [&](int half) {
        sums[threadIdx.x] += sums[threadIdx.x + half * p.lanes];
        products[threadIdx.x] += products[threadIdx.x + half * p.lanes];
    });
    if (group == 0 && inside) {
        double *partial = partials + (split * channels + channel) * PARTIAL;
        partial[0] = (double)sums[threadIdx.x];
        partial[1] = (double)products[threadIdx.x];
    }
}

template <typename A>
__global__ void prepare_backward_kernel(void *grad_norm_weight, void *grad_norm_bias, void *grad_bias, A *coefficients,
                                        const double *partials, const double *mean, const double *variance,
                                        cuda_ops_norm_parameters norm, int64_t channels, int64_t splits, double count,
                                        cuda_ops_dtype bias_dtype)
{
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t channel = global_thread_index() / WARP_SIZE; channel < channels;
         channel += global_thread_count() / WARP_SIZE) {
        double sum = 0.0, product = 0.0;
        for (int64_t split = lane; split < splits; split += WARP_SIZE) {
            const double *partial = partials + (split * channels + channel) * PARTIAL;
            sum += partial[0];
            product += partial[1];
        }
        sum = warp_sum(sum);
        product = warp_sum(product);
        if (lane != 0)
            continue;
        const double rstd = 1.0 / sqrt(variance[channel] + norm.eps);
        const double scale = (norm.weight ? load_value(norm.weight, norm.dtype, channel) : 1.0) * rstd;
        const A center = (A)mean[channel];
        const double rounding = mean[channel] - (double)center;
        const double dot = (product - rounding * sum) * rstd; // of dz with what is normalised
        const double slope = -scale * rstd * dot / count;
        coefficients[channel] = center;
        coefficients[channels + channel] = (A)scale;
        coefficients[2 * channels + channel] = (A)slope;
        coefficients[3 * channels + channel] = (A)(-scale * sum / count - slope * rounding);
        if (grad_norm_weight)
            store_value(grad_norm_weight, norm.dtype, channel, dot);
        if (grad_norm_bias)
            store_value(grad_norm_bias, norm.dtype, channel, sum);
        if (grad_bias)
            store_value(grad_bias, bias_dtype, channel, 0.0 * (sum + slope));
    }
}

template <typename T, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    grad_conv_kernel(T *grad_conv_output, const T *grad_output, const uint8_t *argmax, const T *conv_output,
                     const accumulate_type<T> *coefficients, cuda_ops_pool2d pool, int64_t count)
{
    typedef accumulate_type<T> A;
    const cuda_ops_pool_axis height = pool.height, width = pool.width;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const pool_position at = locate(CHANNELS_LAST, i, pool.channels, height.input, width.input);
        const int64_t c = CHANNELS_LAST ? at.channel : at.outer % pool.channels;
        const int64_t step = CHANNELS_LAST ? pool.channels : 1;
        const int64_t base = plane_base(CHANNELS_LAST, at, pool.channels, height.output, width.output);
        const int32_t h_begin = cuda_ops_pool_first_window(height, at.h),
                      h_end = cuda_ops_pool_end_window(height, at.h);
        const int32_t w_begin = cuda_ops_pool_first_window(width, at.w), w_end = cuda_ops_pool_end_window(width, at.w);
        A dz = A(0);
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const int64_t window = base + (h * width.output + w) * step;
                const int32_t here =
                    (at.h - cuda_ops_pool_start(height, h)) * width.kernel + at.w - cuda_ops_pool_start(width, w);
                if (argmax[window] == here)
                    dz += load_as_accumulate(grad_output[window]);
            }
        const A centered = load_as_accumulate(conv_output[i]) - coefficients[c];
        grad_conv_output[i] = store_from_accumulate<T>(dz * coefficients[pool.channels + c] +
                                                       centered * coefficients[2 * pool.channels + c] +
                                                       coefficients[3 * pool.channels + c]);
    }
}

// The same values by vectors of channels.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    grad_conv_channels_kernel(T *grad_conv_output, const T *grad_output, const uint8_t *argmax, const T *conv_output,
                              const accumulate_type<T> *coefficients, const __grid_constant__ pool_plan plan)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    for_places(plan, [&](uint32_t i) {
        const pool_place at = place_of<V, true>(plan, i, plan.height.input, 1);
        const V outputs = reinterpret_cast<const V *>(conv_output)[i];
        const uint32_t base = (uint32_t)(at.outer * plan.height.output * plan.width.output);
        int32_t h_begin, h_end, w_begin, w_end;
        pool_windows(plan.height, plan.by_stride_h, at.h, at.h, &h_begin, &h_end);
        pool_windows(plan.width, plan.by_stride_w, at.w, at.w, &w_begin, &w_end);
        A dz[V::size] = {};
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t w = w_begin; w < w_end; w++) {
                const uint32_t window =
                    (base + (uint32_t)(h * plan.width.output + w)) * (uint32_t)plan.channels + (uint32_t)at.channel;
                const V grads = *reinterpret_cast<const V *>(grad_output + window);
                const auto positions = *reinterpret_cast<const aligned_vector<uint8_t, V::size> *>(argmax + window);
                const int32_t here = (at.h - cuda_ops_pool_start(plan.height, h)) * plan.width.kernel + at.w -
                                     cuda_ops_pool_start(plan.width, w);
#pragma unroll
                for (int e = 0; e < V::size; e++)
                    if (positions.element[e] == here)
                        dz[e] += element_of(grads, e);
            }
        const auto center = coefficients_at<V::size>(coefficients, 0, plan, at.channel),
                   scale = coefficients_at<V::size>(coefficients, 1, plan, at.channel),
                   slope = coefficients_at<V::size>(coefficients, 2, plan, at.channel),
                   offset = coefficients_at<V::size>(coefficients, 3, plan, at.channel);
        A grads[V::size];
#pragma unroll
        for (int e = 0; e < V::size; e++)
            grads[e] = dz[e] * scale.element[e] + (element_of(outputs, e) - center.element[e]) * slope.element[e] +
                       offset.element[e];
        reinterpret_cast<V *>(grad_conv_output)[i] = vector_of<T>(grads);
    });
}

template <typename T>
static cuda_ops_status forward(T *output, uint8_t *argmax, T *maximum, void *workspace,
                               const cuda_ops_running_statistics *running, const T *conv_output, const void *mean,
                               const void *variance, const cuda_ops_norm_parameters &norm, const cuda_ops_pool2d &pool,
                               cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const cuda_ops_running_statistics none = {NULL, NULL, CUDA_OPS_FLOAT32, NULL, 0.0};
    const double values = (double)pool.batch * pool.height.input * pool.width.input;
    A *coefficients = (A *)workspace;
    prepare_forward_kernel<<<clamp_grid(ceil_div(pool.channels, THREADS)), THREADS, 0, stream>>>(
        coefficients, running ? *running : none, mean, variance, norm, pool.channels, values / (values - 1.0),
        statistics_dtype);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const bool aligned = is_aligned_16(output) && is_aligned_16(argmax) && is_aligned_16(maximum) &&
                         is_aligned_16(conv_output) && is_aligned_16(workspace);
    pool_plan plan;
    if (pool.channels_last && plan_pool<T>(&plan, &pool, /*forward=*/true, aligned)) {
        pool_channels_kernel<T><<<clamp_grid(ceil_div(plan.count, THREADS)), THREADS, 0, stream>>>(
            output, argmax, maximum, conv_output, coefficients, plan);
        return launch_status();
    }
    const int64_t count = pool.batch * pool.channels * pool.height.output * pool.width.output;
    const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
    if (pool.channels_last)
        pool_kernel<T, true>
            <<<grid, THREADS, 0, stream>>>(output, argmax, maximum, conv_output, coefficients, pool, count);
    else
        pool_kernel<T, false>
            <<<grid, THREADS, 0, stream>>>(output, argmax, maximum, conv_output, coefficients, pool, count);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(T *grad_conv_output, void *grad_norm_weight, void *grad_norm_bias, void *grad_bias,
                                void *workspace, const T *grad_output, const uint8_t *argmax, const T *maximum,
                                const T *conv_output, const double *mean, const double *variance,
                                const cuda_ops_norm_parameters &norm, const cuda_ops_pool2d &pool,
                                cuda_ops_dtype bias_dtype, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const sums_partition p = partition_of(pool);
    if (p.tiles > INT32_MAX / p.splits)
        return CUDA_OPS_INVALID_ARGUMENT;
    double *partials = (double *)workspace;
    A *coefficients = (A *)coefficients_of(workspace, p, pool.channels);
    const unsigned int blocks = (unsigned int)(p.tiles * p.splits);
    if (pool.channels_last)
        sums_of_pixels_kernel<<<blocks, THREADS, 0, stream>>>(partials, grad_output, argmax, maximum, mean,
                                                              pool.channels, p);
    else
        sums_of_planes_kernel<<<blocks, THREADS, 0, stream>>>(partials, grad_output, argmax, maximum, mean,
                                                              pool.channels,
                                                              (int64_t)pool.height.output * pool.width.output, p);
    cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    prepare_backward_kernel<<<clamp_grid(ceil_div(pool.channels, WARPS)), THREADS, 0, stream>>>(
        grad_norm_weight, grad_norm_bias, grad_bias, coefficients, partials, mean, variance, norm, pool.channels,
        p.splits, (double)pool.batch * pool.height.input * pool.width.input, bias_dtype);
    status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !grad_conv_output)
        return status;
    const bool aligned = is_aligned_16(grad_conv_output) && is_aligned_16(grad_output) && is_aligned_16(argmax) &&
                         is_aligned_16(conv_output) && is_aligned_16(workspace);
    pool_plan plan;
    if (pool.channels_last && plan_pool<T>(&plan, &pool, /*forward=*/false, aligned)) {
        grad_conv_channels_kernel<T><<<clamp_grid(ceil_div(plan.count, THREADS)), THREADS, 0, stream>>>(
            grad_conv_output, grad_output, argmax, conv_output, coefficients, plan);
        return launch_status();
    }
    const int64_t count = pool.batch * pool.channels * pool.height.input * pool.width.input;
    const unsigned int grid = clamp_grid(ceil_div(count, THREADS));
    if (pool.channels_last)
        grad_conv_kernel<T, true><<<grid, THREADS, 0, stream>>>(grad_conv_output, grad_output, argmax, conv_output,
                                                                coefficients, pool, count);
    else
        grad_conv_kernel<T, false><<<grid, THREADS, 0, stream>>>(grad_conv_output, grad_output, argmax, conv_output,
                                                                 coefficients, pool, count);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_conv_bn_relu_pool_pool_forward_cuda(
    void *output, uint8_t *argmax, void *maximum, void *workspace, const cuda_ops_running_statistics *running,
    const void *conv_output, const void *mean, const void *variance, const cuda_ops_norm_parameters *norm,
    const cuda_ops_pool2d *pool, cuda_ops_dtype dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream)
{
    if (!is_valid(*pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (pool->batch == 0 || pool->channels == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return forward((T *)output, argmax, (T *)maximum, workspace, running, (const T *)conv_output,
                                     mean, variance, *norm, *pool, statistics_dtype, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_conv_bn_relu_pool_pool_backward_cuda(
    void *grad_conv_output, void *grad_norm_weight, void *grad_norm_bias, void *grad_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const void *maximum, const void *conv_output, const double *mean,
    const double *variance, const cuda_ops_norm_parameters *norm, const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
    cuda_ops_dtype bias_dtype, cuda_ops_stream stream)
{
    if (!is_valid(*pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (pool->batch == 0 || pool->channels == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward((T *)grad_conv_output, grad_norm_weight, grad_norm_bias, grad_bias, workspace,
                                      (const T *)grad_output, argmax, (const T *)maximum, (const T *)conv_output, mean,
                                      variance, *norm, *pool, bias_dtype, stream));
    return CUDA_OPS_SUCCESS;
}

// The whole block

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t rounded_up(int64_t bytes)
{
    return ceil_div(bytes, 256) * 256;
}

// The convolution's output as batch_norm.h sees it.
struct NormSizes {
    int64_t outer, channels, inner;
};

static NormSizes norm_sizes(const cuda_ops_conv2d_sizes &s)
{
    const int64_t pixels = s.out_height * s.out_width;
    return s.output_channels_last ? NormSizes{s.batch * pixels, s.out_channels, 1}
                                  : NormSizes{s.batch, s.out_channels, pixels};
}

static int64_t conv_output_bytes(const ConvBlockCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes.conv;
    return rounded_up(s.batch * s.out_channels * s.out_height * s.out_width * dtype_size(call.dtype));
}

static int64_t conv_workspace(cuda_ops_conv2d_pass pass, const ConvBlockCall &call)
{
    return (int64_t)cuda_ops_conv2d_workspace_cuda(pass, &call.sizes.conv, call.dtype, CUDA_OPS_CONV2D_FASTEST);
}

// The steps run one after the other and share the workspace, behind the gradient of conv_output.
int64_t conv_bn_relu_pool_general_workspace(const ConvBlockCall &call, const Device &)
{
    const NormSizes norm = norm_sizes(call.sizes.conv);
    const int64_t pool = cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(&call.sizes.pool);
    const int64_t forward = larger(larger(conv_workspace(CUDA_OPS_CONV2D_FORWARD, call), pool),
                                   cuda_ops_batch_norm_workspace_cuda(norm.outer, norm.channels, norm.inner));
    const int64_t backward =
        conv_output_bytes(call) + larger(larger(conv_workspace(CUDA_OPS_CONV2D_BACKWARD_WEIGHT, call), pool),
                                         conv_workspace(CUDA_OPS_CONV2D_BACKWARD_INPUT, call));
    return larger(forward, backward);
}

static cuda_ops_status whole_forward(const ConvBlockCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes.conv;
    const NormSizes norm = norm_sizes(s);
    double *const mean = call.statistics, *const variance = mean + s.out_channels;
    cuda_ops_status status =
        cuda_ops_conv2d_forward_cuda(call.conv_output, call.input, call.weight, call.bias, &s, call.workspace,
                                     CUDA_OPS_CONV2D_FASTEST, call.dtype, call.stream);
    if (status == CUDA_OPS_SUCCESS)
        status = cuda_ops_batch_norm_forward_training_cuda(
            nullptr, mean, variance, call.workspace, nullptr, call.conv_output, nullptr, nullptr, norm.outer,
            norm.channels, norm.inner, call.norm->eps, call.dtype, call.dtype, call.stream);
    if (status == CUDA_OPS_SUCCESS)
        status = cuda_ops_conv_bn_relu_pool_pool_forward_cuda(
            call.output, call.argmax, call.maximum, call.workspace, call.running, call.conv_output, mean, variance,
            call.norm, &call.sizes.pool, call.dtype, CUDA_OPS_FLOAT64, call.stream);
    return status;
}

static cuda_ops_status whole_backward(const ConvBlockCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes.conv;
    void *const grad_conv_output = call.workspace, *const space = (char *)call.workspace + conv_output_bytes(call);
    cuda_ops_status status = cuda_ops_conv_bn_relu_pool_pool_backward_cuda(
        grad_conv_output, call.grad_norm_weight, call.grad_norm_bias, call.grad_bias, space, call.grad_output,
        call.argmax, call.maximum, call.conv_output, call.statistics, call.statistics + s.out_channels, call.norm,
        &call.sizes.pool, call.dtype, call.weight_dtype, call.stream);
    if (status == CUDA_OPS_SUCCESS)
        status = cuda_ops_conv2d_backward_weight_cuda(call.grad_weight, grad_conv_output, call.input, &s, space,
                                                      CUDA_OPS_CONV2D_FASTEST, call.dtype, call.stream);
    if (status == CUDA_OPS_SUCCESS && call.grad_input)
        status = cuda_ops_conv2d_backward_input_cuda(call.grad_input, grad_conv_output, call.weight, &s, space,
                                                     CUDA_OPS_CONV2D_FASTEST, call.dtype, call.stream);
    return status;
}

Answer conv_bn_relu_pool_general_supports(const ConvBlockCall &, const Device &)
{
    return YES;
}

cuda_ops_status conv_bn_relu_pool_general(const ConvBlockCall &call, const Device &)
{
    if (call.weight_dtype != call.dtype)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return call.backward ? whole_backward(call) : whole_forward(call);
}
