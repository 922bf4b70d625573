// What is known of a part of a row: its largest element, and the sum of exp(x - maximum). The states of two parts make
// that of both, which is all that online softmax is.
#ifndef CUDA_OPS_SOFTMAX_LADDER_STATE_CUH
#define CUDA_OPS_SOFTMAX_LADDER_STATE_CUH

#include <float.h>

#include "common/common.cuh"

struct SoftmaxState {
    float maximum, sum;
};

// Of no elements. The least finite number, not -inf, so that -inf less it is -inf again, and no NaN.
__device__ __forceinline__ SoftmaxState state_of_none()
{
    return {-FLT_MAX, 0.0f};
}

// A maximum that is too small by d has made a sum that is too large by exp(d).
__device__ __forceinline__ SoftmaxState merged(SoftmaxState a, SoftmaxState b)
{
    const float maximum = fmaxf(a.maximum, b.maximum); // passes over NaN, which the sums take up
    return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

// The same for one more element.
__device__ __forceinline__ void add_element(SoftmaxState &state, float x)
{
    const float maximum = fmaxf(state.maximum, x);
    state.sum = state.sum * expf(state.maximum - maximum) + expf(x - maximum);
    state.maximum = maximum;
}

// Of all lanes of a warp; each gets it.
__device__ __forceinline__ SoftmaxState merged_over_warp(SoftmaxState state)
{
#pragma unroll
    for (int apart = WARP_SIZE / 2; apart > 0; apart /= 2)
        state = merged(
            state, {__shfl_xor_sync(FULL_WARP, state.maximum, apart), __shfl_xor_sync(FULL_WARP, state.sum, apart)});
    return state;
}

// Of all warps of a block, whose lanes come with their warp's; `scratch` has a place for each warp.
__device__ __forceinline__ SoftmaxState merged_over_block(SoftmaxState of_warp, SoftmaxState *scratch)
{
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane == 0)
        scratch[threadIdx.x / WARP_SIZE] = of_warp;
    __syncthreads();
    return merged_over_warp(lane < blockDim.x / WARP_SIZE ? scratch[lane] : state_of_none());
}

// Of a row whose elements lie in the registers of warps: the state of the warp's part, and in `x` the exponentials,
// which are then known but for a factor. Elements that are none are -inf.
template <int K>
__device__ __forceinline__ SoftmaxState exponentials_of_warp(float (&x)[K])
{
    SoftmaxState state = state_of_none();
#pragma unroll
    for (int k = 0; k < K; k++)
        state.maximum = fmaxf(state.maximum, x[k]);
#pragma unroll
    for (int apart = WARP_SIZE / 2; apart > 0; apart /= 2)
        state.maximum = fmaxf(state.maximum, __shfl_xor_sync(FULL_WARP, state.maximum, apart));
#pragma unroll
    for (int k = 0; k < K; k++) {
        x[k] = expf(x[k] - state.maximum);
        state.sum += x[k];
    }
    state.sum = warp_sum(state.sum);
    return state;
}

#endif
