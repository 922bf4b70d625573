/* rotary_embedding on the CPU: rows of all heads, of which the cosines and sines of one position are read once from
 * memory. Bound by memory: two streams, and the tables. */
#ifndef REAL

#include "cuda_ops/rotary_embedding.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "rotary_embedding.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "rotary_embedding.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_rotary_embedding_cpu(void *output, const void *input, const void *cos, const void *sin,
                                              const cuda_ops_rotary_embedding_call *call, int64_t begin, int64_t end)
{
    if (call->dtype != call->table_dtype || call->dtype != call->output_dtype)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    switch (call->dtype) {
    case CUDA_OPS_FLOAT32:
        rotary_embedding_f32(output, input, cos, sin, call, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        rotary_embedding_f64(output, input, cos, sin, call, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static void FN(rotate)(REAL *restrict output, const REAL *restrict input, const REAL *restrict cos,
                                     const REAL *restrict sin, int64_t half)
{
    for (int64_t e = 0; e < half; e++) {
        output[e] = input[e] * cos[e] - input[e + half] * sin[e];
        output[e + half] = input[e + half] * cos[e + half] + input[e] * sin[e + half];
    }
}

CUDA_OPS_SIMD static void FN(rotate_back)(REAL *restrict output, const REAL *restrict input, const REAL *restrict cos,
                                          const REAL *restrict sin, int64_t half)
{
    for (int64_t e = 0; e < half; e++) {
        output[e] = input[e] * cos[e] + input[e + half] * sin[e + half];
        output[e + half] = input[e + half] * cos[e + half] - input[e] * sin[e];
    }
}

static void FN(rotary_embedding)(REAL *output, const REAL *input, const REAL *cos, const REAL *sin,
                                 const cuda_ops_rotary_embedding_call *c, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / c->length, position = row % c->length;
        const int64_t table = n * c->table_stride + position * c->features;
        for (int64_t head = 0; head < c->heads; head++) {
            REAL *const to =
                output + n * c->output_strides[0] + head * c->output_strides[1] + position * c->output_strides[2];
            const REAL *const from =
                input + n * c->input_strides[0] + head * c->input_strides[1] + position * c->input_strides[2];
            if (c->transposed)
                FN(rotate_back)(to, from, cos + table, sin + table, c->features / 2);
            else
                FN(rotate)(to, from, cos + table, sin + table, c->features / 2);
        }
    }
}

#endif
