// backward_input with a stride: rows of grad_input with the same remainder modulo the stride meet the same taps of the
// kernel, and so do columns. Each such stride phase is a product of its own, in which no zeros are multiplied.
#ifndef CUDA_OPS_CONV2D_STRIDE_PHASE_H
#define CUDA_OPS_CONV2D_STRIDE_PHASE_H

#include <stdint.h>

#include "cuda_ops/conv2d.h"

// What the phases of one axis, rows or columns, depend on.
struct stride_phase_axis {
    int64_t stride, padding, dilation, kernel, extent; // extent of grad_input
    int64_t source, weight, output;                    // strides in elements of grad_output, weight, grad_input
};

// The strides in elements may be left out where the caller does not address tensors by them.
static inline stride_phase_axis stride_phase_rows(const cuda_ops_conv2d_sizes &s, int64_t source = 0,
                                                  int64_t weight = 0, int64_t output = 0)
{
    return {s.stride_height, s.padding_top, s.dilation_height, s.kernel_height, s.in_height, source, weight, output};
}
static inline stride_phase_axis stride_phase_columns(const cuda_ops_conv2d_sizes &s, int64_t source = 0,
                                                     int64_t weight = 0, int64_t output = 0)
{
    return {s.stride_width, s.padding_left, s.dilation_width, s.kernel_width, s.in_width, source, weight, output};
}

// No more phases than rows, or columns.
static inline int64_t stride_phase_count(const stride_phase_axis &axis)
{
    return axis.stride < axis.extent ? axis.stride : axis.extent;
}

// The taps r = first + j * step, j < count, that reach the rows phase + u * stride of grad_input, from the rows
// start + u - j * back of grad_output.
struct stride_phase_taps {
    int64_t first, step, count, start, back;
};

__host__ __device__ static inline stride_phase_taps taps_of_stride_phase(const stride_phase_axis &axis, int64_t phase)
{
    stride_phase_taps taps = {0, 1, 0, 0, 0};
    for (int64_t r = 0; r < axis.kernel; r++) {
        if ((phase + axis.padding - r * axis.dilation) % axis.stride != 0)
            continue;
        if (taps.count == 1) {
            taps.step = r - taps.first;
            break;
        }
        taps.first = r;
        taps.count = 1;
    }
    if (taps.count == 0)
        return taps;
    if (taps.step * axis.dilation % axis.stride == 0) // there may be more than one
        taps.count = (axis.kernel - 1 - taps.first) / taps.step + 1;
    taps.start = (phase + axis.padding - taps.first * axis.dilation) / axis.stride;
    taps.back = taps.step * axis.dilation / axis.stride;
    return taps;
}

#endif
