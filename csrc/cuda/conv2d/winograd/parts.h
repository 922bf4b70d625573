// Winograd's transforms as launches of their own (images.cu, weight.cu), and the plan that winograd.cu makes of a call.
//
// F(TILE x TILE, 3 x 3) has TILE + 2 points in each axis, and a product at each point of both for a channel of a tile. In
// all three passes `source` is the image whose windows overlap (input, or grad_output for the gradient of input), with S
// channels, and `target` the one that tiles cut up without overlap, with R channels. Numbers of tiles and of channels
// are padded to multiples of four by zeros, so that the GEMM copies vectors.
#ifndef CUDA_OPS_CONV2D_WINOGRAD_PARTS_H
#define CUDA_OPS_CONV2D_WINOGRAD_PARTS_H

#include "common/fast_division.cuh"
#include "conv2d/paths.h"

// The tiles of one chunk of an image tensor, and where their transforms lie: transformed[point][tile][channel] for
// images that are channels_last, else [point][channel][tile].
struct WinogradTiles {
    float *transformed;
    int64_t n_stride, c_stride, y_stride, x_stride; // of the images, in elements
    int height, width;
    int first_y, first_x; // of the first tile's window: the negative padding
    int channels, padded_channels;
    int tiles, padded_tiles; // in the chunk, of this and the next images
    int first_row;           // the chunk's first row of tiles, of those of all images
    Divider columns, rows;   // tiles in a row, and rows of tiles in an image
    uint32_t columns_value, rows_value;
    Divider fastest; // of the padded channels or tiles, whichever lie side by side
    bool channels_last;
};

// transformed = B^T window B, of windows of tile + 2 rows and columns.
cuda_ops_status conv2d_winograd_transform_source(const WinogradTiles &tiles, const float *source, int tile,
                                                 cudaStream_t stream);
// transformed = A grad A^T, of tiles of grad_output.
cuda_ops_status conv2d_winograd_transform_grad(const WinogradTiles &tiles, const float *grad_output, int tile,
                                               cudaStream_t stream);
// target = A^T transformed A + bias.
cuda_ops_status conv2d_winograd_transform_target(float *target, const WinogradTiles &tiles, const float *bias, int tile,
                                                 cudaStream_t stream);

// transformed[point][s][r] = G g G^T of the 3 x 3 kernels: for forward s is the input channel, else it is the output
// channel, and the kernel is rotated. With groups the input channel is one of a group, and the output channels are
// those of all, here and below.
cuda_ops_status conv2d_winograd_transform_weight(float *transformed, const ConvCall &call, int tile);
// grad_weight = G^T transformed G, or is increased by it; transformed[point][input channel][output channel].
cuda_ops_status conv2d_winograd_transform_grad_weight(float *grad_weight, const float *transformed,
                                                      const ConvCall &call, int tile, bool add);

static inline int64_t conv2d_winograd_padded(int64_t count)
{
    return (count + 3) / 4 * 4;
}

#endif
