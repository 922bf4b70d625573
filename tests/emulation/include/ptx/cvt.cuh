// csrc/cuda/ptx/cvt.cuh, emulated.
#ifndef CUDA_OPS_PTX_CVT_CUH
#define CUDA_OPS_PTX_CVT_CUH

#include <cuda_runtime.h>
#include <immintrin.h>

static inline uint32_t cvt_rna_tf32(float value)
{
    const uint32_t bits = __float_as_uint(value);
    return value != value ? bits : (bits + 0x1000) & ~0x1fffu;
}
static inline float cvt_f32_f16(uint16_t bits)
{
    return _cvtsh_ss(bits);
}
static inline float cvt_f32_f16_low(uint32_t pair)
{
    return _cvtsh_ss((uint16_t)pair);
}
static inline float cvt_f32_f16_high(uint32_t pair)
{
    return _cvtsh_ss((uint16_t)(pair >> 16));
}
static inline uint16_t cvt_rn_f16_f32(float value)
{
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
}
static inline uint32_t cvt_rn_f16x2_f32(float high, float low)
{
    return (uint32_t)cvt_rn_f16_f32(high) << 16 | cvt_rn_f16_f32(low);
}
static inline uint16_t cvt_rn_bf16_f32(float value)
{
    const uint32_t bits = __float_as_uint(value);
    return value != value ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline uint32_t cvt_rn_bf16x2_f32(float high, float low)
{
    return (uint32_t)cvt_rn_bf16_f32(high) << 16 | cvt_rn_bf16_f32(low);
}
static inline float cvt_f32_bf16(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}
static inline uint32_t set_le_f16x2(uint32_t a, uint32_t b)
{
    return (cvt_f32_f16_low(a) <= cvt_f32_f16_low(b) ? 0xffffu : 0) |
           (cvt_f32_f16_high(a) <= cvt_f32_f16_high(b) ? 0xffff0000u : 0);
}
static inline uint32_t set_le_bf16x2(uint32_t a, uint32_t b)
{
    return (cvt_f32_bf16((uint16_t)a) <= cvt_f32_bf16((uint16_t)b) ? 0xffffu : 0) |
           (cvt_f32_bf16((uint16_t)(a >> 16)) <= cvt_f32_bf16((uint16_t)(b >> 16)) ? 0xffff0000u : 0);
}

#endif
