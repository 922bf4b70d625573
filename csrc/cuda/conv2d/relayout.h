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

// Whether the weight is in the order that tensor-core paths take, and has as many channels as the images.
static inline bool conv2d_weight_is_ready(const ConvCall &call)
{
    return conv2d_weight_is_channels_last(call.sizes) && call.weight_outs == 0;
}

// An axis of `to` of groups of `group`, of which the first `taken` are there in `from`, `stride` elements apart. The
// others are zero.
struct RelayoutAxis {
    int64_t extent, group, taken, stride;
};

// to[a][t][b] = from[a][t][b], rows of `to` `pitch` elements apart.
struct Relayout {
    RelayoutAxis a, b;
    int64_t t, t_stride, pitch;
};
cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &relayout, cuda_ops_dtype dtype,
                                cudaStream_t stream);

// The weight of any order as [o][tap][c], or transposed as [c][tap][o].
static inline Relayout conv2d_weight_relayout(const ConvCall &call, bool transposed)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t channels = s.in_channels / s.groups, outs = s.out_channels / s.groups;
    const int64_t c = call.weight_outs ? call.weight_channels : channels,
                  o = call.weight_outs ? call.weight_outs : outs;
    const int64_t taps = s.kernel_height * s.kernel_width;
    const bool last = conv2d_weight_is_channels_last(s);
    const RelayoutAxis rows = {s.out_channels, outs, o, taps * c}, columns = {channels, channels, c, last ? 1 : taps};
    return transposed ? Relayout{columns, rows, taps, last ? c : 1, s.out_channels}
                      : Relayout{rows, columns, taps, last ? c : 1, channels};
}

static inline size_t conv2d_round_to_256(int64_t bytes)
{
    return (size_t)ceil_div(bytes, 256) * 256;
}

#endif
