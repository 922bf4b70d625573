/* group_norm and instance_norm on the CPU:
 *
 *     output     = (input - mean) * rstd * weight + bias
 *     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat))     with h = grad_output * weight
 *
 * Contiguous, a group of an image is a row, and each of its channels a run of `inner` elements. In channels_last a unit
 * is as many neighbouring groups as fill a cache line several times, and goes down the pixels with all of their
 * channels, up to TILE at a time. As in layer_norm.c, x - center is exact for values near the mean, and `rest` holds
 * what rounding the mean to the dtype left out; sums of up to SHORT values are in the dtype, sums of those in double.
 * Bound by memory. */
#ifndef REAL

#include "cuda_ops/group_norm.h"

#include "common/common.h"

enum {
    SHORT = 256,         /* values that one sum in the dtype covers */
    TILE = 128,          /* channels whose sums are added at a time */
    LEAST_CHANNELS = 64, /* of a unit in channels_last */
};

typedef struct norm_pass {
    void *output;
    double *new_mean, *new_variance;
    const void *bias;
    void *grad_input;
    double *sums; /* of each image grad_weight's and grad_bias's, by channel */
    const void *grad_output;
    const double *mean, *variance;
    const void *input, *weight;
    cuda_ops_group_norm_sizes sizes;
    int64_t group_channels;
    double eps;
} norm_pass;

/* Groups of a unit. */
static int64_t unit_groups(const cuda_ops_group_norm_sizes *sizes)
{
    if (!sizes->channels_last || sizes->groups == 0)
        return 1;
    const int64_t channels = max_i64(1, sizes->channels / sizes->groups);
    return (LEAST_CHANNELS + channels - 1) / channels;
}

static bool is_empty(const cuda_ops_group_norm_sizes *sizes)
{
    return sizes->images == 0 || sizes->channels == 0 || sizes->inner == 0;
}

static bool fits(const cuda_ops_group_norm_sizes *sizes)
{
    return sizes->groups > 0 && sizes->channels % sizes->groups == 0;
}

int64_t cuda_ops_group_norm_units_cpu(cuda_ops_group_norm_sizes sizes)
{
    if (is_empty(&sizes) || !fits(&sizes))
        return 0;
    const int64_t groups = unit_groups(&sizes);
    return sizes.images * ((sizes.groups + groups - 1) / groups);
}

int64_t cuda_ops_group_norm_workspace_cpu(cuda_ops_group_norm_sizes sizes)
{
    return sizes.images * 2 * sizes.channels * (int64_t)sizeof(double);
}

#define REAL float
#define FN(name) name##_f32
#include "group_norm.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "group_norm.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#define WITHOUT_SUMS /* which are float32's */
#include "group_norm.c"
#undef WITHOUT_SUMS

#include "common/undef_real.h"

cuda_ops_status cuda_ops_group_norm_forward_cpu(void *output, double *mean, double *variance, const void *input,
                                                const void *weight, const void *bias, cuda_ops_group_norm_sizes sizes,
                                                double eps, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64 && dtype != CUDA_OPS_BFLOAT16)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (is_empty(&sizes))
        return CUDA_OPS_SUCCESS;
    if (!fits(&sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    const norm_pass pass = {.output = output,
                            .new_mean = mean,
                            .new_variance = variance,
                            .input = input,
                            .weight = weight,
                            .bias = bias,
                            .sizes = sizes,
                            .group_channels = sizes.channels / sizes.groups,
                            .eps = eps};
    if (dtype == CUDA_OPS_FLOAT32)
        (sizes.channels_last ? forward_columns_f32 : forward_rows_f32)(&pass, begin, end);
    else if (dtype == CUDA_OPS_FLOAT64)
        (sizes.channels_last ? forward_columns_f64 : forward_rows_f64)(&pass, begin, end);
    else
        (sizes.channels_last ? forward_columns_bf16 : forward_rows_bf16)(&pass, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_group_norm_backward_cpu(void *grad_input, void *workspace, const void *grad_output,
                                                 const void *input, const void *weight, const double *mean,
                                                 const double *variance, cuda_ops_group_norm_sizes sizes, double eps,
                                                 int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64 && dtype != CUDA_OPS_BFLOAT16)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (is_empty(&sizes))
        return CUDA_OPS_SUCCESS;
    if (!fits(&sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    const norm_pass pass = {.grad_input = grad_input,
                            .sums = workspace,
                            .grad_output = grad_output,
                            .mean = mean,
                            .variance = variance,
                            .input = input,
                            .weight = weight,
                            .sizes = sizes,
                            .group_channels = sizes.channels / sizes.groups,
                            .eps = eps};
    if (dtype == CUDA_OPS_FLOAT32)
        (sizes.channels_last ? backward_columns_f32 : backward_rows_f32)(&pass, begin, end);
    else if (dtype == CUDA_OPS_FLOAT64)
        (sizes.channels_last ? backward_columns_f64 : backward_rows_f64)(&pass, begin, end);
    else
        (sizes.channels_last ? backward_columns_bf16 : backward_rows_bf16)(&pass, begin, end);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_group_norm_backward_sums_cpu(void *grad_weight, void *grad_bias, const void *workspace,
                                                      cuda_ops_group_norm_sizes sizes, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        backward_sums_f32(grad_weight, grad_bias, workspace, sizes.images, sizes.channels, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        backward_sums_f64(grad_weight, grad_bias, workspace, sizes.images, sizes.channels, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_instance_norm_update_cpu(void *running_mean, void *running_var, const double *mean,
                                                  const double *variance, int64_t images, int64_t channels,
                                                  int64_t count, double momentum, cuda_ops_dtype statistics_dtype)
{
    if (statistics_dtype != CUDA_OPS_FLOAT32 && statistics_dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (images == 0)
        return CUDA_OPS_SUCCESS;
    const double unbiased = (double)count / (double)(count - 1);
    for (int64_t channel = 0; channel < channels; channel++) {
        double means = 0, variances = 0;
        for (int64_t image = 0; image < images; image++) {
            means += mean[image * channels + channel];
            variances += variance[image * channels + channel];
        }
        means /= (double)images;
        variances *= unbiased / (double)images;
        if (statistics_dtype == CUDA_OPS_FLOAT32) {
            float *m = (float *)running_mean + channel, *v = (float *)running_var + channel;
            *m = (float)((1 - momentum) * (double)*m + momentum * means);
            *v = (float)((1 - momentum) * (double)*v + momentum * variances);
        } else {
            double *m = (double *)running_mean + channel, *v = (double *)running_var + channel;
            *m = (1 - momentum) * *m + momentum * means;
            *v = (1 - momentum) * *v + momentum * variances;
        }
    }
    return CUDA_OPS_SUCCESS;
}

#else

#include "common/stored.h"

/* The mean, rounded to the dtype, and what that left out: `rest`, the mean of differences from it. */
typedef struct FN(statistics) {
    REAL center;
    double rest, rstd;
} FN(statistics);

/* Of the mean's rounded value and the sums of `count` differences from it and of their squares; stores mean and
 * variance. */
CUDA_OPS_INLINE FN(statistics)
    FN(finish)(const norm_pass *pass, int64_t row, REAL center, double sum, double squares, int64_t count)
{
    const double rest = sum / (double)count, biased = squares / (double)count - rest * rest;
    const double variance = biased < 0 ? 0 : biased; /* NaN stays */
    pass->new_mean[row] = (double)center + rest;
    pass->new_variance[row] = variance;
    return (FN(statistics)){center, rest, 1 / sqrt(variance + pass->eps)};
}

/* y = (x - center) * scale + shift with a channel's weight and bias. */
CUDA_OPS_INLINE void FN(coefficients)(REAL *scale, REAL *shift, const norm_pass *pass, int64_t channel,
                                      const FN(statistics) * s)
{
    const double weight = pass->weight ? (double)((const REAL *)pass->weight)[channel] : 1;
    const double bias = pass->bias ? (double)((const REAL *)pass->bias)[channel] : 0;
    *scale = (REAL)(weight * s->rstd);
    *shift = (REAL)(bias - s->rest * weight * s->rstd);
}

CUDA_OPS_SIMD static void FN(forward_rows)(const norm_pass *pass, int64_t begin, int64_t end)
{
    const int64_t inner = pass->sizes.inner, channels = pass->group_channels, cols = channels * inner;
    const double inverse_cols = 1 / (double)cols;
    for (int64_t row = begin; row < end; row++) {
        const STORED *restrict x = (const STORED *)pass->input + row * cols;
        STORED *restrict y = (STORED *)pass->output + row * cols;
        double mean = 0, sum = 0, squares = 0;
        for (int64_t first = 0; first < cols; first += SHORT) {
            const int64_t last = min_i64(first + SHORT, cols);
            REAL part = 0; /* of elements that are made smaller first: their sum might be too large for the dtype */
#pragma omp simd reduction(+ : part)
            for (int64_t c = first; c < last; c++)
                part += LOAD(x[c]) * ((REAL)1 / SHORT);
            mean += (double)part * (inverse_cols * SHORT);
        }
        const REAL center = (REAL)mean;
        for (int64_t first = 0; first < cols; first += SHORT) {
            const int64_t last = min_i64(first + SHORT, cols);
            REAL part = 0, part_squares = 0;
#pragma omp simd reduction(+ : part, part_squares)
            for (int64_t c = first; c < last; c++) {
                const REAL difference = LOAD(x[c]) - center;
                part += difference;
                part_squares += difference * difference;
            }
            sum += (double)part;
            squares += (double)part_squares;
        }
        const FN(statistics) s = FN(finish)(pass, row, center, sum, squares, cols);
        for (int64_t d = 0; d < channels; d++) {
            REAL scale, shift;
            FN(coefficients)(&scale, &shift, pass, row % pass->sizes.groups * channels + d, &s);
#pragma omp simd
            for (int64_t i = d * inner; i < (d + 1) * inner; i++)
                y[i] = STORE((LOAD(x[i]) - center) * scale + shift);
        }
    }
}

CUDA_OPS_SIMD static void FN(backward_rows)(const norm_pass *pass, int64_t begin, int64_t end)
{
    const int64_t inner = pass->sizes.inner, channels = pass->group_channels, cols = channels * inner;
    const int64_t groups = pass->sizes.groups;
    const REAL *weight = pass->weight;
    for (int64_t row = begin; row < end; row++) {
        const STORED *restrict x = (const STORED *)pass->input + row * cols;
        const STORED *restrict g = (const STORED *)pass->grad_output + row * cols;
        const double mean = pass->mean[row], rstd = 1 / sqrt(pass->variance[row] + pass->eps);
        const REAL center = (REAL)mean;
        const double off = mean - (double)center;
        double mean_h = 0, slope = 0;
        for (int64_t d = 0; d < channels; d++) {
            const int64_t channel = row % groups * channels + d;
            double sum = 0, products = 0;
            for (int64_t first = d * inner; first < (d + 1) * inner; first += SHORT) {
                const int64_t last = min_i64(first + SHORT, (d + 1) * inner);
                REAL part = 0, part_products = 0;
#pragma omp simd reduction(+ : part, part_products)
                for (int64_t i = first; i < last; i++) {
                    part += LOAD(g[i]);
                    part_products += LOAD(g[i]) * (LOAD(x[i]) - center);
                }
                sum += (double)part;
                products += (double)part_products;
            }
            products = (products - off * sum) * rstd;
            double *to = pass->sums + row / groups * 2 * pass->sizes.channels + channel;
            to[0] = products;
            to[pass->sizes.channels] = sum;
            const double w = weight ? (double)weight[channel] : 1;
            mean_h += w * sum / (double)cols;
            slope += w * products / (double)cols;
        }
        if (!pass->grad_input)
            continue;
        STORED *restrict dx = (STORED *)pass->grad_input + row * cols;
        const double tilt = -rstd * rstd * slope;
        const REAL by_input = (REAL)tilt, rest = (REAL)(-rstd * mean_h - tilt * off);
        for (int64_t d = 0; d < channels; d++) {
            const REAL scale = (REAL)((weight ? (double)weight[row % groups * channels + d] : 1) * rstd);
#pragma omp simd
            for (int64_t i = d * inner; i < (d + 1) * inner; i++)
                dx[i] = STORE(LOAD(g[i]) * scale + (LOAD(x[i]) - center) * by_input + rest);
        }
    }
}

CUDA_OPS_SIMD static void FN(forward_columns)(const norm_pass *pass, int64_t begin, int64_t end)
{
    const int64_t channels = pass->sizes.channels, inner = pass->sizes.inner, groups = pass->sizes.groups;
    const int64_t span = unit_groups(&pass->sizes), units = (groups + span - 1) / span;
    const int64_t count = pass->group_channels * inner; /* of a group */
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t image = unit / units, group = unit % units * span;
        const int64_t first = group * pass->group_channels;
        const int64_t last = min_i64(group + span, groups) * pass->group_channels;
        const STORED *restrict x = (const STORED *)pass->input + image * inner * channels;
        STORED *restrict y = (STORED *)pass->output + image * inner * channels;
        double means[LEAST_CHANNELS] = {0}, sums[LEAST_CHANNELS] = {0}, squares[LEAST_CHANNELS] = {0};
        FN(statistics) s[LEAST_CHANNELS];
        for (int64_t at = first; at < last; at += TILE) {
            const int64_t width = min_i64(TILE, last - at);
            for (int64_t from = 0; from < inner; from += SHORT) {
                REAL part[TILE] = {0};
                for (int64_t p = from; p < min_i64(from + SHORT, inner); p++)
#pragma omp simd
                    for (int64_t c = 0; c < width; c++)
                        part[c] += LOAD(x[p * channels + at + c]) * ((REAL)1 / SHORT);
                for (int64_t c = 0; c < width; c++)
                    means[(at + c - first) / pass->group_channels] += (double)part[c] * SHORT / (double)count;
            }
        }
        for (int64_t at = first; at < last; at += TILE) {
            const int64_t width = min_i64(TILE, last - at);
            REAL center[TILE];
            for (int64_t c = 0; c < width; c++)
                center[c] = (REAL)means[(at + c - first) / pass->group_channels];
            for (int64_t from = 0; from < inner; from += SHORT) {
                REAL part[TILE] = {0}, part_squares[TILE] = {0};
                for (int64_t p = from; p < min_i64(from + SHORT, inner); p++)
#pragma omp simd
                    for (int64_t c = 0; c < width; c++) {
                        const REAL difference = LOAD(x[p * channels + at + c]) - center[c];
                        part[c] += difference;
                        part_squares[c] += difference * difference;
                    }
                for (int64_t c = 0; c < width; c++) {
                    sums[(at + c - first) / pass->group_channels] += (double)part[c];
                    squares[(at + c - first) / pass->group_channels] += (double)part_squares[c];
                }
            }
        }
        for (int64_t g = group; g < min_i64(group + span, groups); g++)
            s[g - group] = FN(finish)(pass, image * groups + g, (REAL)means[g - group], sums[g - group],
                                      squares[g - group], count);
        for (int64_t at = first; at < last; at += TILE) {
            const int64_t width = min_i64(TILE, last - at);
            REAL center[TILE], scale[TILE], shift[TILE];
            for (int64_t c = 0; c < width; c++) {
                const FN(statistics) *of = &s[(at + c - first) / pass->group_channels];
                center[c] = of->center;
                FN(coefficients)(&scale[c], &shift[c], pass, at + c, of);
            }
            for (int64_t p = 0; p < inner; p++)
#pragma omp simd
                for (int64_t c = 0; c < width; c++)
                    y[p * channels + at + c] =
                        STORE((LOAD(x[p * channels + at + c]) - center[c]) * scale[c] + shift[c]);
        }
    }
}

CUDA_OPS_SIMD static void FN(backward_columns)(const norm_pass *pass, int64_t begin, int64_t end)
{
    const int64_t channels = pass->sizes.channels, inner = pass->sizes.inner, groups = pass->sizes.groups;
    const int64_t span = unit_groups(&pass->sizes), units = (groups + span - 1) / span;
    const double count = (double)(pass->group_channels * inner);
    const REAL *weight = pass->weight;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t image = unit / units, group = unit % units * span;
        const int64_t first = group * pass->group_channels;
        const int64_t last = min_i64(group + span, groups) * pass->group_channels;
        const STORED *restrict x = (const STORED *)pass->input + image * inner * channels;
        const STORED *restrict g = (const STORED *)pass->grad_output + image * inner * channels;
        double rstd[LEAST_CHANNELS], mean_h[LEAST_CHANNELS] = {0}, slope[LEAST_CHANNELS] = {0};
        for (int64_t i = group; i < min_i64(group + span, groups); i++)
            rstd[i - group] = 1 / sqrt(pass->variance[image * groups + i] + pass->eps);
        for (int64_t at = first; at < last; at += TILE) {
            const int64_t width = min_i64(TILE, last - at);
            REAL center[TILE];
            double sums[TILE] = {0}, products[TILE] = {0};
            for (int64_t c = 0; c < width; c++)
                center[c] = (REAL)pass->mean[image * groups + (at + c) / pass->group_channels];
            for (int64_t from = 0; from < inner; from += SHORT) {
                REAL part[TILE] = {0}, part_products[TILE] = {0};
                for (int64_t p = from; p < min_i64(from + SHORT, inner); p++)
#pragma omp simd
                    for (int64_t c = 0; c < width; c++) {
                        const REAL grad = LOAD(g[p * channels + at + c]);
                        part[c] += grad;
                        part_products[c] += grad * (LOAD(x[p * channels + at + c]) - center[c]);
                    }
                for (int64_t c = 0; c < width; c++) {
                    sums[c] += (double)part[c];
                    products[c] += (double)part_products[c];
                }
            }
            for (int64_t c = 0; c < width; c++) {
                const int64_t of = (at + c - first) / pass->group_channels;
                const double off = pass->mean[image * groups + group + of] - (double)center[c];
                const double product = (products[c] - off * sums[c]) * rstd[of];
                double *to = pass->sums + image * 2 * channels + at + c;
                to[0] = product;
                to[channels] = sums[c];
                const double w = weight ? (double)weight[at + c] : 1;
                mean_h[of] += w * sums[c] / count;
                slope[of] += w * product / count;
            }
        }
        if (!pass->grad_input)
            continue;
        STORED *restrict dx = (STORED *)pass->grad_input + image * inner * channels;
        for (int64_t at = first; at < last; at += TILE) {
            const int64_t width = min_i64(TILE, last - at);
            REAL center[TILE], scale[TILE], by_input[TILE], rest[TILE];
            for (int64_t c = 0; c < width; c++) {
                const int64_t of = (at + c - first) / pass->group_channels;
                const double mean = pass->mean[image * groups + group + of];
                const double tilt = -rstd[of] * rstd[of] * slope[of];
                center[c] = (REAL)mean;
                scale[c] = (REAL)((weight ? (double)weight[at + c] : 1) * rstd[of]);
                by_input[c] = (REAL)tilt;
                rest[c] = (REAL)(-rstd[of] * mean_h[of] - tilt * (mean - (double)center[c]));
            }
            for (int64_t p = 0; p < inner; p++)
#pragma omp simd
                for (int64_t c = 0; c < width; c++) {
                    const int64_t i = p * channels + at + c;
                    dx[i] = STORE(LOAD(g[i]) * scale[c] + (LOAD(x[i]) - center[c]) * by_input[c] + rest[c]);
                }
        }
    }
}

#ifndef WITHOUT_SUMS
CUDA_OPS_SIMD static void FN(backward_sums)(REAL *grad_weight, REAL *grad_bias, const double *sums, int64_t images,
                                            int64_t channels, int64_t begin, int64_t end)
{
    for (int which = 0; which < 2; which++) {
        REAL *to = which == 0 ? grad_weight : grad_bias;
        for (int64_t first = begin; first < end && to; first += TILE) {
            const int64_t count = min_i64(TILE, end - first);
            double sum[TILE] = {0};
            for (int64_t image = 0; image < images; image++)
                for (int64_t i = 0; i < count; i++)
                    sum[i] += sums[(2 * image + which) * channels + first + i];
            for (int64_t i = 0; i < count; i++)
                to[first + i] = (REAL)sum[i];
        }
    }
}
#endif

#endif
