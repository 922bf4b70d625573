// What batch_norm_act does with the normalised values: adds a residual, and applies an activation, or multiplies a
// gradient by the activation's slope. Which activation it is, is asked once a vector: all threads answer alike, and a
// kernel for each would be five times as many.
#ifndef CUDA_OPS_BATCH_NORM_EPILOGUE_CUH
#define CUDA_OPS_BATCH_NORM_EPILOGUE_CUH

#include "common/activation_functions.cuh"
#include "common/common.cuh"
#include "cuda_ops/batch_norm.h"

// The functions of one precision, of those that activation_functions.cuh has for T.
template <typename T, typename A>
__device__ __forceinline__ A silu_of(A x)
{
    if constexpr (sizeof(T) == 2)
        return silu_f16(x);
    else if constexpr (sizeof(T) == 4)
        return silu_f32(x);
    else
        return silu_f64(x);
}

template <typename T, typename A>
__device__ __forceinline__ A silu_slope_of(A x)
{
    if constexpr (sizeof(T) == 2)
        return silu_slope_f16(x);
    else if constexpr (sizeof(T) == 4)
        return silu_slope_f32(x);
    else
        return silu_slope_f64(x);
}

template <typename A>
__device__ __forceinline__ A hardswish_of(A x)
{
    if constexpr (sizeof(A) == 4)
        return hardswish_f32(x);
    else
        return hardswish_f64(x);
}

template <typename A>
__device__ __forceinline__ A hardswish_slope_of(A x)
{
    if constexpr (sizeof(A) == 4)
        return hardswish_slope_f32(x);
    else
        return hardswish_slope_f64(x);
}

template <typename T>
struct Epilogue {
    typedef accumulate_type<T> A;

    const T *residual; // NULL: none
    cuda_ops_activation function;
    A first, second; // HARDTANH's bounds; no number is beyond one that is NaN

    template <int SIZE>
    __device__ __forceinline__ void apply(A (&z)[SIZE]) const
    {
        switch (function) {
        case CUDA_OPS_ACTIVATION_SILU:
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                z[e] = silu_of<T>(z[e]);
            break;
        case CUDA_OPS_ACTIVATION_HARDSWISH:
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                z[e] = hardswish_of(z[e]);
            break;
        default:
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                z[e] = z[e] < first ? first : z[e];
                z[e] = z[e] > second ? second : z[e];
            }
        }
    }

    // grad *= f'(z)
    template <int SIZE>
    __device__ __forceinline__ void gate(A (&grad)[SIZE], const A (&z)[SIZE]) const
    {
        switch (function) {
        case CUDA_OPS_ACTIVATION_SILU:
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                grad[e] *= silu_slope_of<T>(z[e]);
            break;
        case CUDA_OPS_ACTIVATION_HARDSWISH:
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                grad[e] *= hardswish_slope_of(z[e]);
            break;
        default:
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                grad[e] = z[e] <= first || z[e] >= second ? A(0) : grad[e];
        }
    }
};

template <typename T>
static Epilogue<T> epilogue_of(const cuda_ops_batch_norm_epilogue *epilogue)
{
    typedef accumulate_type<T> A;
    if (!epilogue)
        return {};
    return {(const T *)epilogue->residual, epilogue->function, (A)epilogue->first, (A)epilogue->second};
}

#endif
