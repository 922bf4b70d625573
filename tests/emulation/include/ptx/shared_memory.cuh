// csrc/cuda/ptx/shared_memory.cuh, emulated: an address is a variable's number, the block's in its cluster, and an offset.
#ifndef CUDA_OPS_PTX_SHARED_MEMORY_CUH
#define CUDA_OPS_PTX_SHARED_MEMORY_CUH

#include <cuda_runtime.h>

uint32_t shared_address(const void *pointer);
void *shared_pointer(uint32_t address, size_t bytes); // what lies there, all of whose bytes must exist

static inline void ld_shared(uint32_t &value, uint32_t address)
{
    value = *(uint32_t *)shared_pointer(address, 4);
}
static inline void ld_shared_v2(uint32_t &x, uint32_t &y, uint32_t address)
{
    const uint2 v = *(uint2 *)shared_pointer(address, 8);
    x = v.x, y = v.y;
}
static inline void ld_shared_v4(uint32_t &x, uint32_t &y, uint32_t &z, uint32_t &w, uint32_t address)
{
    const uint4 v = *(uint4 *)shared_pointer(address, 16);
    x = v.x, y = v.y, z = v.z, w = v.w;
}
static inline float4 ld_shared_v4_f32(uint32_t address)
{
    return *(float4 *)shared_pointer(address, 16);
}
static inline void st_shared(uint32_t address, uint32_t value)
{
    *(uint32_t *)shared_pointer(address, 4) = value;
}
static inline void st_shared_v4_f32(uint32_t address, float4 v)
{
    *(float4 *)shared_pointer(address, 16) = v;
}

#endif
