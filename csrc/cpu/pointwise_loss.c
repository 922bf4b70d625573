/* pointwise_loss on the CPU: losses of elements and their derivatives. Bound by memory where the loss is a distance, else
 * by its exponential, a polynomial that the compiler vectorises, or by log. Works on blocks, whose factors and results
 * are on the stack. */
#ifndef REAL

#include "cuda_ops/pointwise_loss.h"

#include "common/common.h"

enum { LOSS_BLOCK = 256 };

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "pointwise_loss.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "pointwise_loss.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_pointwise_loss_forward_cpu(void *losses, double *partial, const void *input,
                                                    const void *target, const cuda_ops_loss_factors *factors,
                                                    int64_t begin, int64_t end, cuda_ops_pointwise_loss loss,
                                                    double parameter, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return pointwise_loss_forward_f32(losses, partial, input, target, factors, begin, end, loss, (float)parameter);
    case CUDA_OPS_FLOAT64:
        return pointwise_loss_forward_f64(losses, partial, input, target, factors, begin, end, loss, parameter);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_pointwise_loss_backward_cpu(void *gradient, const void *grad_output, const void *input,
                                                     const void *target, const cuda_ops_loss_factors *factors,
                                                     int64_t count, int64_t begin, int64_t end,
                                                     cuda_ops_pointwise_loss loss, double parameter, int by_target,
                                                     cuda_ops_reduction reduction, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return pointwise_loss_backward_f32(gradient, grad_output, input, target, factors, count, begin, end, loss,
                                           (float)parameter, by_target, reduction);
    case CUDA_OPS_FLOAT64:
        return pointwise_loss_backward_f64(gradient, grad_output, input, target, factors, count, begin, end, loss,
                                           parameter, by_target, reduction);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/activation_functions.h"

CUDA_OPS_INLINE REAL FN(logarithm)(REAL x)
{
    return sizeof(REAL) == sizeof(float) ? (REAL)logf((float)x) : (REAL)log(x);
}

#include "cuda_ops/pointwise_loss_functions.h"

/* A function of `count` elements, of at most LOSS_BLOCK. */
#define FUNCTION(name)                                                                                                 \
    CUDA_OPS_SIMD static void FN(name##_block)(REAL * result, const REAL *x, const REAL *t, const REAL *pos, REAL p,   \
                                               int64_t count)                                                          \
    {                                                                                                                  \
        _Pragma("omp simd") for (int64_t i = 0; i < count; i++) result[i] = FN(name)(x[i], t[i], pos[i], p);           \
    }
#define FUNCTIONS(enumerator, name) FUNCTION(name) FUNCTION(name##_by_input) FUNCTION(name##_by_target)
CUDA_OPS_POINTWISE_LOSSES(FUNCTIONS)
#undef FUNCTIONS
#undef FUNCTION

typedef void (*FN(block_function))(REAL *result, const REAL *x, const REAL *t, const REAL *pos, REAL p, int64_t count);

/* The loss (derivative 0), or its derivative by input (1) or target (2); NULL if there is no such loss. */
static FN(block_function) FN(function_of)(cuda_ops_pointwise_loss loss, int derivative)
{
#define CASE(enumerator, name)                                                                                         \
    case CUDA_OPS_POINTWISE_LOSS_##enumerator:                                                                         \
        return derivative == 0   ? FN(name##_block)                                                                    \
               : derivative == 1 ? FN(name##_by_input_block)                                                           \
                                 : FN(name##_by_target_block);
    switch (loss) {
        CUDA_OPS_POINTWISE_LOSSES(CASE)
    default:
        return NULL;
    }
#undef CASE
}

/* In many lanes: one sum would wait for each addition. */
CUDA_OPS_SIMD static double FN(block_sum)(const REAL *values, int64_t count)
{
    double sum0 = 0, sum1 = 0;
    const int64_t half = count / 2;
#pragma omp simd reduction(+ : sum0, sum1)
    for (int64_t i = 0; i < half; i++) {
        sum0 += (double)values[i];
        sum1 += (double)values[half + i];
    }
    return sum0 + sum1 + (count % 2 ? (double)values[count - 1] : 0.0);
}

static void FN(load_factors)(REAL *values, const cuda_ops_loss_factor *factor, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = (first + i) / factor->inner;
        values[i] = factor->values ? ((const REAL *)factor->values)[factor->size ? at % factor->size : at] : (REAL)1;
    }
}

static cuda_ops_status FN(pointwise_loss_forward)(REAL *losses, double *partial, const REAL *input, const REAL *target,
                                                  const cuda_ops_loss_factors *factors, int64_t begin, int64_t end,
                                                  cuda_ops_pointwise_loss loss, REAL parameter)
{
    const FN(block_function) function = FN(function_of)(loss, 0);
    if (function == NULL)
        return CUDA_OPS_INVALID_ARGUMENT;
    double sum = 0;
    REAL result[LOSS_BLOCK], weight[LOSS_BLOCK], pos[LOSS_BLOCK];
    FN(load_factors)(pos, &(const cuda_ops_loss_factor){NULL, 1, 1}, 0, LOSS_BLOCK);
    for (int64_t first = begin; first < end; first += LOSS_BLOCK) {
        const int64_t count = min_i64(LOSS_BLOCK, end - first);
        if (factors->pos_weight.values)
            FN(load_factors)(pos, &factors->pos_weight, first, count);
        function(result, input + first, target + first, pos, parameter, count);
        if (factors->weight.values) {
            FN(load_factors)(weight, &factors->weight, first, count);
            for (int64_t i = 0; i < count; i++)
                result[i] *= weight[i];
        }
        if (losses)
            memcpy(losses + first, result, (size_t)count * sizeof(REAL));
        if (partial)
            sum += FN(block_sum)(result, count);
    }
    if (partial) {
        partial[0] = sum;
        partial[1] = (double)(end - begin);
    }
    return CUDA_OPS_SUCCESS;
}

static cuda_ops_status FN(pointwise_loss_backward)(REAL *gradient, const REAL *grad_output, const REAL *input,
                                                   const REAL *target, const cuda_ops_loss_factors *factors,
                                                   int64_t elements, int64_t begin, int64_t end,
                                                   cuda_ops_pointwise_loss loss, REAL parameter, int by_target,
                                                   cuda_ops_reduction reduction)
{
    const FN(block_function) function = FN(function_of)(loss, by_target ? 2 : 1);
    if (function == NULL)
        return CUDA_OPS_INVALID_ARGUMENT;
    const bool each = reduction == CUDA_OPS_REDUCTION_NONE;
    const REAL scale = reduction == CUDA_OPS_REDUCTION_MEAN ? (REAL)(1 / (double)elements) : (REAL)1;
    REAL result[LOSS_BLOCK], weight[LOSS_BLOCK], pos[LOSS_BLOCK];
    FN(load_factors)(pos, &(const cuda_ops_loss_factor){NULL, 1, 1}, 0, LOSS_BLOCK);
    for (int64_t first = begin; first < end; first += LOSS_BLOCK) {
        const int64_t count = min_i64(LOSS_BLOCK, end - first);
        if (factors->pos_weight.values)
            FN(load_factors)(pos, &factors->pos_weight, first, count);
        function(result, input + first, target + first, pos, parameter, count);
        if (factors->weight.values) {
            FN(load_factors)(weight, &factors->weight, first, count);
            for (int64_t i = 0; i < count; i++)
                result[i] *= weight[i];
        }
        for (int64_t i = 0; i < count; i++)
            gradient[first + i] = result[i] * (each ? grad_output[first + i] : grad_output[0] * scale);
    }
    return CUDA_OPS_SUCCESS;
}

#endif
