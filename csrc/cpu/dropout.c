/* dropout on the CPU: output = input * (Philox word >= threshold ? 1 / (1 - p) : 0), plus a residual if there is one.
 * Bound by the ten rounds of Philox, which run on PHILOX_BLOCK counters side by side so that they are vectorised. */
#ifndef REAL

#include "cuda_ops/dropout.h"
#include "cuda_ops/halves_cpu.h"

#include "common/common.h"
#include "common/philox_block.h"

#define REAL float
#define FN(name) name##_f32
#include "dropout.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "dropout.c"

#include "common/undef_real.h"

/* In tiles of whole blocks, each of which is float32 while it is computed. */
static void dropout_halves(uint16_t *output, const uint16_t *input, const uint16_t *residual, int64_t begin, int64_t end,
                           double p, uint64_t seed, uint64_t offset, cuda_ops_dtype dtype)
{
    enum { TILE = 2048 };
    float x[TILE], added[TILE];
    for (int64_t first = begin, last; first < end; first = last) {
        last = min_i64(end, (first / TILE + 1) * TILE);
        cuda_ops_widen_cpu(x, input + first, last - first, dtype);
        if (residual)
            cuda_ops_widen_cpu(added, residual + first, last - first, dtype);
        dropout_f32(x, x, residual ? added : NULL, first, first, last, p, seed, offset);
        cuda_ops_round_cpu(output + first, x, last - first, dtype);
    }
}

cuda_ops_status cuda_ops_dropout_cpu(void *output, const void *input, int64_t begin, int64_t end, double p,
                                     cuda_ops_philox_state philox, cuda_ops_dtype dtype)
{
    return cuda_ops_dropout_add_cpu(output, input, NULL, begin, end, p, philox, dtype);
}

cuda_ops_status cuda_ops_dropout_add_cpu(void *output, const void *input, const void *residual, int64_t begin,
                                         int64_t end, double p, cuda_ops_philox_state philox, cuda_ops_dtype dtype)
{
    if (!(p >= 0.0 && p <= 1.0))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        dropout_f32(output, input, residual, 0, begin, end, p, philox.seed, philox.offset);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        dropout_f64(output, input, residual, 0, begin, end, p, philox.seed, philox.offset);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        dropout_halves(output, input, residual, begin, end, p, philox.seed, philox.offset, dtype);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* Elements [begin, end), the arrays beginning at element `origin`. residual may be NULL. */
CUDA_OPS_SIMD static void FN(dropout)(REAL *output, const REAL *input, const REAL *residual, int64_t origin,
                                      int64_t begin, int64_t end, double p, uint64_t seed, uint64_t offset)
{
    const uint32_t threshold = cuda_ops_dropout_threshold(p);
    const REAL scale = (REAL)cuda_ops_dropout_scale(p);
    const int64_t step = 4 * PHILOX_BLOCK;
    /* Blocks begin at multiples of their size, so that the mask does not depend on how the caller splits the range. */
    for (int64_t block = begin / step * step; block < end; block += step) {
        uint32_t words[4 * PHILOX_BLOCK];
        philox_block(words, offset / 4, (uint64_t)(block / 4), seed);
        const int64_t at = block - origin;
        if (begin <= block && block + step <= end && residual == NULL) {
            for (int64_t i = 0; i < step; i++)
                output[at + i] = input[at + i] * (words[i] >= threshold ? scale : (REAL)0);
            continue;
        }
        if (begin <= block && block + step <= end) {
            for (int64_t i = 0; i < step; i++)
                output[at + i] = input[at + i] * (words[i] >= threshold ? scale : (REAL)0) + residual[at + i];
            continue;
        }
        for (int64_t i = max_i64(begin, block); i < min_i64(end, block + step); i++)
            output[i - origin] = input[i - origin] * (words[i - block] >= threshold ? scale : (REAL)0) +
                                 (residual ? residual[i - origin] : (REAL)0);
    }
}

#endif
