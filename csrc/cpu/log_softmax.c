/* log_softmax on the CPU: output = (input - max) - log(sum(exp(input - max))) along the middle dimension.
 * Bound by exp, which is written so that the compiler vectorises it (exponential.h), and by memory. */
#ifndef REAL

#include "cuda_ops/log_softmax.h"

#include "common/common.h"
#include "common/exponential.h"

#define REAL float
#define FN(name) name##_f32
#include "log_softmax.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "log_softmax.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_log_softmax_forward_cpu(void *output, const void *input, int64_t cols, int64_t inner,
                                                 int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        log_softmax_forward_f32(output, input, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        log_softmax_forward_f64(output, input, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_log_softmax_backward_cpu(void *grad_input, const void *grad_output, const void *output,
                                                  int64_t cols, int64_t inner, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        log_softmax_backward_f32(grad_input, grad_output, output, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        log_softmax_backward_f64(grad_input, grad_output, output, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"

CUDA_OPS_SIMD static void FN(log_softmax_forward)(REAL *output, const REAL *input, int64_t cols, int64_t inner,
                                                  int64_t begin, int64_t end)
{
    REAL maximum[TILE], log_sum[TILE];
    for (int64_t column = begin, count; column < end; column += count) {
        count = tile_columns(column, end, inner);
        const int64_t offset = column_offset(column, cols, inner);
        const REAL *x = input + offset;
        REAL *y = output + offset;
        FN(columns_log_sum_exp)(x, cols, inner, count, maximum, log_sum);
        if (inner == 1) {
            for (int64_t i = 0; i < count; i++) {
                const REAL largest = maximum[i], log_of_sum = log_sum[i];
                for (int64_t c = 0; c < cols; c++)
                    y[i * cols + c] = (x[i * cols + c] - largest) - log_of_sum;
            }
        } else {
            for (int64_t c = 0; c < cols; c++)
                for (int64_t i = 0; i < count; i++)
                    y[c * inner + i] = (x[c * inner + i] - maximum[i]) - log_sum[i];
        }
    }
}

/* Sum along a row, in blocks as in log_sum_exp.h. */
CUDA_OPS_INLINE REAL FN(row_sum)(const REAL *x, int64_t cols)
{
    double sum = 0;
    for (int64_t first = 0; first < cols; first += SUM_BLOCK) {
        const int64_t last = min_i64(first + SUM_BLOCK, cols);
        REAL block = 0;
#pragma omp simd reduction(+ : block)
        for (int64_t c = first; c < last; c++)
            block += x[c];
        sum += block;
    }
    return (REAL)sum;
}

CUDA_OPS_SIMD static void FN(log_softmax_backward)(REAL *grad_input, const REAL *grad_output, const REAL *output,
                                                   int64_t cols, int64_t inner, int64_t begin, int64_t end)
{
    for (int64_t column = begin, count; column < end; column += count) {
        count = tile_columns(column, end, inner);
        const int64_t offset = column_offset(column, cols, inner);
        const REAL *g = grad_output + offset, *y = output + offset;
        REAL *dx = grad_input + offset;
        if (inner == 1) {
            for (int64_t i = 0; i < count; i++, g += cols, y += cols, dx += cols) {
                const REAL sum = FN(row_sum)(g, cols);
                const int64_t whole = cols - cols % LANES;
                /* grad_input may be either of the inputs, which is no dependence between iterations. */
#pragma omp simd
                for (int64_t c = 0; c < whole; c++)
                    dx[c] = g[c] - FN(exponential)(y[c]) * sum;
                if (whole < cols) {
                    REAL tail[LANES];
                    FN(padded_lanes)(tail, y + whole, cols - whole);
#pragma omp simd
                    for (int l = 0; l < LANES; l++)
                        tail[l] = FN(exponential)(tail[l]) * sum;
                    for (int64_t c = whole; c < cols; c++)
                        dx[c] = g[c] - tail[c - whole];
                }
            }
        } else {
            double sum[TILE] = {0};
            for (int64_t c = 0; c < cols; c++)
                for (int64_t i = 0; i < count; i++)
                    sum[i] += g[c * inner + i];
            for (int64_t c = 0; c < cols; c++)
                for (int64_t i = 0; i < count; i++)
                    dx[c * inner + i] = g[c * inner + i] - FN(exponential)(y[c * inner + i]) * (REAL)sum[i];
        }
    }
}

#endif
