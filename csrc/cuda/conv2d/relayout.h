// How the tensor-core paths of conv2d see their tensors: walks over pictures, and weights in another order.
#ifndef CUDA_OPS_CONV2D_RELAYOUT_H
#define CUDA_OPS_CONV2D_RELAYOUT_H

#include "common/common.cuh"
#include "conv2d/paths.h"

// Whether a tensor is channels_last, or in both orders.
static inline bool conv2d_is_channels_last(int flag, int64_t channels, int64_t height, int64_t width)
{
    return flag || channels == 1 || height * width == 1;
}

static inline bool conv2d_weight_is_channels_last(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_is_channels_last(s.weight_channels_last, s.in_channels, s.kernel_height, s.kernel_width);
}

static inline bool conv2d_pictures_are_channels_last(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_is_channels_last(s.input_channels_last, s.in_channels, s.in_height, s.in_width) &&
           conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
}

// to[a][t][b] = from[a * a_size + t * t_size + b * b_size] with rows of b `pitch` long.
struct Relayout {
    int64_t a, t, b;                // extents
    int64_t a_size, t_size, b_size; // distances in `from`
    int64_t pitch;
};
cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &relayout, cuda_ops_dtype dtype,
                                cudaStream_t stream);

// The weight of any order as [o][tap][c], or transposed as [c][tap][o].
static inline Relayout conv2d_weight_relayout(const cuda_ops_conv2d_sizes &s, bool transposed)
{
    const int64_t c = s.in_channels / s.groups, o = s.out_channels, taps = s.kernel_height * s.kernel_width;
    const bool last = conv2d_weight_is_channels_last(s);
    const int64_t o_size = taps * c, tap_size = last ? c : 1, c_size = last ? 1 : taps;
    return transposed ? Relayout{c, taps, o, c_size, tap_size, o_size, o}
                      : Relayout{o, taps, c, o_size, tap_size, c_size, c};
}

// weight = sum over pieces, in order, of partial[piece][o][tap][width], of which the channels of a group count; in the
// order that the sizes say.
cuda_ops_status conv2d_sum_pieces(void *weight, const float *partial, const cuda_ops_conv2d_sizes &sizes, int64_t width,
                                  int64_t pieces, cuda_ops_dtype dtype, cudaStream_t stream);

// Division by a constant of the launch, of numbers below 2^31: (n * multiplier / 2^32 + n) / 2^shift.
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

static inline size_t conv2d_round_to_256(int64_t bytes)
{
    return (size_t)ceil_div(bytes, 256) * 256;
}

// The weight gradient of a 1x1 kernel in TF32 on Hopper: the pixels of input that it meets as [c][place] of float32, in
// rows of so many elements (conv2d/sm90/sm90.cu).
bool conv2d_turns_input(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_turn_input(void *to, const ConvCall &call);
static inline int64_t conv2d_turned_pitch(const cuda_ops_conv2d_sizes &s)
{
    return ceil_div(s.batch * s.out_height * s.out_width, 4) * 4;
}
static inline size_t conv2d_turned_bytes(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_round_to_256(s.in_channels * conv2d_turned_pitch(s) * 4);
}

#endif
