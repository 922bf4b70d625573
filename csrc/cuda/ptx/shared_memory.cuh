// ld.shared and st.shared. By address instead of by pointer where the compiler would split a vector access, or move it.
#ifndef CUDA_OPS_PTX_SHARED_MEMORY_CUH
#define CUDA_OPS_PTX_SHARED_MEMORY_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// As PTX wants it: the 32 bits that shared memory's window has.
__device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// ld.shared.b32, .v2.b32, .v4.b32, .v4.f32: 4, 8 or 16 bytes, at a multiple of as many.
__device__ __forceinline__ void ld_shared(uint32_t &value, uint32_t address)
{
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}
__device__ __forceinline__ void ld_shared_v2(uint32_t &x, uint32_t &y, uint32_t address)
{
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void ld_shared_v4(uint32_t &x, uint32_t &y, uint32_t &z, uint32_t &w, uint32_t address)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// st.shared.b32, .v4.f32.
__device__ __forceinline__ void st_shared(uint32_t address, uint32_t value)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, float4 v)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

#endif
