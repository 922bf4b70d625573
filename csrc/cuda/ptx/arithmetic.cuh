// Arithmetic that has no name in CUDA C++, or that the compiler is to leave as it is written.
#ifndef CUDA_OPS_PTX_ARITHMETIC_CUH
#define CUDA_OPS_PTX_ARITHMETIC_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// 1 / x and 2^x of the multiprocessor's special function unit, with a relative error of some 1e-7; denormals are zeros.
__device__ __forceinline__ float rcp_approx_ftz(float x)
{
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float ex2_approx_ftz(float x)
{
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float lg2_approx_ftz(float x)
{
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// A product of 64 bits. Of one that is written with 64-bit operands the compiler adds zeros to the upper half now and then.
__device__ __forceinline__ uint64_t mul_wide_u32(uint32_t a, uint32_t b)
{
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

// The larger one, NaN if either is (fmaxf drops it); sm_80.
__device__ __forceinline__ float max_nan(float a, float b)
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
// Of two pairs of bf16, element by element; the other value where one is NaN. sm_80.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Byte i of the result is the one of b:a (a's bytes are 0 to 3) that nibble i of `selector` names; with the nibble's
// upper bit, that byte's sign bit eight times, which __byte_perm masks off.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

// d += a * b. Volatile, so that the products stay in the order in which they are written: the register file has two
// banks, and an order in which one factor serves several products in a row has fewer conflicts than the compiler's.
__device__ __forceinline__ void fma_in_order(float &d, float a, float b)
{
    asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(d) : "f"(a), "f"(b));
}

// No instruction: the value, of which the compiler knows nothing from here on. Without it, it makes a copy of a loop
// for every choice within, or computes early what then takes a register through all of a kernel.
__device__ __forceinline__ int opaque(int value)
{
    asm volatile("" : "+r"(value));
    return value;
}

#endif
