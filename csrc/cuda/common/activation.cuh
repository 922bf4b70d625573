// Activations of a product's epilogue, and gelu's derivative. The functions named _quickly take fewer instructions,
// with an error of some 2e-5 of the result: for results that are rounded to 16 bits, or whose operands were rounded to
// TF32.
#ifndef CUDA_OPS_COMMON_ACTIVATION_CUH
#define CUDA_OPS_COMMON_ACTIVATION_CUH

#include <string.h>

#include "common/activation_functions.cuh"
#include "common/common.cuh"
#include "cuda_ops/gemm.h"
#include "ptx/arithmetic.cuh"

__device__ __forceinline__ float gelu(float x)
{
    return gelu_f32(x);
}
__device__ __forceinline__ double gelu(double x)
{
    return gelu_f64(x);
}

__device__ __forceinline__ float gelu_tanh(float x)
{
    return gelu_tanh_f32(x);
}
__device__ __forceinline__ double gelu_tanh(double x)
{
    return gelu_tanh_f64(x);
}

__device__ __forceinline__ float gelu_quickly(float x)
{
    return gelu_f16(x);
}
__device__ __forceinline__ float gelu_slope_quickly(float x)
{
    return gelu_slope_f16(x);
}

// 1 / (1 + exp(-2 u)), which is (1 + tanh(u)) / 2.
__device__ __forceinline__ float tanh_share(float x)
{
    return rcp_approx_ftz(1.0f + ex2_approx_ftz(x * fmaf(-0.1029432396f * x, x, -2.3022081991f)));
}
__device__ __forceinline__ float gelu_tanh_quickly(float x)
{
    return x * tanh_share(x);
}
__device__ __forceinline__ float gelu_tanh_slope_quickly(float x)
{
    const float share = tanh_share(x);
    return fmaf(x * share * (1 - share), fmaf(0.2140644488f * x, x, 1.5957691216f), share);
}

// x / (1 + exp(-x)), and NaN of -infinity.
__device__ __forceinline__ float silu_quickly(float x)
{
    return x * rcp_approx_ftz(1.0f + ex2_approx_ftz(-1.4426950409f * x));
}
// Near -3, where the result is 0, its error is that of x.
__device__ __forceinline__ float hardswish_quickly(float x)
{
    return x * __saturatef(fmaf(x, 0.1666666667f, 0.5f));
}

// Those that are long enough for an epilogue of their own.
__host__ __device__ __forceinline__ bool is_gelu(int activation)
{
    return activation == CUDA_OPS_GEMM_GELU || activation == CUDA_OPS_GEMM_GELU_TANH;
}

__device__ __forceinline__ float silu(float x)
{
    return silu_f32(x);
}
__device__ __forceinline__ double silu(double x)
{
    return silu_f64(x);
}
__device__ __forceinline__ float hardswish(float x)
{
    return hardswish_f32(x);
}
__device__ __forceinline__ double hardswish(double x)
{
    return hardswish_f64(x);
}

template <typename A>
__device__ __forceinline__ A activate(A x, int activation)
{
    switch (activation) {
    case CUDA_OPS_GEMM_RELU:
        return x < A(0) ? A(0) : x; // NaN stays
    case CUDA_OPS_GEMM_RELU6:
        return x < A(0) ? A(0) : x > A(6) ? A(6) : x;
    case CUDA_OPS_GEMM_SILU:
        return silu(x);
    case CUDA_OPS_GEMM_HARDSWISH:
        return hardswish(x);
    case CUDA_OPS_GEMM_GELU:
        return gelu(x);
    case CUDA_OPS_GEMM_GELU_TANH:
        return gelu_tanh(x);
    default:
        return x;
    }
}

// The same of all elements. Which it is, is asked once, so that one element's steps fill another's waits.
template <typename A, int COUNT>
__device__ __forceinline__ void activate_all(A (&x)[COUNT], int activation)
{
    if (activation == CUDA_OPS_GEMM_GELU) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = gelu(x[e]);
    } else if (activation == CUDA_OPS_GEMM_GELU_TANH) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = gelu_tanh(x[e]);
    } else if (activation == CUDA_OPS_GEMM_SILU) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = silu(x[e]);
    } else if (activation == CUDA_OPS_GEMM_HARDSWISH) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = hardswish(x[e]);
    } else if (activation != CUDA_OPS_GEMM_NONE) {
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            x[e] = x[e] < A(0) ? A(0) : x[e]; // and NaN stays
            x[e] = activation == CUDA_OPS_GEMM_RELU6 && x[e] > A(6) ? A(6) : x[e];
        }
    }
}

// gelu_quickly of all elements, interleaved: one element after the other, the compiler uses few registers and waits for
// each step.
template <int COUNT>
__device__ __forceinline__ void gelu_quickly(float (&x)[COUNT])
{
    constexpr float C[6] = {-0.05251441404f, 0.07877082344f, 0.09734022134f,
                            0.1079855240f,   0.1356503504f,  0.1327587460f}; // normal_tail_f16's
    float t[COUNT], beyond[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        t[e] = rcp_approx_ftz(fmaf(0.3333333333f, fabsf(x[e]), 1.0f));
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        beyond[e] = fmaf(C[0], t[e], C[1]);
#pragma unroll
    for (int i = 2; i < 6; i++)
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            beyond[e] = fmaf(beyond[e], t[e], C[i]);
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        beyond[e] *= t[e];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        t[e] = bell_f16(x[e]);
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        beyond[e] *= t[e];
        const float above = x[e] > 0.0f ? 1.0f : 0.0f; // there are only seven predicate registers
        x[e] *= fmaf(above, fmaf(-2.0f, beyond[e], 1.0f), beyond[e]);
    }
}

// All but gelu, in a few instructions an element: for sums in registers.
template <int COUNT>
__device__ __forceinline__ void activate_simply(float (&x)[COUNT], int activation)
{
    if (activation == CUDA_OPS_GEMM_RELU) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = x[e] < 0.0f ? 0.0f : x[e]; // NaN stays
    } else if (activation == CUDA_OPS_GEMM_SILU) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = silu_quickly(x[e]);
    } else if (activation == CUDA_OPS_GEMM_HARDSWISH) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = hardswish_quickly(x[e]);
    } else if (activation == CUDA_OPS_GEMM_RELU6) {
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            x[e] = x[e] < 0.0f ? 0.0f : x[e];
            x[e] = x[e] > 6.0f ? 6.0f : x[e];
        }
    }
}

template <int COUNT>
__device__ __forceinline__ void activate_quickly(float (&x)[COUNT], int activation)
{
    if (activation == CUDA_OPS_GEMM_GELU) {
        gelu_quickly(x);
    } else if (activation == CUDA_OPS_GEMM_GELU_TANH) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = gelu_tanh_quickly(x[e]);
    } else {
        activate_simply(x, activation);
    }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    uint32_t packed;
    if constexpr (is_bfloat16<T>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&packed, &pair, 4);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        memcpy(&packed, &pair, 4);
    }
    return packed;
}

// The two values of a pair, as they were rounded.
template <typename T>
__device__ __forceinline__ void unpack(uint32_t packed, float &low, float &high)
{
    if constexpr (is_bfloat16<T>) {
        low = __uint_as_float(packed << 16);
        high = __uint_as_float(packed & 0xffff0000u);
    } else {
        __half2 pair;
        memcpy(&pair, &packed, 4);
        const float2 both = __half22float2(pair);
        low = both.x, high = both.y;
    }
}

// Stores adjacent elements of a row, of which `left` are in bounds, as T or as float; x becomes what was stored. whole:
// all are in bounds, and 16 bytes may be written at once.
template <typename T, int COUNT>
__device__ __forceinline__ void store_some(void *to, int64_t at, float (&x)[COUNT], bool as_float, bool whole, int left)
{
    if (sizeof(T) == 4 || as_float) {
        float *const line = (float *)to + at;
        if (whole)
#pragma unroll
            for (int e = 0; e < COUNT; e += 4)
                *(float4 *)(line + e) = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
        else
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (e < left)
                    line[e] = x[e];
    } else if constexpr (sizeof(T) == 2) {
        static_assert(COUNT == 8, "one store");
        T *const line = (T *)to + at;
        uint32_t packed[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            packed[e] = pack<T>(x[2 * e], x[2 * e + 1]);
            unpack<T>(packed[e], x[2 * e], x[2 * e + 1]);
        }
        if (whole)
            *(uint4 *)line = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        else
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (e < left)
                    line[e] = store_from_accumulate<T>(x[e]);
    }
}

#endif
