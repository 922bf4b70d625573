/* dropout on the CPU: output = input * (Philox word >= threshold ? 1 / (1 - p) : 0), plus a residual if there is one.
 * Bound by the ten rounds of Philox, which run on PHILOX_BLOCK counters side by side so that they are vectorised; where what is
 * kept is known from before, by memory. */
#ifndef REAL

#include "cuda_ops/dropout.h"

#include "common/common.h"
#include "common/philox_block.h"

_Static_assert(CUDA_OPS_DROPOUT_KEPT_BLOCK == 4 * PHILOX_BLOCK, "a block's words are drawn together");

/* kept[i / 32] has bit i % 32 where words[i] >= threshold, of `count` words. */
CUDA_OPS_SIMD static void pack_kept(uint32_t *kept, const uint32_t *words, uint32_t threshold, int64_t count)
{
    for (int64_t i = 0; i < count; i += 32) {
        uint32_t bits = 0;
        for (int bit = 0; bit < 32; bit++)
            bits |= (words[i + bit] >= threshold ? 1u : 0u) << bit;
        kept[i / 32] = bits;
    }
}

#define REAL float
#define FN(name) name##_f32
#include "dropout.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "dropout.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#include "dropout.c"

#include "common/undef_real.h"

/* kept and residual may be NULL. */
static cuda_ops_status drop(void *output, uint32_t *kept, const void *input, const void *residual, int64_t begin,
                            int64_t end, double p, cuda_ops_philox_state philox, cuda_ops_dtype dtype)
{
    if (!(p >= 0.0 && p <= 1.0))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        dropout_f32(output, kept, input, residual, begin, end, p, philox.seed, philox.offset);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        dropout_f64(output, kept, input, residual, begin, end, p, philox.seed, philox.offset);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        dropout_bf16(output, kept, input, residual, begin, end, p, philox.seed, philox.offset);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_dropout_cpu(void *output, const void *input, int64_t begin, int64_t end, double p,
                                     cuda_ops_philox_state philox, cuda_ops_dtype dtype)
{
    return drop(output, NULL, input, NULL, begin, end, p, philox, dtype);
}

cuda_ops_status cuda_ops_dropout_add_cpu(void *output, const void *input, const void *residual, int64_t begin,
                                         int64_t end, double p, cuda_ops_philox_state philox, cuda_ops_dtype dtype)
{
    return drop(output, NULL, input, residual, begin, end, p, philox, dtype);
}

cuda_ops_status cuda_ops_dropout_keep_cpu(void *output, uint32_t *kept, const void *input, const void *residual,
                                          int64_t count, int64_t begin, int64_t end, double p,
                                          cuda_ops_philox_state philox, cuda_ops_dtype dtype)
{
    return drop(output, kept, input, residual, min_i64(count, begin * CUDA_OPS_DROPOUT_KEPT_BLOCK),
                min_i64(count, end * CUDA_OPS_DROPOUT_KEPT_BLOCK), p, philox, dtype);
}

cuda_ops_status cuda_ops_dropout_kept_cpu(void *output, const void *input, const uint32_t *kept, int64_t count,
                                          int64_t begin, int64_t end, double p, cuda_ops_dtype dtype)
{
    if (!(p >= 0.0 && p <= 1.0))
        return CUDA_OPS_INVALID_ARGUMENT;
    begin = min_i64(count, begin * CUDA_OPS_DROPOUT_KEPT_BLOCK),
    end = min_i64(count, end * CUDA_OPS_DROPOUT_KEPT_BLOCK);
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        dropout_kept_f32(output, input, kept, begin, end, p);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        dropout_kept_f64(output, input, kept, begin, end, p);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        dropout_kept_bf16(output, input, kept, begin, end, p);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/stored.h"

/* kept and residual may be NULL. */
CUDA_OPS_SIMD static void FN(dropout)(STORED *output, uint32_t *kept, const STORED *input, const STORED *residual,
                                      int64_t begin, int64_t end, double p, uint64_t seed, uint64_t offset)
{
    const uint32_t threshold = cuda_ops_dropout_threshold(p);
    const REAL scale = (REAL)cuda_ops_dropout_scale(p);
    const int64_t step = 4 * PHILOX_BLOCK;
    /* Blocks begin at multiples of their size, so that the mask does not depend on how the caller splits the range. */
    for (int64_t block = begin / step * step; block < end; block += step) {
        uint32_t words[4 * PHILOX_BLOCK];
        philox_block(words, offset / 4, (uint64_t)(block / 4), seed);
        if (kept)
            pack_kept(kept + block / 32, words, threshold, min_i64(step, end - block));
        if (begin <= block && block + step <= end && residual == NULL) {
            for (int64_t i = 0; i < step; i++)
                output[block + i] = STORE(LOAD(input[block + i]) * (words[i] >= threshold ? scale : (REAL)0));
            continue;
        }
        if (begin <= block && block + step <= end) {
            for (int64_t i = 0; i < step; i++)
                output[block + i] = STORE(LOAD(input[block + i]) * (words[i] >= threshold ? scale : (REAL)0) +
                                          LOAD(residual[block + i]));
            continue;
        }
        for (int64_t i = max_i64(begin, block); i < min_i64(end, block + step); i++)
            output[i] = STORE(LOAD(input[i]) * (words[i - block] >= threshold ? scale : (REAL)0) +
                              (residual ? LOAD(residual[i]) : (REAL)0));
    }
}

/* `begin` is a multiple of 32. */
CUDA_OPS_SIMD static void FN(dropout_kept)(STORED *output, const STORED *input, const uint32_t *kept, int64_t begin,
                                           int64_t end, double p)
{
    const REAL scale = (REAL)cuda_ops_dropout_scale(p);
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
        const uint32_t bits = kept[i / 32];
#pragma omp simd
        for (int bit = 0; bit < 32; bit++)
            output[i + bit] = STORE(LOAD(input[i + bit]) * (bits >> bit & 1 ? scale : (REAL)0));
    }
    for (; i < end; i++)
        output[i] = STORE(LOAD(input[i]) * (kept[i / 32] >> (i % 32) & 1 ? scale : (REAL)0));
}

#endif
