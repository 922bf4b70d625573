// What kernel B of one_channel.cu makes of A's moments: batch_norm's statistics and coefficients.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_COEFFICIENTS_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_COEFFICIENTS_CUH

#include "common/value.cuh"
#include "conv_bn_relu_pool/one_channel/moments.cuh"

// The edge that a tap never reads: tap row 0 reads every row of pixels but the last, tap row 2 every row but the first.
__device__ __forceinline__ int missed(int tap, int first, int last)
{
    return tap == 0 ? last : tap == 2 ? first : -1;
}

__device__ __forceinline__ double tap_sum(const double *sums, int k)
{
    const int row = missed(k / 3, FIRST_ROW, LAST_ROW), column = missed(k % 3, FIRST_COLUMN, LAST_COLUMN);
    double sum = sums[SUM];
    sum -= row >= 0 ? sums[row] : 0.0;
    sum -= column >= 0 ? sums[column] : 0.0;
    sum += row >= 0 && column >= 0 ? sums[column + (row == FIRST_ROW ? 4 : 6)] : 0.0;
    return sum;
}

__device__ __forceinline__ double tap_product(const double *sums, int k, int l)
{
    if (k > l) {
        const int other = k;
        k = l;
        l = other;
    }
    // Towards the edge that one tap misses the other tap is out of bounds, unless both are in the same row or column.
    const int dy = l / 3 - k / 3, dx = l % 3 - k % 3;
    const int row = dy == 0 ? missed(k / 3, FIRST_ROW, LAST_ROW) : -1;
    const int column = dx == 0 ? missed(k % 3, FIRST_COLUMN, LAST_COLUMN) : -1;
    double sum = sums[lag_index(dy, dx)];
    sum -= row >= 0 ? sums[row + 1 + dx] : 0.0;
    sum -= column >= 0 ? sums[column + 1 + dy] : 0.0;
    sum += row >= 0 && column >= 0 ? sums[column + (row == FIRST_ROW ? 5 : 7)] : 0.0;
    return sum;
}

// Statistics kept for backward: mean and variance of each channel, then E[p] and Cov(p).
__device__ __forceinline__ double *tap_means_of(double *statistics, int64_t channels)
{
    return statistics + 2 * channels;
}

// A weight as it is multiplied: rounded to the images' dtype.
template <typename T>
__device__ __forceinline__ float rounded_weight(float weight)
{
    return load_as_accumulate(store_from_accumulate<T>(weight));
}

struct one_parameters {
    const void *weight, *bias; // bias may be NULL
    cuda_ops_dtype weight_dtype;
    cuda_ops_norm_parameters norm;
};

struct one_coefficients {
    float weight[TAPS][CHANNELS]; // times the sign of scale, so that max(y) is where max(z) is
    float scale[CHANNELS], offset[CHANNELS];
};

static constexpr int PARTS = THREADS / SUMS;

struct one_scratch {
    double parts[SUMS][PARTS], sums[SUMS], means[TAPS], covariance[TAPS][TAPS];
};

// Channels [first, first + CHANNELS), by the whole block; the block that `writes` also stores the statistics.
template <typename T>
__device__ void make_coefficients(one_coefficients &c, one_scratch &scratch, double *statistics,
                                  const cuda_ops_running_statistics &running, const double *partials, int partial_count,
                                  const one_parameters &p, const one_sizes &s, int first, bool writes)
{
    const double count = (double)s.batch * s.height * s.width;
    const int part = threadIdx.x / SUMS, which = threadIdx.x % SUMS, channel = first + threadIdx.x;
    const bool inside = threadIdx.x < CHANNELS && channel < s.channels;
    // The loads of the parameters are issued before those of the sums, to overlap the latencies.
    float weight[TAPS];
#pragma unroll
    for (int k = 0; k < TAPS; k++)
        weight[k] = inside ? load_value_early(p.weight, p.weight_dtype, (int64_t)channel * TAPS + k) : 0.0f;
    const float gamma = inside && p.norm.weight ? load_value_early(p.norm.weight, p.norm.dtype, channel) : 1.0f;
    const float shift = inside && p.norm.bias ? load_value_early(p.norm.bias, p.norm.dtype, channel) : 0.0f;
    if (part < PARTS) {
        double sum = 0.0;
#pragma unroll 22
        for (int i = part; i < partial_count; i += PARTS)
            sum += partials[(int64_t)i * SUMS + which];
        scratch.parts[which][part] = sum;
    }
    __syncthreads();
    double *const sums = scratch.sums;
    if (threadIdx.x < SUMS) {
        double sum = 0.0;
        for (int i = 0; i < PARTS; i++)
            sum += scratch.parts[threadIdx.x][i];
        sums[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < TAPS * TAPS) {
        const int k = threadIdx.x / TAPS, l = threadIdx.x % TAPS;
        const double mean_k = tap_sum(sums, k) / count, mean_l = tap_sum(sums, l) / count;
        const double covariance = tap_product(sums, k, l) / count - mean_k * mean_l;
        scratch.covariance[k][l] = covariance;
        if (l == 0)
            scratch.means[k] = mean_k;
        if (writes && first == 0) {
            double *means = tap_means_of(statistics, s.channels);
            means[TAPS + threadIdx.x] = covariance;
            if (l == 0)
                means[k] = mean_k;
        }
    }
    __syncthreads();
    if (threadIdx.x < CHANNELS) {
        double mean = 0.0, variance = 0.0;
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            weight[k] = rounded_weight<T>(weight[k]);
            mean += (double)weight[k] * scratch.means[k];
        }
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            double dot = 0.0;
#pragma unroll
            for (int l = 0; l < TAPS; l++)
                dot += scratch.covariance[k][l] * (double)weight[l];
            variance += dot * (double)weight[k];
        }
        variance = variance < 0.0 ? 0.0 : variance; // by rounding; a NaN stays
        const double scale = (double)gamma / sqrt(variance + p.norm.eps);
        const float sign = scale < 0.0 ? -1.0f : scale == 0.0 ? 0.0f : 1.0f;
#pragma unroll
        for (int k = 0; k < TAPS; k++)
            c.weight[k][threadIdx.x] = weight[k] * sign;
        c.scale[threadIdx.x] = (float)fabs(scale);
        c.offset[threadIdx.x] = (float)((double)shift - mean * scale);
        if (writes && inside) {
            mean += p.bias ? load_value(p.bias, p.weight_dtype, channel) : 0.0;
            statistics[channel] = mean;
            statistics[s.channels + channel] = variance;
            if (running.mean) {
                const double keep = 1.0 - running.momentum, take = running.momentum;
                store_value(running.mean, running.dtype, channel,
                            keep * load_value(running.mean, running.dtype, channel) + take * mean);
                store_value(running.variance, running.dtype, channel,
                            keep * load_value(running.variance, running.dtype, channel) +
                                take * variance * (count / (count - 1.0)));
            }
            if (running.batches && channel == 0)
                *running.batches += 1;
        }
    }
    __syncthreads();
}

#endif
