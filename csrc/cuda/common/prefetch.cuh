// Asking for memory ahead of its use, without looking at it.
#ifndef CUDA_OPS_COMMON_PREFETCH_CUH
#define CUDA_OPS_COMMON_PREFETCH_CUH

#include "ptx/global_memory.cuh"

static constexpr int CACHE_LINE = 128;

// Prefetches `bytes` from `begin` on to the L2, by a block. The L2 is coherent whoever writes later, so that a kernel
// may ask for what it will need before wait_for_predecessor(), while the kernel before still runs.
__device__ __forceinline__ void prefetch_lines(const void *begin, int64_t bytes)
{
    for (int64_t at = (int64_t)threadIdx.x * CACHE_LINE; at < bytes; at += (int64_t)blockDim.x * CACHE_LINE)
        prefetch_global_l2((const char *)begin + at);
}

#endif
