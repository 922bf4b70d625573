/* layer_scale_add on the CPU: sum = residual + weight * row_scale * input, and grad_input. Bound by memory: three
 * streams forward, two backward. */
#ifndef REAL

#include "cuda_ops/layer_scale_add.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "layer_scale_add.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "layer_scale_add.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#include "layer_scale_add.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_layer_scale_add_forward_cpu(void *sum, const void *input, const void *residual,
                                                     const void *weight, const void *row_scale, int64_t cols,
                                                     int64_t channels, int64_t image_rows, int64_t begin, int64_t end,
                                                     cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        layer_scale_add_f32(sum, input, residual, weight, row_scale, cols, channels, image_rows, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        layer_scale_add_f64(sum, input, residual, weight, row_scale, cols, channels, image_rows, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        layer_scale_add_bf16(sum, input, residual, weight, row_scale, cols, channels, image_rows, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_layer_scale_add_backward_cpu(void *grad_input, const void *grad_sum, const void *weight,
                                                      const void *row_scale, int64_t cols, int64_t channels,
                                                      int64_t image_rows, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        layer_scale_add_f32(grad_input, grad_sum, NULL, weight, row_scale, cols, channels, image_rows, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        layer_scale_add_f64(grad_input, grad_sum, NULL, weight, row_scale, cols, channels, image_rows, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        layer_scale_add_bf16(grad_input, grad_sum, NULL, weight, row_scale, cols, channels, image_rows, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/stored.h"

/* output = residual + weight * scale * input of a row's elements; residual may be NULL, and so may weight. */
CUDA_OPS_INLINE void FN(scale_add_row)(STORED *output, const STORED *input, const STORED *residual, const REAL *weight,
                                       REAL scale, int64_t count)
{
    if (weight && residual)
        for (int64_t i = 0; i < count; i++)
            output[i] = STORE(LOAD(residual[i]) + weight[i] * scale * LOAD(input[i]));
    else if (weight)
        for (int64_t i = 0; i < count; i++)
            output[i] = STORE(weight[i] * scale * LOAD(input[i]));
    else if (residual)
        for (int64_t i = 0; i < count; i++)
            output[i] = STORE(LOAD(residual[i]) + scale * LOAD(input[i]));
    else
        for (int64_t i = 0; i < count; i++)
            output[i] = STORE(scale * LOAD(input[i]));
}

/* Forward; and, without a residual, backward. */
CUDA_OPS_SIMD static void FN(layer_scale_add)(STORED *output, const STORED *input, const STORED *residual,
                                              const REAL *weight, const REAL *row_scale, int64_t cols, int64_t channels,
                                              int64_t image_rows, int64_t begin, int64_t end)
{
    for (int64_t i = begin, count; i < end; i += count) {
        const int64_t row = i / cols, col = i % cols;
        count = min_i64(end - i, cols - col);
        REAL scale = row_scale ? row_scale[row / image_rows] : (REAL)1;
        if (weight && channels > 0)
            scale *= weight[row % channels];
        FN(scale_add_row)(output + i, input + i, residual ? residual + i : NULL,
                          weight && channels == 0 ? weight + col : NULL, scale, count);
    }
}

#endif
