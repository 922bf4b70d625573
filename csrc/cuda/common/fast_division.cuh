// Division of indices by a number that is known before the launch: by multiplication with its inverse, computed on the
// host, instead of some twenty instructions.
#ifndef CUDA_OPS_COMMON_FAST_DIVISION_CUH
#define CUDA_OPS_COMMON_FAST_DIVISION_CUH

#include <stdint.h>

// Of numbers below 2^31: (n * multiplier / 2^32 + n) / 2^shift.
struct Divider {
    uint32_t multiplier, shift;
    __device__ __forceinline__ uint32_t of(uint32_t n) const
    {
        return (__umulhi(n, multiplier) + n) >> shift;
    }
};
static inline Divider divider_by(uint32_t divisor)
{
    uint32_t shift = 0;
    while ((uint64_t)1 << shift < divisor)
        shift++;
    return {(uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << shift) - divisor)) / divisor + 1), shift};
}

// Of numbers that stay below 2^32 when multiplied by the divisor, such as indices in a tile: one multiplication with
// the inverse, 2^32 / value rounded up, which a kernel may compute too.
struct Divisor {
    uint32_t value, inverse;
};
__host__ __device__ __forceinline__ Divisor make_divisor(uint32_t value)
{
    return {value, 0xffffffffu / value + 1}; // 0 for 1
}
__device__ __forceinline__ int quotient(int index, Divisor by)
{
    return by.value == 1 ? index : (int)__umulhi((uint32_t)index, by.inverse);
}

#endif
