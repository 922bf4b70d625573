/* What conv_block.c and conv_block/kernel.h share: the sizes of a block, its workspace, and the table of functions that
 * each instruction set fills in. */
#ifndef CUDA_OPS_CPU_CONV_BLOCK_BLOCK_H
#define CUDA_OPS_CPU_CONV_BLOCK_BLOCK_H

#include "common/common.h"

enum { CHUNKS = 16, ALIGNMENT = 64, LARGEST = 1 << 18 };

struct block {
    int64_t batch, in_channels, out_channels, height, width;
    int64_t rows, columns, windows; /* of the pooling */
    int64_t chunks;
    int input_channels_last, output_channels_last;
};

struct workspace {
    float *staged_input, *staged_grad; /* zero-padded */
    float *v, *m, *u;
    float *pooled;  /* T x K */
    float *channel; /* 10 * K */
};

struct kernels {
    void (*convolve)(float *conv_output, double *moments, const float *input, const float *prepared, const float *bias,
                     const struct block *b, int64_t begin, int64_t end, const struct workspace *w);
    void (*pool)(float *output, uint8_t *argmax, float *maximum, const float *conv_output, const float *input,
                 const float *prepared, const float *bias, const float *coefficients, const struct block *b,
                 int64_t begin, int64_t end, const struct workspace *w);
    void (*sums)(double *partials, const float *grad_output, const uint8_t *argmax, const float *maximum,
                 const float *input, const float *center, const struct block *b, int64_t begin, int64_t end,
                 const struct workspace *w);
    void (*gradients)(float *grad_input, float *weights, const float *grad_output, const uint8_t *argmax,
                      const float *conv_output, const float *input, const float *prepared, const float *coefficients,
                      const struct block *b, int64_t begin, int64_t end, const struct workspace *w);
    void (*gradients_one)(float *grad_input, const float *grad_output, const uint8_t *argmax, const float *input,
                          const float *prepared, const float *bias, const float *coefficients, const struct block *b,
                          int64_t begin, int64_t end, const struct workspace *w);
};

static inline int64_t first_of_chunk(const struct block *b, int64_t chunk)
{
    return b->batch * chunk / b->chunks;
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
