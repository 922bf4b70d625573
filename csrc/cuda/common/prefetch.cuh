// Asking for memory ahead of its use, without looking at it.
#ifndef CUDA_OPS_COMMON_PREFETCH_CUH
#define CUDA_OPS_COMMON_PREFETCH_CUH

#include "common/common.cuh"

static constexpr int CACHE_LINE = 128;

// The line of `pointer` comes to the L2, where it then is up to date whoever writes it: what a kernel will need may be
// asked for before wait_for_predecessor(), while the kernel before it still runs.
__device__ __forceinline__ void prefetch_line(const void *pointer)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer) : "memory");
}

// `bytes` from `begin` on, by a block.
__device__ __forceinline__ void prefetch_lines(const void *begin, int64_t bytes)
{
    for (int64_t at = (int64_t)threadIdx.x * CACHE_LINE; at < bytes; at += (int64_t)blockDim.x * CACHE_LINE)
        prefetch_line((const char *)begin + at);
}

#endif
