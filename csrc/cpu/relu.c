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

/* Of halves the bits tell: numbers that are not above 0 are 0, or, as integers, from -0 to -inf, which is `infinity` with
 * the sign. Beyond are NaNs. */
CUDA_OPS_INLINE bool is_not_above_zero(uint16_t half, uint16_t infinity)
{
    return half == 0 || (uint16_t)(half - 0x8000u) <= infinity;
}

CUDA_OPS_SIMD static void relu_forward_halves(uint16_t *output, const uint16_t *input, int64_t begin, int64_t end,
                                              uint16_t infinity)
{
    for (int64_t i = begin; i < end; i++)
        output[i] = is_not_above_zero(input[i], infinity) ? 0 : input[i];
}

CUDA_OPS_SIMD static void relu_backward_halves(uint16_t *grad_input, const uint16_t *grad_output,
                                               const uint16_t *output, int64_t begin, int64_t end, uint16_t infinity)
{
    for (int64_t i = begin; i < end; i++) {
        const uint16_t grad = grad_output[i];
        grad_input[i] = is_not_above_zero(output[i], infinity) ? 0 : grad;
    }
}

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
    case CUDA_OPS_FLOAT16:
        relu_forward_halves(output, input, begin, end, 0x7c00);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        relu_forward_halves(output, input, begin, end, 0x7f80);
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
    case CUDA_OPS_FLOAT16:
        relu_backward_halves(grad_input, grad_output, output, begin, end, 0x7c00);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        relu_backward_halves(grad_input, grad_output, output, begin, end, 0x7f80);
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
