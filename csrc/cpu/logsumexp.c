/* logsumexp on the CPU: output = max + log(sum(exp(input - max))) along the middle dimension. Bound by exp, which is
 * written so that the compiler vectorises it (exponential.h), and by memory. */
#ifndef REAL

#include "cuda_ops/logsumexp.h"

#include "common/common.h"
#include "common/exponential.h"

#define REAL float
#define FN(name) name##_f32
#include "logsumexp.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "logsumexp.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_logsumexp_forward_cpu(void *output, const void *input, int64_t cols, int64_t inner,
                                               int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        logsumexp_forward_f32(output, input, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        logsumexp_forward_f64(output, input, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_logsumexp_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                                const void *output, int64_t cols, int64_t inner, int64_t begin,
                                                int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        logsumexp_backward_f32(grad_input, grad_output, input, output, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        logsumexp_backward_f64(grad_input, grad_output, input, output, cols, inner, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"

/* Of a column whose largest number is infinite (or that has none): NaN if there is one, else that infinity. */
static REAL FN(infinite_column)(const REAL *x, int64_t cols, int64_t inner, REAL largest)
{
    for (int64_t c = 0; c < cols; c++)
        if (isnan(x[c * inner]))
            return (REAL)NAN;
    return largest;
}

CUDA_OPS_SIMD static void FN(logsumexp_forward)(REAL *output, const REAL *input, int64_t cols, int64_t inner,
                                                int64_t begin, int64_t end)
{
    REAL maximum[TILE], log_sum[TILE];
    for (int64_t column = begin, count; column < end; column += count) {
        const REAL *x = input + column_offset(column, cols, inner);
        count = tile_columns(column, end, inner);
        FN(columns_log_sum_exp)(x, cols, inner, count, maximum, log_sum);
        for (int64_t i = 0; i < count; i++)
            output[column + i] = isinf(maximum[i])
                                     ? FN(infinite_column)(x + (inner == 1 ? i * cols : i), cols, inner, maximum[i])
                                     : maximum[i] + log_sum[i];
    }
}

CUDA_OPS_SIMD static void FN(logsumexp_backward)(REAL *grad_input, const REAL *grad_output, const REAL *input,
                                                 const REAL *output, int64_t cols, int64_t inner, int64_t begin,
                                                 int64_t end)
{
    for (int64_t column = begin, count; column < end; column += count) {
        const int64_t offset = column_offset(column, cols, inner);
        count = inner == 1 ? 1 : tile_columns(column, end, inner);
        if (inner == 1) {
            const REAL g = grad_output[column], y = output[column];
#pragma omp simd
            for (int64_t c = 0; c < cols; c++)
                grad_input[offset + c] = g * FN(exponential)(input[offset + c] - y);
            continue;
        }
        for (int64_t c = 0; c < cols; c++)
#pragma omp simd
            for (int64_t i = 0; i < count; i++)
                grad_input[offset + c * inner + i] =
                    grad_output[column + i] * FN(exponential)(input[offset + c * inner + i] - output[column + i]);
    }
}

#endif
