// Pictures as the copy engine walks over them, for the paths of conv2d that are Hopper's alone.
#ifndef CUDA_OPS_CONV2D_TMA_IM2COL_H
#define CUDA_OPS_CONV2D_TMA_IM2COL_H

#include "common/tensor_map.h"
#include "conv2d/relayout.h"

// Where the first tap of each output lies in the input.
static inline PixelGrid conv2d_input_grid(const cuda_ops_conv2d_sizes &s)
{
    return {s.batch,     s.in_height,    s.in_width,      s.in_channels,   s.out_height,
            s.out_width, -s.padding_top, -s.padding_left, s.stride_height, s.stride_width};
}

// Where the last tap (the first of the mirrored kernel) of each element of grad_input lies in grad_output, stride 1.
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
