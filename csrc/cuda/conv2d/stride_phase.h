// backward_input with a stride: the rows of grad_input with the same remainder modulo the stride meet the same taps of
// the kernel, and so do columns; each such residue is a product of its own.
#ifndef CUDA_OPS_CONV2D_STRIDE_PHASE_H
#define CUDA_OPS_CONV2D_STRIDE_PHASE_H

#include <stdint.h>

#include "cuda_ops/conv2d.h"

// Rows, or columns.
struct residue_line {
    int64_t stride, padding, dilation, kernel, extent; // extent of grad_input
    int64_t source, weight, output;                    // strides in elements
};

// Those of grad_input; the strides are for kernels that walk by them.
static inline residue_line residue_rows(const cuda_ops_conv2d_sizes &s, int64_t source = 0, int64_t weight = 0,
                                        int64_t output = 0)
{
    return {s.stride_height, s.padding_top, s.dilation_height, s.kernel_height, s.in_height, source, weight, output};
}
static inline residue_line residue_columns(const cuda_ops_conv2d_sizes &s, int64_t source = 0, int64_t weight = 0,
                                           int64_t output = 0)
{
    return {s.stride_width, s.padding_left, s.dilation_width, s.kernel_width, s.in_width, source, weight, output};
}

// No more than there are rows, or columns.
static inline int64_t residues_of(const residue_line &line)
{
    return line.stride < line.extent ? line.stride : line.extent;
}

// The taps r = first + j * step, j < count, that reach the rows `residue + u * stride` of grad_input, from the rows
// start + u - j * back of grad_output.
struct residue_taps {
    int64_t first, step, count, start, back;
};

__host__ __device__ static inline residue_taps taps_of_residue(const residue_line &line, int64_t residue)
{
    residue_taps taps = {0, 1, 0, 0, 0};
    for (int64_t r = 0; r < line.kernel; r++) {
        if ((residue + line.padding - r * line.dilation) % line.stride != 0)
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
    if (taps.step * line.dilation % line.stride == 0) // there may be more than one
        taps.count = (line.kernel - 1 - taps.first) / taps.step + 1;
    taps.start = (residue + line.padding - taps.first * line.dilation) / line.stride;
    taps.back = taps.step * line.dilation / line.stride;
    return taps;
}

#endif
