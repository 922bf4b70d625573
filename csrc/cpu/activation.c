/* activation on the CPU: output = f(input), and grad_input = grad_output * f'(saved), the functions being those of
 * cuda_ops/activation_functions.h. Bound by memory, two streams forward and three backward, where the instructions are
 * AVX-512's; exponentials are polynomials (common/exponential.h), so that the compiler vectorises every loop. */
#ifndef REAL

#include "cuda_ops/activation.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "activation.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "activation.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#define PRECISION 16
#include "activation.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_activation_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                                cuda_ops_activation function, double first, double second,
                                                cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return activation_forward_f32(output, input, begin, end, function, (float)first, (float)second);
    case CUDA_OPS_FLOAT64:
        return activation_forward_f64(output, input, begin, end, function, first, second);
    case CUDA_OPS_BFLOAT16:
        return activation_forward_bf16(output, input, begin, end, function, (float)first, (float)second);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_activation_backward_cpu(void *grad_input, const void *grad_output, const void *saved,
                                                 int64_t begin, int64_t end, cuda_ops_activation function, double first,
                                                 double second, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return activation_backward_f32(grad_input, grad_output, saved, begin, end, function, (float)first,
                                       (float)second);
    case CUDA_OPS_FLOAT64:
        return activation_backward_f64(grad_input, grad_output, saved, begin, end, function, first, second);
    case CUDA_OPS_BFLOAT16:
        return activation_backward_bf16(grad_input, grad_output, saved, begin, end, function, (float)first,
                                        (float)second);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/activation_functions.h"
#include "common/stored.h"

/* Not every function has every parameter. */
#define FORWARD(enumerator, name, arguments)                                                                           \
    CUDA_OPS_SIMD static void FN(name##_forward)(STORED * output, const STORED *input, int64_t begin, int64_t end,     \
                                                 REAL first, REAL second, REAL third)                                  \
    {                                                                                                                  \
        (void)first, (void)second, (void)third;                                                                        \
        STORE_EACH(output, begin, end, const REAL x = LOAD(input[i]), FN(name) arguments)                              \
    }
CUDA_OPS_ACTIVATIONS(FORWARD)
#undef FORWARD

#define BACKWARD(enumerator, name, arguments)                                                                          \
    CUDA_OPS_SIMD static void FN(name##_backward)(STORED * grad_input, const STORED *grad_output, const STORED *saved, \
                                                  int64_t begin, int64_t end, REAL first, REAL second)                 \
    {                                                                                                                  \
        (void)first, (void)second;                                                                                     \
        STORE_EACH(grad_input, begin, end, const REAL x = LOAD(saved[i]), LOAD(grad_output[i]) * FN(name) arguments)   \
    }
CUDA_OPS_ACTIVATION_SLOPES(BACKWARD)
#undef BACKWARD

static cuda_ops_status FN(activation_forward)(STORED *output, const STORED *input, int64_t begin, int64_t end,
                                              cuda_ops_activation function, REAL first, REAL second)
{
#define CASE(enumerator, name, arguments)                                                                              \
    case CUDA_OPS_ACTIVATION_##enumerator:                                                                             \
        FN(name##_forward)(output, input, begin, end, first, second, 1 / first);                                       \
        return CUDA_OPS_SUCCESS;
    switch (function) {
        CUDA_OPS_ACTIVATIONS(CASE)
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
#undef CASE
}

static cuda_ops_status FN(activation_backward)(STORED *grad_input, const STORED *grad_output, const STORED *saved,
                                               int64_t begin, int64_t end, cuda_ops_activation function, REAL first,
                                               REAL second)
{
#define CASE(enumerator, name, arguments)                                                                              \
    case CUDA_OPS_ACTIVATION_##enumerator:                                                                             \
        FN(name##_backward)(grad_input, grad_output, saved, begin, end, first, second);                                \
        return CUDA_OPS_SUCCESS;
    switch (function) {
        CUDA_OPS_ACTIVATION_SLOPES(CASE)
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
#undef CASE
}

#endif
