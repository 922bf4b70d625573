/* Matrix multiplication on one core, shared by linear and conv2d. Callers spread blocks of rows over threads.
 *
 *   output[i][j] = sum over p of a[i][p] * b[p][j]      (+ output[i][j] if accumulate)
 *
 *   a is m x k, b is k x n, output is m x n. Every matrix has two strides in elements (row, column), so that
 *   transposed operands need no copy; output's column stride is 1.
 *   k = 0 gives zeros (or leaves output alone if accumulate). output overlaps neither a nor b.
 *   workspace: GEMM_WORKSPACE_BYTES, aligned to 64 bytes, for this call alone.
 *   Every element is summed in the same order whatever m, n and the strides are, so that results repeat bit by bit and
 *   do not depend on how callers cut the rows and columns.
 *   gemm_cpu.h is the same for callers from outside.
 */
#ifndef CUDA_OPS_CPU_GEMM_SINGLE_THREAD_H
#define CUDA_OPS_CPU_GEMM_SINGLE_THREAD_H

#include <stdbool.h>
#include <stdint.h>

#define GEMM_WORKSPACE_BYTES (5 << 20)

void cuda_ops_gemm_f32(float *output, int64_t output_row, const float *a, int64_t a_row, int64_t a_column,
                       const float *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                       bool accumulate, void *workspace);
void cuda_ops_gemm_f64(double *output, int64_t output_row, const double *a, int64_t a_row, int64_t a_column,
                       const double *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                       bool accumulate, void *workspace);

/* bfloat16 (as its bits) times bfloat16, summed in float32. workspace: cuda_ops_gemm_bf16_workspace bytes. */
int64_t cuda_ops_gemm_bf16_workspace(void);
void cuda_ops_gemm_bf16(float *output, int64_t output_row, const uint16_t *a, int64_t a_row, int64_t a_column,
                        const uint16_t *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                        bool accumulate, void *workspace);

#endif
