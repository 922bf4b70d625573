/* gemm_cpu: matrix multiplication on the CPU. gemm.h is its counterpart for CUDA.
 *
 *   output[i][j] = sum over p of a[i][p] * b[p][j]      (+ output[i][j] if accumulate)
 *
 *   a is m x k, b is k x n, output is m x n. Every matrix has two strides in elements (row, column), so that
 *   transposed operands need no copy; output's column stride is 1. Either stride of a, and of b, may be 1, or neither.
 *   dtype: float32 and float64, output likewise; or bfloat16, with products and sums in float32 and output float32.
 *   k = 0 gives zeros (or leaves output alone if accumulate). output overlaps neither a nor b.
 *   workspace: cuda_ops_gemm_workspace_cpu bytes, aligned to 64, for this call alone.
 *
 * One core: callers cut the rows or the columns of output for their threads. float32 and float64 are summed in the same
 * order wherever the cuts are and whatever the sizes, so that a row has the same bits alone as among others.
 *
 * bfloat16 by the set in use (cpu_isa.h): amx's tiles; the same by avx512_bf16's products of pairs; else widened to float32. The
 * first two take subnormal numbers for zero.
 */
#ifndef CUDA_OPS_GEMM_CPU_H
#define CUDA_OPS_GEMM_CPU_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

int64_t cuda_ops_gemm_workspace_cpu(cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_gemm_cpu(void *output, int64_t output_row, const void *a, int64_t a_row, int64_t a_column,
                                  const void *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                                  int accumulate, void *workspace, cuda_ops_dtype dtype);

/* output = round(a b + bias), of float16 or bfloat16, where cuda_ops_gemm_has_tiles_cpu() is not 0: where the set in use is
 * amx, or avx512_bf16 and dtype is bfloat16. Sums are float32. bfloat16 by the processor's products; a float16 as a sum of two bfloat16, of whose four products
 * the least, at most 2^-18 of the whole, is left out.
 * relu: not 0: of the sums with their bias, before they are rounded.
 * bias: NULL, or a number for each column, of output_dtype, which is dtype or float32. k = 0 gives the bias, or zeros.
 * workspace: cuda_ops_gemm_tiles_workspace_cpu bytes. The order of summation depends on k alone. */
int cuda_ops_gemm_has_tiles_cpu(cuda_ops_dtype dtype);

int64_t cuda_ops_gemm_tiles_workspace_cpu(void);

cuda_ops_status cuda_ops_gemm_tiles_cpu(void *output, int64_t output_row, const void *bias, const void *a,
                                        int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column,
                                        int64_t m, int64_t n, int64_t k, void *workspace, int relu,
                                        cuda_ops_dtype dtype, cuda_ops_dtype output_dtype);

#ifdef __cplusplus
}
#endif

#endif
