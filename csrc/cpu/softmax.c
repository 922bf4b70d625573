/* softmax on the CPU: output = exp(input - max) / sum(exp(input - max)) along the middle dimension.
 * Bound by exp, which is written so that the compiler vectorises it (exponential.h), once an element, and by memory. */
#ifndef REAL

#include "cuda_ops/softmax.h"

#include "common/common.h"
#include "common/exponential.h"

#define REAL float
#define FN(name) name##_f32
#include "softmax.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "softmax.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_softmax_forward_cpu(void *output, const void *input, int64_t cols, int64_t inner,
                                             int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        softmax_forward_f32(output, input, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        softmax_forward_f64(output, input, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_softmax_backward_cpu(void *grad_input, const void *grad_output, const void *output,
                                              double scale, int64_t cols, int64_t inner, int64_t begin, int64_t end,
                                              cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        softmax_backward_f32(grad_input, grad_output, output, (float)scale, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        softmax_backward_f64(grad_input, grad_output, output, scale, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"
#include "common/row_exponentials.h"

CUDA_OPS_SIMD static void FN(softmax_forward)(REAL *output, const REAL *input, int64_t cols, int64_t inner,
                                              int64_t begin, int64_t end)
{
    for (int64_t column = begin, count; column < end; column += count) {
        count = tile_columns(column, end, inner);
        const int64_t offset = column_offset(column, cols, inner);
        const REAL *x = input + offset;
        REAL *y = output + offset;
        if (inner == 1) {
            for (int64_t i = 0; i < count; i++) {
                const REAL maximum = FN(row_maximum)(x + i * cols, cols);
                FN(row_scale)(y + i * cols, cols, 1 / FN(row_exponentials)(y + i * cols, x + i * cols, cols, maximum));
            }
            continue;
        }
        REAL maximum[TILE], factor[TILE];
        double sum[TILE];
        for (int64_t i = 0; i < count; i++) {
            maximum[i] = -(REAL)INFINITY;
            sum[i] = 0;
        }
        for (int64_t c = 0; c < cols; c++)
            for (int64_t i = 0; i < count; i++)
                maximum[i] = x[c * inner + i] > maximum[i] ? x[c * inner + i] : maximum[i];
        for (int64_t c = 0; c < cols; c++)
#pragma omp simd
            for (int64_t i = 0; i < count; i++) {
                const REAL e = FN(exponential)(x[c * inner + i] - maximum[i]);
                y[c * inner + i] = e;
                sum[i] += e;
            }
        for (int64_t i = 0; i < count; i++)
            factor[i] = (REAL)(1 / sum[i]);
        for (int64_t c = 0; c < cols; c++)
            for (int64_t i = 0; i < count; i++)
                y[c * inner + i] *= factor[i];
    }
}

/* Sum of products along a row, in blocks as in log_sum_exp.h. */
CUDA_OPS_INLINE REAL FN(row_dot)(const REAL *a, const REAL *b, int64_t cols)
{
    double sum = 0;
    for (int64_t first = 0; first < cols; first += SUM_BLOCK) {
        const int64_t last = min_i64(first + SUM_BLOCK, cols);
        REAL block = 0;
#pragma omp simd reduction(+ : block)
        for (int64_t c = first; c < last; c++)
            block += a[c] * b[c];
        sum += block;
    }
    return (REAL)sum;
}

/* grad_input may be either of the inputs, which is no dependence between iterations. */
CUDA_OPS_SIMD static void FN(softmax_backward)(REAL *grad_input, const REAL *grad_output, const REAL *output,
                                               REAL scale, int64_t cols, int64_t inner, int64_t begin, int64_t end)
{
    for (int64_t column = begin, count; column < end; column += count) {
        count = tile_columns(column, end, inner);
        const int64_t offset = column_offset(column, cols, inner);
        const REAL *g = grad_output + offset, *y = output + offset;
        REAL *dx = grad_input + offset;
        if (inner == 1) {
            for (int64_t i = 0; i < count; i++, g += cols, y += cols, dx += cols) {
                const REAL sum = FN(row_dot)(g, y, cols);
#pragma omp simd
                for (int64_t c = 0; c < cols; c++)
                    dx[c] = y[c] * (g[c] - sum) * scale;
            }
            continue;
        }
        double sum[TILE] = {0};
        for (int64_t c = 0; c < cols; c++)
            for (int64_t i = 0; i < count; i++)
                sum[i] += g[c * inner + i] * y[c * inner + i];
        for (int64_t c = 0; c < cols; c++)
#pragma omp simd
            for (int64_t i = 0; i < count; i++)
                dx[c * inner + i] = y[c * inner + i] * (g[c * inner + i] - (REAL)sum[i]) * scale;
    }
}

#endif
