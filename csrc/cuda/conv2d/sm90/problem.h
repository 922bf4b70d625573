// A product of conv2d's sm90 path, its plan and its launchers, for sm90.cu, which makes them, and for the files of
// instances, which run them.
#ifndef CUDA_OPS_CONV2D_SM90_PROBLEM_H
#define CUDA_OPS_CONV2D_SM90_PROBLEM_H

#include "conv2d/relayout.h"
#include "conv2d/stride_phase.h"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// A product as the kernel sees it. `source` is the tensor that TMA gathers by im2col: the pixels of `grid` (see
// PixelGrid), and their taps, which are (0 .. kernel - 1) * dilation further on. Forward and backward_input have a row
// of the matrix product per pixel, backward_weight has columns of (tap, channel) and sums over pixels. Each of the groups
// is a product of its own; channels and columns are those of one.
struct ConvProduct {
    int64_t groups, first_group, group_count; // all, and those of the launch
    PixelGrid grid;
    const void *source;
    int64_t pixel_stride; // of source, in elements
    int64_t kernel_height, kernel_width, dilation_height, dilation_width;
    int mirrored; // backward_input: tap 0 of the weight is the last tap of the grid

    // `other` is the operand that is not gathered.
    //   forward, backward_input   the weight as [group][columns][taps][channels]; where `weight_by_channel`, as
    //                             [group][channels][taps][columns], rows of columns `other_pitch` apart; where
    //                             `groups_inside`, as [columns][taps][group][channels]; result is
    //                             [pixels][group][columns]
    //   backward_weight           grad_output, of 16 bits as [pixels][group][columns], of TF32 as
    //                             [group][columns][other_pitch]; result is [group][columns][taps][channels], or float
    //                             splits of it with channels padded to the tile
    const void *other;
    int64_t columns, other_pitch;
    int weight_by_channel, groups_inside;
    void *result;
    int result_is_float;      // backward_weight: splits, or padded channels
    int weight_channels_last; // backward_weight by a cluster a tile, which stores either format
    const void *bias;
    cuda_ops_dtype dtype;
    cuda_ops_gemm_activation activation; // forward: of the sums with their bias
    cudaStream_t stream;

    // backward_input with a stride: the product of one stride phase (conv2d/stride_phase.h), whose pixels are every
    // stride-th of the result.
    bool strided;
    stride_phase_taps taps_y, taps_x;
    int64_t result_height, result_width, result_y, result_x, stride_y, stride_x;
};

// Of one launch. A group's map of grad_output or input ends where the group does, if its channels do not fill stages:
// the next group's must not be multiplied even by zeros, since they may be NaN.
static constexpr int MOST_PHASES_TOGETHER = 4, MOST_MAPS = 16;

// A row of the table of tiles, the splits of k that another kernel adds up, how many rows of tiles are scheduled as one
// band, and the blocks of a cluster that share a tile.
struct ConvPlan {
    int tile, splits, group, sharing;
    double time; // expected, in microseconds
};

// Launchers, in a file for each dtype and product. TF32's forward is also its backward_input, of a transposed weight.
cuda_ops_status conv2d_sm90_forward_bfloat16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_input_bfloat16(const ConvProduct &product, ConvDevice device,
                                                    const ConvPlan &plan);
// Stride phases, MOST_PHASES_TOGETHER at most, with the longest sums first.
cuda_ops_status conv2d_sm90_backward_input_strided_bfloat16(const ConvProduct *products, int count, ConvDevice device,
                                                            const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_input_strided_float16(const ConvProduct *products, int count, ConvDevice device,
                                                           const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_input_strided_tf32(const ConvProduct *products, int count, ConvDevice device,
                                                        const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_weight_bfloat16(const ConvProduct &product, ConvDevice device,
                                                     const ConvPlan &plan);
cuda_ops_status conv2d_sm90_forward_float16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_input_float16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_weight_float16(const ConvProduct &product, ConvDevice device,
                                                    const ConvPlan &plan);
cuda_ops_status conv2d_sm90_forward_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_weight_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_sm90_backward_weight_stride1_tf32(const ConvProduct &product, ConvDevice device,
                                                         const ConvPlan &plan);

static inline int64_t conv2d_taps(const ConvProduct &p)
{
    return p.kernel_height * p.kernel_width;
}

static inline int64_t conv2d_pixels(const PixelGrid &g)
{
    return g.images * g.grid_height * g.grid_width;
}

// Whether each group has maps of its own of what forward and backward_input gather.
static inline bool conv2d_has_group_maps(const ConvProduct &p)
{
    return p.groups > 1 && p.grid.channels % (SWIZZLE_ROW / (p.dtype == CUDA_OPS_FLOAT32 ? 4 : 2)) != 0;
}

#endif
