/* square on the CPU: output = input^2 and grad_input = 2 * input * grad_output.
 * Bound by memory: two streams forward, three backward. The loops are left plain for the compiler to vectorise. */
#ifndef REAL

#include "cuda_ops/square.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "square.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "square.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_square_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                            cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        square_forward_f32(output, input, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        square_forward_f64(output, input, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_square_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                             int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        square_backward_f32(grad_input, grad_output, input, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        square_backward_f64(grad_input, grad_output, input, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static void FN(square_forward)(REAL *output, const REAL *input, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        output[i] = input[i] * input[i];
}

CUDA_OPS_SIMD static void FN(square_backward)(REAL *grad_input, const REAL *grad_output, const REAL *input,
                                              int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        grad_input[i] = (REAL)2 * input[i] * grad_output[i];
}

#endif
