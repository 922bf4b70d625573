// ld.global, st.global, red.global and prefetch.global, where the compiler has no name for them or makes others.
#ifndef CUDA_OPS_PTX_GLOBAL_MEMORY_CUH
#define CUDA_OPS_PTX_GLOBAL_MEMORY_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// st.global.v4.b32, .v2.b32: 16 or 8 bytes at a multiple of as many, by one instruction; what is made under a condition
// the compiler stores in words now and then.
__device__ __forceinline__ void st_global_v4(void *to, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void st_global_v2(void *to, uint32_t x, uint32_t y)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}

// A barrier of the whole grid is made of these two: what this thread wrote, and what it saw written, is seen by whom
// the load lets see the sum.
__device__ __forceinline__ void red_release_gpu_add(void *to, uint32_t value)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t ld_acquire_gpu(const void *from)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// The cache line of `pointer` comes to the L2.
__device__ __forceinline__ void prefetch_global_l2(const void *pointer)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer) : "memory");
}

#endif
