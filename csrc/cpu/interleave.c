/* interleave on the CPU: a row at a time, in words of an element's size. Bound by memory. */
#include "cuda_ops/interleave.h"

#include "common/common.h"

#define INTERLEAVE(WORD)                                                                                               \
    CUDA_OPS_SIMD static void interleave_##WORD(WORD *restrict output, const WORD *restrict input,                     \
                                                const WORD *restrict other, int64_t input_stride,                      \
                                                int64_t other_stride, int64_t cols, int64_t begin, int64_t end)        \
    {                                                                                                                  \
        for (int64_t r = begin; r < end; r++)                                                                          \
            for (int64_t c = 0; c < cols; c++) {                                                                       \
                output[2 * (r * cols + c)] = input[r * input_stride + c];                                              \
                output[2 * (r * cols + c) + 1] = other[r * other_stride + c];                                          \
            }                                                                                                          \
    }                                                                                                                  \
    CUDA_OPS_SIMD static void part_##WORD(WORD *restrict grad_input, WORD *restrict grad_other,                        \
                                          const WORD *restrict grad, int64_t begin, int64_t end)                       \
    {                                                                                                                  \
        for (int64_t i = begin; i < end; i++) {                                                                        \
            grad_input[i] = grad[2 * i];                                                                               \
            grad_other[i] = grad[2 * i + 1];                                                                           \
        }                                                                                                              \
    }
INTERLEAVE(uint16_t)
INTERLEAVE(uint32_t)
INTERLEAVE(uint64_t)

cuda_ops_status cuda_ops_interleave_forward_cpu(void *output, const void *input, const void *other,
                                                int64_t input_stride, int64_t other_stride, int64_t cols, int64_t begin,
                                                int64_t end, int element_bytes)
{
    if (element_bytes == 2)
        interleave_uint16_t(output, input, other, input_stride, other_stride, cols, begin, end);
    else if (element_bytes == 4)
        interleave_uint32_t(output, input, other, input_stride, other_stride, cols, begin, end);
    else if (element_bytes == 8)
        interleave_uint64_t(output, input, other, input_stride, other_stride, cols, begin, end);
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_interleave_backward_cpu(void *grad_input, void *grad_other, const void *grad, int64_t cols,
                                                 int64_t begin, int64_t end, int element_bytes)
{
    if (element_bytes == 2)
        part_uint16_t(grad_input, grad_other, grad, begin * cols, end * cols);
    else if (element_bytes == 4)
        part_uint32_t(grad_input, grad_other, grad, begin * cols, end * cols);
    else if (element_bytes == 8)
        part_uint64_t(grad_input, grad_other, grad, begin * cols, end * cols);
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return CUDA_OPS_SUCCESS;
}
