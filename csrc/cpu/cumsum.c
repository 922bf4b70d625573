/* cumsum on the CPU, in double: along a row SEGMENTS runs at a time, whose sums are found first, so that additions do not
 * wait for each other; or TILE neighbouring columns at a time. float16 and bfloat16 by pieces that are widened. Bound by
 * conversions along rows, by memory across columns. */
#ifndef REAL

#include "cuda_ops/cumsum.h"

#include "common/common.h"
#include "cuda_ops/halves_cpu.h"

enum {
    TILE = 64,                  /* columns */
    SEGMENTS = 8,               /* of a row */
    SEGMENT = 64,               /* elements of each */
    PIECE = SEGMENTS * SEGMENT, /* halves of a row that are widened at a time */
};

static int64_t tiles_of(int64_t inner)
{
    return (inner + TILE - 1) / TILE;
}

int64_t cuda_ops_cumsum_units_cpu(int64_t outer, int64_t inner)
{
    return outer * tiles_of(inner);
}

#define REAL float
#define FN(name) name##_f32
#define WITH_PIECES /* of halves */
#include "cumsum.c"
#undef WITH_PIECES

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "cumsum.c"

#include "common/undef_real.h"

static void cumsum_halves(uint16_t *output, const uint16_t *input, int64_t cols, int64_t inner, int reverse,
                          int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const int64_t tiles = tiles_of(inner);
    float from[PIECE], to[PIECE];
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit / tiles * cols * inner + unit % tiles * TILE;
        const int64_t width = min_i64(TILE, inner - unit % tiles * TILE), step = inner == 1 ? PIECE : 1;
        double sums[TILE] = {0};
        for (int64_t c = 0; c < cols; c += step) {
            const int64_t rows = min_i64(step, cols - c), count = inner == 1 ? rows : width;
            const int64_t at = first + (reverse ? cols - c - rows : c) * inner;
            (void)cuda_ops_widen_cpu(from, input + at, count, dtype);
            if (inner == 1)
                sums[0] = cumsum_of_row_f32(to, from, count, reverse, sums[0]);
            else
                cumsum_of_columns_f32(to, from, sums, count);
            (void)cuda_ops_round_cpu(output + at, to, count, dtype);
        }
    }
}

cuda_ops_status cuda_ops_cumsum_cpu(void *output, const void *input, int64_t cols, int64_t inner, int reverse,
                                    int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        cumsum_f32(output, input, cols, inner, reverse, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        cumsum_f64(output, input, cols, inner, reverse, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        cumsum_halves(output, input, cols, inner, reverse, begin, end, dtype);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* The sums along a row, or a part of it, from `sum` on; returns the last one. In reverse the row begins at its end. */
CUDA_OPS_SIMD static double FN(cumsum_of_row)(REAL *restrict output, const REAL *restrict input, int64_t count,
                                              int reverse, double sum)
{
    const int64_t step = reverse ? -1 : 1, start = reverse ? count - 1 : 0;
    int64_t c = 0;
    for (; c + SEGMENTS * SEGMENT <= count; c += SEGMENTS * SEGMENT) {
        double sums[SEGMENTS];
        for (int k = 0; k < SEGMENTS; k++) {
            const REAL *x = input + start + (c + k * SEGMENT) * step - (reverse ? SEGMENT - 1 : 0);
            double even = 0, odd = 0;
#pragma omp simd reduction(+ : even, odd)
            for (int i = 0; i < SEGMENT / 2; i++) {
                even += (double)x[i];
                odd += (double)x[i + SEGMENT / 2];
            }
            sums[k] = sum;
            sum += even + odd;
        }
        const REAL *x = input + start + c * step;
        REAL *y = output + start + c * step;
        for (int64_t i = 0; i < SEGMENT; i++)
#pragma GCC unroll 8
            for (int k = 0; k < SEGMENTS; k++) {
                sums[k] += (double)x[(i + k * SEGMENT) * step];
                y[(i + k * SEGMENT) * step] = (REAL)sums[k];
            }
    }
    for (; c < count; c++) {
        sum += (double)input[start + c * step];
        output[start + c * step] = (REAL)sum;
    }
    return sum;
}

/* The next row of `width` columns. */
CUDA_OPS_INLINE void FN(next_row)(REAL *restrict output, const REAL *restrict input, double *restrict sums,
                                  int64_t width)
{
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        sums[i] += (double)input[i];
        output[i] = (REAL)sums[i];
    }
}

#ifdef WITH_PIECES
CUDA_OPS_SIMD static void FN(cumsum_of_columns)(REAL *output, const REAL *input, double *sums, int64_t width)
{
    FN(next_row)(output, input, sums, width);
}
#endif

CUDA_OPS_SIMD static void FN(cumsum)(REAL *output, const REAL *input, int64_t cols, int64_t inner, int reverse,
                                     int64_t begin, int64_t end)
{
    const int64_t tiles = tiles_of(inner);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit / tiles * cols * inner + unit % tiles * TILE;
        const int64_t width = min_i64(TILE, inner - unit % tiles * TILE);
        if (inner == 1) {
            (void)FN(cumsum_of_row)(output + first, input + first, cols, reverse, 0);
            continue;
        }
        double sums[TILE] = {0};
        for (int64_t c = 0; c < cols; c++) {
            const int64_t at = first + (reverse ? cols - 1 - c : c) * inner;
            FN(next_row)(output + at, input + at, sums, width);
        }
    }
}

#endif
