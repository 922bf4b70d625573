// Clusters (sm_90): blocks that run at once and reach each other's shared memory. Before Hopper a block is a cluster of
// its own: those functions that kernels call there as well do nothing then.
#ifndef CUDA_OPS_PTX_CLUSTER_CUH
#define CUDA_OPS_PTX_CLUSTER_CUH

#include "ptx/shared_memory.cuh"

// This block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_ctarank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// ---- barrier.cluster: all threads of all blocks arrive once a phase, and wait ----

// .aligned: the whole warp executes it together, which the compiler must be able to rely on.
__device__ __forceinline__ void cluster_arrive_aligned()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait_aligned()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync()
{
    cluster_arrive_aligned();
    cluster_wait_aligned();
}
// Where nothing but mbarriers is to be seen by the other blocks, which fence_mbarrier_init() sees to: what .release
// adds is a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive_relaxed_aligned()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync_relaxed()
{
    cluster_arrive_relaxed_aligned();
    cluster_wait_aligned();
}
// By threads of a warp that have parted.
__device__ __forceinline__ void cluster_arrive_relaxed()
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// ---- mapa: the address in block `rank` of the cluster of what lies at `address` in this one ----

__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank)
{
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// As a pointer, to be read through. (A block's shared memory must outlive the others' reads: cluster_sync().)
template <typename T>
__device__ __forceinline__ const T *mapa(const T *pointer, int rank)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint64_t address;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(pointer), "r"(rank));
    return reinterpret_cast<const T *>(address);
#else
    return pointer;
#endif
}

// ---- stores to mapa's addresses ----

// st.async: 4, 8 or 16 bytes, whose arrival the mbarrier there counts (mbarrier_arrive_expect_tx).
__device__ __forceinline__ void st_async(uint32_t to, float value, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(value),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(uint32_t to, uint32_t value, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(value),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(uint32_t to, uint2 v, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(uint32_t to, float4 v, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async(uint32_t to, uint4 v, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
                 : "memory");
}

#endif
