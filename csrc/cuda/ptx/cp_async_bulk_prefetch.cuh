// cp.async.bulk.prefetch (sm_90): bytes in a row come to the L2. Address and size are multiples of 16.
#ifndef CUDA_OPS_PTX_CP_ASYNC_BULK_PREFETCH_CUH
#define CUDA_OPS_PTX_CP_ASYNC_BULK_PREFETCH_CUH

#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ void bulk_prefetch_l2(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

#endif
