/* exp for loops that the compiler vectorises: libm's is a call for each element. Like libm's: NaN stays, exp(-inf) is
 * 0, overflow is inf, denormal results are denormal. */
#ifndef CUDA_OPS_CPU_COMMON_EXPONENTIAL_H
#define CUDA_OPS_CPU_COMMON_EXPONENTIAL_H

#include "common/common.h"

/* exp(x) = 2^n * exp(r), n the nearest integer to x / ln 2 and |r| <= ln(2) / 2, where the Taylor polynomial of degree
 * 7 is off by 5e-9 at most; with the rounding of float the error stays below 2 ulp. */
CUDA_OPS_INLINE float exponential_f32(float x)
{
    /* Beyond these the result is 0 or inf anyway, and n would not fit. Comparisons, not fmin: a NaN stays. */
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    /* Added to a small number, 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded, and n is in its lowest
     * bits. */
    const float round_magic = 12582912.0f;
    const float shifted = x * 1.44269504088896341f + round_magic;
    const float n = shifted - round_magic;
    /* ln 2 in two parts: the first has few bits, so that its product with n is exact. */
    const float r = (x - n * 0.693359375f) + n * 2.12194440054690583e-4f;
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    /* 2^n as a product of two powers, since 2^128 and the powers of denormal results are no floats. */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    const int32_t power = (int32_t)(bits - 0x4b400000u);
    const int32_t half = power >> 1;
    const uint32_t first_bits = (uint32_t)(half + 127) << 23, second_bits = (uint32_t)(power - half + 127) << 23;
    float first, second;
    memcpy(&first, &first_bits, sizeof first);
    memcpy(&second, &second_bits, sizeof second);
    return y * first * second;
}

/* float64 is for checking gradients, not for speed. */
CUDA_OPS_INLINE double exponential_f64(double x)
{
    return exp(x);
}

#endif
