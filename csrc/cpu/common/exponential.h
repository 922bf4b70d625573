/* exp and expm1 for loops that the compiler vectorises: libm's are a call for each element. Like libm's: NaN stays, exp(-inf) is
 * 0, overflow is inf, denormal results are denormal. */
#ifndef CUDA_OPS_CPU_COMMON_EXPONENTIAL_H
#define CUDA_OPS_CPU_COMMON_EXPONENTIAL_H

#include "common/common.h"

/* exp(x + rest) = 2^n * exp(r), n the nearest integer to x / ln 2 and |r| <= ln(2) / 2 or, by the rest, a little more,
 * where the Taylor polynomial of degree 7 is off by 5e-9 at most; with the rounding of float the error stays below 2
 * units in the last place. The rest is what of an exponent a float does not hold: small beside x, 0 for exp(x).
 * Returns exp(r), and n in the lowest bits of *shifted, less those of 1.5 * 2^23. */
CUDA_OPS_INLINE float exponential_parts_f32(float x, float rest, uint32_t *shifted)
{
    /* Added to a small number, 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded, and n is in its
     * lowest bits. */
    const float round_magic = 12582912.0f;
    const float sum = x * 1.44269504088896341f + round_magic;
    const float n = sum - round_magic;
    /* ln 2 in two parts: the first has few bits, so that its product with n is exact. */
    const float r = (x - n * 0.693359375f) + (n * 2.12194440054690583e-4f + rest);
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    memcpy(shifted, &sum, sizeof sum);
    return y;
}

CUDA_OPS_INLINE float exponential_f32(float x)
{
    /* Beyond these the result is 0 or inf anyway, and n would not fit. Comparisons, not fmin: a NaN stays. */
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    uint32_t bits;
    const float y = exponential_parts_f32(x, 0.0f, &bits);
    /* 2^n as a product of two powers, since 2^128 and the powers of denormal results are no floats. */
    const int32_t power = (int32_t)(bits - 0x4b400000u);
    const int32_t half = power >> 1;
    const uint32_t first_bits = (uint32_t)(half + 127) << 23, second_bits = (uint32_t)(power - half + 127) << 23;
    float first, second;
    memcpy(&first, &first_bits, sizeof first);
    memcpy(&second, &second_bits, sizeof second);
    return y * first * second;
}

/* Which exponential a loop takes. Of no more than 0 (and of NaN): the exponents that rounding leaves above it are small,
 * and results below 2^-125 may be 0. Rough: off by 3e-6 of the result, for what is rounded to a half anyway. */
enum exponent_range { ANY_EXPONENT, NO_MORE_THAN_0, ROUGHLY_NO_MORE_THAN_0 };

CUDA_OPS_INLINE float exponential_within_f32(float x, enum exponent_range range)
{
    if (range == ANY_EXPONENT)
        return exponential_f32(x);
    const float least = -87.0f, clamped = x < least ? least : x;
    uint32_t bits;
    float y;
    if (range == NO_MORE_THAN_0) {
        y = exponential_parts_f32(clamped, 0.0f, &bits);
    } else {
        const float round_magic = 12582912.0f;
        const float sum = clamped * 1.44269504088896341f + round_magic;
        const float r = clamped - (sum - round_magic) * 0.693147180559945309f;
        y = 0.041458400415f; /* minimax of degree 4, of the relative error */
        y = y * r + 0.16791031050f;
        y = y * r + 0.50004367389f;
        y = y * r + 0.99996333232f;
        y = y * r + 0.99999925923f;
        memcpy(&bits, &sum, sizeof sum);
    }
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < least ? 0.0f : y * power;
}

/* exp(x + rest) for x from -125 to 0: one of the two powers is always 2^-64. */
CUDA_OPS_INLINE float exponential_of_sum_f32(float x, float rest)
{
    uint32_t bits;
    const float y = exponential_parts_f32(x, rest, &bits);
    bits = (bits + 127 + 64) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power * 0x1p-64f;
}

/* e^x - 1 for x <= 0, to the last digits also where x is small: e^r - 1 = r + r^2 S(r) by a minimax polynomial, good to
 * 2e-10, is never added to a 1 that it is lost in unless the result is as large. */
CUDA_OPS_INLINE float expm1_of_negative_f32(float x)
{
    x = x < -20.0f ? -20.0f : x;
    const float round_magic = 12582912.0f;
    const float shifted = x * 1.44269504088896341f + round_magic;
    const float n = shifted - round_magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440054690583e-4f;
    float y = 0.0001990890633f;
    y = y * r + 0.001393454711f;
    y = y * r + 0.008333284103f;
    y = y * r + 0.04166645675f;
    y = y * r + 0.1666666676f;
    y = y * r + 0.5000000014f;
    y = y * r * r + r;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power * y + (power - 1.0f);
}

/* e^r - 1 = r + r^2 S(r), |r| <= ln(2) / 2, by a minimax polynomial that is good to 2e-19. */
CUDA_OPS_INLINE double exponential_series_f64(double r)
{
    double y = 2.092248227617753015e-9;
    y = y * r + 2.510627617108493529e-8;
    y = y * r + 2.755725024571590089e-7;
    y = y * r + 2.755725282955392744e-6;
    y = y * r + 0.00002480158735012645463;
    y = y * r + 0.0001984126987686799668;
    y = y * r + 0.001388888888887320994;
    y = y * r + 0.00833333333332554346;
    y = y * r + 0.04166666666666668557;
    y = y * r + 0.1666666666666667144;
    y = y * r + 0.5;
    return y * r * r + r;
}

/* 2^n for an integer n from -1022 to 1023. */
CUDA_OPS_INLINE double power_of_two_f64(double n)
{
    const double shifted = n + 6755399441055744.0; /* 1.5 * 2^52 */
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

CUDA_OPS_INLINE double nearest_integer_f64(double x)
{
    return x + 6755399441055744.0 - 6755399441055744.0;
}

/* x from -1000 to 710. */
CUDA_OPS_INLINE double exponential_of_sum_f64(double x, double rest)
{
    const double n = nearest_integer_f64(x * 1.44269504088896340736);
    const double r = (x - n * 0.693147180369123816490) + (rest - n * 1.90821492927058770002e-10);
    const double half = nearest_integer_f64(n * 0.5);
    return (1.0 + exponential_series_f64(r)) * power_of_two_f64(half) * power_of_two_f64(n - half);
}

CUDA_OPS_INLINE double exponential_f64(double x)
{
    x = x < -746.0 ? -746.0 : x;
    x = x > 710.0 ? 710.0 : x;
    return exponential_of_sum_f64(x, 0.0);
}

/* double has one that is fast enough for all. */
CUDA_OPS_INLINE double exponential_within_f64(double x, enum exponent_range range)
{
    (void)range;
    return exponential_f64(x);
}

/* e^x - 1 for x <= 0, to the last digits also where x is small. */
CUDA_OPS_INLINE double expm1_of_negative_f64(double x)
{
    x = x < -40.0 ? -40.0 : x;
    const double n = nearest_integer_f64(x * 1.44269504088896340736);
    const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    const double power = power_of_two_f64(n);
    return power * exponential_series_f64(r) + (power - 1.0);
}

#endif
