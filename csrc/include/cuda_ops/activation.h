/* activation: output[i] = f(input[i]), and grad_input[i] = grad_output[i] * f'(saved[i]), for one of the functions below.
 *
 *   input, output, grad_output, saved, grad_input: `count` elements, dense, of the same dtype
 *   output may be input, and grad_input may be grad_output or saved (elementwise in place)
 *   first, second: the function's parameters, as listed; those that it has not are not looked at
 *   saved: the input; the output where the list says so
 *   no workspace
 *
 * What is computed, and how: cuda_ops/activation_functions.h. In float32 and float64 a function is off by 4 units in the
 * last place at most, where it is 0 too (gelu by 11 far below 0, gelu_tanh there by its exponent times as many); a slope
 * by 2 units of a number near 1. A half is such a number, good to 2e-5, rounded once. NaN and infinities as in PyTorch.
 */
#ifndef CUDA_OPS_ACTIVATION_H
#define CUDA_OPS_ACTIVATION_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of each function its name in activation_functions.h, with its arguments there: x is the element, third 1 / first. */
#define CUDA_OPS_ACTIVATIONS(X)                                                                                        \
    X(GELU, gelu, (x))                                                                                                 \
    X(GELU_TANH, gelu_tanh, (x))                                                                                       \
    X(SILU, silu, (x))                                                                                                 \
    X(SIGMOID, sigmoid, (x))                                                                                           \
    X(TANH, tanh, (x))                                                                                                 \
    X(ELU, elu, (x, first))                                                                                            \
    X(LEAKY_RELU, leaky_relu, (x, first))                                                                              \
    X(SOFTPLUS, softplus, (x, first, second, third))                                                                   \
    X(HARDTANH, hardtanh, (x, first, second))                                                                          \
    X(HARDSIGMOID, hardsigmoid, (x))                                                                                   \
    X(HARDSWISH, hardswish, (x))                                                                                       \
    X(MISH, mish, (x))

/* Of each slope. That of ELU_OUTPUT is elu's, by its output. */
#define CUDA_OPS_ACTIVATION_SLOPES(X)                                                                                  \
    X(GELU, gelu_slope, (x))                                                                                           \
    X(GELU_TANH, gelu_tanh_slope, (x))                                                                                 \
    X(SILU, silu_slope, (x))                                                                                           \
    X(SIGMOID, sigmoid_slope, (x))                                                                                     \
    X(TANH, tanh_slope, (x))                                                                                           \
    X(ELU, elu_slope, (x, first))                                                                                      \
    X(LEAKY_RELU, leaky_relu_slope, (x, first))                                                                        \
    X(SOFTPLUS, softplus_slope, (x, first, second))                                                                    \
    X(HARDTANH, hardtanh_slope, (x, first, second))                                                                    \
    X(HARDSIGMOID, hardsigmoid_slope, (x))                                                                             \
    X(HARDSWISH, hardswish_slope, (x))                                                                                 \
    X(MISH, mish_slope, (x))                                                                                           \
    X(ELU_OUTPUT, elu_output_slope, (x, first))

typedef enum cuda_ops_activation {
    CUDA_OPS_ACTIVATION_GELU,
    CUDA_OPS_ACTIVATION_GELU_TANH, /* by its approximation with tanh */
    CUDA_OPS_ACTIVATION_SILU,
    CUDA_OPS_ACTIVATION_SIGMOID,    /* saved: the output */
    CUDA_OPS_ACTIVATION_TANH,       /* saved: the output */
    CUDA_OPS_ACTIVATION_ELU,        /* first: alpha */
    CUDA_OPS_ACTIVATION_LEAKY_RELU, /* first: negative_slope; saved: the input, or the output if that is not negative */
    CUDA_OPS_ACTIVATION_SOFTPLUS,   /* first: beta; second: threshold */
    CUDA_OPS_ACTIVATION_HARDTANH,   /* first: min_val; second: max_val; saved: input or output */
    CUDA_OPS_ACTIVATION_HARDSIGMOID,
    CUDA_OPS_ACTIVATION_HARDSWISH,
    CUDA_OPS_ACTIVATION_MISH,
    CUDA_OPS_ACTIVATION_ELU_OUTPUT, /* backward alone; first: alpha, not negative; saved: the output of ELU */
} cuda_ops_activation;

/* Elements [begin, end) of the arrays, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_activation_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                                cuda_ops_activation function, double first, double second,
                                                cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_activation_backward_cpu(void *grad_input, const void *grad_output, const void *saved,
                                                 int64_t begin, int64_t end, cuda_ops_activation function, double first,
                                                 double second, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_activation_forward_cuda(void *output, const void *input, int64_t count,
                                                 cuda_ops_activation function, double first, double second,
                                                 cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_activation_backward_cuda(void *grad_input, const void *grad_output, const void *saved,
                                                  int64_t count, cuda_ops_activation function, double first,
                                                  double second, cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
