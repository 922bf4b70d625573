/* The depthwise convolution for one instruction set and element type (depthwise.c includes this). A vector's lanes are
 * channels. What callers' tensors have are STORED, which LOAD_VECTOR and LOAD_ONE make REAL, and STORE_VECTOR and STORE_ONE
 * round. */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))

typedef REAL FN(vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INDEX FN(index) __attribute__((vector_size(VECTOR_BYTES)));

#ifdef HALF
#define STORED uint16_t
#define LOAD_VECTOR(from) FN(load)(from)
#define STORE_VECTOR(to, value) FN(store)(to, value)
#define LOAD_ONE(x) widened_half(x, HALF)
#define STORE_ONE(x) rounded_half(x, HALF)

typedef uint16_t FN(half_vector) __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint32_t FN(bits) __attribute__((vector_size(VECTOR_BYTES)));

CUDA_OPS_INLINE FN(vector) FN(load)(const uint16_t *from)
{
#if VECTOR_BYTES == 64
    if (HALF == CUDA_OPS_FLOAT16)
        return (FN(vector))_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif VECTOR_BYTES == 32
    if (HALF == CUDA_OPS_FLOAT16)
        return (FN(vector))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#endif
    if (HALF == CUDA_OPS_BFLOAT16)
        return (FN(vector))(__builtin_convertvector(*(const FN(half_vector) *)from, FN(bits)) << 16);
    FN(vector) value;
    for (int i = 0; i < LANES; i++)
        value[i] = LOAD_ONE(from[i]);
    return value;
}

CUDA_OPS_INLINE void FN(store)(uint16_t *to, FN(vector) value)
{
#if VECTOR_BYTES == 64
    if (HALF == CUDA_OPS_FLOAT16) {
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#elif VECTOR_BYTES == 32
    if (HALF == CUDA_OPS_FLOAT16) {
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#endif
    if (HALF == CUDA_OPS_BFLOAT16) { /* as rounded_bfloat16 */
        const FN(bits) bits = (FN(bits))value, is_nan = (FN(bits))(value != value);
        const FN(bits) nearest = bits + 0x7fffu + (bits >> 16 & 1u);
        const FN(bits) rounded = (is_nan & (bits | 0x400000u)) | (~is_nan & nearest);
        *(FN(half_vector) *)to = __builtin_convertvector(rounded >> 16, FN(half_vector));
        return;
    }
    for (int i = 0; i < LANES; i++)
        to[i] = STORE_ONE(value[i]);
}
#else
#define STORED REAL
#define LOAD_VECTOR(from) (*(const FN(vector) *)(from))
#define STORE_VECTOR(to, value) (*(FN(vector) *)(to) = (value))
#define LOAD_ONE(x) (x)
#define STORE_ONE(x) (x)
#endif

#if defined(__GNUC__) && !defined(__clang__)
#include "conv2d/transpose_vectors.h"
#define TRANSPOSES 1
#else
#define TRANSPOSES 0
#endif

/* Pixels [0, count) of `lanes` channels, pixel i at from + i * pixel, as vectors at to(i): rows of `width` pixels, of
 * which the first starts with column `first`, are `row` elements apart. Lanes beyond are zeros. */
static void FN(stage_pixels)(REAL *restrict to, int64_t row, int64_t width, const STORED *restrict from,
                             int64_t channel, int64_t pixel, int lanes, int64_t count)
{
    int64_t x = 0, i = 0;
#if TRANSPOSES
    for (; pixel == 1 && i + LANES <= count; i += LANES) {
        FN(vector) block[LANES];
#pragma GCC unroll 16
        for (int q = 0; q < LANES; q++)
            block[q] = q < lanes ? LOAD_VECTOR(from + q * channel + i) : (FN(vector)){0};
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
            value = LOAD_VECTOR(from + i * pixel);
        else
            for (int q = 0; q < lanes; q++)
                value[q] = LOAD_ONE(from[q * channel + i * pixel]);
        *(FN(vector) *)(to + x * LANES) = value;
        if (++x == width) {
            x = 0;
            to += row;
        }
    }
}

/* The opposite, of dense vectors. */
static void FN(write_pixels)(STORED *restrict to, const REAL *restrict from, int64_t channel, int64_t pixel, int lanes,
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
                STORE_VECTOR(to + q * channel + i, block[q]);
    }
#endif
    for (; i < count; i++)
        if (channel == 1 && lanes == LANES)
            STORE_VECTOR(to + i * pixel, *(const FN(vector) *)(from + i * LANES));
        else
            for (int q = 0; q < lanes; q++)
                to[q * channel + i * pixel] = STORE_ONE(from[i * LANES + q]);
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

/* channels_last where it lies: nothing is staged, so that memory is read and written in the order in which it is. */

#ifndef HALF /* of which rows are widened before */
/* `pixels` neighbours in `blocks` vectors of channels: out[i] = bias + sum over taps of weight * from[i * step +
 * offset]. A vector's weights are kernel * LANES elements after those of the one before. */
CUDA_OPS_INLINE void FN(pixel_tile)(const int pixels, const int blocks, REAL *restrict out, int64_t out_step,
                                    const REAL *restrict from, int64_t step, const REAL *restrict weight,
                                    int64_t kernel, const REAL *bias, const struct tap *taps, int64_t count)
{
    FN(vector) sum[8][8];
#pragma GCC unroll 8
    for (int b = 0; b < blocks; b++)
#pragma GCC unroll 8
        for (int i = 0; i < pixels; i++)
            sum[b][i] = bias ? *(const FN(vector) *)(bias + b * LANES) : (FN(vector)){0};
    for (int64_t t = 0; t < count; t++) {
        const REAL *at = from + taps[t].offset;
        const REAL *const weights = weight + taps[t].index * LANES;
        FN(vector) factor[8];
#pragma GCC unroll 8
        for (int b = 0; b < blocks; b++)
            factor[b] = *(const FN(vector) *)(weights + b * kernel * LANES);
        /* A pixel's address is made of the one before: made of the first, it takes more instructions than the products. */
#pragma GCC unroll 8
        for (int i = 0; i < pixels; i++, at += step)
#pragma GCC unroll 8
            for (int b = 0; b < blocks; b++)
                sum[b][i] += factor[b] * *(const FN(vector) *)(at + b * LANES);
    }
#pragma GCC unroll 8
    for (int b = 0; b < blocks; b++)
#pragma GCC unroll 8
        for (int i = 0; i < pixels; i++)
            *(FN(vector) *)(out + i * out_step + b * LANES) = sum[b][i];
}

/* The same in all channels, at least LANES. The last vector overlaps the one before if there are no whole ones. */
CUDA_OPS_INLINE void FN(pixel_channels)(const int pixels, REAL *restrict out, int64_t out_step,
                                        const REAL *restrict from, int64_t step, const REAL *restrict weight,
                                        int64_t kernel, const REAL *bias, const struct tap *taps, int64_t count,
                                        int64_t channels)
{
    /* Two sums or more for each cycle that one waits for another, as many as there are registers for. */
    enum { SUMS = VECTOR_BYTES == 64 ? 16 : 8 };
    const int together = pixels > 4 ? SUMS / 8 : pixels > 2 ? SUMS / 4 : pixels > 1 ? 4 : 8;
    int64_t c = 0;
    for (; c + together * LANES <= channels; c += together * LANES)
        FN(pixel_tile)(pixels, together, out + c, out_step, from + c, step, weight + c * kernel, kernel,
                       bias ? bias + c : NULL, taps, count);
    for (int64_t block = c / LANES; c < channels; c += LANES, block++) {
        const int64_t first = min_i64(c, channels - LANES);
        FN(pixel_tile)(pixels, 1, out + first, out_step, from + first, step, weight + block * LANES * kernel, kernel,
                       bias ? bias + first : NULL, taps, count);
    }
}

/* `pixels` neighbours of a row, in all channels. */
static void FN(convolve_pixels)(REAL *out, int64_t out_step, const REAL *from, int64_t step, const REAL *weight,
                                int64_t kernel, const REAL *bias, const struct tap *taps, int64_t count, int64_t pixels,
                                int64_t channels)
{
    const int64_t tiles = (pixels + 7) / 8;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = pixels * tile / tiles;
        REAL *const to = out + first * out_step;
        const REAL *const at = from + first * step;
        switch (pixels * (tile + 1) / tiles - first) {
        case 8:
            FN(pixel_channels)(8, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        case 7:
            FN(pixel_channels)(7, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        case 6:
            FN(pixel_channels)(6, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        case 5:
            FN(pixel_channels)(5, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        case 4:
            FN(pixel_channels)(4, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        case 3:
            FN(pixel_channels)(3, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        case 2:
            FN(pixel_channels)(2, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
            break;
        default:
            FN(pixel_channels)(1, to, out_step, at, step, weight, kernel, bias, taps, count, channels);
        }
    }
}
#endif

/* sums[row * sums_row] += sum over the pixels of grad * from of that row of the kernel, in `blocks` vectors of
 * channels. */
CUDA_OPS_INLINE void FN(weight_pixel_tile)(const int rows, const int blocks, REAL *restrict sums, int64_t sums_row,
                                           int64_t sums_block, const STORED *restrict grad, int64_t grad_step,
                                           const STORED *restrict from, int64_t from_row, int64_t step, int64_t pixels)
{
    FN(vector) sum[5][4];
#pragma GCC unroll 5
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++)
            sum[r][b] = (FN(vector)){0};
    for (int64_t i = 0; i < pixels; i++, grad += grad_step, from += step) {
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
            const FN(vector) factor = LOAD_VECTOR(grad + b * LANES);
#pragma GCC unroll 5
            for (int r = 0; r < rows; r++)
                sum[r][b] += factor * LOAD_VECTOR(from + r * from_row + b * LANES);
        }
    }
#pragma GCC unroll 5
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++)
            *(FN(vector) *)(sums + r * sums_row + b * sums_block) += sum[r][b];
}

/* The same for a kernel's columns, `spans`, each with the pixels that it reaches, of those from `begin` to `end`. */
CUDA_OPS_INLINE void FN(weight_columns)(const int rows, const int blocks, REAL *sums, int64_t sums_row,
                                        int64_t sums_block, const STORED *grad, int64_t grad_step, const STORED *from,
                                        int64_t from_row, int64_t step, const struct span *spans, int64_t columns,
                                        int64_t begin, int64_t end)
{
    for (int64_t j = 0; j < columns; j++) {
        const int64_t first = max_i64(begin, spans[j].begin), last = min_i64(end, spans[j].end);
        if (first < last)
            FN(weight_pixel_tile)(rows, blocks, sums + j * LANES, sums_row, sums_block, grad + first * grad_step,
                                  grad_step, from + spans[j].offset + first * step, from_row, step, last - first);
    }
}

/* And in all of `channels` channels; those of the last block begin `last` elements after the first's. */
CUDA_OPS_INLINE void FN(weight_channels)(const int rows, REAL *sums, int64_t sums_row, int64_t sums_block,
                                         const STORED *grad, int64_t grad_step, const STORED *from, int64_t from_row,
                                         int64_t step, const struct span *spans, int64_t columns, int64_t begin,
                                         int64_t end, int64_t blocks, int64_t last)
{
    const int together = rows > 3 ? 2 : 4;
    int64_t block = 0;
    for (; (block + together - 1) * LANES <= last && block + together <= blocks; block += together)
        FN(weight_columns)(rows, together, sums + block * sums_block, sums_row, sums_block, grad + block * LANES,
                           grad_step, from + block * LANES, from_row, step, spans, columns, begin, end);
    for (; block < blocks; block++) {
        const int64_t first = min_i64(block * LANES, last);
        FN(weight_columns)(rows, 1, sums + block * sums_block, sums_row, sums_block, grad + first, grad_step,
                           from + first, from_row, step, spans, columns, begin, end);
    }
}

/* A row of pixels of grad_output with the `rows` rows of the source that the kernel's rows read, `from_row` apart.
 * sums[block][row][column] are vectors. */
static void FN(weight_pixels)(REAL *sums, int64_t kernel, const STORED *grad, int64_t grad_step, const STORED *from,
                              int64_t from_row, int64_t rows, int64_t step, const struct span *spans, int64_t columns,
                              int64_t pixels, int64_t blocks, int64_t last)
{
    enum { TOGETHER = 16 }; /* pixels that are read again by all columns of the kernel */
    const int64_t sums_row = columns * LANES, sums_block = kernel * LANES;
    for (int64_t begin = 0; begin < pixels; begin += TOGETHER) {
        const int64_t end = min_i64(pixels, begin + TOGETHER);
        for (int64_t row = 0, count; row < rows; row += count) {
            count = rows - row <= 5 ? rows - row : rows - row == 6 ? 3 : 4;
            REAL *const to = sums + row * sums_row;
            const STORED *const at = from + row * from_row;
            switch (count) {
            case 5:
                FN(weight_channels)(5, to, sums_row, sums_block, grad, grad_step, at, from_row, step, spans, columns,
                                    begin, end, blocks, last);
                break;
            case 4:
                FN(weight_channels)(4, to, sums_row, sums_block, grad, grad_step, at, from_row, step, spans, columns,
                                    begin, end, blocks, last);
                break;
            case 3:
                FN(weight_channels)(3, to, sums_row, sums_block, grad, grad_step, at, from_row, step, spans, columns,
                                    begin, end, blocks, last);
                break;
            case 2:
                FN(weight_channels)(2, to, sums_row, sums_block, grad, grad_step, at, from_row, step, spans, columns,
                                    begin, end, blocks, last);
                break;
            default:
                FN(weight_channels)(1, to, sums_row, sums_block, grad, grad_step, at, from_row, step, spans, columns,
                                    begin, end, blocks, last);
            }
        }
    }
}

#undef LANES
#undef TRANSPOSES
#undef STORED
#undef LOAD_VECTOR
#undef STORE_VECTOR
#undef LOAD_ONE
#undef STORE_ONE
