// A channel's parameters and statistics as batch_norm's kernels take them: asked for before the channel's own values
// come, and used when these are added up; and the update of the running statistics, which is theirs too, since a kernel
// of its own takes as long as a small batch_norm does.
#ifndef CUDA_OPS_BATCH_NORM_CHANNEL_VALUES_CUH
#define CUDA_OPS_BATCH_NORM_CHANNEL_VALUES_CUH

#include "batch_norm/paths.h"
#include "common/common.cuh"
#include "common/value.cuh"

// The bits of a value whose dtype is known at run time only, so that nothing waits for the load before `value_of_bits`.
__device__ __forceinline__ uint64_t load_bits(const void *values, cuda_ops_dtype dtype, int64_t index)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        return ((const uint64_t *)values)[index];
    case CUDA_OPS_FLOAT32:
        return ((const uint32_t *)values)[index];
    default:
        return ((const uint16_t *)values)[index];
    }
}

__device__ __forceinline__ double value_of_bits(uint64_t bits, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        return __longlong_as_double((long long)bits);
    case CUDA_OPS_FLOAT16:
        return (double)__half2float(__ushort_as_half((unsigned short)bits));
    case CUDA_OPS_BFLOAT16:
        return (double)__uint_as_float((unsigned int)bits << 16);
    default:
        return (double)__uint_as_float((unsigned int)bits);
    }
}

struct RunningUpdate {
    cuda_ops_running_statistics statistics;
    double unbiased; // n / (n - 1) of n values in a channel

    // By one thread of each channel. Channel 0's counts the batch.
    __device__ __forceinline__ void update(int64_t channel, double mean, double variance, double old_mean,
                                           double old_variance) const
    {
        const double momentum = statistics.momentum;
        if (statistics.mean) {
            store_value(statistics.mean, statistics.dtype, channel, (1.0 - momentum) * old_mean + momentum * mean);
            store_value(statistics.variance, statistics.dtype, channel,
                        (1.0 - momentum) * old_variance + momentum * variance * unbiased);
        }
        if (statistics.batches && channel == 0)
            *statistics.batches += 1;
    }

    __device__ __forceinline__ void update(int64_t channel, double mean, double variance) const
    {
        const bool there = statistics.mean;
        update(channel, mean, variance, there ? load_value(statistics.mean, statistics.dtype, channel) : 0.0,
               there ? load_value(statistics.variance, statistics.dtype, channel) : 0.0);
    }
};

static inline RunningUpdate running_update_of(const NormCall &call)
{
    const double count = (double)(call.outer * call.inner);
    return {call.running, count / (count - 1.0)};
}

// The values of a channel that a warp needs, one in each of its first lanes, so that they are loaded at once.
// `otherwise` stands for an array that is not there.
struct ChannelValues {
    uint64_t bits;
    cuda_ops_dtype dtype;

    __device__ __forceinline__ ChannelValues(const void *values, cuda_ops_dtype of_values, double otherwise,
                                             int64_t channel)
    {
        bits = values ? load_bits(values, of_values, channel) : (uint64_t)__double_as_longlong(otherwise);
        dtype = values ? of_values : CUDA_OPS_FLOAT64;
    }

    // For whole warps: what lane `from` has, in all lanes.
    __device__ __forceinline__ double of(int from) const
    {
        return __shfl_sync(FULL_WARP, value_of_bits(bits, dtype), from);
    }
};

// Forward: lanes 0 to 3 have weight, bias, running mean and running variance.
__device__ __forceinline__ ChannelValues load_forward_values(const void *weight, const void *bias,
                                                             cuda_ops_dtype parameter_dtype,
                                                             const cuda_ops_running_statistics &running,
                                                             int64_t channel)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const void *const values = lane == 0   ? weight
                               : lane == 1 ? bias
                               : lane == 2 ? running.mean
                               : lane == 3 ? running.variance
                                           : nullptr;
    return ChannelValues(values, lane < 2 ? parameter_dtype : running.dtype, lane == 0 ? 1.0 : 0.0, channel);
}

// Backward: lanes 0 to 2 have weight, mean and variance.
__device__ __forceinline__ ChannelValues load_backward_values(const void *weight, cuda_ops_dtype parameter_dtype,
                                                              const void *mean, const void *variance,
                                                              cuda_ops_dtype statistics_dtype, int64_t channel)
{
    const int lane = threadIdx.x % WARP_SIZE;
    const void *const values = lane == 0 ? weight : lane == 1 ? mean : lane == 2 ? variance : nullptr;
    return ChannelValues(values, lane == 0 ? parameter_dtype : statistics_dtype, 1.0, channel);
}

// What the elementwise part of a pass needs. rsqrt: its last digit is far below what is computed from it.
template <typename A>
struct ForwardFactors {
    A center, scale, offset;

    ForwardFactors() = default;
    __device__ __forceinline__ ForwardFactors(double mean, double variance, double weight, double bias, double eps)
    {
        const double gain = weight * rsqrt(variance + eps);
        center = (A)mean, scale = (A)gain, offset = (A)(bias - (mean - (double)center) * gain);
    }
};

template <typename A>
struct BackwardFactors {
    A scale, slope, offset;

    BackwardFactors() = default;

    // total, products: sums of grad_output and of grad_output * (input - center), center being the mean rounded to A.
    // Returns the gradient of weight too; that of bias is the total.
    __device__ __forceinline__ BackwardFactors(double total, double products, double mean, double variance,
                                               double weight, double eps, double inverse_count, double *dot)
    {
        const double rstd = rsqrt(variance + eps), gain = weight * rstd, rounding = mean - (double)(A)mean;
        *dot = (products - rounding * total) * rstd;
        const double tilt = -gain * rstd * *dot * inverse_count;
        scale = (A)gain, slope = (A)tilt, offset = (A)(-gain * total * inverse_count - tilt * rounding);
    }
};

#endif
