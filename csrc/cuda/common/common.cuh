// Shared by the CUDA kernels: the only copy of what more than one of them needs.
#ifndef CUDA_OPS_COMMON_COMMON_CUH
#define CUDA_OPS_COMMON_COMMON_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/half.cuh"
#include "cuda_ops/core.h"

// Halves are stored, never computed with: each kernel loads an element, computes in accumulate_type, and stores it.
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

template <typename T>
static constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

// 16 bytes of T, moved by one load or store. Only for pointers that is_aligned_16 holds for.
template <typename T>
struct __align__(16) vector16 {
    static constexpr int size = 16 / sizeof(T);
    T element[size];
};

static inline bool is_aligned_16(const void *pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

__host__ __device__ __forceinline__ constexpr int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

// Enough blocks to fill every GPU there is several times over; kernels that clamp their grid to it loop (grid-stride).
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

// Programmatic dependent launch (Hopper): a kernel started by launch_dependent may begin while the one before it on the
// stream still runs, so that its launch and prologue hide under that one's tail. Every thread of such a kernel calls
// wait_for_predecessor() before it touches memory that an earlier kernel wrote, or writes memory that one reads; every
// thread, or the kernel after it could overtake the one before. Before Hopper all three are ordinary launches.
__device__ __forceinline__ void wait_for_predecessor()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From here on the next kernel may be started, once every block has said so or ended. It still waits for this one's
// memory in wait_for_predecessor().
__device__ __forceinline__ void release_successor()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... Parameters, typename... Arguments>
static inline void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                                    cudaStream_t stream, Arguments... arguments)
{
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = major >= 9 ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...); // its error is launch_status()'s
}

// Lets `kernel` be launched with `bytes` of dynamic shared memory, and with whatever other calls ask for, up to what a
// block may have beside `declared` bytes, which are at least what the kernel declares itself: the attribute is the
// kernel's, and a call with fewer bytes must not take back what another host thread's launch needs.
template <typename... Parameters>
static inline cudaError_t allow_shared_memory(void (*kernel)(Parameters...), size_t bytes, int declared = 1024)
{
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int allowed = (int)bytes > most - declared ? (int)bytes : most - declared;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed);
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
