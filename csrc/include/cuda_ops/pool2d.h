/* The geometry that max_pool2d and avg_pool2d share: which input positions a window covers, and which windows cover
 * an input position.
 *
 * Along an axis, window `o` covers the positions o * stride - padding + k * dilation, k = 0 ... kernel - 1, of which
 * those outside of [0, input) are padding.
 *
 * Arrays are (batch, channels, height, width), dense, with the last dimension running fastest, or if channels_last is
 * not zero in the order (batch, height, width, channels).
 */
#ifndef CUDA_OPS_POOL2D_H
#define CUDA_OPS_POOL2D_H

#include <stdbool.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_pool_axis {
    int32_t input, output;                     /* sizes */
    int32_t kernel, stride, padding, dilation; /* dilation is 1 in avg_pool2d */
} cuda_ops_pool_axis;

typedef struct cuda_ops_pool2d {
    int64_t batch, channels;
    cuda_ops_pool_axis height, width;
    int32_t channels_last;
} cuda_ops_pool2d;

/* Positions from the first to the last that a window covers, both included. */
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_pool_span(int64_t kernel, int64_t dilation)
{
    return (kernel - 1) * dilation + 1;
}

/* How many windows there are, as PyTorch counts them; below 1 if not even one fits. With ceil_mode a window may run
 * past the padding's end, but none starts at or beyond the input's end. stride and kernel are positive, and padding is
 * at most half of the kernel. */
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_pool_output_size(int64_t input, int64_t kernel, int64_t stride, int64_t padding,
                                                       int64_t dilation, bool ceil_mode)
{
    const int64_t room = input + 2 * padding - cuda_ops_pool_span(kernel, dilation) + (ceil_mode ? stride - 1 : 0);
    if (room < 0)
        return 0;
    const int64_t windows = room / stride + 1;
    const int64_t starting_inside = (input + padding - 1) / stride + 1;
    return ceil_mode && windows > starting_inside ? starting_inside : windows;
}

/* First position of a window; negative if it begins in the padding. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_pool_start(cuda_ops_pool_axis axis, int32_t window)
{
    return window * axis.stride - axis.padding;
}

/* First k with a position that is not in the padding before the input. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_pool_first_tap(cuda_ops_pool_axis axis, int32_t start)
{
    return start >= 0 ? 0 : (axis.dilation - 1 - start) / axis.dilation;
}

/* One past the last k with a position that is not in the padding behind the input. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_pool_end_tap(cuda_ops_pool_axis axis, int32_t start)
{
    const int32_t end = start < axis.input ? (axis.input - 1 - start) / axis.dilation + 1 : 0;
    return end < axis.kernel ? end : axis.kernel;
}

/* First window whose span holds the position, and one past the last. With dilation, some of these step over it. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_pool_first_window(cuda_ops_pool_axis axis, int32_t position)
{
    const int32_t beyond = position + axis.padding - (axis.kernel - 1) * axis.dilation;
    return beyond <= 0 ? 0 : (beyond - 1) / axis.stride + 1;
}

CUDA_OPS_HOST_DEVICE int32_t cuda_ops_pool_end_window(cuda_ops_pool_axis axis, int32_t position)
{
    const int32_t end = (position + axis.padding) / axis.stride + 1;
    return end < axis.output ? end : axis.output;
}

/* Windows [begin, end) hold no padding at all: every tap of theirs is in the input. */
CUDA_OPS_HOST_DEVICE void cuda_ops_pool_inside(cuda_ops_pool_axis axis, int32_t *begin, int32_t *end)
{
    const int32_t room =
        axis.input + axis.padding - (int32_t)cuda_ops_pool_span(axis.kernel, axis.dilation); /* for the last start */
    const int32_t first = axis.padding / axis.stride + (axis.padding % axis.stride != 0);
    const int32_t last = room < 0 ? -1 : room / axis.stride;
    *begin = first < axis.output ? first : axis.output;
    *end = last + 1 < axis.output ? last + 1 : axis.output;
    if (*end < *begin)
        *end = *begin;
}

/* Whether an axis is sound, and small enough for the 32-bit arithmetic of the functions above. */
CUDA_OPS_HOST_DEVICE bool cuda_ops_pool_axis_valid(cuda_ops_pool_axis axis)
{
    if (axis.input < 1 || axis.output < 1 || axis.kernel < 1 || axis.stride < 1 || axis.dilation < 1 ||
        axis.padding < 0 || axis.padding > axis.kernel / 2)
        return false;
    const int64_t last_start = (int64_t)(axis.output - 1) * axis.stride - axis.padding;
    return last_start < axis.input &&
           axis.input + 2 * (int64_t)axis.padding + cuda_ops_pool_span(axis.kernel, axis.dilation) <= INT32_MAX;
}

/* Whether a call may be made with this geometry: each axis is valid, and a plane's positions number less than 2^31. */
CUDA_OPS_HOST_DEVICE bool cuda_ops_pool2d_valid(const cuda_ops_pool2d *pool)
{
    return pool->batch >= 0 && pool->channels >= 0 && cuda_ops_pool_axis_valid(pool->height) &&
           cuda_ops_pool_axis_valid(pool->width) && (int64_t)pool->height.input * pool->width.input <= INT32_MAX &&
           (int64_t)pool->height.output * pool->width.output <= INT32_MAX;
}

#ifdef __cplusplus
}
#endif

#endif
