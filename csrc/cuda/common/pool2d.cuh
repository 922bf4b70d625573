// The indices of pooled tensors' elements, for max_pool2d and avg_pool2d.
#ifndef CUDA_OPS_COMMON_POOL2D_CUH
#define CUDA_OPS_COMMON_POOL2D_CUH

#include "cuda_ops/pool2d.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"

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
__device__ __forceinline__ pool_position locate(bool channels_last, int64_t index, int64_t channels, int32_t height,
                                                int32_t width)
{
    pool_position at;
    int64_t rest = index, pixel;
    if (channels_last) {
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
__device__ __forceinline__ int64_t plane_base(bool channels_last, pool_position at, int64_t channels, int32_t height,
                                              int32_t width)
{
    const int64_t plane = (int64_t)height * width;
    return channels_last ? at.outer * plane * channels + at.channel : at.outer * plane;
}

// The kernels above hold for any size, and divide. Tensors of fewer than 2^31 elements, which is most, have these: what
// takes the time of a pool is not its bytes but the divisions for each element's coordinates and windows.
struct pool_plan {
    cuda_ops_pool_axis height, width;
    int32_t channels;     // of an image in channels_last, else 1
    uint32_t count;       // vectors or groups of elements that are written
    uint32_t row, column; // groups in a row; vectors of channels in a pixel
    Divider by_column, by_row, by_height, by_stride_h, by_stride_w;
};

// Where a thread writes: a vector of `channel` ..., or a group of columns from w on; outer is image or plane.
struct pool_place {
    int32_t outer, h, w, channel;
};

template <typename V, bool CHANNELS_LAST>
__device__ __forceinline__ pool_place place_of(const pool_plan &plan, uint32_t i, int32_t height, int group)
{
    pool_place at;
    uint32_t pixel = i;
    at.channel = 0;
    if (CHANNELS_LAST) {
        pixel = plan.by_column.of(i);
        at.channel = (int32_t)(i - pixel * plan.column) * V::size;
    }
    const uint32_t row = plan.by_row.of(pixel);
    at.w = (int32_t)(pixel - row * plan.row) * group;
    at.outer = (int32_t)plan.by_height.of(row);
    at.h = (int32_t)row - at.outer * height;
    return at;
}

// cuda_ops_pool_first_tap and _end_tap, which divide, only where the window leaves the input.
__device__ __forceinline__ void pool_taps(const cuda_ops_pool_axis &axis, int32_t start, int32_t *begin, int32_t *end)
{
    *begin = 0;
    *end = axis.kernel;
    if (start < 0 || start + (axis.kernel - 1) * axis.dilation >= axis.input) {
        *begin = cuda_ops_pool_first_tap(axis, start);
        *end = cuda_ops_pool_end_tap(axis, start);
    }
}

// The windows whose spans hold one of the positions from `first` to `last`.
__device__ __forceinline__ void pool_windows(const cuda_ops_pool_axis &axis, const Divider &by_stride, int32_t first,
                                             int32_t last, int32_t *begin, int32_t *end)
{
    const int32_t beyond = first + axis.padding - (axis.kernel - 1) * axis.dilation;
    *begin = beyond <= 0 ? 0 : (int32_t)by_stride.of((uint32_t)(beyond - 1)) + 1;
    const int32_t behind = (int32_t)by_stride.of((uint32_t)(last + axis.padding)) + 1;
    *end = behind < axis.output ? behind : axis.output;
}

// Columns that a thread of backward has beside each other in planes.
static constexpr int POOL_GROUP = 4;

// The plan for writing the output (forward) or grad_input; false where there is none. T's vectors need aligned pointers.
template <typename T>
static inline bool plan_pool(pool_plan *plan, const cuda_ops_pool2d *pool, bool forward, bool aligned)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t images = pool->batch * pool->channels;
    const int64_t limit = INT32_MAX / 2;
    const int64_t vector = vector16<T>::size;
    if (images * height.input > limit / width.input || images * height.output > limit / width.output ||
        (pool->channels_last && (pool->channels % vector != 0 || !aligned)))
        return false;
    const int32_t rows = forward ? height.output : height.input, columns = forward ? width.output : width.input;
    plan->height = height;
    plan->width = width;
    plan->channels = pool->channels_last ? (int32_t)pool->channels : 1;
    plan->column = pool->channels_last ? (uint32_t)(pool->channels / vector) : 1;
    plan->row = (uint32_t)(pool->channels_last || forward ? columns : ceil_div(columns, POOL_GROUP));
    plan->count = (uint32_t)(pool->channels_last ? pool->batch : images) * rows * plan->row * plan->column;
    plan->by_column = divider_by(plan->column);
    plan->by_row = divider_by(plan->row);
    plan->by_height = divider_by((uint32_t)rows);
    plan->by_stride_h = divider_by((uint32_t)height.stride);
    plan->by_stride_w = divider_by((uint32_t)width.stride);
    return true;
}

// For a whole grid: each of the plan's vectors or groups to one thread.
template <typename F>
__device__ __forceinline__ void for_places(const pool_plan &plan, F function)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < plan.count; i += gridDim.x * blockDim.x)
        function(i);
}

#endif
