// csrc/cuda/ptx/global_memory.cuh, emulated.
#ifndef CUDA_OPS_PTX_GLOBAL_MEMORY_CUH
#define CUDA_OPS_PTX_GLOBAL_MEMORY_CUH

#include <cuda_runtime.h>

static inline void st_global_v4(void *to, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    *(uint4 *)to = {x, y, z, w};
}
static inline void st_global_v2(void *to, uint32_t x, uint32_t y)
{
    *(uint2 *)to = {x, y};
}
static inline void red_release_gpu_add(void *to, uint32_t value)
{
    atomicAdd((uint32_t *)to, value);
}
static inline uint32_t ld_acquire_gpu(const void *from)
{
    emulation::yield();
    return *(const volatile uint32_t *)from;
}
static inline void prefetch_global_l2(const void *)
{
}

#endif
