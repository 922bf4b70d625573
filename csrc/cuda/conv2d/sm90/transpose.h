// Images with pixels contiguous per channel, for products in TF32: wgmma reads TF32 from shared memory only where it is
// contiguous along k (K-major), and backward_weight sums over pixels.
#ifndef CUDA_OPS_CONV2D_SM90_TRANSPOSE_H
#define CUDA_OPS_CONV2D_SM90_TRANSPOSE_H

#include "conv2d/relayout.h"

// to[copy][channel][pixel] = from[pixel + first_shift + copy * shift][channel], rows of `to` `pitch` elements apart.
// Pixels are numbered in a grid at least as large as the images, and are zero outside of them. Channels are a multiple
// of 4, and the copies' shifts together at most CONV2D_MOST_SHIFT.
struct Transpose {
    int64_t images, height, width, channels;
    int64_t image_stride, row_stride, pixel_stride; // in elements of `from`
    int64_t grid_height, grid_width, pitch;
    int copies, first_shift, shift;
};
static constexpr int CONV2D_MOST_SHIFT = 32;

// One copy of dense channels_last images; the pitch is the caller's to set.
static inline Transpose conv2d_transpose_of(int64_t images, int64_t height, int64_t width, int64_t channels)
{
    const int64_t row = width * channels;
    return {images, height, width, channels, height * row, row, channels, height, width, 0, 1, 0, 0};
}
cuda_ops_status conv2d_transpose(void *to, const void *from, const Transpose &transpose, cudaStream_t stream);

// For the weight gradient of a 1x1 kernel in TF32 (gemm_1x1.cu): the pixels of input that it reads, as [c][pixel].
bool conv2d_transposes_input(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_transpose_input(void *to, const ConvCall &call);
static inline int64_t conv2d_transposed_input_pitch(const cuda_ops_conv2d_sizes &s)
{
    return ceil_div(s.batch * s.out_height * s.out_width, 4) * 4;
}
static inline size_t conv2d_transposed_input_bytes(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_round_to_256(s.in_channels * conv2d_transposed_input_pitch(s) * 4);
}

#endif
