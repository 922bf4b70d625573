/* avg_pool2d on the CPU. Forward: out = sum over the window / divisor; backward: each position gathers grad / divisor
 * from its windows. Bound by memory: input and output are each moved once, both ways. Contiguous: windows that lie
 * inside the input are processed a row at a time, with the kernel's and the stride's sizes as constants for the usual
 * 2x2, so that the row is vectorised. channels_last: vectors over the channels. */
#ifndef REAL

#include "cuda_ops/avg_pool2d.h"

#include "common/common.h"
#include "common/stored.h"

/* What the kernels need besides the geometry. */
typedef struct {
    int64_t divisor_override;
    bool count_include_pad;
} divisor_rule;

/* Divisor of the window that begins at row h_start and column w_start. */
CUDA_OPS_INLINE int64_t window_divisor(const cuda_ops_pool2d *pool, divisor_rule rule, int32_t h_start, int32_t w_start)
{
    if (rule.divisor_override != 0)
        return rule.divisor_override;
    return (int64_t)cuda_ops_avg_pool_extent(pool->height, h_start, rule.count_include_pad) *
           cuda_ops_avg_pool_extent(pool->width, w_start, rule.count_include_pad);
}

#define REAL float
#define FN(name) name##_f32
#include "avg_pool2d.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "avg_pool2d.c"

#include "common/undef_real.h"

/* As FN(avg_forward_rows), some channels of a window at a time, which are widened in registers. */
CUDA_OPS_SIMD static void avg_forward_rows_bf16(uint16_t *restrict output, const uint16_t *restrict input,
                                                const cuda_ops_pool2d *pool, divisor_rule rule, int64_t begin,
                                                int64_t end)
{
    enum { LANES = 32 };
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.output;
        const int32_t h_start = cuda_ops_pool_start(height, (int32_t)(row % height.output));
        const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start);
        const int32_t h_end = cuda_ops_pool_end_tap(height, h_start);
        for (int32_t w = 0; w < width.output; w++) {
            const int32_t w_start = cuda_ops_pool_start(width, w);
            const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start);
            const int32_t w_end = cuda_ops_pool_end_tap(width, w_start);
            const float divisor = (float)window_divisor(pool, rule, h_start, w_start);
            const uint16_t *const image = input + n * height.input * width.input * channels;
            for (int64_t first = 0; first < channels; first += LANES) {
                const int64_t lanes = min_i64(LANES, channels - first);
                float sums[LANES] = {0};
                for (int32_t i = h_begin; i < h_end; i++)
                    for (int32_t j = w_begin; j < w_end; j++) {
                        const int64_t position = (int64_t)(h_start + i) * width.input + w_start + j;
                        const uint16_t *const in = image + position * channels + first;
                        if (lanes == LANES) /* a number that the compiler knows keeps the sums in registers */
                            for (int c = 0; c < LANES; c++)
                                sums[c] += widened_bfloat16(in[c]);
                        else
                            for (int64_t c = 0; c < lanes; c++)
                                sums[c] += widened_bfloat16(in[c]);
                    }
                uint16_t *const out = output + (row * width.output + w) * channels + first;
                for (int64_t c = 0; c < lanes; c++)
                    sums[c] /= divisor;
                for (int64_t c = 0; c < lanes; c++)
                    out[c] = stored_bfloat16(sums[c]);
            }
        }
    }
}

cuda_ops_status cuda_ops_avg_pool2d_forward_cpu(void *output, const void *input, const cuda_ops_pool2d *pool,
                                                bool count_include_pad, int64_t divisor_override, int64_t begin,
                                                int64_t end, cuda_ops_dtype dtype)
{
    const divisor_rule rule = {divisor_override, count_include_pad};
    if (!cuda_ops_pool2d_valid(pool) || pool->height.dilation != 1 || pool->width.dilation != 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        (pool->channels_last ? avg_forward_rows_f32 : avg_forward_planes_f32)(output, input, pool, rule, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        (pool->channels_last ? avg_forward_rows_f64 : avg_forward_planes_f64)(output, input, pool, rule, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        if (!pool->channels_last)
            return CUDA_OPS_UNSUPPORTED_DTYPE;
        avg_forward_rows_bf16(output, input, pool, rule, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_avg_pool2d_backward_cpu(void *grad_input, const void *grad_output, const cuda_ops_pool2d *pool,
                                                 bool count_include_pad, int64_t divisor_override, int64_t begin,
                                                 int64_t end, cuda_ops_dtype dtype)
{
    const divisor_rule rule = {divisor_override, count_include_pad};
    if (!cuda_ops_pool2d_valid(pool) || pool->height.dilation != 1 || pool->width.dilation != 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        (pool->channels_last ? avg_backward_rows_f32 : avg_backward_planes_f32)(grad_input, grad_output, pool, rule,
                                                                                begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        (pool->channels_last ? avg_backward_rows_f64 : avg_backward_planes_f64)(grad_input, grad_output, pool, rule,
                                                                                begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* Windows [begin, end) of one row of outputs that starts at row h_start; `first` is column 0 of the first of its `rows`
 * rows in the input. `inside` promises that no window leaves the input along the width. */
CUDA_OPS_INLINE void FN(avg_row)(REAL *restrict output, const REAL *restrict first, int32_t rows,
                                 const cuda_ops_pool2d *pool, divisor_rule rule, int32_t h_start,
                                 cuda_ops_pool_axis width, int32_t begin, int32_t end, bool inside)
{
    /* Windows inside have all the same divisor. */
    REAL divisor = 0;
    if (inside && begin < end)
        divisor = (REAL)window_divisor(pool, rule, h_start, cuda_ops_pool_start(width, begin));
    for (int32_t w = begin; w < end; w++) {
        const int32_t start = cuda_ops_pool_start(width, w);
        const int32_t tap_begin = inside ? 0 : cuda_ops_pool_first_tap(width, start);
        const int32_t tap_end = inside ? width.kernel : cuda_ops_pool_end_tap(width, start);
        if (!inside)
            divisor = (REAL)window_divisor(pool, rule, h_start, start);
        REAL sum = 0;
        for (int32_t row = 0; row < rows; row++)
            for (int32_t tap = tap_begin; tap < tap_end; tap++)
                sum += first[row * width.input + start + tap];
        output[w] = sum / divisor;
    }
}

CUDA_OPS_SIMD static void FN(avg_forward_planes)(REAL *output, const REAL *input, const cuda_ops_pool2d *pool,
                                                 divisor_rule rule, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t input_plane = (int64_t)height.input * width.input;
    const bool usual = width.kernel == 2 && width.stride == 2;
    const cuda_ops_pool_axis two = {width.input, width.output, 2, 2, width.padding, 1};
    int32_t inside_begin, inside_end;
    cuda_ops_pool_inside(width, &inside_begin, &inside_end);
    for (int64_t plane = begin; plane < end; plane++)
        for (int32_t h = 0; h < height.output; h++) {
            const int32_t start = cuda_ops_pool_start(height, h);
            const int32_t tap_begin = cuda_ops_pool_first_tap(height, start);
            const int32_t rows = cuda_ops_pool_end_tap(height, start) - tap_begin;
            const REAL *first = input + plane * input_plane + (int64_t)(start + tap_begin) * width.input;
            REAL *out = output + (plane * height.output + h) * width.output;
            FN(avg_row)(out, first, rows, pool, rule, start, width, 0, inside_begin, false);
            if (usual && rows == 2)
                FN(avg_row)(out, first, 2, pool, rule, start, two, inside_begin, inside_end, true);
            else
                FN(avg_row)(out, first, rows, pool, rule, start, width, inside_begin, inside_end, true);
            FN(avg_row)(out, first, rows, pool, rule, start, width, inside_end, width.output, false);
        }
}

CUDA_OPS_SIMD static void FN(avg_forward_rows)(REAL *output, const REAL *input, const cuda_ops_pool2d *pool,
                                               divisor_rule rule, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.output;
        const int32_t h_start = cuda_ops_pool_start(height, (int32_t)(row % height.output));
        const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start);
        const int32_t h_end = cuda_ops_pool_end_tap(height, h_start);
        for (int32_t w = 0; w < width.output; w++) {
            const int32_t w_start = cuda_ops_pool_start(width, w);
            const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start);
            const int32_t w_end = cuda_ops_pool_end_tap(width, w_start);
            const REAL divisor = (REAL)window_divisor(pool, rule, h_start, w_start);
            REAL *restrict out = output + (row * width.output + w) * channels;
            memset(out, 0, (size_t)channels * sizeof(REAL));
            for (int32_t i = h_begin; i < h_end; i++)
                for (int32_t j = w_begin; j < w_end; j++) {
                    const int64_t position = (n * height.input + h_start + i) * width.input + w_start + j;
                    const REAL *restrict in = input + position * channels;
                    for (int64_t c = 0; c < channels; c++)
                        out[c] += in[c];
                }
            for (int64_t c = 0; c < channels; c++)
                out[c] /= divisor;
        }
    }
}

/* Within a plane one thread adds window after window, in their order. */
CUDA_OPS_SIMD static void FN(avg_backward_planes)(REAL *grad_input, const REAL *grad_output,
                                                  const cuda_ops_pool2d *pool, divisor_rule rule, int64_t begin,
                                                  int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t input_plane = (int64_t)height.input * width.input;
    for (int64_t plane = begin; plane < end; plane++) {
        memset(grad_input + plane * input_plane, 0, (size_t)input_plane * sizeof(REAL));
        for (int32_t h = 0; h < height.output; h++) {
            const int32_t h_start = cuda_ops_pool_start(height, h);
            const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start);
            const int32_t h_end = cuda_ops_pool_end_tap(height, h_start);
            const REAL *grad_out = grad_output + (plane * height.output + h) * width.output;
            for (int32_t w = 0; w < width.output; w++) {
                const int32_t w_start = cuda_ops_pool_start(width, w);
                const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start);
                const int32_t w_end = cuda_ops_pool_end_tap(width, w_start);
                const REAL grad = grad_out[w] / (REAL)window_divisor(pool, rule, h_start, w_start);
                for (int32_t i = h_begin; i < h_end; i++) {
                    REAL *grad_in = grad_input + plane * input_plane + (int64_t)(h_start + i) * width.input + w_start;
                    for (int32_t j = w_begin; j < w_end; j++)
                        grad_in[j] += grad;
                }
            }
        }
    }
}

/* A row of the input gathers from the windows over it: rows share windows, and nothing is written by two threads. */
CUDA_OPS_SIMD static void FN(avg_backward_rows)(REAL *grad_input, const REAL *grad_output, const cuda_ops_pool2d *pool,
                                                divisor_rule rule, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t h = (int32_t)(row % height.input);
        const int32_t h_begin = cuda_ops_pool_first_window(height, h), h_end = cuda_ops_pool_end_window(height, h);
        for (int32_t w = 0; w < width.input; w++) {
            const int32_t w_begin = cuda_ops_pool_first_window(width, w), w_end = cuda_ops_pool_end_window(width, w);
            REAL *restrict grad_in = grad_input + (row * width.input + w) * channels;
            memset(grad_in, 0, (size_t)channels * sizeof(REAL));
            for (int32_t i = h_begin; i < h_end; i++)
                for (int32_t j = w_begin; j < w_end; j++) {
                    const REAL divisor =
                        (REAL)window_divisor(pool, rule, cuda_ops_pool_start(height, i), cuda_ops_pool_start(width, j));
                    const REAL *restrict grad_out =
                        grad_output + ((n * height.output + i) * width.output + j) * channels;
                    for (int64_t c = 0; c < channels; c++)
                        grad_in[c] += grad_out[c] / divisor;
                }
        }
    }
}

#endif
