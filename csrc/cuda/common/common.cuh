// What all CUDA kernels share: accumulation types, index arithmetic, warp and block reductions, dispatch by dtype.
#ifndef CUDA_OPS_COMMON_COMMON_CUH
#define CUDA_OPS_COMMON_COMMON_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/half.cuh"
#include "common/launch.cuh"
#include "cuda_ops/core.h"
#include "ptx/griddepcontrol.cuh"

// fp16 and bf16 are stored, never computed with: a kernel loads an element, computes in accumulate_type, and stores it.
template <typename T>
struct accumulate {
    typedef float type;
};
template <>
struct accumulate<double> {
    typedef double type;
};
template <typename T>
using accumulate_type = typename accumulate<T>::type;

__device__ __forceinline__ float load_as_accumulate(float value)
{
    return value;
}
__device__ __forceinline__ double load_as_accumulate(double value)
{
    return value;
}
__device__ __forceinline__ float load_as_accumulate(__half value)
{
    return __half2float(value);
}
__device__ __forceinline__ float load_as_accumulate(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

template <typename T>
__device__ __forceinline__ T store_from_accumulate(accumulate_type<T> value);
template <>
__device__ __forceinline__ float store_from_accumulate<float>(float value)
{
    return value;
}
template <>
__device__ __forceinline__ double store_from_accumulate<double>(double value)
{
    return value;
}
template <>
__device__ __forceinline__ __half store_from_accumulate<__half>(float value)
{
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 store_from_accumulate<__nv_bfloat16>(float value)
{
    return __float2bfloat16_rn(value);
}

__host__ __device__ __forceinline__ constexpr int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

// Fills every GPU several times over; kernels whose grid is clamped to it loop (grid-stride).
static constexpr int64_t MAX_GRID = 65535;

static inline unsigned int clamp_grid(int64_t blocks)
{
    return (unsigned int)(blocks < MAX_GRID ? blocks : MAX_GRID);
}

// A grid-stride loop's start and step in int64_t, since blockIdx.x * blockDim.x alone is 32 bits wide.
__device__ __forceinline__ int64_t global_thread_index()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t global_thread_count()
{
    return (int64_t)gridDim.x * blockDim.x;
}

static constexpr int WARP_SIZE = 32;
static constexpr unsigned int FULL_WARP = 0xffffffffu;

// Tells the compiler that `value` is the same in the whole warp, so that what is computed from it stays in uniform
// registers, where wgmma wants its descriptors. Otherwise each is moved there first, and the tensor cores wait.
__device__ __forceinline__ int warp_uniform(int value)
{
    return __shfl_sync(FULL_WARP, value, 0);
}

// Sum over the 32 lanes of a full warp, in a fixed order; every lane gets it.
template <typename A>
__device__ __forceinline__ A warp_sum(A value)
{
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

// Largest over the 32 lanes of a full warp; NaN if any lane has one (fmax would drop it).
template <typename A>
__device__ __forceinline__ A warp_max(A value)
{
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
        A other = __shfl_xor_sync(FULL_WARP, value, offset);
        value = (other > value || other != other) ? other : value;
    }
    return value;
}

// Sum over a one-dimensional block whose size is a multiple of 32; every thread gets it. `scratch` holds 32 values in
// shared memory and may be used again right after, since the function ends with a barrier.
template <typename A>
__device__ __forceinline__ A block_sum(A value, A *scratch)
{
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    value = warp_sum(value);
    if (lane == 0)
        scratch[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? scratch[lane] : A(0));
    __syncthreads();
    return value;
}

// Status of the launch just made. Launchers end with it; cudaGetLastError also clears the error, so that a bad
// launch is reported by the call that made it and by no later one.
static inline cuda_ops_status launch_status()
{
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? CUDA_OPS_SUCCESS : CUDA_OPS_CUDA_ERROR + (int)error;
}

// Bytes of an element.
static inline int64_t dtype_size(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? 8 : dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

// Runs the statement with `T` standing for the element type that `dtype` names.
#define CUDA_OPS_DISPATCH(dtype, T, ...)                                                                               \
    switch (dtype) {                                                                                                   \
    case CUDA_OPS_FLOAT32: {                                                                                           \
        typedef float T;                                                                                               \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case CUDA_OPS_FLOAT64: {                                                                                           \
        typedef double T;                                                                                              \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case CUDA_OPS_FLOAT16: {                                                                                           \
        typedef __half T;                                                                                              \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case CUDA_OPS_BFLOAT16: {                                                                                          \
        typedef __nv_bfloat16 T;                                                                                       \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    default:                                                                                                           \
        return CUDA_OPS_UNSUPPORTED_DTYPE;                                                                             \
    }

#endif
