// What the kernels of conv2d for few input channels and for depthwise convolutions both need.
#ifndef CUDA_OPS_CONV2D_DIRECT_CUH
#define CUDA_OPS_CONV2D_DIRECT_CUH

#include <limits.h>

#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "conv2d/paths.h"
#include "ptx/cp_async.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"

// Copies BYTES from device to shared memory past the registers, zeros if not `inside`.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(void *shared, const void *global, bool inside)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async<BYTES>(shared_address(shared), global, inside ? BYTES : 0);
#else
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++)
        ((uint32_t *)shared)[i] = inside ? ((const uint32_t *)global)[i] : 0;
#endif
}

template <typename T>
__device__ __forceinline__ uint32_t bits_of(T value)
{
    if constexpr (sizeof(T) == 2)
        return *(const unsigned short *)&value;
    else
        return *(const uint32_t *)&value;
}

// Values side by side as one store of 4, 8 or 16 bytes. (The compiler makes several of a struct now and then.)
template <typename T, int COUNT>
__device__ __forceinline__ void store_run(T *to, const T (&values)[COUNT])
{
    constexpr int WORDS = COUNT * sizeof(T) / 4;
    uint32_t words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        words[i] = sizeof(T) == 4 ? bits_of(values[i])
                                  : bits_of(values[i * 2 % COUNT]) | bits_of(values[(i * 2 + 1) % COUNT]) << 16;
    if constexpr (WORDS == 4)
        st_global_v4(to, words[0], words[1], words[2], words[3]);
    else if constexpr (WORDS == 2)
        st_global_v2(to, words[0], words[1]);
    else
        *(uint32_t *)to = words[0];
}

#endif
