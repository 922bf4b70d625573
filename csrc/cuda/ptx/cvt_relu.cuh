// cvt with relu: pairs of the 16-bit types, 0 in place of what is negative. sm_80.
#ifndef CUDA_OPS_PTX_CVT_RELU_CUH
#define CUDA_OPS_PTX_CVT_RELU_CUH

#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t cvt_rn_relu_f16x2_f32(float high, float low)
{
    uint32_t pair;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t cvt_rn_relu_bf16x2_f32(float high, float low)
{
    uint32_t pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif
