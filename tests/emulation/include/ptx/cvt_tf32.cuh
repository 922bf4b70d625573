// csrc/cuda/ptx/cvt_tf32.cuh, emulated.
#ifndef CUDA_OPS_PTX_CVT_TF32_CUH
#define CUDA_OPS_PTX_CVT_TF32_CUH

#include "ptx/cvt.cuh"

static inline uint32_t cvt_rn_tf32(float value)
{
    const uint32_t bits = __float_as_uint(value);
    return value != value ? bits : (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

#endif
