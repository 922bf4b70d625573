/* cumsum on the CPU: a row's sums one after the other, or TILE neighbouring columns' at a time, in double. Bound by the
 * latency of an addition along rows, by memory across columns. */
#ifndef REAL

#include "cuda_ops/cumsum.h"

#include "common/common.h"

enum { TILE = 64 };

static int64_t tiles_of(int64_t inner)
{
    return (inner + TILE - 1) / TILE;
}

int64_t cuda_ops_cumsum_units_cpu(int64_t outer, int64_t inner)
{
    return outer * tiles_of(inner);
}

#define REAL float
#define FN(name) name##_f32
#include "cumsum.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "cumsum.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_cumsum_cpu(void *output, const void *input, int64_t cols, int64_t inner, int reverse,
                                    int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        cumsum_f32(output, input, cols, inner, reverse, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        cumsum_f64(output, input, cols, inner, reverse, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static void FN(cumsum)(REAL *restrict output, const REAL *restrict input, int64_t cols, int64_t inner,
                                     int reverse, int64_t begin, int64_t end)
{
    const int64_t tiles = tiles_of(inner);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit / tiles * cols * inner + unit % tiles * TILE;
        const int64_t width = min_i64(TILE, inner - unit % tiles * TILE);
        double sums[TILE] = {0};
        for (int64_t c = 0; c < cols; c++) {
            const int64_t at = first + (reverse ? cols - 1 - c : c) * inner;
            if (inner == 1) {
                sums[0] += (double)input[at];
                output[at] = (REAL)sums[0];
                continue;
            }
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                sums[i] += (double)input[at + i];
                output[at + i] = (REAL)sums[i];
            }
        }
    }
}

#endif
