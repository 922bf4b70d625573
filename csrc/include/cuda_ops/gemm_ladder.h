/* gemm_ladder: rung 3 of the ladder, matrix multiplication in C, from three loops to what linear runs on the CPU.
 *
 *   d = a b    a is m x k, b is k x n, d is m x n; all row-major and dense, d overlaps neither a nor b
 *
 * k = 0 makes d zero. Rows [begin, end) of d are written, so that the last rung spreads over threads; the others are
 * for one core. workspace: cuda_ops_gemm_ladder_workspace_cpu bytes (zero: may be NULL), aligned to 64, for this call
 * alone. The kernels of the GPU are in gemm.h.
 */
#ifndef CUDA_OPS_GEMM_LADDER_H
#define CUDA_OPS_GEMM_LADDER_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_gemm_c_rung {
    CUDA_OPS_GEMM_C_NAIVE = 31,      /* for i, for j, for p */
    CUDA_OPS_GEMM_C_LOOP_ORDER = 32, /* for i, for p, for j */
    CUDA_OPS_GEMM_C_BLOCKED = 33,    /* the same over blocks that stay in cache */
    CUDA_OPS_GEMM_C_PACKED = 34,     /* packed blocks and a register tile */
    CUDA_OPS_GEMM_C_THREADS = 35 /* csrc/cpu/gemm/gemm.c: explicit vectors; the caller cuts the rows for its threads */
} cuda_ops_gemm_c_rung;

int64_t cuda_ops_gemm_ladder_workspace_cpu(int rung);

/* CUDA_OPS_INVALID_ARGUMENT where there is no such rung. */
cuda_ops_status cuda_ops_gemm_ladder_cpu(void *d, const void *a, const void *b, void *workspace, int64_t m, int64_t n,
                                         int64_t k, int64_t begin, int64_t end, int rung, cuda_ops_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
