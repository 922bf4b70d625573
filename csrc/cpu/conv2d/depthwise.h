/* The depthwise convolution for one instruction set and element type (depthwise.c includes this). A vector's lanes are
 * channels. */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))

typedef REAL FN(vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INDEX FN(index) __attribute__((vector_size(VECTOR_BYTES)));

#if defined(__GNUC__) && !defined(__clang__)
#include "conv2d/transpose_vectors.h"
#define TRANSPOSES 1
#else
#define TRANSPOSES 0
#endif

/* Pixels [0, count) of `lanes` channels, pixel i at from + i * pixel, as vectors at to(i): rows of `width` pixels, of
 * which the first starts with column `first`, are `row` elements apart. Lanes beyond are zeros. */
static void FN(stage_pixels)(REAL *restrict to, int64_t row, int64_t width, const REAL *restrict from, int64_t channel,
                             int64_t pixel, int lanes, int64_t count)
{
    int64_t x = 0, i = 0;
#if TRANSPOSES
    for (; pixel == 1 && i + LANES <= count; i += LANES) {
        FN(vector) block[LANES];
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++)
            block[q] = q < lanes ? *(const FN(vector) *)(from + q * channel + i) : (FN(vector)){0};
        FN(transpose)(block);
        for (int q = 0; q < LANES; q++) {
            *(FN(vector) *)(to + x * LANES) = block[q];
            if (++x == width) {
                x = 0;
                to += row;
            }
        }
    }
#endif
    for (; i < count; i++) {
        FN(vector) value = {0};
        if (channel == 1 && lanes == LANES)
            value = *(const FN(vector) *)(from + i * pixel);
        else
            for (int q = 0; q < lanes; q++)
                value[q] = from[q * channel + i * pixel];
        *(FN(vector) *)(to + x * LANES) = value;
        if (++x == width) {
            x = 0;
            to += row;
        }
    }
}

/* The opposite, of dense vectors. */
static void FN(write_pixels)(REAL *restrict to, const REAL *restrict from, int64_t channel, int64_t pixel, int lanes,
                             int64_t count)
{
    int64_t i = 0;
#if TRANSPOSES
    for (; pixel == 1 && i + LANES <= count; i += LANES) {
        FN(vector) block[LANES];
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++)
            block[q] = *(const FN(vector) *)(from + (i + q) * LANES);
        FN(transpose)(block);
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++)
            if (q < lanes)
                *(FN(vector) *)(to + q * channel + i) = block[q];
    }
#endif
    for (; i < count; i++)
        if (channel == 1 && lanes == LANES)
            *(FN(vector) *)(to + i * pixel) = *(const FN(vector) *)(from + i * LANES);
        else
            for (int q = 0; q < lanes; q++)
                to[q * channel + i * pixel] = from[i * LANES + q];
}

/* `pixels` neighbours: out[i] = bias + sum over taps of weight[tap] * from[i * step + offset[tap]]. */
CUDA_OPS_INLINE void FN(tile)(const int pixels, REAL *restrict out, int64_t out_step, const REAL *restrict from,
                              int64_t step, const REAL *restrict weight, const struct tap *taps, int64_t count,
                              FN(vector) bias)
{
    FN(vector) sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < pixels; i++)
        sum[i] = bias;
    for (int64_t t = 0; t < count; t++) {
        const FN(vector) factor = *(const FN(vector) *)(weight + taps[t].index * LANES);
        const REAL *const at = from + taps[t].offset * LANES;
#pragma GCC unroll 8
        for (int i = 0; i < pixels; i++)
            sum[i] += factor * *(const FN(vector) *)(at + i * step);
    }
#pragma GCC unroll 8
    for (int i = 0; i < pixels; i++)
        *(FN(vector) *)(out + i * out_step) = sum[i];
}

/* out(u, v) for a phase's rows and columns; out_row and out_column, and likewise for `from`, are in vectors. */
static void FN(convolve)(REAL *out, int64_t out_row, int64_t out_column, const REAL *from, int64_t from_row,
                         int64_t from_column, const REAL *weight, const REAL *bias, const struct tap *taps,
                         int64_t count, int64_t u_count, int64_t v_count)
{
    const FN(vector) start = bias ? *(const FN(vector) *)bias : (FN(vector)){0};
    const int64_t step = from_column * LANES, out_step = out_column * LANES;
    for (int64_t u = 0; u < u_count; u++) {
        REAL *to = out + u * out_row * LANES;
        const REAL *at = from + u * from_row * LANES;
        int64_t v = v_count;
        for (; v >= 8; v -= 8, to += 8 * out_step, at += 8 * step)
            FN(tile)(8, to, out_step, at, step, weight, taps, count, start);
        if (v & 4) {
            FN(tile)(4, to, out_step, at, step, weight, taps, count, start);
            to += 4 * out_step;
            at += 4 * step;
        }
        if (v & 2) {
            FN(tile)(2, to, out_step, at, step, weight, taps, count, start);
            to += 2 * out_step;
            at += 2 * step;
        }
        if (v & 1)
            FN(tile)(1, to, out_step, at, step, weight, taps, count, start);
    }
}

/* sums[tap] += sum over u and v of grad(u, v) * from(u, v) at the tap's offset, for `count` taps. */
CUDA_OPS_INLINE void FN(weight_tile)(const int count, REAL *restrict sums, const struct tap *taps,
                                     const REAL *restrict grad, const REAL *restrict from, int64_t from_row,
                                     int64_t from_column, int64_t u_count, int64_t v_count)
{
    FN(vector) sum[9];
    const REAL *at[9];
#pragma GCC unroll 9
    for (int t = 0; t < count; t++) {
        sum[t] = (FN(vector)){0};
        at[t] = from + taps[t].offset * LANES;
    }
    for (int64_t u = 0; u < u_count; u++)
        for (int64_t v = 0; v < v_count; v++, grad += LANES) {
            const FN(vector) factor = *(const FN(vector) *)grad;
            const int64_t offset = (u * from_row + v * from_column) * LANES;
#pragma GCC unroll 9
            for (int t = 0; t < count; t++)
                sum[t] += factor * *(const FN(vector) *)(at[t] + offset);
        }
#pragma GCC unroll 9
    for (int t = 0; t < count; t++)
        *(FN(vector) *)(sums + taps[t].index * LANES) += sum[t];
}

static void FN(weight_sums)(REAL *sums, const struct tap *taps, int64_t count, const REAL *grad, const REAL *from,
                            int64_t from_row, int64_t from_column, int64_t u_count, int64_t v_count)
{
    while (count > 0) {
        int64_t done;
        if (count % 9 == 0 || count > 25) {
            done = 9;
            FN(weight_tile)(9, sums, taps, grad, from, from_row, from_column, u_count, v_count);
        } else if (count >= 5) {
            done = 5;
            FN(weight_tile)(5, sums, taps, grad, from, from_row, from_column, u_count, v_count);
        } else if (count >= 3) {
            done = 3;
            FN(weight_tile)(3, sums, taps, grad, from, from_row, from_column, u_count, v_count);
        } else {
            done = 1;
            FN(weight_tile)(1, sums, taps, grad, from, from_row, from_column, u_count, v_count);
        }
        taps += done;
        count -= done;
    }
}

#undef LANES
#undef TRANSPOSES
