/* excitation on the CPU: two products with the weights of 1x1 convolutions, of one pixel an image. A dot product is taken
 * in several sums. Bound by reading the weights once for each image. */
#ifndef REAL

#include "cuda_ops/excitation.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "excitation.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "excitation.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_excitation_forward_cpu(void *output, void *hidden, const cuda_ops_excitation *call,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        excitation_forward_f32(output, hidden, call, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        excitation_forward_f64(output, hidden, call, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/activation_functions.h"
#include "common/dot.h"

CUDA_OPS_SIMD static REAL FN(dot_product)(const REAL *a, const REAL *b, int64_t count)
{
    return FN(dot)(a, b, count);
}

static REAL FN(excited)(REAL x, cuda_ops_excitation_activation activation)
{
    if (activation == CUDA_OPS_EXCITATION_SILU)
        return FN(silu)(x);
    if (activation == CUDA_OPS_EXCITATION_HARDSWISH)
        return FN(hardswish)(x);
    return x < (REAL)0 ? (REAL)0 : x; /* NaN stays */
}

static void FN(excitation_forward)(REAL *output, REAL *hidden, const cuda_ops_excitation *call, int64_t begin,
                                   int64_t end)
{
    const REAL *const bias1 = call->bias1, *const bias2 = call->bias2;
    const int64_t channels = call->channels, squeezed = call->squeezed, outputs = call->outputs;
    for (int64_t n = begin; n < end; n++) {
        const REAL *const input = (const REAL *)call->input + n * channels;
        REAL *const h = hidden + n * squeezed;
        for (int64_t s = 0; s < squeezed; s++) {
            const REAL *const weight = (const REAL *)call->weight1 + s * channels;
            h[s] =
                FN(excited)((bias1 ? bias1[s] : (REAL)0) + FN(dot_product)(input, weight, channels), call->activation);
        }
        for (int64_t o = 0; o < outputs; o++) {
            const REAL *const weight = (const REAL *)call->weight2 + o * squeezed;
            output[n * outputs + o] = (bias2 ? bias2[o] : (REAL)0) + FN(dot_product)(h, weight, squeezed);
        }
    }
}

#endif
