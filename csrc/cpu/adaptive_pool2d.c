/* adaptive_avg_pool2d and adaptive_max_pool2d on the CPU: window after window of a plane, or vectors over the channels
 * (channels_last). Means are added up in the element type along a row and in double over rows. Backward: planes scatter,
 * one window after the other; channels_last gathers from the windows over a position. Where windows do not overlap,
 * nothing is added up, and gradients of halves are written as they are. Bound by memory. */
#ifndef REAL

#include "cuda_ops/adaptive_pool2d.h"

#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/halves_cpu.h"

/* Positions of a window, rows [h, h_end) and columns [w, w_end). */
#define WINDOW(o_h, o_w)                                                                                               \
    const int32_t h_begin = cuda_ops_adaptive_start(height, o_h), h_end = cuda_ops_adaptive_end(height, o_h);          \
    const int32_t w_begin = cuda_ops_adaptive_start(width, o_w), w_end = cuda_ops_adaptive_end(width, o_w)

enum {
    LANES = 64,
    SHORT = 256 /* elements that one sum in the dtype covers */
};

/* Whether the windows over two positions of an axis are the same. */
static bool share_windows(cuda_ops_adaptive_axis axis, int32_t a, int32_t b)
{
    return cuda_ops_adaptive_first_window(axis, a) == cuda_ops_adaptive_first_window(axis, b) &&
           cuda_ops_adaptive_end_window(axis, a) == cuda_ops_adaptive_end_window(axis, b);
}

/* A window as runs of what lies behind each other, `pitch` apart: rows that are taken as a whole are one. */
struct runs {
    int64_t count, length;
};

CUDA_OPS_INLINE struct runs runs_of(int64_t rows, int64_t cols, int64_t pitch)
{
    const bool whole = cols == pitch;
    const struct runs runs = {whole ? 1 : rows, whole ? rows * cols : cols};
    return runs;
}

/* Makes all elements of a window `value`; the rows of the plane are `pitch` apart. */
#define DEFINE_FILL(name, type)                                                                                        \
    CUDA_OPS_INLINE void name(type *window, int64_t pitch, int64_t rows, int64_t cols, type value)                     \
    {                                                                                                                  \
        const struct runs runs = runs_of(rows, cols, pitch);                                                           \
        for (int64_t run = 0; run < runs.count; run++)                                                                 \
            for (int64_t i = 0; i < runs.length; i++)                                                                  \
                window[run * pitch + i] = value;                                                                       \
    }
DEFINE_FILL(fill_f32, float)
DEFINE_FILL(fill_f64, double)
DEFINE_FILL(fill_halves, uint16_t)

CUDA_OPS_INLINE float widened(uint16_t half, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? widened_bfloat16(half) : widened_float16(half);
}

CUDA_OPS_INLINE uint16_t rounded(float x, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? rounded_bfloat16(x) : rounded_float16(x);
}

/* Gradients of halves, where windows do not overlap. */
CUDA_OPS_SIMD static void avg_backward_planes_halves(uint16_t *restrict grad_input,
                                                     const uint16_t *restrict grad_output,
                                                     const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end,
                                                     cuda_ops_dtype dtype)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    for (int64_t plane = begin; plane < end; plane++)
        for (int32_t i = 0; i < height.output; i++)
            for (int32_t j = 0; j < width.output; j++) {
                WINDOW(i, j);
                const float count = (float)(h_end - h_begin) * (float)(w_end - w_begin);
                const float grad = widened(grad_output[(plane * height.output + i) * width.output + j], dtype);
                fill_halves(grad_input + (plane * height.input + h_begin) * width.input + w_begin, width.input,
                            h_end - h_begin, w_end - w_begin, rounded(grad / count, dtype));
            }
}

static void avg_backward_rows_halves(uint16_t *restrict grad_input, const uint16_t *restrict grad_output,
                                     const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end,
                                     cuda_ops_dtype dtype)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t i = cuda_ops_adaptive_first_window(height, (int32_t)(row % height.input));
        for (int32_t w = 0; w < width.input; w++) {
            const int32_t j = cuda_ops_adaptive_first_window(width, w);
            WINDOW(i, j);
            const float count = (float)(h_end - h_begin) * (float)(w_end - w_begin);
            uint16_t *in = grad_input + (row * width.input + w) * channels;
            if (w > w_begin) { /* as on its left */
                memcpy(in, in - channels, (size_t)channels * sizeof *in);
                continue;
            }
            const uint16_t *out = grad_output + ((n * height.output + i) * width.output + j) * channels;
            float shares[LANES];
            for (int64_t first = 0; first < channels; first += LANES) {
                const int64_t lanes = min_i64(LANES, channels - first);
                (void)cuda_ops_widen_cpu(shares, out + first, lanes, dtype);
                for (int64_t c = 0; c < lanes; c++)
                    shares[c] /= count;
                (void)cuda_ops_round_cpu(in + first, shares, lanes, dtype);
            }
        }
    }
}

/* Only indices that are not forward's name a position twice. */
static void max_backward_planes_halves(uint16_t *restrict grad_input, const uint16_t *restrict grad_output,
                                       const int64_t *restrict indices, const cuda_ops_adaptive_pool2d *pool,
                                       int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const int64_t inputs = (int64_t)pool->height.input * pool->width.input;
    const int64_t outputs = (int64_t)pool->height.output * pool->width.output;
    memset(grad_input + begin * inputs, 0, (size_t)((end - begin) * inputs) * sizeof *grad_input);
    for (int64_t at = begin * outputs; at < end * outputs; at++)
        if ((uint64_t)indices[at] < (uint64_t)inputs) {
            uint16_t *in = grad_input + at / outputs * inputs + indices[at];
            *in = rounded(widened(*in, dtype) + widened(grad_output[at], dtype), dtype);
        }
}

/* Positions of a window, counted in it, of `lanes` channels. Of equal ones the first, of NaN the last: the largest of
 * integers, in which a half's magnitude with its sign comes first, or of a NaN a larger number, and then the position. */
CUDA_OPS_INLINE void find_largest_halves(int32_t *restrict where, const uint16_t *restrict window, int32_t rows,
                                         int32_t cols, int64_t row_step, int64_t channels, const int64_t lanes,
                                         int32_t infinity)
{
    int32_t best[LANES];
    for (int64_t c = 0; c < lanes; c++)
        best[c] = INT32_MIN;
    for (int32_t h = 0; h < rows; h++)
        for (int32_t w = 0; w < cols; w++) {
            const uint16_t *const in = window + h * row_step + w * channels;
            const int32_t position = h * cols + w, nan = (INT16_MAX << 16) + position, back = INT16_MAX - position;
#pragma omp simd
            for (int64_t c = 0; c < lanes; c++) {
                const int32_t magnitude = in[c] & INT16_MAX;
                const int32_t order = in[c] > INT16_MAX ? -magnitude : magnitude;
                const int32_t key = magnitude > infinity ? nan : order * 65536 + back;
                best[c] = key > best[c] ? key : best[c];
            }
        }
    for (int64_t c = 0; c < lanes; c++) {
        const int32_t low = best[c] & 0xffff;
        where[c] = best[c] >> 16 == INT16_MAX ? low : INT16_MAX - low;
    }
}

/* By comparisons of integers, which need not be widened; windows have less than 2^15 positions. */
CUDA_OPS_SIMD static void max_forward_rows_halves(uint16_t *restrict output, int64_t *restrict indices,
                                                  const uint16_t *restrict input, const cuda_ops_adaptive_pool2d *pool,
                                                  int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels, row_step = width.input * channels;
    const int32_t infinity = dtype == CUDA_OPS_FLOAT16 ? 0x7c00 : 0x7f80;
    for (int64_t row = begin; row < end; row++) {
        const uint16_t *const image = input + row / height.output * height.input * row_step;
        const int32_t i = (int32_t)(row % height.output);
        for (int32_t j = 0; j < width.output; j++) {
            WINDOW(i, j);
            const int32_t rows = h_end - h_begin, cols = w_end - w_begin;
            const uint16_t *const window = image + h_begin * row_step + w_begin * channels;
            for (int64_t first = 0; first < channels; first += LANES) {
                const int64_t lanes = min_i64(LANES, channels - first);
                const int64_t at = (row * width.output + j) * channels + first;
                int32_t where[LANES];
                if (lanes == LANES)
                    find_largest_halves(where, window + first, rows, cols, row_step, channels, LANES, infinity);
                else
                    find_largest_halves(where, window + first, rows, cols, row_step, channels, lanes, infinity);
                for (int64_t c = 0; c < lanes; c++) {
                    const int32_t in_row = cols == width.input ? where[c] : where[c] % cols;
                    const int32_t in_column = cols == width.input ? 0 : where[c] / cols;
                    const int64_t position = (int64_t)(h_begin + in_column) * width.input + w_begin + in_row;
                    output[at + c] = image[position * channels + first + c];
                    indices[at + c] = position;
                }
            }
        }
    }
}

CUDA_OPS_SIMD static void max_backward_rows_halves(uint16_t *restrict grad_input, const uint16_t *restrict grad_output,
                                                   const int64_t *restrict indices,
                                                   const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t h = (int32_t)(row % height.input), i = cuda_ops_adaptive_first_window(height, h);
        for (int32_t w = 0; w < width.input; w++) {
            const int64_t position = (int64_t)h * width.input + w;
            const int64_t window =
                ((n * height.output + i) * width.output + cuda_ops_adaptive_first_window(width, w)) * channels;
            uint16_t *in = grad_input + (row * width.input + w) * channels;
            for (int64_t c = 0; c < channels; c++) {
                const uint16_t grad = grad_output[window + c];
                /* 0 + -0 is 0. */
                in[c] = indices[window + c] == position && grad != 0x8000u ? grad : 0;
            }
        }
    }
}

#define REAL float
#define FN(name) name##_f32
#include "adaptive_pool2d.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "adaptive_pool2d.c"

#include "common/undef_real.h"

/* The call for planes or for rows of channels_last, in the dtype. */
#define DISPATCH(name, ...)                                                                                            \
    if (!cuda_ops_adaptive_pool2d_valid(pool))                                                                         \
        return CUDA_OPS_INVALID_ARGUMENT;                                                                              \
    switch (dtype) {                                                                                                   \
    case CUDA_OPS_FLOAT32:                                                                                             \
        (pool->channels_last ? name##_rows_f32 : name##_planes_f32)(__VA_ARGS__);                                      \
        return CUDA_OPS_SUCCESS;                                                                                       \
    case CUDA_OPS_FLOAT64:                                                                                             \
        (pool->channels_last ? name##_rows_f64 : name##_planes_f64)(__VA_ARGS__);                                      \
        return CUDA_OPS_SUCCESS;                                                                                       \
    default:                                                                                                           \
        return CUDA_OPS_UNSUPPORTED_DTYPE;                                                                             \
    }

cuda_ops_status cuda_ops_adaptive_avg_pool2d_forward_cpu(void *output, const void *input,
                                                         const cuda_ops_adaptive_pool2d *pool, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype){
    DISPATCH(avg_forward, output, input, pool, begin, end)}

cuda_ops_status cuda_ops_adaptive_avg_pool2d_backward_cpu(void *grad_input, const void *grad_output,
                                                          const cuda_ops_adaptive_pool2d *pool, int64_t begin,
                                                          int64_t end, cuda_ops_dtype dtype)
{
    if (is_half(dtype) && cuda_ops_adaptive_pool2d_valid(pool) && !cuda_ops_adaptive_pool2d_overlaps(pool)) {
        (pool->channels_last ? avg_backward_rows_halves : avg_backward_planes_halves)(grad_input, grad_output, pool,
                                                                                      begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    DISPATCH(avg_backward, grad_input, grad_output, pool, begin, end)
}

/* No window of an axis is longer than this. */
static int64_t longest_window(cuda_ops_adaptive_axis axis)
{
    return axis.output > 0 ? axis.input / axis.output + 2 : 0;
}

int cuda_ops_adaptive_max_pool2d_takes_halves_cpu(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->channels_last && longest_window(pool->height) * longest_window(pool->width) < INT16_MAX;
}

cuda_ops_status cuda_ops_adaptive_max_pool2d_forward_cpu(void *output, int64_t *indices, const void *input,
                                                         const cuda_ops_adaptive_pool2d *pool, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype)
{
    if (is_half(dtype) && cuda_ops_adaptive_pool2d_valid(pool) && cuda_ops_adaptive_max_pool2d_takes_halves_cpu(pool)) {
        max_forward_rows_halves(output, indices, input, pool, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    DISPATCH(max_forward, output, indices, input, pool, begin, end)
}

cuda_ops_status cuda_ops_adaptive_max_pool2d_backward_cpu(void *grad_input, const void *grad_output,
                                                          const int64_t *indices, const cuda_ops_adaptive_pool2d *pool,
                                                          int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (is_half(dtype) && cuda_ops_adaptive_pool2d_valid(pool) && !cuda_ops_adaptive_pool2d_overlaps(pool)) {
        if (pool->channels_last)
            max_backward_rows_halves(grad_input, grad_output, indices, pool, begin, end);
        else
            max_backward_planes_halves(grad_input, grad_output, indices, pool, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    }
    DISPATCH(max_backward, grad_input, grad_output, indices, pool, begin, end)
}

#undef WINDOW

#else

CUDA_OPS_SIMD static void FN(avg_forward_planes)(REAL *restrict output, const REAL *restrict input,
                                                 const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    for (int64_t plane = begin; plane < end; plane++) {
        const REAL *in = input + plane * height.input * width.input;
        for (int32_t i = 0; i < height.output; i++)
            for (int32_t j = 0; j < width.output; j++) {
                WINDOW(i, j);
                double sum = 0;
                const struct runs runs = runs_of(h_end - h_begin, w_end - w_begin, width.input);
                for (int64_t run = 0; run < runs.count; run++) {
                    const REAL *from = in + (h_begin + run) * width.input + w_begin;
                    for (int64_t first = 0; first < runs.length; first += SHORT) {
                        const int64_t last = min_i64(first + SHORT, runs.length);
                        REAL part = 0;
#pragma omp simd reduction(+ : part)
                        for (int64_t i = first; i < last; i++)
                            part += from[i];
                        sum += (double)part;
                    }
                }
                const double count = (double)(h_end - h_begin) * (double)(w_end - w_begin);
                output[(plane * height.output + i) * width.output + j] = (REAL)(sum / count);
            }
    }
}

/* Adds `lanes` channels of pixels that lie behind each other. */
CUDA_OPS_INLINE void FN(add_pixels)(double *sums, const REAL *restrict in, int64_t pixels, int64_t channels,
                                    int64_t lanes)
{
    for (int64_t first = 0; first < pixels; first += SHORT) {
        const int64_t last = min_i64(first + SHORT, pixels);
        REAL part[LANES] = {0};
        for (int64_t p = first; p < last; p++)
#pragma omp simd
            for (int64_t c = 0; c < lanes; c++)
                part[c] += in[p * channels + c];
        for (int64_t c = 0; c < lanes; c++)
            sums[c] += (double)part[c];
    }
}

CUDA_OPS_SIMD static void FN(avg_forward_rows)(REAL *restrict output, const REAL *restrict input,
                                               const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const REAL *image = input + row / height.output * height.input * width.input * channels;
        const int32_t i = (int32_t)(row % height.output);
        for (int32_t j = 0; j < width.output; j++) {
            WINDOW(i, j);
            const double count = (double)(h_end - h_begin) * (double)(w_end - w_begin);
            for (int64_t first = 0; first < channels; first += LANES) {
                const int64_t lanes = min_i64(LANES, channels - first);
                double sums[LANES] = {0};
                const struct runs runs = runs_of(h_end - h_begin, w_end - w_begin, width.input);
                for (int64_t run = 0; run < runs.count; run++) {
                    const REAL *in = image + ((h_begin + run) * width.input + w_begin) * channels + first;
                    if (lanes == LANES) /* a number that the compiler knows keeps the sums in registers */
                        FN(add_pixels)(sums, in, runs.length, channels, LANES);
                    else
                        FN(add_pixels)(sums, in, runs.length, channels, lanes);
                }
                REAL *out = output + (row * width.output + j) * channels + first;
                for (int64_t c = 0; c < lanes; c++)
                    out[c] = (REAL)(sums[c] / count);
            }
        }
    }
}

CUDA_OPS_SIMD static void FN(avg_backward_planes)(REAL *restrict grad_input, const REAL *restrict grad_output,
                                                  const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const bool overlaps = cuda_ops_adaptive_pool2d_overlaps(pool);
    for (int64_t plane = begin; plane < end; plane++) {
        REAL *in = grad_input + plane * height.input * width.input;
        if (overlaps)
            memset(in, 0, (size_t)height.input * (size_t)width.input * sizeof(REAL));
        for (int32_t i = 0; i < height.output; i++)
            for (int32_t j = 0; j < width.output; j++) {
                WINDOW(i, j);
                const REAL count = (REAL)(h_end - h_begin) * (REAL)(w_end - w_begin);
                const REAL share = grad_output[(plane * height.output + i) * width.output + j] / count;
                if (!overlaps) {
                    FN(fill)
                    (in + (int64_t)h_begin * width.input + w_begin, width.input, h_end - h_begin, w_end - w_begin,
                     share);
                    continue;
                }
                for (int32_t h = h_begin; h < h_end; h++)
                    for (int32_t w = w_begin; w < w_end; w++)
                        in[(int64_t)h * width.input + w] += share;
            }
    }
}

/* A row of the input gathers from the windows over it: rows share windows, and nothing is written by two threads. */
CUDA_OPS_SIMD static void FN(avg_backward_rows)(REAL *restrict grad_input, const REAL *restrict grad_output,
                                                const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t h = (int32_t)(row % height.input);
        const int32_t i_end = cuda_ops_adaptive_end_window(height, h);
        for (int32_t w = 0; w < width.input; w++) {
            const int32_t j_end = cuda_ops_adaptive_end_window(width, w);
            REAL *in = grad_input + (row * width.input + w) * channels;
            if (w > 0 && share_windows(width, w - 1, w)) {
                memcpy(in, in - channels, (size_t)channels * sizeof(REAL));
                continue;
            }
            memset(in, 0, (size_t)channels * sizeof(REAL));
            for (int32_t i = cuda_ops_adaptive_first_window(height, h); i < i_end; i++)
                for (int32_t j = cuda_ops_adaptive_first_window(width, w); j < j_end; j++) {
                    WINDOW(i, j);
                    const REAL count = (REAL)(h_end - h_begin) * (REAL)(w_end - w_begin);
                    const REAL *out = grad_output + ((n * height.output + i) * width.output + j) * channels;
                    for (int64_t c = 0; c < channels; c++)
                        in[c] += out[c] / count;
                }
        }
    }
}

static void FN(max_forward_planes)(REAL *restrict output, int64_t *restrict indices, const REAL *restrict input,
                                   const cuda_ops_adaptive_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    for (int64_t plane = begin; plane < end; plane++) {
        const REAL *in = input + plane * height.input * width.input;
        for (int32_t i = 0; i < height.output; i++)
            for (int32_t j = 0; j < width.output; j++) {
                WINDOW(i, j);
                int64_t index = (int64_t)h_begin * width.input + w_begin;
                REAL best = (REAL)-INFINITY;
                for (int32_t h = h_begin; h < h_end; h++)
                    for (int32_t w = w_begin; w < w_end; w++) {
                        const int64_t position = (int64_t)h * width.input + w;
                        if (in[position] > best || in[position] != in[position]) {
                            best = in[position];
                            index = position;
                        }
                    }
                output[(plane * height.output + i) * width.output + j] = best;
                indices[(plane * height.output + i) * width.output + j] = index;
            }
    }
}

CUDA_OPS_SIMD static void FN(max_forward_rows)(REAL *restrict output, int64_t *restrict indices,
                                               const REAL *restrict input, const cuda_ops_adaptive_pool2d *pool,
                                               int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const REAL *image = input + row / height.output * height.input * width.input * channels;
        const int32_t i = (int32_t)(row % height.output);
        for (int32_t j = 0; j < width.output; j++) {
            WINDOW(i, j);
            REAL *out = output + (row * width.output + j) * channels;
            int64_t *index = indices + (row * width.output + j) * channels;
            for (int64_t c = 0; c < channels; c++) {
                out[c] = (REAL)-INFINITY;
                index[c] = (int64_t)h_begin * width.input + w_begin;
            }
            for (int32_t h = h_begin; h < h_end; h++)
                for (int32_t w = w_begin; w < w_end; w++) {
                    const int64_t position = (int64_t)h * width.input + w;
                    const REAL *in = image + position * channels;
                    for (int64_t c = 0; c < channels; c++) {
                        const bool take = in[c] > out[c] || in[c] != in[c];
                        out[c] = take ? in[c] : out[c];
                        index[c] = take ? position : index[c];
                    }
                }
        }
    }
}

static void FN(max_backward_planes)(REAL *restrict grad_input, const REAL *restrict grad_output,
                                    const int64_t *restrict indices, const cuda_ops_adaptive_pool2d *pool,
                                    int64_t begin, int64_t end)
{
    const int64_t inputs = (int64_t)pool->height.input * pool->width.input;
    const int64_t outputs = (int64_t)pool->height.output * pool->width.output;
    memset(grad_input + begin * inputs, 0, (size_t)((end - begin) * inputs) * sizeof(REAL));
    for (int64_t at = begin * outputs; at < end * outputs; at++)
        if ((uint64_t)indices[at] < (uint64_t)inputs)
            grad_input[at / outputs * inputs + indices[at]] += grad_output[at];
}

CUDA_OPS_SIMD static void FN(max_backward_rows)(REAL *restrict grad_input, const REAL *restrict grad_output,
                                                const int64_t *restrict indices, const cuda_ops_adaptive_pool2d *pool,
                                                int64_t begin, int64_t end)
{
    const cuda_ops_adaptive_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t h = (int32_t)(row % height.input);
        const int32_t i_end = cuda_ops_adaptive_end_window(height, h);
        for (int32_t w = 0; w < width.input; w++) {
            const int32_t j_end = cuda_ops_adaptive_end_window(width, w);
            const int64_t position = (int64_t)h * width.input + w;
            REAL *in = grad_input + (row * width.input + w) * channels;
            memset(in, 0, (size_t)channels * sizeof(REAL));
            for (int32_t i = cuda_ops_adaptive_first_window(height, h); i < i_end; i++)
                for (int32_t j = cuda_ops_adaptive_first_window(width, w); j < j_end; j++) {
                    const int64_t window = ((n * height.output + i) * width.output + j) * channels;
                    for (int64_t c = 0; c < channels; c++)
                        in[c] += indices[window + c] == position ? grad_output[window + c] : (REAL)0;
                }
        }
    }
}

#endif
