// The indices of pooled tensors' elements, for max_pool2d and avg_pool2d.
#ifndef CUDA_OPS_COMMON_POOL2D_CUH
#define CUDA_OPS_COMMON_POOL2D_CUH

#include "cuda_ops/pool2d.h"

#include "common/common.cuh"

// An element of a (batch, channels, height, width) tensor. Planes has `outer` count batch * channels and channel 0;
// channels_last has `outer` count the batch.
struct pool_position {
    int64_t outer, channel;
    int32_t h, w;
};

// index / divisor, and index is left with the remainder. 64-bit division takes some hundred instructions, and tensors
// seldom need it.
__device__ __forceinline__ int64_t divide(int64_t *index, int64_t divisor)
{
    const int64_t dividend = *index;
    if (((dividend | divisor) >> 32) == 0) {
        const uint32_t quotient = (uint32_t)dividend / (uint32_t)divisor;
        *index = (uint32_t)dividend - quotient * (uint32_t)divisor;
        return quotient;
    }
    const int64_t quotient = dividend / divisor;
    *index = dividend - quotient * divisor;
    return quotient;
}

// The coordinates of the element at `index` in memory, in a tensor of this height and width.
template <bool CHANNELS_LAST>
__device__ __forceinline__ pool_position locate(int64_t index, int64_t channels, int32_t height, int32_t width)
{
    pool_position at;
    int64_t rest = index, pixel;
    if (CHANNELS_LAST) {
        pixel = divide(&rest, channels);
        at.channel = rest;
        at.outer = divide(&pixel, (int64_t)height * width);
    } else {
        at.outer = divide(&rest, (int64_t)height * width);
        at.channel = 0;
        pixel = rest;
    }
    at.h = (int32_t)((uint32_t)pixel / (uint32_t)width);
    at.w = (int32_t)pixel - at.h * width;
    return at;
}

// Offset of row 0, column 0 of the element's plane in a tensor of this height and width.
template <bool CHANNELS_LAST>
__device__ __forceinline__ int64_t plane_base(pool_position at, int64_t channels, int32_t height, int32_t width)
{
    const int64_t plane = (int64_t)height * width;
    return CHANNELS_LAST ? at.outer * plane * channels + at.channel : at.outer * plane;
}

#endif
