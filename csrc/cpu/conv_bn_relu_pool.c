/* conv_bn_relu_pool on the CPU, after the convolution: normalise, relu and max-pool in one pass over the convolution's
 * output, and the gradient with respect to it.
 * Bound by memory: forward reads conv_output once and writes a quarter of it (pooling 2x2) and a byte beside each
 * value; backward takes its sums from the pooled values alone, then reads conv_output once and writes its gradient.
 * Contiguous: window after window of a plane, with the usual 2x2 as constants for the compiler; channels_last: vectors
 * over the channels. */
#ifndef REAL

#include "cuda_ops/conv_bn_relu_pool.h"

#include "common/common.h"

/* Channels whose maxima are kept in registers while their window is read, and independent partial sums. */
enum { LANES = 32 };

static bool valid(const cuda_ops_pool2d *pool)
{
    return cuda_ops_pool2d_valid(pool) && pool->height.dilation == 1 && pool->width.dilation == 1 &&
           (int64_t)pool->height.kernel * pool->width.kernel <= CUDA_OPS_POOL_LARGEST;
}

/* INDEX: an integer as wide as REAL, so that a comparison of REALs selects between INDEX values without conversion. */
#define REAL float
#define INDEX int32_t
#define FN(name) name##_f32
#include "conv_bn_relu_pool.c"

#include "common/undef_real.h"
#undef INDEX
#define REAL double
#define INDEX int64_t
#define FN(name) name##_f64
#include "conv_bn_relu_pool.c"

#include "common/undef_real.h"
#undef INDEX

#define DISPATCH(dtype, name, ...)                                                                                     \
    switch (dtype) {                                                                                                   \
    case CUDA_OPS_FLOAT32:                                                                                             \
        name##_f32(__VA_ARGS__);                                                                                       \
        return CUDA_OPS_SUCCESS;                                                                                       \
    case CUDA_OPS_FLOAT64:                                                                                             \
        name##_f64(__VA_ARGS__);                                                                                       \
        return CUDA_OPS_SUCCESS;                                                                                       \
    default:                                                                                                           \
        return CUDA_OPS_UNSUPPORTED_DTYPE;                                                                             \
    }

cuda_ops_status cuda_ops_conv_bn_relu_pool_prepare_forward_cpu(void *coefficients, const void *mean,
                                                               const void *variance, const void *norm_weight,
                                                               const void *norm_bias, int64_t channels, double eps,
                                                               cuda_ops_dtype dtype, cuda_ops_dtype statistics_dtype)
{
    if (statistics_dtype != CUDA_OPS_FLOAT32 && statistics_dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    DISPATCH(dtype, prepare_forward, coefficients, mean, variance, norm_weight, norm_bias, channels, eps,
             statistics_dtype)
}

cuda_ops_status cuda_ops_conv_bn_relu_pool_pool_cpu(void *output, uint8_t *argmax, void *maximum,
                                                    const void *conv_output, const void *coefficients,
                                                    const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype)
{
    if (!valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (pool->channels_last)
        DISPATCH(dtype, pool_rows, output, argmax, maximum, conv_output, coefficients, pool, begin, end)
    DISPATCH(dtype, pool_planes, output, argmax, maximum, conv_output, coefficients, pool, begin, end)
}

cuda_ops_status cuda_ops_conv_bn_relu_pool_sums_cpu(double *sums, const void *grad_output, const uint8_t *argmax,
                                                    const void *maximum, const double *mean,
                                                    const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype)
{
    if (!valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (pool->channels_last)
        DISPATCH(dtype, sums_of_rows, sums, grad_output, argmax, maximum, mean, pool, begin, end)
    DISPATCH(dtype, sums_of_planes, sums, grad_output, argmax, maximum, mean, pool, begin, end)
}

cuda_ops_status cuda_ops_conv_bn_relu_pool_prepare_backward_cpu(void *grad_norm_weight, void *grad_norm_bias,
                                                                void *coefficients, const double *sums,
                                                                const double *mean, const double *variance,
                                                                const void *norm_weight, const cuda_ops_pool2d *pool,
                                                                double eps, cuda_ops_dtype dtype)
{
    if (!valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    DISPATCH(dtype, prepare_backward, grad_norm_weight, grad_norm_bias, coefficients, sums, mean, variance, norm_weight,
             pool, eps)
}

cuda_ops_status cuda_ops_conv_bn_relu_pool_grad_conv_cpu(void *grad_conv_output, const void *grad_output,
                                                         const uint8_t *argmax, const void *conv_output,
                                                         const void *coefficients, const cuda_ops_pool2d *pool,
                                                         int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (!valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (pool->channels_last)
        DISPATCH(dtype, grad_conv_rows, grad_conv_output, grad_output, argmax, conv_output, coefficients, pool, begin,
                 end)
    DISPATCH(dtype, grad_conv_planes, grad_conv_output, grad_output, argmax, conv_output, coefficients, pool, begin,
             end)
}

#else

/* Forward: center, scale, offset of each channel. Rounding the mean to REAL would shift a channel whose mean is far
 * larger than its deviation; offset makes up for it. */
static void FN(prepare_forward)(REAL *coefficients, const void *mean, const void *variance, const REAL *norm_weight,
                                const REAL *norm_bias, int64_t channels, double eps, cuda_ops_dtype statistics_dtype)
{
    const bool single = statistics_dtype == CUDA_OPS_FLOAT32;
    for (int64_t c = 0; c < channels; c++) {
        const double m = single ? ((const float *)mean)[c] : ((const double *)mean)[c];
        const double v = single ? ((const float *)variance)[c] : ((const double *)variance)[c];
        const double scale = (norm_weight ? norm_weight[c] : 1.0) / sqrt(v + eps);
        const REAL center = (REAL)m;
        coefficients[c] = center;
        coefficients[channels + c] = (REAL)scale;
        coefficients[2 * channels + c] = (REAL)((norm_bias ? norm_bias[c] : 0.0) - (m - (double)center) * scale);
    }
}

/* Windows [begin, end) of one row of outputs, over rows [h_begin, h_end) of the window; `first` is row 0, column 0 of
 * the window of output 0, seen without padding. `inside` promises that no window leaves the input along the width. */
CUDA_OPS_INLINE void FN(pool_row)(REAL *restrict output, uint8_t *restrict argmax, REAL *restrict maximum,
                                  const REAL *first, REAL center, REAL scale, REAL offset, int32_t h_begin,
                                  int32_t h_end, cuda_ops_pool_axis width, int32_t begin, int32_t end, bool inside)
{
    for (int32_t w = begin; w < end; w++) {
        const int32_t start = cuda_ops_pool_start(width, w);
        const int32_t w_begin = inside ? 0 : cuda_ops_pool_first_tap(width, start);
        const int32_t w_end = inside ? width.kernel : cuda_ops_pool_end_tap(width, start);
        REAL best = (REAL)-INFINITY, raw = 0;
        INDEX index = h_begin * width.kernel + w_begin;
        for (int32_t h = h_begin; h < h_end; h++)
            for (int32_t tap = w_begin; tap < w_end; tap++) {
                const REAL y = first[(int64_t)h * width.input + start + tap];
                const REAL z = (y - center) * scale + offset;
                const bool take = z > best || z != z;
                best = take ? z : best;
                raw = take ? y : raw;
                index = take ? (INDEX)(h * width.kernel + tap) : index;
            }
        const bool active = !(best <= 0);
        output[w] = active ? best : (REAL)0;
        if (argmax) {
            argmax[w] = (uint8_t)(active ? index : CUDA_OPS_POOL_INACTIVE);
            maximum[w] = raw;
        }
    }
}

CUDA_OPS_SIMD static void FN(pool_planes)(REAL *output, uint8_t *argmax, REAL *maximum, const REAL *conv_output,
                                          const REAL *coefficients, const cuda_ops_pool2d *pool, int64_t begin,
                                          int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    int32_t inside_begin, inside_end;
    cuda_ops_pool_inside(width, &inside_begin, &inside_end);
    const bool usual = width.kernel == 2 && width.stride == 2;
    const cuda_ops_pool_axis two = {width.input, width.output, 2, 2, width.padding, 1};
    for (int64_t plane = begin; plane < end; plane++) {
        const int64_t c = plane % pool->channels;
        const REAL center = coefficients[c], scale = coefficients[pool->channels + c],
                   offset = coefficients[2 * pool->channels + c];
        const REAL *image = conv_output + plane * height.input * width.input;
        for (int32_t h = 0; h < height.output; h++) {
            const int32_t start = cuda_ops_pool_start(height, h);
            const int32_t h_begin = cuda_ops_pool_first_tap(height, start),
                          h_end = cuda_ops_pool_end_tap(height, start);
            const REAL *first = image + (int64_t)start * width.input;
            const int64_t row = (plane * height.output + h) * width.output;
            REAL *out = output + row, *max = maximum ? maximum + row : NULL;
            uint8_t *arg = argmax ? argmax + row : NULL;
            FN(pool_row)(out, arg, max, first, center, scale, offset, h_begin, h_end, width, 0, inside_begin, false);
            if (usual && h_begin == 0 && h_end == 2)
                FN(pool_row)
            (out, arg, max, first, center, scale, offset, 0, 2, two, inside_begin, inside_end, true);
            else FN(pool_row)(out, arg, max, first, center, scale, offset, h_begin, h_end, width, inside_begin,
                              inside_end, true);
            FN(pool_row)
            (out, arg, max, first, center, scale, offset, h_begin, h_end, width, inside_end, width.output, false);
        }
    }
}

/* A window in `lanes` channels, at most LANES of them, c the first. `window` is its row 0, column 0 in channel 0, seen
 * without padding. */
CUDA_OPS_INLINE void FN(pool_channels)(REAL *restrict output, uint8_t *restrict argmax, REAL *restrict maximum,
                                       const REAL *window, const REAL *restrict coefficients, int64_t channels,
                                       cuda_ops_pool_axis height, cuda_ops_pool_axis width, int32_t h_start,
                                       int32_t w_start, int64_t c, int64_t lanes)
{
    const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start), h_end = cuda_ops_pool_end_tap(height, h_start);
    const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start), w_end = cuda_ops_pool_end_tap(width, w_start);
    const REAL *restrict center = coefficients + c, *restrict scale = center + channels,
                         *restrict offset = scale + channels;
    REAL best[LANES], raw[LANES];
    INDEX index[LANES];
    for (int64_t i = 0; i < lanes; i++) {
        best[i] = (REAL)-INFINITY;
        raw[i] = 0;
        index[i] = h_begin * width.kernel + w_begin;
    }
    for (int32_t h = h_begin; h < h_end; h++)
        for (int32_t w = w_begin; w < w_end; w++) {
            const REAL *restrict y = window + ((int64_t)h * width.input + w) * channels + c;
            const INDEX position = h * width.kernel + w;
            for (int64_t i = 0; i < lanes; i++) {
                const REAL z = (y[i] - center[i]) * scale[i] + offset[i];
                const bool take = z > best[i] || z != z;
                best[i] = take ? z : best[i];
                raw[i] = take ? y[i] : raw[i];
                index[i] = take ? position : index[i];
            }
        }
    for (int64_t i = 0; i < lanes; i++)
        output[i] = best[i] <= 0 ? (REAL)0 : best[i];
    if (!argmax)
        return;
    for (int64_t i = 0; i < lanes; i++) {
        argmax[i] = (uint8_t)(best[i] <= 0 ? CUDA_OPS_POOL_INACTIVE : index[i]);
        maximum[i] = raw[i];
    }
}

CUDA_OPS_SIMD static void FN(pool_rows)(REAL *output, uint8_t *argmax, REAL *maximum, const REAL *conv_output,
                                        const REAL *coefficients, const cuda_ops_pool2d *pool, int64_t begin,
                                        int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int32_t h_start = cuda_ops_pool_start(height, (int32_t)(row % height.output));
        const REAL *image = conv_output + row / height.output * height.input * width.input * channels;
        for (int32_t w = 0; w < width.output; w++) {
            const int32_t w_start = cuda_ops_pool_start(width, w);
            const REAL *window = image + ((int64_t)h_start * width.input + w_start) * channels;
            for (int64_t c = 0; c < channels; c += LANES) {
                const int64_t i = (row * width.output + w) * channels + c;
                REAL *max = maximum ? maximum + i : NULL;
                uint8_t *arg = argmax ? argmax + i : NULL;
                if (c + LANES <= channels)
                    FN(pool_channels)
                (output + i, arg, max, window, coefficients, channels, height, width, h_start, w_start, c, LANES);
                else FN(pool_channels)(output + i, arg, max, window, coefficients, channels, height, width, h_start,
                                       w_start, c, channels - c);
            }
        }
    }
}

/* Sums of dz and of dz * (maximum - center) of one channel, in independent lanes so that the loop is vectorised, and in
 * double from plane to plane. center is the mean rounded to REAL; prepare_backward corrects for the rounding. */
CUDA_OPS_SIMD static void FN(sums_of_planes)(double *sums, const REAL *grad_output, const uint8_t *argmax,
                                             const REAL *maximum, const double *mean, const cuda_ops_pool2d *pool,
                                             int64_t begin, int64_t end)
{
    const int64_t plane = (int64_t)pool->height.output * pool->width.output;
    for (int64_t c = begin; c < end; c++) {
        const REAL center = (REAL)mean[c];
        double sum = 0, product = 0;
        for (int64_t n = 0; n < pool->batch; n++) {
            const int64_t base = (n * pool->channels + c) * plane;
            const REAL *restrict g = grad_output + base, *restrict y = maximum + base;
            const uint8_t *restrict arg = argmax + base;
            REAL part[LANES] = {0}, part_product[LANES] = {0};
            int64_t i = 0;
            for (; i + LANES <= plane; i += LANES)
                for (int lane = 0; lane < LANES; lane++) {
                    const REAL dz = arg[i + lane] == CUDA_OPS_POOL_INACTIVE ? (REAL)0 : g[i + lane];
                    part[lane] += dz;
                    part_product[lane] += dz * (y[i + lane] - center);
                }
            for (int lane = 0; i < plane; i++, lane++) {
                const REAL dz = arg[i] == CUDA_OPS_POOL_INACTIVE ? (REAL)0 : g[i];
                part[lane] += dz;
                part_product[lane] += dz * (y[i] - center);
            }
            for (int lane = 0; lane < LANES; lane++) {
                sum += (double)part[lane];
                product += (double)part_product[lane];
            }
        }
        sums[c] = sum;
        sums[pool->channels + c] = product;
    }
}

CUDA_OPS_SIMD static void FN(sums_of_rows)(double *sums, const REAL *grad_output, const uint8_t *argmax,
                                           const REAL *maximum, const double *mean, const cuda_ops_pool2d *pool,
                                           int64_t begin, int64_t end)
{
    const int64_t channels = pool->channels;
    const int64_t rows = pool->batch * pool->height.output, columns = pool->width.output;
    for (int64_t c = begin; c < end; c += LANES) {
        const int64_t lanes = min_i64(LANES, end - c);
        REAL center[LANES] = {0};
        double sum[LANES] = {0}, product[LANES] = {0};
        for (int64_t i = 0; i < lanes; i++)
            center[i] = (REAL)mean[c + i];
        for (int64_t row = 0; row < rows; row++) {
            REAL part[LANES] = {0}, part_product[LANES] = {0};
            for (int64_t w = 0; w < columns; w++) {
                const int64_t base = (row * columns + w) * channels + c;
                const REAL *restrict g = grad_output + base, *restrict y = maximum + base;
                const uint8_t *restrict arg = argmax + base;
                for (int64_t i = 0; i < lanes; i++) {
                    const REAL dz = arg[i] == CUDA_OPS_POOL_INACTIVE ? (REAL)0 : g[i];
                    part[i] += dz;
                    part_product[i] += dz * (y[i] - center[i]);
                }
            }
            for (int64_t i = 0; i < lanes; i++) {
                sum[i] += (double)part[i];
                product[i] += (double)part_product[i];
            }
        }
        for (int64_t i = 0; i < lanes; i++) {
            sums[c + i] = sum[i];
            sums[channels + c + i] = product[i];
        }
    }
}

/* Backward: center, scale, slope, offset of grad_conv_output = dz * scale + (conv_output - center) * slope + offset. */
static void FN(prepare_backward)(REAL *grad_norm_weight, REAL *grad_norm_bias, REAL *coefficients, const double *sums,
                                 const double *mean, const double *variance, const REAL *norm_weight,
                                 const cuda_ops_pool2d *pool, double eps)
{
    const int64_t channels = pool->channels;
    const double count = (double)pool->batch * pool->height.input * pool->width.input;
    for (int64_t c = 0; c < channels; c++) {
        const double rstd = 1 / sqrt(variance[c] + eps);
        const double scale = (norm_weight ? norm_weight[c] : 1.0) * rstd;
        const REAL center = (REAL)mean[c];
        const double rounding = mean[c] - (double)center;
        const double dot = (sums[channels + c] - rounding * sums[c]) * rstd; /* of dz with what is normalised */
        const double slope = -scale * rstd * dot / count;
        coefficients[c] = center;
        coefficients[channels + c] = (REAL)scale;
        coefficients[2 * channels + c] = (REAL)slope;
        coefficients[3 * channels + c] = (REAL)(-scale * sums[c] / count - slope * rounding);
        if (grad_norm_weight)
            grad_norm_weight[c] = (REAL)dot;
        if (grad_norm_bias)
            grad_norm_bias[c] = (REAL)sums[c];
    }
}

/* Within a plane one thread adds window after window, in their order. */
CUDA_OPS_SIMD static void FN(grad_conv_planes)(REAL *grad_conv_output, const REAL *grad_output, const uint8_t *argmax,
                                               const REAL *conv_output, const REAL *coefficients,
                                               const cuda_ops_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t plane = (int64_t)height.input * width.input, channels = pool->channels;
    for (int64_t p = begin; p < end; p++) {
        const int64_t c = p % channels;
        const REAL center = coefficients[c], scale = coefficients[channels + c], slope = coefficients[2 * channels + c],
                   offset = coefficients[3 * channels + c];
        const REAL *restrict y = conv_output + p * plane;
        REAL *restrict grad = grad_conv_output + p * plane;
        for (int64_t i = 0; i < plane; i++)
            grad[i] = (y[i] - center) * slope + offset;
        for (int32_t h = 0; h < height.output; h++)
            for (int32_t w = 0; w < width.output; w++) {
                const int64_t o = (p * height.output + h) * width.output + w;
                if (argmax[o] == CUDA_OPS_POOL_INACTIVE)
                    continue;
                const int64_t row = cuda_ops_pool_start(height, h) + argmax[o] / width.kernel;
                const int64_t column = cuda_ops_pool_start(width, w) + argmax[o] % width.kernel;
                /* Forward writes no other index, but a caller of the op may pass one: nothing is written out of
                 * bounds. */
                if (row < 0 || row >= height.input || column < 0 || column >= width.input)
                    continue;
                grad[row * width.input + column] += grad_output[o] * scale;
            }
    }
}

/* A row of conv_output gathers from the windows over it: rows share windows, and nothing is written by two threads. */
CUDA_OPS_SIMD static void FN(grad_conv_rows)(REAL *grad_conv_output, const REAL *grad_output, const uint8_t *argmax,
                                             const REAL *conv_output, const REAL *coefficients,
                                             const cuda_ops_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    const REAL *restrict center = coefficients, *restrict scale = center + channels, *restrict slope = scale + channels,
                         *restrict offset = slope + channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t h = (int32_t)(row % height.input);
        const int32_t h_begin = cuda_ops_pool_first_window(height, h), h_end = cuda_ops_pool_end_window(height, h);
        for (int32_t w = 0; w < width.input; w++) {
            const int32_t w_begin = cuda_ops_pool_first_window(width, w), w_end = cuda_ops_pool_end_window(width, w);
            const int64_t base = (row * width.input + w) * channels;
            const REAL *restrict y = conv_output + base;
            REAL *restrict grad = grad_conv_output + base;
            for (int64_t c = 0; c < channels; c++)
                grad[c] = (y[c] - center[c]) * slope[c] + offset[c];
            for (int32_t i = h_begin; i < h_end; i++)
                for (int32_t j = w_begin; j < w_end; j++) {
                    const int64_t window = ((n * height.output + i) * width.output + j) * channels;
                    const uint8_t position = (uint8_t)((h - cuda_ops_pool_start(height, i)) * width.kernel + w -
                                                       cuda_ops_pool_start(width, j));
                    const REAL *restrict g = grad_output + window;
                    const uint8_t *restrict arg = argmax + window;
                    for (int64_t c = 0; c < channels; c++)
                        grad[c] += arg[c] == position ? g[c] * scale[c] : (REAL)0;
                }
        }
    }
}

#endif
