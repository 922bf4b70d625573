// The activation of forward's epilogues on CUDA cores, of values that are rounded to T. NaN stays.
#ifndef CUDA_OPS_CONV2D_ACTIVATION_CUH
#define CUDA_OPS_CONV2D_ACTIVATION_CUH

#include "common/activation.cuh"
#include "cuda_ops/conv2d.h"

template <typename T, int COUNT>
__device__ __forceinline__ void conv2d_activate(float (&x)[COUNT], int activation)
{
    if (activation == CUDA_OPS_CONV2D_SILU) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = sizeof(T) == 2 ? silu_quickly(x[i]) : silu_f32(x[i]);
    } else if (activation == CUDA_OPS_CONV2D_HARDSWISH) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = hardswish_f32(x[i]);
    } else if (activation != CUDA_OPS_CONV2D_NONE) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[i] = x[i] < 0.0f ? 0.0f : x[i];
            x[i] = activation == CUDA_OPS_CONV2D_RELU6 && x[i] > 6.0f ? 6.0f : x[i];
        }
    }
}

#endif
