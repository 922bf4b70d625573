/* polynomial on the CPU: output = p(input) and grad_input = grad_output * p'(input), by Horner's rule.
 * Bound by memory for the few coefficients that polynomials have. A tile of inputs takes one coefficient after the
 * other, so that the inner loop runs over elements, which the compiler vectorises, and not over coefficients. */
#ifndef REAL

#include "cuda_ops/polynomial.h"

#include "common/common.h"

/* Elements of a tile: what stays in the first-level cache between two coefficients. */
enum { TILE = 512 };

#define REAL float
#define FN(name) name##_f32
#include "polynomial.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "polynomial.c"

#include "common/undef_real.h"

static bool is_count_valid(int64_t coefficient_count)
{
    return 1 <= coefficient_count && coefficient_count <= CUDA_OPS_POLYNOMIAL_MAX;
}

cuda_ops_status cuda_ops_polynomial_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                                const double *coefficients, int64_t coefficient_count,
                                                cuda_ops_dtype dtype)
{
    if (!is_count_valid(coefficient_count))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        polynomial_forward_f32(output, input, begin, end, coefficients, coefficient_count);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        polynomial_forward_f64(output, input, begin, end, coefficients, coefficient_count);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_polynomial_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                                 int64_t begin, int64_t end, const double *coefficients,
                                                 int64_t coefficient_count, cuda_ops_dtype dtype)
{
    if (!is_count_valid(coefficient_count))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        polynomial_backward_f32(grad_input, grad_output, input, begin, end, coefficients, coefficient_count);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        polynomial_backward_f64(grad_input, grad_output, input, begin, end, coefficients, coefficient_count);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* value[i] = p(x[i]) for i in [0, count), count <= TILE. */
CUDA_OPS_INLINE void FN(horner)(REAL *restrict value, const REAL *x, int64_t count, const REAL *coefficients,
                                int64_t coefficient_count)
{
    for (int64_t i = 0; i < count; i++)
        value[i] = coefficients[coefficient_count - 1];
    for (int64_t k = coefficient_count - 2; k >= 0; k--) {
        const REAL coefficient = coefficients[k];
        for (int64_t i = 0; i < count; i++)
            value[i] = value[i] * x[i] + coefficient;
    }
}

CUDA_OPS_SIMD static void FN(polynomial_forward)(REAL *output, const REAL *input, int64_t begin, int64_t end,
                                                 const double *coefficients, int64_t coefficient_count)
{
    REAL p[CUDA_OPS_POLYNOMIAL_MAX], value[TILE];
    for (int64_t k = 0; k < coefficient_count; k++)
        p[k] = (REAL)coefficients[k];
    for (int64_t tile = begin; tile < end; tile += TILE) {
        const int64_t count = min_i64(TILE, end - tile);
        FN(horner)(value, input + tile, count, p, coefficient_count);
        memcpy(output + tile, value, (size_t)count * sizeof(REAL));
    }
}

CUDA_OPS_SIMD static void FN(polynomial_backward)(REAL *grad_input, const REAL *grad_output, const REAL *input,
                                                  int64_t begin, int64_t end, const double *coefficients,
                                                  int64_t coefficient_count)
{
    REAL derivative[CUDA_OPS_POLYNOMIAL_MAX] = {0}, value[TILE];
    for (int64_t k = 1; k < coefficient_count; k++)
        derivative[k - 1] = (REAL)((double)k * coefficients[k]);
    for (int64_t tile = begin; tile < end; tile += TILE) {
        const int64_t count = min_i64(TILE, end - tile);
        /* The derivative of a constant is the constant 0: one coefficient, like p itself. */
        FN(horner)(value, input + tile, count, derivative, max_i64(coefficient_count - 1, 1));
        for (int64_t i = 0; i < count; i++)
            grad_input[tile + i] = grad_output[tile + i] * value[i];
    }
}

#endif
