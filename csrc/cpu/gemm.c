/* Matrix multiplication on one core: the plain three loops, in the order that walks b and output along rows. */
#ifndef REAL

#include "gemm.h"

#include "common.h"

#define REAL float
#define FN(name) name##_f32
#include "gemm.c"
#include "undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "gemm.c"
#include "undef_real.h"

#else

CUDA_OPS_SIMD void FN(cuda_ops_gemm)(REAL *output, int64_t output_row, const REAL *a, int64_t a_row, int64_t a_column,
                                     const REAL *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                                     bool accumulate, void *workspace)
{
    (void)workspace;
    for (int64_t i = 0; i < m; i++) {
        REAL *row = output + i * output_row;
        if (!accumulate)
            memset(row, 0, (size_t)n * sizeof(REAL));
        for (int64_t p = 0; p < k; p++) {
            const REAL factor = a[i * a_row + p * a_column];
            for (int64_t j = 0; j < n; j++)
                row[j] += factor * b[p * b_row + j * b_column];
        }
    }
}

#endif
