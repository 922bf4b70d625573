// The activation of forward's epilogues on CUDA cores.
#ifndef CUDA_OPS_CONV2D_ACTIVATION_CUH
#define CUDA_OPS_CONV2D_ACTIVATION_CUH

#include "batch_norm/epilogue.cuh"
#include "cuda_ops/conv2d.h"

// A call, since an epilogue has as many as 64 values, for each of which it would be inlined.
template <typename T>
__device__ __noinline__ float conv2d_activate_smoothly(float x, int activation)
{
    return activation == CUDA_OPS_CONV2D_SILU ? silu_of<T>(x) : hardswish_of(x);
}

template <typename T, int COUNT>
__device__ __forceinline__ void conv2d_activate(float (&x)[COUNT], int activation)
{
    if (activation >= CUDA_OPS_CONV2D_SILU) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = conv2d_activate_smoothly<T>(x[i], activation);
    } else if (activation != CUDA_OPS_CONV2D_NONE) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) { // NaN stays
            x[i] = x[i] < 0.0f ? 0.0f : x[i];
            x[i] = activation == CUDA_OPS_CONV2D_RELU6 && x[i] > 6.0f ? 6.0f : x[i];
        }
    }
}

#endif
