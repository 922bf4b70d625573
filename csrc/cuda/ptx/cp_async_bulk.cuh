// cp.async.bulk (sm_90): TMA copies of contiguous bytes, a multiple of 16, from and to 16-byte aligned addresses,
// issued by one thread. Into shared memory an mbarrier counts the bytes: mbarrier_arrive_expect_tx announces them,
// mbarrier_wait waits. Out of it groups are committed and waited for as cp.async's are. ptx/tma.cuh has the copies of
// boxes of a tensor.
#ifndef CUDA_OPS_PTX_CP_ASYNC_BULK_CUH
#define CUDA_OPS_PTX_CP_ASYNC_BULK_CUH

#include "ptx/shared_memory.cuh"

__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
// Adds floats to those there, each a sum of its own, by the L2; into the group that bulk_commit_group() closes.
__device__ __forceinline__ void bulk_reduce_add_f32(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

// Closes a group of stores, of boxes too.
__device__ __forceinline__ void bulk_commit_group()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the newest PENDING groups have read their sources, which may then be overwritten ...
template <int PENDING>
__device__ __forceinline__ void bulk_wait_group_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// ... and until they have written, so that further copies of this thread may load their targets.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_group()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Makes shared memory written by ordinary stores (and by cp.async and stmatrix) visible to TMA and to wgmma; each
// writing thread calls it, then a barrier follows.
__device__ __forceinline__ void fence_proxy_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for device memory written by ordinary stores, by this thread or by those whose barrier it waited for.
__device__ __forceinline__ void fence_proxy_async_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif
