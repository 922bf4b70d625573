// Division of 64-bit indices by numbers that are known before the launch: by a Divider where the index is below 2^31.
#ifndef CUDA_OPS_COMMON_WIDE_DIVISION_CUH
#define CUDA_OPS_COMMON_WIDE_DIVISION_CUH

#include "common/fast_division.cuh"

__device__ __forceinline__ int64_t divided(int64_t n, int64_t by, const Divider &divider)
{
    return n >> 31 == 0 ? (int64_t)divider.of((uint32_t)n) : n / by;
}

// index is left with the quotient; returns the remainder.
__device__ __forceinline__ int split(int64_t *index, int divisor, const Divider &divider)
{
    const int64_t quotient = divided(*index, divisor, divider);
    const int remainder = (int)(*index - quotient * divisor);
    *index = quotient;
    return remainder;
}

// Of any divisor; of those from 2^31 on, by which no index below is divided but to 0.
static inline Divider wide_divider_by(int64_t divisor)
{
    return divider_by((uint32_t)(divisor < INT32_MAX ? divisor : INT32_MAX));
}

#endif
