/* random_fill on the CPU: output[i] = first + u * (second - first), or first + second * z.
 * Bound by the ten rounds of Philox, on PHILOX_BLOCK counters side by side; normal numbers by logarithms, sines and cosines,
 * which of floats are polynomials that the compiler vectorises. */
#ifndef REAL

#include "cuda_ops/random_fill.h"

#include "common/common.h"
#include "common/half.h"
#include "common/philox_block.h"

static const double TWO_PI = 6.283185307179586;

/* log(x) for a normal number x > 0: of x = 2^n * m with m around 1, n log 2 + 2 atanh(s) with s = (m - 1) / (m + 1). */
CUDA_OPS_INLINE float logarithm_f32(float x)
{
    const uint32_t root_half = 0x3f3504f3u; /* the bits of sqrt(1/2), from which to twice that m goes */
    const int32_t n = (int32_t)(bits_of(x) - root_half) >> 23;
    const float m = float_of(bits_of(x) - ((uint32_t)n << 23));
    const float s = (m - 1.0f) / (m + 1.0f), square = s * s;
    float y = 2.0f / 9;
    y = y * square + 2.0f / 7;
    y = y * square + 2.0f / 5;
    y = y * square + 2.0f / 3;
    y = y * square + 2.0f;
    return (float)n * 0.69314718f + y * s;
}

/* The cosine and the sine of 2 pi u, 0 <= u < 1: the Taylor polynomials of what is left of u beside the nearest quarter,
 * good to 4e-9 and better within an eighth, exchanged and with the signs that the quarter says. */
CUDA_OPS_INLINE void cosine_and_sine_f32(float *cosine, float *sine, float u)
{
    const int32_t quarter = (int32_t)(4.0f * u + 0.5f);
    const float angle = (u - 0.25f * (float)quarter) * 6.28318531f, square = angle * angle;
    float c = 1.0f / 40320;
    c = c * square - 1.0f / 720;
    c = c * square + 1.0f / 24;
    c = c * square - 0.5f;
    c = c * square + 1.0f;
    float s = 1.0f / 362880;
    s = s * square - 1.0f / 5040;
    s = s * square + 1.0f / 120;
    s = s * square - 1.0f / 6;
    s = (s * square * angle) + angle;
    const bool exchanged = quarter & 1;
    const float of_cosine = exchanged ? s : c, of_sine = exchanged ? c : s;
    *cosine = (quarter + 1) & 2 ? -of_cosine : of_cosine;
    *sine = quarter & 2 ? -of_sine : of_sine;
}

CUDA_OPS_INLINE float root_f32(float x)
{
    return sqrtf(x);
}

CUDA_OPS_INLINE double logarithm_f64(double x)
{
    return log(x);
}

CUDA_OPS_INLINE void cosine_and_sine_f64(double *cosine, double *sine, double u)
{
    *cosine = cos(TWO_PI * u);
    *sine = sin(TWO_PI * u);
}

CUDA_OPS_INLINE double root_f64(double x)
{
    return sqrt(x);
}

#define REAL float
#define FN(name) name##_f32
#define WORDS_OF_ELEMENT 1
#define UNIT(words, i) cuda_ops_unit_float((words)[i])
#define POSITIVE_UNIT(words, i) cuda_ops_positive_unit_float((words)[i])
#include "random_fill.c"

#include "common/undef_real.h"
#undef WORDS_OF_ELEMENT
#undef UNIT
#undef POSITIVE_UNIT
#define REAL double
#define FN(name) name##_f64
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
#pragma omp simd
            for (int i = 0; i < STEP / 2; i++) {
                const REAL radius = FN(root)(-2 * FN(logarithm)(POSITIVE_UNIT(words, 2 * i)));
                REAL cosine, sine;
                FN(cosine_and_sine)(&cosine, &sine, UNIT(words, 2 * i + 1));
                values[2 * i] = radius * cosine;
                values[2 * i + 1] = radius * sine;
            }
        else
            for (int i = 0; i < STEP; i++)
                values[i] = UNIT(words, i);
        for (int64_t i = max_i64(begin, block); i < min_i64(end, block + STEP); i++)
            output[i] = first + scale * values[i - block];
    }
}

#endif
