// The activation of forward's epilogues on CUDA cores. NaN stays. silu is none of them: with its exponentials, of all
// of a thread's values after its products, a depthwise kernel took longer than it and batch_norm's pass apart.
#ifndef CUDA_OPS_CONV2D_ACTIVATION_CUH
#define CUDA_OPS_CONV2D_ACTIVATION_CUH

#include "common/activation_functions.cuh"
#include "cuda_ops/conv2d.h"

template <int COUNT>
__device__ __forceinline__ void conv2d_activate(float (&x)[COUNT], int activation)
{
    if (activation == CUDA_OPS_CONV2D_HARDSWISH) {
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
