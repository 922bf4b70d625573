// Mean and variance of values that many threads have between them: each has the moments of its own, and these are merged
// (Chan's formula), without a difference of large sums.
#ifndef CUDA_OPS_COMMON_MOMENTS_CUH
#define CUDA_OPS_COMMON_MOMENTS_CUH

#include "common/common.cuh"

// Count, mean and sum of squared differences from the mean of some values.
template <typename A>
struct moments {
    A count, mean, squares;
};

template <typename A>
__device__ __forceinline__ moments<A> merge(const moments<A> &a, const moments<A> &b)
{
    moments<A> both;
    both.count = a.count + b.count;
    if (both.count == A(0))
        return a;
    const A difference = b.mean - a.mean, share = b.count / both.count;
    both.mean = a.mean + difference * share;
    both.squares = a.squares + b.squares + difference * difference * a.count * share;
    return both;
}

// Over the lanes of a full warp, in a fixed order; lane 0 gets it.
template <typename A>
__device__ __forceinline__ moments<A> warp_merge(moments<A> value)
{
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
        moments<A> other;
        other.count = __shfl_down_sync(FULL_WARP, value.count, offset);
        other.mean = __shfl_down_sync(FULL_WARP, value.mean, offset);
        other.squares = __shfl_down_sync(FULL_WARP, value.squares, offset);
        value = merge(value, other);
    }
    return value;
}

#endif
