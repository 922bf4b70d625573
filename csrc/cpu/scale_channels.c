/* scale_channels on the CPU: output = input * f(scale) with a scale for each channel of each image, and its gradients.
 * A unit is up to CHUNK channels of an image, whose factors are computed once; with inner == 1 an image of one channel.
 * Sums over pixels are taken of SHORT at a time, and added in double. Bound by memory: two streams forward, three
 * backward. */
#ifndef REAL

#include "cuda_ops/scale_channels.h"

#include "common/common.h"

enum { CHUNK = 256, SHORT = 64 };

int64_t cuda_ops_scale_channels_units_cpu(int64_t outer, int64_t inner)
{
    return outer * ((inner + CHUNK - 1) / CHUNK);
}

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "scale_channels.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "scale_channels.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#define PRECISION 16
#include "scale_channels.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_scale_channels_forward_cpu(void *output, const void *input, const void *scale, int64_t count,
                                                    int64_t inner, cuda_ops_channel_gate gate, int64_t begin,
                                                    int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        scale_channels_forward_f32(output, input, scale, count, inner, gate, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        scale_channels_forward_f64(output, input, scale, count, inner, gate, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        scale_channels_forward_bf16(output, input, scale, count, inner, gate, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_scale_channels_backward_cpu(void *grad_input, void *grad_scale, const void *grad_output,
                                                     const void *input, const void *scale, int64_t count, int64_t inner,
                                                     cuda_ops_channel_gate gate, int64_t begin, int64_t end,
                                                     cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        scale_channels_backward_f32(grad_input, grad_scale, grad_output, input, scale, count, inner, gate, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        scale_channels_backward_f64(grad_input, grad_scale, grad_output, input, scale, count, inner, gate, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        scale_channels_backward_bf16(grad_input, grad_scale, grad_output, input, scale, count, inner, gate, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/activation_functions.h"
#include "common/stored.h"

/* f(scale), and f'(scale) if it is asked for. */
CUDA_OPS_INLINE void FN(open_gates)(REAL *factor, REAL *slope, const REAL *scale, cuda_ops_channel_gate gate,
                                    int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        factor[i] = gate == CUDA_OPS_CHANNEL_GATE_SIGMOID       ? FN(sigmoid)(scale[i])
                    : gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID ? FN(hardsigmoid)(scale[i])
                                                                : scale[i];
    for (int64_t i = 0; slope && i < count; i++)
        slope[i] = gate == CUDA_OPS_CHANNEL_GATE_SIGMOID       ? FN(sigmoid_slope)(factor[i])
                   : gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID ? FN(hardsigmoid_slope)(scale[i])
                                                               : (REAL)1;
}

/* A gate that is shut or wide open has no gradient, whatever the sum is: of an infinite one it would be NaN. */
CUDA_OPS_INLINE REAL FN(times_slope)(double sum, REAL slope, cuda_ops_channel_gate gate)
{
    return gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID && slope == 0 ? 0 : (REAL)(sum * (double)slope);
}

CUDA_OPS_INLINE void FN(scale_row)(STORED *output, const STORED *input, const REAL *factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = STORE(LOAD(input[i]) * factor[i]);
}

CUDA_OPS_INLINE void FN(scale_pixels)(STORED *output, const STORED *input, REAL factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = STORE(LOAD(input[i]) * factor);
}

CUDA_OPS_INLINE void FN(add_products)(REAL *sum, const STORED *a, const STORED *b, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        sum[i] += LOAD(a[i]) * LOAD(b[i]);
}

/* The sum over some pixels of one channel, in CHUNK lanes that are added up at the end. */
CUDA_OPS_INLINE double FN(product_sum)(const STORED *a, const STORED *b, int64_t count)
{
    double total = 0;
    for (int64_t first = 0; first < count; first += CHUNK) {
        REAL lanes[16] = {0};
        const int64_t some = min_i64(CHUNK, count - first);
        int64_t i = 0;
        for (; i + 16 <= some; i += 16)
            for (int64_t e = 0; e < 16; e++)
                lanes[e] += LOAD(a[first + i + e]) * LOAD(b[first + i + e]);
        for (int64_t e = 0; i + e < some; e++)
            lanes[e] += LOAD(a[first + i + e]) * LOAD(b[first + i + e]);
        for (int64_t e = 0; e < 16; e++)
            total += (double)lanes[e];
    }
    return total;
}

/* Where a unit begins: its first pixel's first element, its scale, and how many channels it has. */
#define UNIT(unit)                                                                                                     \
    const int64_t chunks = (inner + CHUNK - 1) / CHUNK, image = (unit) / chunks;                                       \
    const int64_t channel = (unit) % chunks * CHUNK, width = min_i64(CHUNK, inner - channel);                          \
    const int64_t from = image * count * inner + channel, at = image * inner + channel

CUDA_OPS_SIMD static void FN(scale_channels_forward)(STORED *output, const STORED *input, const REAL *scale,
                                                     int64_t count, int64_t inner, cuda_ops_channel_gate gate,
                                                     int64_t begin, int64_t end)
{
    for (int64_t unit = begin; unit < end; unit++) {
        UNIT(unit);
        REAL factor[CHUNK];
        FN(open_gates)(factor, NULL, scale + at, gate, width);
        if (inner == 1)
            FN(scale_pixels)(output + from, input + from, factor[0], count);
        else
            for (int64_t p = 0; p < count; p++)
                FN(scale_row)(output + from + p * inner, input + from + p * inner, factor, width);
    }
}

CUDA_OPS_SIMD static void FN(scale_channels_backward)(STORED *grad_input, REAL *grad_scale, const STORED *grad_output,
                                                      const STORED *input, const REAL *scale, int64_t count,
                                                      int64_t inner, cuda_ops_channel_gate gate, int64_t begin,
                                                      int64_t end)
{
    for (int64_t unit = begin; unit < end; unit++) {
        UNIT(unit);
        REAL factor[CHUNK], slope[CHUNK];
        FN(open_gates)(factor, slope, scale + at, gate, width);
        if (inner == 1) {
            if (grad_scale)
                grad_scale[at] =
                    FN(times_slope)(FN(product_sum)(grad_output + from, input + from, count), slope[0], gate);
            if (grad_input)
                FN(scale_pixels)(grad_input + from, grad_output + from, factor[0], count);
            continue;
        }
        double total[CHUNK] = {0};
        for (int64_t first = 0; first < count; first += SHORT) {
            REAL some[CHUNK] = {0};
            for (int64_t p = first; p < min_i64(first + SHORT, count); p++) {
                if (grad_scale)
                    FN(add_products)(some, grad_output + from + p * inner, input + from + p * inner, width);
                if (grad_input)
                    FN(scale_row)(grad_input + from + p * inner, grad_output + from + p * inner, factor, width);
            }
            for (int64_t i = 0; i < width; i++)
                total[i] += (double)some[i];
        }
        for (int64_t i = 0; grad_scale && i < width; i++)
            grad_scale[at + i] = FN(times_slope)(total[i], slope[i], gate);
    }
}

#undef UNIT

#endif
