// TMA im2col descriptors of conv2d's operands, for the paths that are Hopper's alone.
#ifndef CUDA_OPS_CONV2D_TMA_IM2COL_H
#define CUDA_OPS_CONV2D_TMA_IM2COL_H

#include "common/tensor_map.h"
#include "conv2d/relayout.h"

// Forward and backward_weight: for each output pixel the input pixel of the first tap.
static inline PixelGrid conv2d_input_grid(const cuda_ops_conv2d_sizes &s)
{
    return {s.batch,     s.in_height,    s.in_width,      s.in_channels,   s.out_height,
            s.out_width, -s.padding_top, -s.padding_left, s.stride_height, s.stride_width};
}

// backward_input of stride 1: for each pixel of grad_input the pixel of grad_output of the last tap, which is the first
// of the mirrored kernel.
static inline PixelGrid conv2d_output_grid(const cuda_ops_conv2d_sizes &s)
{
    return {s.batch,
            s.out_height,
            s.out_width,
            s.out_channels,
            s.in_height,
            s.in_width,
            s.padding_top - (s.kernel_height - 1) * s.dilation_height,
            s.padding_left - (s.kernel_width - 1) * s.dilation_width,
            1,
            1};
}

#endif
