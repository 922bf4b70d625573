/* histc and bincount on the CPU: counts[bin of element i] += 1, or the weight of i.
 * Bound by the additions, each of which waits for the one before it where both go to the same bin. */
#ifndef REAL

#include "cuda_ops/histogram.h"

#include "common/common.h"

static int64_t key_at(const void *input, int key_bytes, int64_t i)
{
    return key_bytes == 1   ? ((const uint8_t *)input)[i]
           : key_bytes == 4 ? ((const int32_t *)input)[i]
                            : ((const int64_t *)input)[i];
}

static bool is_key_size(int key_bytes)
{
    return key_bytes == 1 || key_bytes == 4 || key_bytes == 8;
}

#define REAL float
#define FN(name) name##_f32
#include "histogram.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "histogram.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_histc_cpu(int64_t *counts, const void *input, int64_t begin, int64_t end, int64_t bins,
                                   double low, double high, cuda_ops_dtype dtype)
{
    if (bins < 1 || !(low < high) || !isfinite(low) || !isfinite(high))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype == CUDA_OPS_FLOAT32)
        histc_f32(counts, input, begin, end, bins, (float)low, (float)high);
    else if (dtype == CUDA_OPS_FLOAT64)
        histc_f64(counts, input, begin, end, bins, low, high);
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_bincount_cpu(int64_t *counts, const void *input, int key_bytes, int64_t begin, int64_t end,
                                      int64_t bins)
{
    if (!is_key_size(key_bytes))
        return CUDA_OPS_INVALID_ARGUMENT;
    for (int64_t i = begin; i < end; i++) {
        const int64_t key = key_at(input, key_bytes, i);
        if (0 <= key && key < bins)
            counts[key]++;
    }
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_bincount_weights_cpu(double *sums, const void *input, int key_bytes, const void *weights,
                                              int64_t begin, int64_t end, int64_t bins, cuda_ops_dtype dtype)
{
    if (!is_key_size(key_bytes))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype == CUDA_OPS_FLOAT32)
        add_weights_f32(sums, input, key_bytes, weights, begin, end, bins);
    else if (dtype == CUDA_OPS_FLOAT64)
        add_weights_f64(sums, input, key_bytes, weights, begin, end, bins);
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_bincount_range_cpu(int64_t *range, const void *input, int key_bytes, int64_t begin,
                                            int64_t end)
{
    if (!is_key_size(key_bytes) || begin >= end)
        return CUDA_OPS_INVALID_ARGUMENT;
    range[0] = range[1] = key_at(input, key_bytes, begin);
    for (int64_t i = begin + 1; i < end; i++) {
        const int64_t key = key_at(input, key_bytes, i);
        range[0] = min_i64(range[0], key);
        range[1] = max_i64(range[1], key);
    }
    return CUDA_OPS_SUCCESS;
}

#else

static void FN(histc)(int64_t *counts, const REAL *input, int64_t begin, int64_t end, int64_t bins, REAL low, REAL high)
{
    const REAL range = high - low;
    for (int64_t i = begin; i < end; i++) {
        const REAL value = input[i];
        if (!(value >= low && value <= high)) /* NaN too */
            continue;
        const REAL place = (value - low) * (REAL)bins / range;
        /* Of a range that overflows the place may be no number; it is in some bin all the same. */
        counts[place >= (REAL)bins ? bins - 1 : place > 0 ? min_i64((int64_t)place, bins - 1) : 0]++;
    }
}

static void FN(add_weights)(double *sums, const void *input, int key_bytes, const REAL *weights, int64_t begin,
                            int64_t end, int64_t bins)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t key = key_at(input, key_bytes, i);
        if (0 <= key && key < bins)
            sums[key] += (double)weights[i];
    }
}

#endif
