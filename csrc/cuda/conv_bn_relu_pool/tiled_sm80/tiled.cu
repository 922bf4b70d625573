// conv_bn_relu_pool in float32 by tiles: conv 3x3 (padding 1) -> batch norm (training) -> ReLU -> max pool 2x2, for
// numbers of channels that are multiples of 8, from 16 to 128, and any image size; TF32 on tensor cores (wgmma on
// Hopper, else mma.sync) where that is allowed, else on CUDA cores, by Winograd's algorithm where that is.
// Forward: convolve (convolve.cu) makes y, channels_last, and its statistics by block; prepare adds these in double, a
// warp a channel; pool has a thread for four channels of a window, of which wgmma's convolve has taken the maximum
// already (activate). Backward: sums of dz and dz * maximum by channel; prepare adds them: dy = scale * dz + slope * y +
// offset; weight (backward_weight.cu) and convolve make both gradients from dy, which is made while y is loaded, and
// which weight stores for convolve in winograd.cu and the files for sm90; backward_sm90.cu makes both of small images.
// sum adds the blocks' gradients of weight. The order of sums follows from the sizes and the number of multiprocessors:
// results repeat bitwise. Bound by arithmetic in float32, by memory in TF32 on Hopper, small batches by latency
// (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/tiled_sm80/tile.cuh"

#include "common/fast_division.cuh"
#include "common/value.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
// Pooling: a block takes RUN windows of GROUP channels at a time, a thread four channels of every 16th window.
static constexpr int GROUP = 64, RUN = 64, VECTORS = GROUP / 4, PITCH = GROUP + 1;
static constexpr int APART = THREADS / VECTORS, EACH = RUN / APART;
static constexpr int BLOCKS_A_PROCESSOR = 4;

static tiled_problem problem_of(const cuda_ops_conv_bn_relu_pool_tiled_sizes &s)
{
    tiled_problem p = {};
    p.batch = s.batch;
    p.in_channels = s.in_channels, p.out_channels = s.out_channels;
    p.height = s.height, p.width = s.width;
    p.pooled_height = s.height / 2, p.pooled_width = s.width / 2;
    p.tf32 = s.allow_tf32 != 0;
    p.wgmma = p.tf32 && wgmma_convolve_fits(p);
    p.wgmma_weight = p.tf32 && wgmma_weight_fits(p);
    p.wgmma_gradient = p.wgmma_weight && wgmma_gradient_fits(p); // which reads what that has stored
    p.wgmma_backward = p.wgmma_weight && p.wgmma_gradient && wgmma_backward_fits(p);
    p.winograd = !p.tf32 && s.allow_winograd && winograd_fits(p);
    return p;
}

static bool is_valid(const cuda_ops_conv_bn_relu_pool_tiled_sizes &s)
{
    return s.batch >= 0 && s.in_channels > 0 && s.out_channels > 0 && s.in_channels % 4 == 0 &&
           s.out_channels % 4 == 0 && s.height >= 2 && s.width >= 2 && (int64_t)s.height * s.width <= INT32_MAX;
}

Answer conv_bn_relu_pool_tiled_supports(const ConvBlockCall &call, const Device &device)
{
    const cuda_ops_conv2d_sizes &c = call.sizes.conv;
    // With fewer channels the depth of 32 would be mostly zeros; with more the weights are reloaded for every tile.
    const auto fits = [](int64_t channels) { return channels >= 16 && channels <= 128 && channels % 8 == 0; };
    if (call.dtype != CUDA_OPS_FLOAT32)
        return no("takes only float32");
    if (!fits(c.in_channels) || !fits(c.out_channels))
        return no("numbers of channels are not multiples of 8 from 16 to 128");
    if (c.in_height < 2 || c.in_width < 2 || c.in_height > INT32_MAX || c.in_width > INT32_MAX ||
        c.in_height * c.in_width > INT32_MAX)
        return no("images have fewer than 2 x 2 pixels, or 2^31 or more");
    return device.shared_bytes >= tiled_convolve_shared_bytes(1) + 4096
               ? YES
               : no("needs 160 KB of shared memory a block"); // more than Turing has
}

// Hands out the parts of a workspace, each at a multiple of 256 bytes.
struct workspace_parts {
    unsigned char *start;
    int64_t bytes;

    template <typename T>
    T *take(int64_t count)
    {
        T *const part = reinterpret_cast<T *>(start + bytes);
        bytes += ceil_div(count * (int64_t)sizeof(T), 256) * 256;
        return part;
    }
};

struct forward_workspace {
    batch_moments moments;
    float *coefficients; // scale and shift by channel
    int64_t bytes;
};

static forward_workspace forward_parts(void *workspace, const tiled_problem &p)
{
    const int64_t blocks = tiled_convolve_blocks(p, false);
    workspace_parts parts = {(unsigned char *)workspace, 0};
    forward_workspace w;
    w.moments.partial = parts.take<float2>(blocks * p.out_channels);
    w.moments.pixels = parts.take<double>(blocks);
    w.coefficients = parts.take<float>(2 * (int64_t)p.out_channels);
    w.bytes = parts.bytes;
    return w;
}

struct backward_workspace {
    float2 *sums;        // [blocks][out_channels]
    float *coefficients; // scale, slope and offset by channel
    float *grad_pooled;  // channels_last
    float4 *weights;
    float *made; // dy, channels_last, where the gradient of input reads it
    int64_t bytes;
};

static int64_t runs_of(const tiled_problem &p)
{
    return p.batch * ceil_div((int64_t)p.pooled_height * p.pooled_width, RUN);
}

static int64_t groups_of(const tiled_problem &p)
{
    return ceil_div(p.out_channels, GROUP);
}

// Blocks for each group of channels.
static int64_t pooling_blocks(const tiled_problem &p)
{
    const int64_t runs = runs_of(p), blocks = BLOCKS_A_PROCESSOR * tiled_blocks(runs, groups_of(p));
    return blocks < runs ? blocks : runs;
}

static backward_workspace backward_parts(void *workspace, const tiled_problem &p, bool channels_last)
{
    workspace_parts parts = {(unsigned char *)workspace, 0};
    backward_workspace w;
    w.sums = parts.take<float2>(pooling_blocks(p) * p.out_channels);
    w.coefficients = parts.take<float>(3 * (int64_t)p.out_channels);
    w.weights = parts.take<float4>(tiled_weight_workspace(p) / (int64_t)sizeof(float4));
    w.made = p.winograd || (p.wgmma_gradient && !p.wgmma_backward)
                 ? parts.take<float>(p.batch * p.height * p.width * p.out_channels)
                 : nullptr;
    w.grad_pooled = parts.take<float>(channels_last ? 0 : p.batch * p.out_channels * p.pooled_height * p.pooled_width);
    w.bytes = parts.bytes;
    return w;
}

int64_t conv_bn_relu_pool_tiled_workspace(const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes)
{
    if (!is_valid(*sizes) || sizes->batch == 0)
        return 0;
    const tiled_problem p = problem_of(*sizes);
    const int64_t forward = forward_parts(nullptr, p).bytes;
    const int64_t backward = backward_parts(nullptr, p, sizes->output_channels_last != 0).bytes;
    return forward > backward ? forward : backward;
}

__global__ void __launch_bounds__(THREADS)
    prepare_forward_kernel(float *coefficients, double *statistics, cuda_ops_running_statistics running,
                           batch_moments moments, int blocks, cuda_ops_norm_parameters norm, const void *bias,
                           cuda_ops_dtype bias_dtype, int64_t channels)
{
    wait_for_predecessor();
    release_successor();
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t channel = global_thread_index() / WARP_SIZE;
    if (running.batches && global_thread_index() == 0)
        *running.batches += 1;
    if (channel >= channels)
        return;
    double count = 0.0, sum = 0.0, square = 0.0;
#pragma unroll 4 // loads at once: their latency is most of this kernel's time
    for (int i = lane; i < blocks; i += WARP_SIZE) {
        count += moments.pixels[i];
        sum += moments.pixels[i] * (double)moments.partial[i * channels + channel].x;
    }
    count = warp_sum(count);
    const double mean = warp_sum(sum) / count;
#pragma unroll 4
    for (int i = lane; i < blocks; i += WARP_SIZE) {
        const float2 part = moments.partial[i * channels + channel];
        const double delta = (double)part.x - mean;
        square += (double)part.y + moments.pixels[i] * delta * delta;
    }
    square = warp_sum(square);
    if (lane != 0)
        return;
    const double variance = square / count;
    const double scale = (norm.weight ? load_value(norm.weight, norm.dtype, channel) : 1.0) / sqrt(variance + norm.eps);
    statistics[channel] = mean;
    statistics[channels + channel] = variance;
    coefficients[channel] = (float)scale;
    coefficients[channels + channel] =
        (float)((norm.bias ? load_value(norm.bias, norm.dtype, channel) : 0.0) - mean * scale);
    if (running.mean) {
        const double m = running.momentum, shift = bias ? load_value(bias, bias_dtype, channel) : 0.0;
        store_value(running.mean, running.dtype, channel,
                    (1.0 - m) * load_value(running.mean, running.dtype, channel) + m * (mean + shift));
        store_value(running.variance, running.dtype, channel,
                    (1.0 - m) * load_value(running.variance, running.dtype, channel) + m * square / (count - 1.0));
    }
}

// What a block takes at a time: `count` windows of one image from `first` on.
struct window_run {
    int64_t image;
    int first, count;
};

__device__ __forceinline__ window_run run_of(const tiled_problem &p, int64_t number)
{
    const int windows = p.pooled_height * p.pooled_width, runs = (windows + RUN - 1) / RUN;
    window_run run;
    run.image = number / runs;
    run.first = (int)(number - run.image * runs) * RUN;
    run.count = min(windows - run.first, RUN);
    return run;
}

// Visits a run's values in the order of the planes (the contiguous layout): for several of a thread's in a row,
// first(which, offset in the tensor), then second(which, channel of the group, window of the run, offset).
static constexpr int PLANES_AT_ONCE = 7;
template <typename First, typename Second>
__device__ __forceinline__ void for_planes(const tiled_problem &p, const window_run &run, int first_channel,
                                           First first, Second second)
{
    const int64_t windows = (int64_t)p.pooled_height * p.pooled_width;
    const int channels = min(p.out_channels - first_channel, GROUP);
    const int64_t base = (run.image * p.out_channels + first_channel) * windows + run.first;
    const Divisor by_count = make_divisor((uint32_t)run.count);
    const int count = channels * run.count;
    for (int begin = threadIdx.x; begin < count; begin += PLANES_AT_ONCE * THREADS) {
        int c[PLANES_AT_ONCE], w[PLANES_AT_ONCE];
#pragma unroll
        for (int e = 0; e < PLANES_AT_ONCE; e++) {
            const int i = begin + e * THREADS;
            c[e] = quotient(i, by_count), w[e] = i - c[e] * run.count;
            if (i < count)
                first(e, base + c[e] * windows + w[e]);
        }
#pragma unroll
        for (int e = 0; e < PLANES_AT_ONCE; e++)
            if (begin + e * THREADS < count)
                second(e, c[e], w[e], base + c[e] * windows + w[e]);
    }
}

// POOLED: maximum and argmax are there already, as window_maxima.
template <bool CHANNELS_LAST, bool POOLED>
__device__ __forceinline__ void pool_runs(float *output, uint8_t *argmax, float *maximum, const float *conv_output,
                                          const float *coefficients, const tiled_problem &p, int64_t runs, int groups)
{
    constexpr int VALUES = POOLED ? 1 : 4; // of a window
    __shared__ float tile[CHANNELS_LAST ? 1 : RUN * PITCH];
    wait_for_predecessor();
    release_successor();
    const int first_channel = blockIdx.x % groups * GROUP;
    const int vector = threadIdx.x % VECTORS, channel = first_channel + vector * 4;
    const bool exists = channel < p.out_channels;
    float scale[4], shift[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        scale[e] = exists ? coefficients[channel + e] : 0.0f;
        shift[e] = exists ? coefficients[p.out_channels + channel + e] : 0.0f;
    }
    for (int64_t number = blockIdx.x / groups; number < runs; number += gridDim.x / groups) {
        const window_run run = run_of(p, number);
        const int64_t base =
            (run.image * p.pooled_height * p.pooled_width + run.first) * (int64_t)p.out_channels + channel;
        const float *const from = conv_output + run.image * p.height * p.width * p.out_channels + channel;
        float4 y[EACH][VALUES];
        uint32_t positions[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) { // all loads in flight at once
            const int w = threadIdx.x / VECTORS + i * APART, window = run.first + w;
            if (!exists || w >= run.count)
                continue;
            if constexpr (POOLED) {
                const int64_t at = base + (int64_t)w * p.out_channels;
                y[i][0] = *reinterpret_cast<const float4 *>(maximum + at);
                positions[i] = *reinterpret_cast<const uint32_t *>(argmax + at);
            } else {
                const int row = window / p.pooled_width, column = window - row * p.pooled_width;
                positions[i] = 0;
#pragma unroll
                for (int e = 0; e < VALUES; e++)
                    y[i][e] = __ldcs(reinterpret_cast<const float4 *>(
                        from + ((int64_t)(2 * row + e / 2) * p.width + 2 * column + e % 2) * p.out_channels));
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int w = threadIdx.x / VECTORS + i * APART;
            if (!exists || w >= run.count)
                continue;
            float best[4], raw[4];
            uint32_t where = 0;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const auto of = [&](const float4 &v) { return c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w; };
                raw[c] = of(y[i][0]);
                best[c] = fmaf(scale[c], raw[c], shift[c]);
                uint32_t at = positions[i] >> (8 * c) & 255;
#pragma unroll
                for (int e = 1; e < VALUES; e++) {
                    const float z = fmaf(scale[c], of(y[i][e]), shift[c]);
                    if (z > best[c] || z != z) { // NaN propagates, as in PyTorch
                        best[c] = z;
                        raw[c] = of(y[i][e]);
                        at = e;
                    }
                }
                if (best[c] <= 0.0f) {
                    best[c] = 0.0f;
                    at = CUDA_OPS_POOL_INACTIVE;
                }
                where |= at << (8 * c);
            }
            const int64_t to = base + (int64_t)w * p.out_channels;
            *reinterpret_cast<uint32_t *>(argmax + to) = where;
            if constexpr (!POOLED)
                *reinterpret_cast<float4 *>(maximum + to) = make_float4(raw[0], raw[1], raw[2], raw[3]);
            if constexpr (CHANNELS_LAST) {
                *reinterpret_cast<float4 *>(output + to) = make_float4(best[0], best[1], best[2], best[3]);
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++)
                    tile[w * PITCH + vector * 4 + c] = best[c];
            }
        }
        if constexpr (!CHANNELS_LAST) {
            __syncthreads();
            for_planes(
                p, run, first_channel, [](int, int64_t) {},
                [&](int, int c, int w, int64_t at) { output[at] = tile[w * PITCH + c]; });
            __syncthreads();
        }
    }
}

template <bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    pool_kernel(float *output, uint8_t *argmax, float *maximum, const float *conv_output, const float *coefficients,
                const __grid_constant__ tiled_problem p, int64_t runs, int groups)
{
    pool_runs<CHANNELS_LAST, false>(output, argmax, maximum, conv_output, coefficients, p, runs, groups);
}

template <bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    activate_kernel(float *output, uint8_t *argmax, float *maximum, const float *conv_output, const float *coefficients,
                    const __grid_constant__ tiled_problem p, int64_t runs, int groups)
{
    pool_runs<CHANNELS_LAST, true>(output, argmax, maximum, conv_output, coefficients, p, runs, groups);
}

// sums[block][channel] = (sum of dz, sum of dz * (maximum - mean)) of the block's runs. Gradients that are not
// channels_last are copied to grad_pooled in that layout.
template <bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    sums_kernel(float2 *sums, float *grad_pooled, const float *grad_output, const uint8_t *argmax, const float *maximum,
                const double *statistics, const __grid_constant__ tiled_problem p, int64_t runs, int groups)
{
    __shared__ float tile[CHANNELS_LAST ? 1 : RUN * PITCH];
    __shared__ float2 of_threads[APART][GROUP];
    wait_for_predecessor();
    release_successor();
    const int first_channel = blockIdx.x % groups * GROUP;
    const int vector = threadIdx.x % VECTORS, channel = first_channel + vector * 4;
    const bool exists = channel < p.out_channels;
    float mean[4], sum[4], product[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        mean[c] = exists ? (float)statistics[channel + c] : 0.0f;
        sum[c] = product[c] = 0.0f;
    }
    for (int64_t number = blockIdx.x / groups; number < runs; number += gridDim.x / groups) {
        const window_run run = run_of(p, number);
        const int64_t base = (run.image * p.pooled_height * p.pooled_width + run.first) * p.out_channels + channel;
        float4 raw[EACH], grad[EACH];
        uint32_t positions[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) { // all loads in flight at once
            const int w = threadIdx.x / VECTORS + i * APART;
            if (exists && w < run.count) {
                const int64_t at = base + (int64_t)w * p.out_channels;
                raw[i] = __ldcs(reinterpret_cast<const float4 *>(maximum + at));
                positions[i] = *reinterpret_cast<const uint32_t *>(argmax + at);
                if constexpr (CHANNELS_LAST)
                    grad[i] = *reinterpret_cast<const float4 *>(grad_output + at);
            }
        }
        if constexpr (!CHANNELS_LAST) {
            float values[PLANES_AT_ONCE]; // on their way together
            for_planes(
                p, run, first_channel, [&](int i, int64_t at) { values[i] = __ldcs(grad_output + at); },
                [&](int i, int c, int w, int64_t) { tile[w * PITCH + c] = values[i]; });
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int w = threadIdx.x / VECTORS + i * APART;
            if (!exists || w >= run.count)
                continue;
            if constexpr (!CHANNELS_LAST) {
                const float *const g = tile + w * PITCH + vector * 4;
                grad[i] = make_float4(g[0], g[1], g[2], g[3]);
                *reinterpret_cast<float4 *>(grad_pooled + base + (int64_t)w * p.out_channels) = grad[i];
            }
            const float dz[4] = {grad[i].x, grad[i].y, grad[i].z, grad[i].w};
            const float y[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int c = 0; c < 4; c++)
                if ((positions[i] >> (8 * c) & 255) != CUDA_OPS_POOL_INACTIVE) {
                    sum[c] += dz[c];
                    product[c] = fmaf(dz[c], y[c] - mean[c], product[c]);
                }
        }
        if constexpr (!CHANNELS_LAST)
            __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < 4; c++)
        of_threads[threadIdx.x / VECTORS][vector * 4 + c] = make_float2(sum[c], product[c]);
    __syncthreads();
    const int own = first_channel + threadIdx.x;
    if (threadIdx.x < GROUP && own < p.out_channels) {
        float2 total = of_threads[0][threadIdx.x];
        for (int i = 1; i < APART; i++) {
            total.x += of_threads[i][threadIdx.x].x;
            total.y += of_threads[i][threadIdx.x].y;
        }
        sums[(int64_t)(blockIdx.x / groups) * p.out_channels + own] = total;
    }
}

__global__ void __launch_bounds__(THREADS)
    prepare_backward_kernel(float *coefficients, void *grad_norm_weight, void *grad_norm_bias, void *grad_bias,
                            const float2 *sums, int blocks, const double *statistics, cuda_ops_norm_parameters norm,
                            cuda_ops_dtype bias_dtype, int64_t channels, double count)
{
    wait_for_predecessor();
    release_successor();
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t channel = global_thread_index() / WARP_SIZE;
    if (channel >= channels)
        return;
    double sum = 0.0, product = 0.0;
#pragma unroll 8
    for (int i = lane; i < blocks; i += WARP_SIZE) {
        const float2 part = sums[i * channels + channel];
        sum += (double)part.x;
        product += (double)part.y;
    }
    sum = warp_sum(sum);
    product = warp_sum(product);
    if (lane != 0)
        return;
    const double mean = statistics[channel], rstd = 1.0 / sqrt(statistics[channels + channel] + norm.eps);
    const double scale = (norm.weight ? load_value(norm.weight, norm.dtype, channel) : 1.0) * rstd;
    // The products were made with the mean rounded to float.
    const double dot = (product - (mean - (double)(float)mean) * sum) * rstd;
    const double slope = -scale * rstd * dot / count;
    coefficients[channel] = (float)scale;
    coefficients[channels + channel] = (float)slope;
    coefficients[2 * channels + channel] = (float)(-scale * sum / count - slope * mean);
    if (grad_norm_weight)
        store_value(grad_norm_weight, norm.dtype, channel, dot);
    if (grad_norm_bias)
        store_value(grad_norm_bias, norm.dtype, channel, sum);
    if (grad_bias) // batch norm subtracts the mean, so that bias has no effect
        store_value(grad_bias, bias_dtype, channel, 0.0 * (sum + slope));
}

cuda_ops_status conv_bn_relu_pool_tiled_forward(float *output, float *conv_output, uint8_t *argmax, float *maximum,
                                                double *statistics, void *workspace,
                                                const cuda_ops_running_statistics *running, const float *input,
                                                const float *weight, const void *bias,
                                                const cuda_ops_norm_parameters *norm,
                                                const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes,
                                                cuda_ops_dtype bias_dtype, cudaStream_t stream)
{
    if (!is_valid(*sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (sizes->batch == 0)
        return CUDA_OPS_SUCCESS;
    const tiled_problem p = problem_of(*sizes);
    const forward_workspace w = forward_parts(workspace, p);
    const window_maxima maxima = {maximum, argmax, *norm};
    const cuda_ops_status status = tiled_convolve_forward(conv_output, w.moments, maxima, input, weight, p, stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    launch_dependent(prepare_forward_kernel, (unsigned int)ceil_div(p.out_channels, WARPS), THREADS, 0, stream,
                     w.coefficients, statistics, *running, w.moments, (int)tiled_convolve_blocks(p, false), *norm, bias,
                     bias_dtype, p.out_channels);
    const int64_t groups = groups_of(p), blocks = pooling_blocks(p) * groups;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const bool channels_last = sizes->output_channels_last != 0;
    const auto pool = p.wgmma         ? channels_last ? activate_kernel<true> : activate_kernel<false>
                              : channels_last ? pool_kernel<true>
                                      : pool_kernel<false>;
    launch_dependent(pool, (unsigned int)blocks, THREADS, 0, stream, output, argmax, maximum, conv_output,
                     w.coefficients, p, runs_of(p), (int)groups);
    return launch_status();
}

cuda_ops_status conv_bn_relu_pool_tiled_backward(float *grad_input, float *grad_weight, void *grad_bias,
                                                 void *grad_norm_weight, void *grad_norm_bias, void *workspace,
                                                 const float *grad_output, const uint8_t *argmax, const float *maximum,
                                                 const float *conv_output, const double *statistics, const float *input,
                                                 const float *weight, const cuda_ops_norm_parameters *norm,
                                                 const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes,
                                                 cuda_ops_dtype bias_dtype, cudaStream_t stream)
{
    if (!is_valid(*sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (sizes->batch == 0)
        return CUDA_OPS_SUCCESS;
    const tiled_problem p = problem_of(*sizes);
    const bool channels_last = sizes->output_channels_last != 0;
    const backward_workspace w = backward_parts(workspace, p, channels_last);
    const int64_t groups = groups_of(p), blocks = pooling_blocks(p);
    if (blocks * groups > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(channels_last ? sums_kernel<true> : sums_kernel<false>, (unsigned int)(blocks * groups), THREADS,
                     0, stream, w.sums, w.grad_pooled, grad_output, argmax, maximum, statistics, p, runs_of(p),
                     (int)groups);
    launch_dependent(prepare_backward_kernel, (unsigned int)ceil_div(p.out_channels, WARPS), THREADS, 0, stream,
                     w.coefficients, grad_norm_weight, grad_norm_bias, grad_bias, w.sums, (int)blocks, statistics,
                     *norm, bias_dtype, p.out_channels, (double)p.batch * p.height * p.width);
    gradient_source source = {};
    source.conv_output = conv_output;
    source.grad_pooled = channels_last ? grad_output : w.grad_pooled;
    source.argmax = argmax;
    source.scale = w.coefficients;
    source.slope = w.coefficients + p.out_channels;
    source.offset = w.coefficients + 2 * (int64_t)p.out_channels;
    source.made = grad_input ? w.made : nullptr;
    cuda_ops_status status = tiled_weight_gradient(w.weights, grad_input, source, input, weight, p, stream);
    if (status == CUDA_OPS_SUCCESS && grad_input)
        status = tiled_convolve_backward(grad_input, source, weight, p, stream);
    return status == CUDA_OPS_SUCCESS ? tiled_weight_sum(grad_weight, w.weights, p, stream) : status;
}
