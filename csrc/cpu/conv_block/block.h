/* What conv_block.c and conv_block/kernel.h share: the sizes of a block, its workspace, and the table of functions that
 * each instruction set fills in. */
#ifndef CUDA_OPS_CPU_CONV_BLOCK_BLOCK_H
#define CUDA_OPS_CPU_CONV_BLOCK_BLOCK_H

#include "common/common.h"
#include "cuda_ops/halves_cpu.h"

enum { CHUNKS = 16, ALIGNMENT = 64, LARGEST = 1 << 18 };

struct block {
    int64_t batch, in_channels, out_channels, height, width;
    int64_t rows, columns, windows; /* of the pooling */
    int64_t chunks;
    int64_t pitch, padded; /* columns and pixels of a zero-padded image */
    int input_channels_last, output_channels_last;
    cuda_ops_dtype dtype;
};

struct workspace {
    float *staged_input, *staged_grad; /* zero-padded */
    float *v, *m, *u;
    float *pooled;  /* T x K */
    float *channel; /* 10 * K */
    /* One image of halves, in float32. */
    float *wide_input, *wide_conv_output, *wide_output, *wide_maximum;
    /* conv_block/tiled.h's. */
    uint16_t *pixels, *grads, *channels, *pairs;
    float *tile_sums;
};

struct kernels {
    void (*convolve)(void *conv_output, double *moments, const void *input, const float *prepared, const float *bias,
                     const struct block *b, int64_t begin, int64_t end, const struct workspace *w);
    void (*pool)(void *output, uint8_t *argmax, void *maximum, const void *conv_output, const void *input,
                 const float *prepared, const float *bias, const float *coefficients, const struct block *b,
                 int64_t begin, int64_t end, const struct workspace *w);
    void (*sums)(double *partials, const void *grad_output, const uint8_t *argmax, const void *maximum,
                 const void *input, const float *center, const struct block *b, int64_t begin, int64_t end,
                 const struct workspace *w);
    void (*gradients)(void *grad_input, float *weights, const void *grad_output, const uint8_t *argmax,
                      const void *conv_output, const void *input, const float *prepared, const float *coefficients,
                      const struct block *b, int64_t begin, int64_t end, const struct workspace *w);
    void (*gradients_one)(void *grad_input, const void *grad_output, const uint8_t *argmax, const void *input,
                          const float *prepared, const float *bias, const float *coefficients, const struct block *b,
                          int64_t begin, int64_t end, const struct workspace *w);
};

static inline int64_t first_of_chunk(const struct block *b, int64_t chunk)
{
    return b->batch * chunk / b->chunks;
}

/* `count` elements of `array` from the one at `at` on: where they lie, or of halves widened into `wide`. */
static inline const float *as_float(const struct block *b, const void *array, int64_t at, int64_t count, float *wide)
{
    if (b->dtype == CUDA_OPS_FLOAT32)
        return (const float *)array + at;
    cuda_ops_widen_cpu(wide, (const uint16_t *)array + at, count, b->dtype);
    return wide;
}

/* Where elements of `array` from the one at `at` on are computed, for store_rounded to put them there. */
static inline float *room_for(const struct block *b, void *array, int64_t at, float *wide)
{
    return b->dtype == CUDA_OPS_FLOAT32 ? (float *)array + at : wide;
}

static inline void store_rounded(const struct block *b, void *array, int64_t at, const float *computed, int64_t count)
{
    if (b->dtype != CUDA_OPS_FLOAT32)
        cuda_ops_round_cpu((uint16_t *)array + at, computed, count, b->dtype);
}

/* Merges an image's moments of each channel into its chunk's mean and squares, which are of `count` pixels, by Chan's
 * formula. `squares` are about `center`, which is the image's mean but for rounding. */
static inline void merge_moments(double *moments, double *count, const float *sums, const float *center,
                                 const float *squares, int64_t pixels, int64_t channels)
{
    double *const mean = moments, *const square = mean + channels;
    const double more = (double)pixels, all = *count + more;
    for (int64_t k = 0; k < channels; k++) {
        const double exact = (double)sums[k] / more, off = exact - (double)center[k];
        const double distance = exact - mean[k];
        square[k] += (double)squares[k] - more * off * off + distance * distance * *count * more / all;
        mean[k] += distance * more / all;
    }
    *count = all;
}

/* target (columns x rows) = source (rows x columns) transposed, in blocks that stay in the cache. */
static void transpose_any(float *restrict target, const float *restrict source, int64_t rows, int64_t columns)
{
    enum { BLOCK = 16 };
    for (int64_t i0 = 0; i0 < rows; i0 += BLOCK)
        for (int64_t j0 = 0; j0 < columns; j0 += BLOCK)
            for (int64_t i = i0; i < min_i64(i0 + BLOCK, rows); i++)
                for (int64_t j = j0; j < min_i64(j0 + BLOCK, columns); j++)
                    target[j * rows + i] = source[i * columns + j];
}

#endif
