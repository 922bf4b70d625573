// A float32 number as the sum of two of TF32, upper + lower: upper is the nearest to it, lower the rest, of which at most
// one unit of float32's last place is lost. Where |x| < 2^-113 more of lower is, up to 2^-136, the distance of TF32's
// smallest numbers. Of what rounds to an infinity, or is one or NaN, upper + lower is NaN.
#ifndef CUDA_OPS_GEMM_SM90_3XTF32_SPLIT_CUH
#define CUDA_OPS_GEMM_SM90_3XTF32_SPLIT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "ptx/cvt_tf32.cuh"

struct Parts {
    uint32_t upper, lower;
};

// wgmma ignores the 13 bits that TF32 has not: of `lower`, which has 12 bits of its own, the last one.
__device__ __forceinline__ Parts split(float x)
{
    const uint32_t upper = cvt_rn_tf32(x);
    return {upper, __float_as_uint(x - __uint_as_float(upper))};
}

// Which k of a group of 32 lies at `position` of the copies of B, where A is K-major. A thread loads 16 bytes of each of
// its rows of A for two steps of wgmma, whose lanes t hold k = t and t + 4: so in position 16 half + 8 step + 4 i + t is
// the number 2 step + i of the four that lane t loads, which are those of the vector (t % 2) + 4 (t / 2) + 2 half: with
// that choice rows two apart meet all banks.
__host__ __device__ __forceinline__ int split_vector(int half, int lane)
{
    return lane % 2 + lane / 2 * 4 + half * 2;
}
__host__ __device__ __forceinline__ int split_position(int position)
{
    return 4 * split_vector(position / 16, position % 4) + position / 4 % 4;
}

#endif
