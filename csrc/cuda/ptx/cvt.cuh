// cvt and set: conversions between fp32 and the 16-bit types, and comparisons of pairs of these, on bits.
// common/half.cuh gives them the names of CUDA's headers. What an architecture lacks is left out here, and made of
// others there.
#ifndef CUDA_OPS_PTX_CVT_CUH
#define CUDA_OPS_PTX_CVT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// To the nearest TF32, ties away from zero; before sm_80, which has no TF32, the value as it is.
__device__ __forceinline__ uint32_t cvt_rna_tf32(float value)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
#else
    return __float_as_uint(value);
#endif
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t bits)
{
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}
// Of the lower and of the upper 16 bits of a pair, which is unpacked within: as two operands each would be moved to a
// register of its own.
__device__ __forceinline__ float cvt_f32_f16_low(uint32_t pair)
{
    float result;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(result) : "r"(pair));
    return result;
}
__device__ __forceinline__ float cvt_f32_f16_high(uint32_t pair)
{
    float result;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(result) : "r"(pair));
    return result;
}
__device__ __forceinline__ uint16_t cvt_rn_f16_f32(float value)
{
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// sm_80, like the next two of bf16.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint16_t cvt_rn_bf16_f32(float value)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// cvt.f32.bf16 exists from sm_90 on; before, the 16 bits are an fp32's upper half all the same.
__device__ __forceinline__ float cvt_f32_bf16(uint16_t bits)
{
    float result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("cvt.f32.bf16 %0, %1;" : "=f"(result) : "h"(bits));
#else
    asm("mov.b32 %0, {0, %1};" : "=f"(result) : "h"(bits));
#endif
    return result;
}

// 0xffff in each 16 bits where a <= b, else, and for a NaN, 0. Of bf16 from sm_90 on.
__device__ __forceinline__ uint32_t set_le_f16x2(uint32_t a, uint32_t b)
{
    uint32_t mask;
    asm("set.le.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}
__device__ __forceinline__ uint32_t set_le_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t mask;
    asm("set.le.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}

#endif
