/* random_fill on the CPU: output[i] = first + u * (second - first), or first + second * z.
 * Bound by the ten rounds of Philox, which run on PHILOX_BLOCK counters side by side so that they are vectorised; normal
 * numbers by the library's logarithms, sines and cosines. */
#ifndef REAL

#include "cuda_ops/random_fill.h"

#include "common/common.h"
#include "common/philox_block.h"

static const double TWO_PI = 6.283185307179586;

#define REAL float
#define FN(name) name##_f32
#define MATH(name) name##f
#define WORDS_OF_ELEMENT 1
#define UNIT(words, i) cuda_ops_unit_float((words)[i])
#define POSITIVE_UNIT(words, i) cuda_ops_positive_unit_float((words)[i])
#include "random_fill.c"

#include "common/undef_real.h"
#undef MATH
#undef WORDS_OF_ELEMENT
#undef UNIT
#undef POSITIVE_UNIT
#define REAL double
#define FN(name) name##_f64
#define MATH(name) name
#define WORDS_OF_ELEMENT 2
#define UNIT(words, i) cuda_ops_unit_double((words)[2 * (i)], (words)[2 * (i) + 1])
#define POSITIVE_UNIT(words, i) cuda_ops_positive_unit_double((words)[2 * (i)], (words)[2 * (i) + 1])
#include "random_fill.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_random_fill_cpu(void *output, int64_t begin, int64_t end, cuda_ops_distribution distribution,
                                         double first, double second, cuda_ops_philox_state philox,
                                         cuda_ops_dtype dtype)
{
    const bool is_normal = distribution == CUDA_OPS_NORMAL;
    if (!(is_normal ? second >= 0 : first <= second) || (!is_normal && distribution != CUDA_OPS_UNIFORM))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype == CUDA_OPS_FLOAT32)
        random_fill_f32(output, begin, end, is_normal, (float)first, (float)(is_normal ? second : second - first),
                        philox.seed, philox.offset);
    else if (dtype == CUDA_OPS_FLOAT64)
        random_fill_f64(output, begin, end, is_normal, first, is_normal ? second : second - first, philox.seed,
                        philox.offset);
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return CUDA_OPS_SUCCESS;
}

#else

/* scale: what a unit is multiplied by. */
CUDA_OPS_SIMD static void FN(random_fill)(REAL *output, int64_t begin, int64_t end, bool is_normal, REAL first,
                                          REAL scale, uint64_t seed, uint64_t offset)
{
    enum { STEP = 4 * PHILOX_BLOCK / WORDS_OF_ELEMENT };
    /* Blocks begin at multiples of their size, so that numbers do not depend on how the caller splits the range. */
    for (int64_t block = begin / STEP * STEP; block < end; block += STEP) {
        uint32_t words[4 * PHILOX_BLOCK];
        REAL values[STEP];
        philox_block(words, offset / 4, (uint64_t)(block * WORDS_OF_ELEMENT / 4), seed);
        if (is_normal)
            for (int i = 0; i < STEP; i += 2) {
                const REAL radius = MATH(sqrt)(-2 * MATH(log)(POSITIVE_UNIT(words, i)));
                const REAL angle = (REAL)TWO_PI * UNIT(words, i + 1);
                values[i] = radius * MATH(cos)(angle);
                values[i + 1] = radius * MATH(sin)(angle);
            }
        else
            for (int i = 0; i < STEP; i++)
                values[i] = UNIT(words, i);
        for (int64_t i = max_i64(begin, block); i < min_i64(end, block + STEP); i++)
            output[i] = first + scale * values[i - block];
    }
}

#endif
