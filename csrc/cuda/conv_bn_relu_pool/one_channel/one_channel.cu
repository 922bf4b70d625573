// conv_bn_relu_pool of images with one channel (3x3, padding 1, pooled 2x2, in training). With p the nine pixels under
// the kernel, 0 outside the image:
//     y = weight . p + bias,  mean = weight . E[p] + bias,  variance = weight^T Cov(p) weight
//     output[window] = max over its four y of relu((y - mean) * scale + bn_bias),  scale = bn_weight * rstd
//     grad_weight = scale * (S - sum(dz) * E[p] - dot * rstd * Cov(p) weight)
//     S = sum of dz * p at the argmax,  dot = rstd * weight . (S - sum(dz) * E[p])
// y is never stored. Forward: A takes E[p] and Cov(p) from the images, B recomputes y, normalises and pools. Backward:
// C makes S and sum(dz), D the gradients. In B and C a lane has a channel (float32) or a fragment of m16n8k16 (fp16,
// bf16).
// Bound by memory at best, float32 by arithmetic (36 FMA for 5 bytes), few images by latency. On an H200 forward of
// 4096 images in bf16 runs at 0.3 of a copy's 4.3 TB/s (benchmarks/notes/mnist.md).
#include "common/device.h"
#include "conv_bn_relu_pool/one_channel/cuda_cores.cuh"
#include "conv_bn_relu_pool/one_channel/tensor_cores.cuh"
#include "conv_bn_relu_pool/one_channel/tf32.cuh"

static constexpr size_t STATIC_BYTES = 1024; // of shared memory beside the dynamic, at most

// ---- D: gradients ----

static constexpr int GRADIENT_THREADS = GRADIENT_SUMS * WARP_SIZE;

struct one_gradients {
    void *weight, *bias, *norm_weight, *norm_bias; // all but weight may be NULL
};

// A block has a channel, a warp one of its sums, added in a fixed order in double.
template <typename T>
__global__ void __launch_bounds__(GRADIENT_THREADS)
    one_gradients_kernel(one_gradients grads, const float *partials, int partial_count, const double *statistics,
                         one_parameters p, one_sizes s)
{
    __shared__ double sums[GRADIENT_SUMS];
    const int lane = threadIdx.x % WARP_SIZE, which = threadIdx.x / WARP_SIZE;
    const int64_t channel = blockIdx.x;
    wait_for_predecessor();
    release_successor();
    const float *mine = partials + (channel * GRADIENT_SUMS + which) * partial_count;
    // The loads that the first threads need after the sums are issued before them, to overlap the latencies.
    const int k = threadIdx.x;
    const bool makes = k < TAPS;
    const double *means = statistics + 2 * s.channels, *covariance = means + TAPS;
    double mean[TAPS], row[TAPS], mean_of_mine = 0.0, variance = 0.0;
    float weight[TAPS], gamma = 1.0f;
    if (makes) {
        mean_of_mine = means[k];
        variance = statistics[s.channels + channel];
        gamma = p.norm.weight ? load_value_early(p.norm.weight, p.norm.dtype, channel) : 1.0f;
#pragma unroll
        for (int l = 0; l < TAPS; l++) {
            weight[l] = load_value_early(p.weight, p.weight_dtype, channel * TAPS + l);
            mean[l] = means[l];
            row[l] = covariance[k * TAPS + l];
        }
    }
    double sum = 0.0;
#pragma unroll 9
    for (int i = lane; i < partial_count; i += WARP_SIZE)
        sum += (double)mine[i];
    sum = warp_sum(sum);
    if (lane == 0)
        sums[which] = sum;
    __syncthreads();
    if (!makes)
        return;
    const double rstd = 1.0 / sqrt(variance + p.norm.eps), scale = (double)gamma * rstd, total = sums[TAPS];
    double dot = 0.0, spread = 0.0;
#pragma unroll
    for (int l = 0; l < TAPS; l++) {
        const double w = (double)rounded_weight<T>(weight[l]);
        dot += w * (sums[l] - total * mean[l]);
        spread += w * row[l];
    }
    dot *= rstd;
    const double grad = scale * (sums[k] - total * mean_of_mine - dot * rstd * spread);
    store_value(grads.weight, p.weight_dtype, channel * TAPS + k, grad);
    if (k > 0)
        return;
    if (grads.norm_weight)
        store_value(grads.norm_weight, p.norm.dtype, channel, dot);
    if (grads.norm_bias)
        store_value(grads.norm_bias, p.norm.dtype, channel, total);
    if (grads.bias)
        store_value(grads.bias, p.weight_dtype, channel, 0.0 * (total + dot * scale));
}

// ---- launchers ----

static bool is_valid(const one_sizes &s)
{
    return s.batch > 0 && s.channels > 0 && s.height >= 2 && s.width >= 2 && s.width <= CUDA_OPS_ONE_WIDEST &&
           s.channels < (int64_t)MAX_GRID * CHANNELS && (int64_t)s.height * s.width < INT32_MAX;
}

int64_t conv_bn_relu_pool_one_channel_statistics(int64_t channels)
{
    return 2 * channels + TAPS + TAPS * TAPS;
}

int64_t conv_bn_relu_pool_one_channel_workspace(const one_sizes *s)
{
    if (!is_valid(*s))
        return 0;
    const moment_grid m = moment_grid_of(*s);
    const int64_t forward = (int64_t)m.blocks * m.strips * SUMS * (int64_t)sizeof(double);
    const int64_t blocks = 2 * MOST_BLOCKS;
    const int64_t backward = s->channels * GRADIENT_SUMS * blocks * (int64_t)sizeof(float);
    return forward > backward ? forward : backward;
}

template <typename T>
static cuda_ops_status forward(T *output, uint8_t *argmax, double *statistics, double *partials,
                               const cuda_ops_running_statistics &running, const T *input, const one_parameters &p,
                               const one_sizes &s, cudaStream_t stream)
{
    const moment_grid m = moment_grid_of(s);
    launch_dependent(one_moments_kernel<T>, dim3(m.strips, m.blocks), dim3(MOMENT_THREADS), 0, stream, partials, input,
                     s, m);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int partial_count = (int)(m.blocks * m.strips);
    const unsigned int channel_blocks = (unsigned int)ceil_div(s.channels, CHANNELS);
    if constexpr (sizeof(T) == 2)
        if (uses_tensor_cores(s, output, argmax)) {
            const band_grid b = band_grid_of(s, sizeof(T), WANTED_BLOCKS);
            launch_dependent(one_forward_tensor_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS),
                             tensor_shared(b, sizeof(T)), stream, output, argmax, statistics, running, partials,
                             partial_count, input, p, s, b);
            return launch_status();
        }
    if constexpr (sizeof(T) == 4)
        if (s.allow_tf32 && uses_tensor_cores(s, output, argmax)) {
            const band_grid b = band_grid_of(s, sizeof(T), WANTED_BLOCKS);
            launch_dependent(one_forward_tf32_kernel, dim3(b.blocks, channel_blocks), dim3(THREADS),
                             tensor_shared(b, sizeof(T)), stream, output, argmax, statistics, running, partials,
                             partial_count, input, p, s, b);
            return launch_status();
        }
    const band_grid b = band_grid_of(s, sizeof(float), MOST_BLOCKS);
    launch_dependent(one_forward_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS),
                     (size_t)b.units * b.tile * sizeof(float), stream, output, argmax, statistics, running, partials,
                     partial_count, input, p, s, b, strides_of(s, b));
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(const one_gradients &grads, float *partials, const T *grad_output,
                                const uint8_t *argmax, const double *statistics, const T *input,
                                const one_parameters &p, const one_sizes &s, cudaStream_t stream)
{
    const unsigned int channel_blocks = (unsigned int)ceil_div(s.channels, CHANNELS);
    band_grid b = band_grid_of(s, sizeof(float), MOST_BLOCKS);
    bool launched = false;
    if constexpr (sizeof(T) == 2)
        if (uses_tensor_cores(s, grad_output, argmax)) {
            b = band_grid_of(s, sizeof(T), WANTED_BLOCKS);
            const size_t for_products = WARPS_AT_ONCE * PRODUCTS * sizeof(float);
            const size_t ring_offset = (tensor_shared(b, sizeof(T)) + 15) / 16 * 16,
                         for_reading = ring_offset + GradientRing<T>::BYTES;
            const size_t bytes = for_products > for_reading ? for_products : for_reading;
            allow_shared_memory(one_sums_tensor_kernel<T>, bytes);
            launch_dependent(one_sums_tensor_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS), bytes, stream,
                             partials, grad_output, argmax, input, s, b, (int)ring_offset);
            launched = true;
        }
    if constexpr (sizeof(T) == 4)
        if (s.allow_tf32 && uses_tensor_cores(s, grad_output, argmax)) {
            const band_grid wanted = band_grid_of(s, sizeof(T), WANTED_BLOCKS);
            const size_t for_products = WARPS_AT_ONCE * PRODUCTS * sizeof(float);
            const size_t ring_offset = (tensor_shared(wanted, sizeof(T)) + 15) / 16 * 16,
                         for_reading = ring_offset + GradientRing<T>::BYTES;
            const size_t bytes = for_products > for_reading ? for_products : for_reading;
            // Not everywhere is there room for wide images: some GPUs' blocks have 99 KB.
            if (bytes + STATIC_BYTES <= (size_t)current_device().shared_bytes) {
                b = wanted;
                allow_shared_memory(one_sums_tf32_kernel, bytes);
                launch_dependent(one_sums_tf32_kernel, dim3(b.blocks, channel_blocks), dim3(THREADS), bytes, stream,
                                 partials, grad_output, argmax, input, s, b, (int)ring_offset);
                launched = true;
            }
        }
    if (!launched)
        launch_dependent(one_sums_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS),
                         (size_t)b.units * b.tile * sizeof(float), stream, partials, grad_output, argmax, input, s, b,
                         strides_of(s, b));
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    launch_dependent(one_gradients_kernel<T>, dim3((unsigned int)s.channels), dim3(GRADIENT_THREADS), 0, stream, grads,
                     partials, (int)b.blocks, statistics, p, s);
    return launch_status();
}

cuda_ops_status conv_bn_relu_pool_one_channel_forward(void *output, uint8_t *argmax, double *statistics,
                                                      void *workspace, const cuda_ops_running_statistics *running,
                                                      const void *input, const void *weight, const void *bias,
                                                      const cuda_ops_norm_parameters *norm, const one_sizes *s,
                                                      cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                      cudaStream_t stream)
{
    if (!is_valid(*s))
        return CUDA_OPS_INVALID_ARGUMENT;
    const one_parameters p = {weight, bias, weight_dtype, *norm};
    double *const partials = (double *)workspace;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return forward((float *)output, argmax, statistics, partials, *running, (const float *)input, p, *s, stream);
    case CUDA_OPS_FLOAT16:
        return forward((__half *)output, argmax, statistics, partials, *running, (const __half *)input, p, *s, stream);
    case CUDA_OPS_BFLOAT16:
        return forward((__nv_bfloat16 *)output, argmax, statistics, partials, *running, (const __nv_bfloat16 *)input, p,
                       *s, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status conv_bn_relu_pool_one_channel_backward(void *grad_weight, void *grad_bias, void *grad_norm_weight,
                                                       void *grad_norm_bias, void *workspace, const void *grad_output,
                                                       const uint8_t *argmax, const double *statistics,
                                                       const void *input, const void *weight,
                                                       const cuda_ops_norm_parameters *norm, const one_sizes *s,
                                                       cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                       cudaStream_t stream)
{
    if (!is_valid(*s))
        return CUDA_OPS_INVALID_ARGUMENT;
    const one_parameters p = {weight, NULL, weight_dtype, *norm};
    const one_gradients grads = {grad_weight, grad_bias, grad_norm_weight, grad_norm_bias};
    float *const partials = (float *)workspace;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return backward(grads, partials, (const float *)grad_output, argmax, statistics, (const float *)input, p, *s,
                        stream);
    case CUDA_OPS_FLOAT16:
        return backward(grads, partials, (const __half *)grad_output, argmax, statistics, (const __half *)input, p, *s,
                        stream);
    case CUDA_OPS_BFLOAT16:
        return backward(grads, partials, (const __nv_bfloat16 *)grad_output, argmax, statistics,
                        (const __nv_bfloat16 *)input, p, *s, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
