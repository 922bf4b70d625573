// The part of CUDA's cuda_fp16.h and cuda_bf16.h that the kernels use, under the same names and with the same
// instructions. Those headers are 20,000 lines of arithmetic that is never used here, parsed once for each file and
// architecture: 1.5 of a small file's 5.5 CPU seconds. A file that needs more of them includes them before this one,
// which then leaves its own definitions out.
#ifndef CUDA_OPS_COMMON_HALF_CUH
#define CUDA_OPS_COMMON_HALF_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "ptx/cvt.cuh"

#if !defined(__CUDA_FP16_H__) && !defined(__CUDA_BF16_H__)

struct __align__(2) __half {
    unsigned short bits;
};
struct __align__(4) __half2 {
    __half x, y;
};
struct __align__(2) __nv_bfloat16 {
    unsigned short bits;
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

__device__ __forceinline__ __half __ushort_as_half(unsigned short bits)
{
    return {bits};
}

__device__ __forceinline__ float __half2float(__half value)
{
    return cvt_f32_f16(value.bits);
}

__device__ __forceinline__ __half __float2half_rn(float value)
{
    return {cvt_rn_f16_f32(value)};
}

__device__ __forceinline__ float2 __half22float2(__half2 value)
{
    const unsigned int &pair = reinterpret_cast<const unsigned int &>(value);
    return make_float2(cvt_f32_f16_low(pair), cvt_f32_f16_high(pair));
}

__device__ __forceinline__ __half2 __floats2half2_rn(float x, float y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned int pair = cvt_rn_f16x2_f32(y, x);
    return reinterpret_cast<const __half2 &>(pair);
#else
    return {__float2half_rn(x), __float2half_rn(y)};
#endif
}

__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 value)
{
    return cvt_f32_bf16(value.bits);
}

// To the nearest, ties to even; a NaN becomes 0x7fff.
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float value)
{
    __nv_bfloat16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    result.bits = cvt_rn_bf16_f32(value);
#else
    const unsigned int bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const unsigned int rest = is_nan ? 0 : bits << 16;
    result.bits = is_nan ? 0x7fff : (unsigned short)(bits >> 16);
    if (rest > 0x80000000 || (rest == 0x80000000 && (result.bits & 1)))
        result.bits++;
#endif
    return result;
}

__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned int pair = cvt_rn_bf16x2_f32(y, x);
    return reinterpret_cast<const __nv_bfloat162 &>(pair);
#else
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
#endif
}

// 0xffff in each 16 bits where a <= b, and 0 where it is not or one of them is NaN.
__device__ __forceinline__ unsigned int __hle2_mask(__half2 a, __half2 b)
{
    return set_le_f16x2(reinterpret_cast<unsigned int &>(a), reinterpret_cast<unsigned int &>(b));
}

__device__ __forceinline__ unsigned int __hle2_mask(__nv_bfloat162 a, __nv_bfloat162 b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return set_le_bf16x2(reinterpret_cast<unsigned int &>(a), reinterpret_cast<unsigned int &>(b));
#else
    return (__bfloat162float(a.x) <= __bfloat162float(b.x) ? 0xffffu : 0) |
           (__bfloat162float(a.y) <= __bfloat162float(b.y) ? 0xffff0000u : 0);
#endif
}

#endif

template <typename T>
static constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

#endif
