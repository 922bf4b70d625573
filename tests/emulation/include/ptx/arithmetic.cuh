// csrc/cuda/ptx/arithmetic.cuh, emulated.
#ifndef CUDA_OPS_PTX_ARITHMETIC_CUH
#define CUDA_OPS_PTX_ARITHMETIC_CUH

#include <cuda_runtime.h>

static inline float rcp_approx_ftz(float x)
{
    return 1.0f / x;
}
static inline float ex2_approx_ftz(float x)
{
    return exp2f(x);
}
static inline float lg2_approx_ftz(float x)
{
    return log2f(x);
}
static inline uint64_t mul_wide_u32(uint32_t a, uint32_t b)
{
    return (uint64_t)a * b;
}
static inline float max_nan(float a, float b)
{
    return a != a || b != b ? NAN : a > b ? a : b;
}
static inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t nibble = selector >> 4 * i & 15;
        const uint32_t byte = (uint32_t)(((uint64_t)b << 32 | a) >> 8 * (nibble & 7)) & 255;
        result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}
static inline void fma_in_order(float &d, float a, float b)
{
    d = fmaf(a, b, d);
}
static inline int opaque(int value)
{
    return value;
}

#endif
