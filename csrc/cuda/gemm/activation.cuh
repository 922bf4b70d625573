// What a product's epilogue may apply to a sum. Rungs 12 and 13 have a gelu of their own, of fewer instructions.
#ifndef CUDA_OPS_GEMM_ACTIVATION_CUH
#define CUDA_OPS_GEMM_ACTIVATION_CUH

#include "cuda_ops/gemm.h"

// 1 + erf(u) is erfc(-u), which keeps its digits where the sum cancels: at x = -3, 1 + erf loses nine of float32's
// bits.
__device__ __forceinline__ float gelu(float x)
{
    return 0.5f * x * erfcf(x * -0.70710678f);
}
__device__ __forceinline__ double gelu(double x)
{
    return 0.5 * x * erfc(x * -0.70710678118654752);
}

// x / 2 * (1 + tanh(u)) is x / (1 + exp(-2 u)); where that overflows, for x far below zero, the quotient is -0.
__device__ __forceinline__ float gelu_tanh(float x)
{
    return x / (1 + expf(-1.5957691216f * x * (1 + 0.044715f * x * x)));
}
__device__ __forceinline__ double gelu_tanh(double x)
{
    return x / (1 + exp(-1.59576912160573071 * x * (1 + 0.044715 * x * x)));
}

template <typename A>
__device__ __forceinline__ A activate(A x, int activation)
{
    switch (activation) {
    case CUDA_OPS_GEMM_RELU:
        return x < A(0) ? A(0) : x; // NaN stays
    case CUDA_OPS_GEMM_GELU:
        return gelu(x);
    case CUDA_OPS_GEMM_GELU_TANH:
        return gelu_tanh(x);
    default:
        return x;
    }
}

#endif
