// cp.async (sm_80): copies from device to shared memory past the registers. A thread's copies are asked for, closed as
// a group, and waited for group by group; other threads see them after a barrier. Before sm_80 the functions do
// nothing: a kernel that runs there loads and stores instead.
#ifndef CUDA_OPS_PTX_CP_ASYNC_CUH
#define CUDA_OPS_PTX_CP_ASYNC_CUH

#include "ptx/shared_memory.cuh"

// BYTES of which the first `valid` come from memory; the rest are zeros, and with `valid` = 0 nothing is read. 16 bytes
// go past the L1 cache.
template <int BYTES>
__device__ __forceinline__ void cp_async(uint32_t to, const void *from, int valid)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what cp.async copies");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid)
                     : "memory");
#else
    (void)to, (void)from, (void)valid;
#endif
}
// 16 bytes, all of them there.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    (void)to, (void)from;
#endif
}

// Closes a group: what this thread asked for since the last one.
__device__ __forceinline__ void cp_async_commit_group()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all but the newest PENDING groups of this thread have landed.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
// Until all of this thread's copies have landed, closed as groups or not.
__device__ __forceinline__ void cp_async_wait_all()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif
