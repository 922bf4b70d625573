// What batch_norm's split.cu and rows.cu share: the partial results that their reductions leave, and the kernels that
// merge these and write the coefficients of the elementwise kernels, in double and in a fixed order.
//
//     output     = (input - center) * scale + offset
//     grad_input = grad_output * scale + (input - center) * slope + offset
//
// where center is the mean rounded to the accumulation type, and offset corrects for that. A fifth coefficient of the
// backward pass, shift, is the forward pass's offset, from which batch_norm_act computes the activation's argument anew.
#ifndef CUDA_OPS_BATCH_NORM_COEFFICIENTS_CUH
#define CUDA_OPS_BATCH_NORM_COEFFICIENTS_CUH

#include "batch_norm/channel_values.cuh"
#include "common/common.cuh"
#include "common/launch.cuh"
#include "common/value.cuh"

// The workspace: for each channel and split a partial result of up to PARTIAL doubles (count, mean and squares; or two
// sums), then for each channel COEFFICIENTS values, with room for doubles.
static constexpr int PARTIAL = 3;
static constexpr int COEFFICIENTS = 5;
static constexpr int PREPARE_THREADS = 128; // of a channel

static inline int64_t batch_norm_workspace_bytes(int64_t splits, int64_t channels)
{
    return (splits * PARTIAL + COEFFICIENTS) * channels * (int64_t)sizeof(double);
}

template <typename A>
static inline A *coefficients_of(void *workspace, int64_t splits, int64_t channels)
{
    return (A *)((double *)workspace + splits * channels * PARTIAL);
}

template <typename A>
__device__ __forceinline__ void set_forward_coefficients(A *coefficients, double mean, double variance,
                                                         const void *weight, const void *bias, int64_t channel,
                                                         int64_t channels, double eps, cuda_ops_dtype parameter_dtype)
{
    const double scale = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) / sqrt(variance + eps);
    const double shift = bias ? load_value(bias, parameter_dtype, channel) : 0.0;
    const A center = (A)mean;
    coefficients[channel] = center;
    coefficients[channels + channel] = (A)scale;
    coefficients[2 * channels + channel] = (A)(shift - (mean - (double)center) * scale);
}

// A block a channel. Of the splits' counts, means and squared differences: the mean first, then the squared differences
// from it, so that nothing is divided on the way.
template <typename A>
__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_training_kernel(double *mean, double *variance, A *coefficients, const double *partials, const void *weight,
                            const void *bias, int64_t channels, int64_t splits, double eps,
                            cuda_ops_dtype parameter_dtype, const __grid_constant__ RunningUpdate running)
{
    __shared__ double scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor();
    for (int64_t channel = blockIdx.x; channel < channels; channel += gridDim.x) {
        const double *const of_channel = partials + channel * splits * PARTIAL;
        double count = 0.0, sum = 0.0, squares = 0.0;
#pragma unroll 4
        for (int64_t split = threadIdx.x; split < splits; split += PREPARE_THREADS) {
            count += of_channel[split * PARTIAL];
            sum += of_channel[split * PARTIAL] * of_channel[split * PARTIAL + 1];
        }
        count = block_sum(count, scratch);
        const double center = block_sum(sum, scratch) / count;
#pragma unroll 4
        for (int64_t split = threadIdx.x; split < splits; split += PREPARE_THREADS) {
            const double difference = of_channel[split * PARTIAL + 1] - center;
            squares += of_channel[split * PARTIAL + 2] + of_channel[split * PARTIAL] * difference * difference;
        }
        squares = block_sum(squares, scratch);
        if (threadIdx.x == 0) {
            const double biased = squares / count;
            mean[channel] = center;
            variance[channel] = biased;
            running.update(channel, center, biased);
            set_forward_coefficients(coefficients, center, biased, weight, bias, channel, channels, eps,
                                     parameter_dtype);
        }
    }
}

template <typename A>
__global__ void prepare_inference_kernel(A *coefficients, const void *weight, const void *bias,
                                         const void *running_mean, const void *running_var, int64_t channels,
                                         double eps, cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t channel = global_thread_index(); channel < channels; channel += global_thread_count())
        set_forward_coefficients(coefficients, load_value(running_mean, statistics_dtype, channel),
                                 load_value(running_var, statistics_dtype, channel), weight, bias, channel, channels,
                                 eps, parameter_dtype);
}

// grad_weight, grad_bias (if they are not NULL), and the coefficients of grad_input, of the splits' sums of grad_output
// and of grad_output * (input - center). `splits` is 0 where no sums were made.
template <typename A>
__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_backward_kernel(void *grad_weight, void *grad_bias, A *coefficients, const double *partials,
                            const void *weight, const void *bias, const void *mean, const void *variance,
                            int64_t channels, int64_t splits, double count, double eps, cuda_ops_dtype parameter_dtype,
                            cuda_ops_dtype statistics_dtype)
{
    __shared__ double scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor();
    for (int64_t channel = blockIdx.x; channel < channels; channel += gridDim.x) {
        const double *const of_channel = partials + channel * splits * PARTIAL;
        double sum = 0.0, products = 0.0;
#pragma unroll 4
        for (int64_t split = threadIdx.x; split < splits; split += PREPARE_THREADS) {
            sum += of_channel[split * PARTIAL];
            products += of_channel[split * PARTIAL + 1];
        }
        sum = block_sum(sum, scratch);
        products = block_sum(products, scratch);
        if (threadIdx.x != 0)
            continue;
        const double m = load_value(mean, statistics_dtype, channel);
        const double deviation = sqrt(load_value(variance, statistics_dtype, channel) + eps), rstd = 1.0 / deviation;
        // As in forward, to the last digit: batch_norm_act asks where its sum was 0.
        const double scale = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) / deviation;
        const A center = (A)m;
        const double rounding = m - (double)center;
        const double dot = (products - rounding * sum) * rstd; // of grad_output with the normalised input
        const double slope = -scale * rstd * dot / count;
        coefficients[channel] = center;
        coefficients[channels + channel] = (A)scale;
        coefficients[2 * channels + channel] = (A)slope;
        coefficients[3 * channels + channel] = (A)(-scale * sum / count - slope * rounding);
        coefficients[4 * channels + channel] =
            (A)((bias ? load_value(bias, parameter_dtype, channel) : 0.0) - rounding * scale);
        if (grad_weight) {
            store_value(grad_weight, parameter_dtype, channel, dot);
            store_value(grad_bias, parameter_dtype, channel, sum);
        }
    }
}

template <typename A>
static void prepare_training(double *mean, double *variance, A *coefficients, const double *partials,
                             const void *weight, const void *bias, int64_t channels, int64_t splits, double eps,
                             cuda_ops_dtype parameter_dtype, const RunningUpdate &running, cudaStream_t stream)
{
    launch_dependent(prepare_training_kernel<A>, dim3(clamp_grid(channels)), dim3(PREPARE_THREADS), 0, stream, mean,
                     variance, coefficients, partials, weight, bias, channels, splits, eps, parameter_dtype, running);
}

template <typename A>
static void prepare_inference(A *coefficients, const void *weight, const void *bias, const void *running_mean,
                              const void *running_var, int64_t channels, double eps, cuda_ops_dtype parameter_dtype,
                              cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    launch_dependent(prepare_inference_kernel<A>, dim3(clamp_grid(ceil_div(channels, PREPARE_THREADS))),
                     dim3(PREPARE_THREADS), 0, stream, coefficients, weight, bias, running_mean, running_var, channels,
                     eps, parameter_dtype, statistics_dtype);
}

template <typename A>
static void prepare_backward(void *grad_weight, void *grad_bias, A *coefficients, const double *partials,
                             const void *weight, const void *bias, const void *mean, const void *variance,
                             int64_t channels, int64_t splits, double count, double eps, cuda_ops_dtype parameter_dtype,
                             cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    launch_dependent(prepare_backward_kernel<A>, dim3(clamp_grid(channels)), dim3(PREPARE_THREADS), 0, stream,
                     grad_weight, grad_bias, coefficients, partials, weight, bias, mean, variance, channels, splits,
                     count, eps, parameter_dtype, statistics_dtype);
}

template <typename A>
struct forward_coefficients {
    A center, scale, offset;
};

template <typename A>
__device__ __forceinline__ forward_coefficients<A> load_forward(const A *coefficients, int64_t channel,
                                                                int64_t channels)
{
    return {coefficients[channel], coefficients[channels + channel], coefficients[2 * channels + channel]};
}

template <typename T>
__device__ __forceinline__ T normalize_element(T input, const forward_coefficients<accumulate_type<T>> &c)
{
    return store_from_accumulate<T>((load_as_accumulate(input) - c.center) * c.scale + c.offset);
}

template <typename A>
struct backward_coefficients {
    A center, scale, slope, offset;
};

template <typename A>
__device__ __forceinline__ backward_coefficients<A> load_backward(const A *coefficients, int64_t channel,
                                                                  int64_t channels)
{
    return {coefficients[channel], coefficients[channels + channel], coefficients[2 * channels + channel],
            coefficients[3 * channels + channel]};
}

template <typename T>
__device__ __forceinline__ T grad_element(T grad_output, T input, const backward_coefficients<accumulate_type<T>> &c)
{
    return store_from_accumulate<T>(load_as_accumulate(grad_output) * c.scale +
                                    (load_as_accumulate(input) - c.center) * c.slope + c.offset);
}

// With running statistics grad_input does not depend on input, which must not even be multiplied by 0 (Inf).
template <typename T>
__device__ __forceinline__ T grad_element(T grad_output, const backward_coefficients<accumulate_type<T>> &c)
{
    return store_from_accumulate<T>(load_as_accumulate(grad_output) * c.scale);
}

#endif
