/* relu on the CPU: output = max(input, 0), and grad_input = grad_output where output > 0, else 0. Bound by memory: two
 * streams forward, three backward. The comparisons treat NaN as PyTorch does: forward keeps it, and backward passes its
 * gradient on. */
#ifndef REAL

#include "cuda_ops/relu.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "relu.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "relu.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_relu_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                          cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        relu_forward_f32(output, input, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        relu_forward_f64(output, input, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_relu_backward_cpu(void *grad_input, const void *grad_output, const void *output, int64_t begin,
                                           int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        relu_backward_f32(grad_input, grad_output, output, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        relu_backward_f64(grad_input, grad_output, output, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static void FN(relu_forward)(REAL *output, const REAL *input, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        output[i] = input[i] <= (REAL)0 ? (REAL)0 : input[i];
}

CUDA_OPS_SIMD static void FN(relu_backward)(REAL *grad_input, const REAL *grad_output, const REAL *output,
                                            int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        const REAL grad = grad_output[i];
        grad_input[i] = output[i] <= (REAL)0 ? (REAL)0 : grad;
    }
}

#endif
