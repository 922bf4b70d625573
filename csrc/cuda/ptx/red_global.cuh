// red.global: sums in device memory, of which nothing comes back.
#ifndef CUDA_OPS_PTX_RED_GLOBAL_CUH
#define CUDA_OPS_PTX_RED_GLOBAL_CUH

#include <cuda_runtime.h>

// red.global.add.v4.f32 (sm_90): to[0] to to[3], at a multiple of 16 bytes, += v. Before, one by one.
__device__ __forceinline__ void red_global_add_v4_f32(float *to, float4 v)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#else
    atomicAdd(to, v.x), atomicAdd(to + 1, v.y), atomicAdd(to + 2, v.z), atomicAdd(to + 3, v.w);
#endif
}

#endif
