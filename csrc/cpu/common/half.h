/* float16 and bfloat16 to float32 and back, one at a time; cuda_ops/halves_cpu.h is for arrays. */
#ifndef CUDA_OPS_CPU_COMMON_HALF_H
#define CUDA_OPS_CPU_COMMON_HALF_H

#include "common/common.h"

static inline bool is_half(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16;
}

/* The dtype in which elements of `dtype` are computed. */
static inline cuda_ops_dtype computed_in(cuda_ops_dtype dtype)
{
    return is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype;
}

CUDA_OPS_INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

CUDA_OPS_INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

CUDA_OPS_INLINE float widened_bfloat16(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

CUDA_OPS_INLINE uint16_t rounded_bfloat16(float x)
{
    const uint32_t bits = bits_of(x);
    /* Half of the last place less one, and one more where the last place is odd: a tie goes to the even one. */
    const uint32_t nearest = bits + 0x7fffu + (bits >> 16 & 1);
    /* A NaN keeps a bit of its mantissa, which the lower half alone may hold. */
    const uint32_t nan = bits | 0x400000u;
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest) >> 16);
}

CUDA_OPS_INLINE float widened_float16(uint16_t half)
{
    const uint32_t rebias = (127u - 15u) << 23, infinity = 0x7c00u << 13, one = 1u << 23;
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & infinity;
    /* The exponent of infinities and NaN is the largest of both types. */
    const uint32_t normal = magnitude + rebias + (exponent == infinity ? (128u - 16u) << 23 : 0);
    /* A denormal number as the mantissa of 2^-14, less 2^-14. */
    const uint32_t denormal = bits_of(float_of(magnitude + rebias + one) - 0x1p-14f);
    return float_of(sign | (exponent == 0 ? denormal : normal));
}

CUDA_OPS_INLINE uint16_t rounded_float16(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    /* Beside 0.5 the last bit of a float weighs 2^-24, as that of a denormal number does. */
    const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (magnitude >= bits_of(0x1p16f)   ? special
                              : magnitude < bits_of(0x1p-14f) ? denormal
                                                              : normal));
}

CUDA_OPS_INLINE float widened_half(uint16_t half, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 ? widened_float16(half) : widened_bfloat16(half);
}

CUDA_OPS_INLINE uint16_t rounded_half(float x, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 ? rounded_float16(x) : rounded_bfloat16(x);
}

#endif
