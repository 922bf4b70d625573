// csrc/cuda/ptx/red_global.cuh, emulated.
#ifndef CUDA_OPS_PTX_RED_GLOBAL_CUH
#define CUDA_OPS_PTX_RED_GLOBAL_CUH

#include <cuda_runtime.h>

static inline void red_global_add_v4_f32(float *to, float4 v)
{
    *(float4 *)to = {((float4 *)to)->x + v.x, ((float4 *)to)->y + v.y, ((float4 *)to)->z + v.z,
                     ((float4 *)to)->w + v.w};
}

#endif
