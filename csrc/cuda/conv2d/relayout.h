// Tensors in the order that the tensor-core paths of conv2d want: channels_last images, and weights copied to it.
#ifndef CUDA_OPS_CONV2D_RELAYOUT_H
#define CUDA_OPS_CONV2D_RELAYOUT_H

#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "conv2d/paths.h"

// Whether a tensor is channels_last; one channel or one pixel is both orders at once.
static inline bool conv2d_is_channels_last(int flag, int64_t channels, int64_t height, int64_t width)
{
    return flag || channels == 1 || height * width == 1;
}

static inline bool conv2d_weight_is_channels_last(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_is_channels_last(s.weight_channels_last, s.in_channels, s.kernel_height, s.kernel_width);
}

static inline bool conv2d_images_are_channels_last(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_is_channels_last(s.input_channels_last, s.in_channels, s.in_height, s.in_width) &&
           conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
}

// to[a][t][b] = from[a * a_stride + t * t_stride + b * b_stride], rows of `to` `pitch` elements apart.
struct Relayout {
    int64_t a, t, b; // extents
    int64_t a_stride, t_stride, b_stride;
    int64_t pitch;
};
cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &relayout, cuda_ops_dtype dtype,
                                cudaStream_t stream);

// The weight of any order as [o][tap][c], or transposed as [c][tap][o].
static inline Relayout conv2d_weight_relayout(const cuda_ops_conv2d_sizes &s, bool transposed)
{
    const int64_t c = s.in_channels / s.groups, o = s.out_channels, taps = s.kernel_height * s.kernel_width;
    const bool last = conv2d_weight_is_channels_last(s);
    const int64_t o_stride = taps * c, tap_stride = last ? c : 1, c_stride = last ? 1 : taps;
    return transposed ? Relayout{c, taps, o, c_stride, tap_stride, o_stride, o}
                      : Relayout{o, taps, c, o_stride, tap_stride, c_stride, c};
}

static inline size_t conv2d_round_to_256(int64_t bytes)
{
    return (size_t)ceil_div(bytes, 256) * 256;
}

#endif
