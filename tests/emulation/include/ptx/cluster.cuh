// csrc/cuda/ptx/cluster.cuh, emulated (emulator.cpp).
#ifndef CUDA_OPS_PTX_CLUSTER_CUH
#define CUDA_OPS_PTX_CLUSTER_CUH

#include "ptx/shared_memory.cuh"

uint32_t cluster_ctarank();
void cluster_arrive_aligned();
void cluster_wait_aligned();
static inline void cluster_sync()
{
    cluster_arrive_aligned();
    cluster_wait_aligned();
}
static inline void cluster_sync_relaxed()
{
    cluster_sync();
}
static inline void cluster_arrive_relaxed()
{
    cluster_arrive_aligned();
}
static inline void cluster_wait()
{
    cluster_wait_aligned();
}

uint32_t mapa(uint32_t address, uint32_t rank);
template <typename T>
static inline const T *mapa(const T *pointer, int rank)
{
    return (const T *)shared_pointer(mapa(shared_address(pointer), (uint32_t)rank), sizeof(T));
}

// The bytes come some time later.
void st_async_bytes(uint32_t to, const void *bytes, uint32_t count, uint32_t barrier);
template <typename T>
static inline void st_async(uint32_t to, T value, uint32_t barrier)
{
    st_async_bytes(to, &value, sizeof value, barrier);
}

#endif
