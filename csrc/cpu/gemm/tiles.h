/* Matrix multiplication of halves by AMX's tile registers, or bfloat16's by vectors of AVX512-BF16, on one core. For callers that have asked
 * cuda_ops_has_tiles(): elsewhere halves go by gemm/single_thread.h.
 *
 *   output[i][j] = round(sum over p of a[i][p] * b[p][j] + bias[j])
 *
 * bfloat16: the processor's products of pairs, summed in float32. A float16 is exactly a sum of two bfloat16, high +
 * low, and its products are high * high + high * low + low * high: what is left out is at most 2^-18 of a product,
 * below what rounding the operands of a float16 product to its eleven digits leaves. A float32 operand is rounded to
 * bfloat16, or (`split`) taken as the sum of two, which has sixteen digits.
 * Subnormal numbers of bfloat16 count as zero. Every element is summed in an order that depends on k alone, so that
 * results do not depend on how callers cut rows and columns.
 */
#ifndef CUDA_OPS_CPU_GEMM_TILES_H
#define CUDA_OPS_CPU_GEMM_TILES_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_ops/core.h"

/* Strides in elements, between lines (the rows of a, the columns of b) and along the depth. Either may be 1, or
 * neither. */
struct tile_operand {
    const void *data;
    int64_t line, depth;
};

/* Columns are contiguous. dtype: float32, or the operands' half. */
struct tile_output {
    void *data;
    int64_t row;
    cuda_ops_dtype dtype;
    const void *bias; /* for each column, of the output's dtype; or NULL */
    bool accumulate;  /* float32 alone: adds to what is there */
    bool relu;        /* of the sums with their bias, before they are rounded */
};

struct tile_product {
    struct tile_operand a, b;
    struct tile_output output;
    int64_t m, n, k;
    cuda_ops_dtype dtype; /* of a and b: bfloat16, float16 or float32 */
    bool split;           /* high and low parts: always of float16, never of bfloat16 */
};

/* For operands of this dtype. */
bool cuda_ops_has_tiles(cuda_ops_dtype dtype);

/* workspace: so many bytes, aligned to 64, for this call alone. */
int64_t cuda_ops_tiles_workspace(void);
void cuda_ops_multiply_tiles(const struct tile_product *product, void *workspace);

#endif
