// cvt: to the nearest TF32, ties to even.
#ifndef CUDA_OPS_PTX_CVT_TF32_CUH
#define CUDA_OPS_PTX_CVT_TF32_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "ptx/cvt.cuh"

// cvt.rn.tf32.f32 (sm_90): one instruction, where cvt.rna is four there. Before, ties go away from zero.
__device__ __forceinline__ uint32_t cvt_rn_tf32(float value)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t rounded;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
#else
    return cvt_rna_tf32(value);
#endif
}

#endif
