/* gated on the CPU: output = f(gate) * value, and both gradients. Bound by memory, three streams forward and five
 * backward; exponentials are polynomials (common/exponential.h), so that the compiler vectorises every loop. */
#ifndef REAL

#include "cuda_ops/gated.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "gated.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "gated.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#define PRECISION 16
#include "gated.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_gated_forward_cpu(void *output, const void *gate, const void *value, int64_t cols,
                                           int64_t stride, int64_t begin, int64_t end, cuda_ops_gate function,
                                           cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return gated_forward_f32(output, gate, value, cols, stride, begin, end, function);
    case CUDA_OPS_FLOAT64:
        return gated_forward_f64(output, gate, value, cols, stride, begin, end, function);
    case CUDA_OPS_BFLOAT16:
        return gated_forward_bf16(output, gate, value, cols, stride, begin, end, function);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_gated_backward_cpu(void *grad_gate, void *grad_value, const void *grad_output,
                                            const void *gate, const void *value, int64_t cols, int64_t stride,
                                            int64_t begin, int64_t end, cuda_ops_gate function, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return gated_backward_f32(grad_gate, grad_value, grad_output, gate, value, cols, stride, begin, end, function);
    case CUDA_OPS_FLOAT64:
        return gated_backward_f64(grad_gate, grad_value, grad_output, gate, value, cols, stride, begin, end, function);
    case CUDA_OPS_BFLOAT16:
        return gated_backward_bf16(grad_gate, grad_value, grad_output, gate, value, cols, stride, begin, end, function);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/activation_functions.h"
#include "common/stored.h"

/* The part of a row that lies in the range, `count` elements of it. */
#define FORWARD(enumerator, name)                                                                                      \
    CUDA_OPS_SIMD static void FN(name##_gated_forward)(STORED * output, const STORED *gate, const STORED *value,       \
                                                       int64_t count)                                                  \
    {                                                                                                                  \
        STORE_EACH(output, 0, count, const REAL x = LOAD(gate[i]), FN(name)(x) * LOAD(value[i]))                       \
    }
CUDA_OPS_GATES(FORWARD)
#undef FORWARD

#define BACKWARD(enumerator, name)                                                                                     \
    CUDA_OPS_SIMD static void FN(name##_gated_backward)(STORED * grad_gate, STORED * grad_value,                       \
                                                        const STORED *grad_output, const STORED *gate,                 \
                                                        const STORED *value, int64_t count)                            \
    {                                                                                                                  \
        _Pragma("omp simd") for (int64_t i = 0; i < count; i++)                                                        \
        {                                                                                                              \
            const REAL x = LOAD(gate[i]), g = LOAD(grad_output[i]), v = LOAD(value[i]);                                \
            grad_gate[i] = STORE(g * v * FN(name##_slope)(x));                                                         \
            grad_value[i] = STORE(g * FN(name)(x));                                                                    \
        }                                                                                                              \
    }
CUDA_OPS_GATES(BACKWARD)
#undef BACKWARD

static cuda_ops_status FN(gated_forward)(STORED *output, const STORED *gate, const STORED *value, int64_t cols,
                                         int64_t stride, int64_t begin, int64_t end, cuda_ops_gate function)
{
    for (int64_t i = begin, count; i < end; i += count) {
        const int64_t at = i / cols * stride + i % cols;
        count = min_i64(end - i, cols - i % cols);
        switch (function) {
#define CASE(enumerator, name)                                                                                         \
    case CUDA_OPS_GATE_##enumerator:                                                                                   \
        FN(name##_gated_forward)(output + i, gate + at, value + at, count);                                            \
        break;
            CUDA_OPS_GATES(CASE)
#undef CASE
        default:
            return CUDA_OPS_INVALID_ARGUMENT;
        }
    }
    return CUDA_OPS_SUCCESS;
}

static cuda_ops_status FN(gated_backward)(STORED *grad_gate, STORED *grad_value, const STORED *grad_output,
                                          const STORED *gate, const STORED *value, int64_t cols, int64_t stride,
                                          int64_t begin, int64_t end, cuda_ops_gate function)
{
    for (int64_t i = begin, count; i < end; i += count) {
        const int64_t at = i / cols * stride + i % cols;
        count = min_i64(end - i, cols - i % cols);
        switch (function) {
#define CASE(enumerator, name)                                                                                         \
    case CUDA_OPS_GATE_##enumerator:                                                                                   \
        FN(name##_gated_backward)(grad_gate + at, grad_value + at, grad_output + i, gate + at, value + at, count);     \
        break;
            CUDA_OPS_GATES(CASE)
#undef CASE
        default:
            return CUDA_OPS_INVALID_ARGUMENT;
        }
    }
    return CUDA_OPS_SUCCESS;
}

#endif
