// What the kernels of conv2d for few input channels and for depthwise convolutions both need.
#ifndef CUDA_OPS_CONV2D_DIRECT_CUH
#define CUDA_OPS_CONV2D_DIRECT_CUH

#include <limits.h>

#include "common.cuh"
#include "conv2d_choice.h"

// Quotients of indices by a number that is known before the launch; index * value stays below 2^32.
struct Divisor {
    uint32_t value, inverse;
};

static inline Divisor make_divisor(int64_t value)
{
    return {(uint32_t)value, (uint32_t)(value == 1 ? 0 : ((1ull << 32) + value - 1) / value)};
}

__device__ __forceinline__ int quotient(int index, Divisor by)
{
    return by.value == 1 ? index : (int)__umulhi((uint32_t)index, by.inverse);
}

__device__ __forceinline__ uint32_t address_in_shared(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// Copies BYTES from device to shared memory past the registers, zeros if not `inside`.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(void *shared, const void *global, bool inside)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what cp.async copies");
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_in_shared(shared)), "l"(global),
                     "r"(inside ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address_in_shared(shared)), "l"(global),
                     "n"(BYTES), "r"(inside ? BYTES : 0)
                     : "memory");
#else
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++)
        ((uint32_t *)shared)[i] = inside ? ((const uint32_t *)global)[i] : 0;
#endif
}

__device__ __forceinline__ void wait_for_copies_to_shared()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// The same in steps: what was asked for since the last call is one, and all but the last PENDING of them have come.
__device__ __forceinline__ void end_step_of_copies()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void wait_for_steps_of_copies()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
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
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                     "r"(words[3])
                     : "memory");
    else if constexpr (WORDS == 2)
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    else
        *(uint32_t *)to = words[0];
}

#endif
