// The three products of conv2d as one kind of matrix multiplication, for the kernel of simt.cu: three tensors and three
// axes,
//
//   source [pixel, tap]     weight [out, tap]     output [out, pixel]
//
// of which two tensors are multiplied, and summed over the axis that they share. backward_input is forward with
// grad_output as the source and grad_input as the output.
#ifndef CUDA_OPS_CONV2D_SIMT_PROBLEM_CUH
#define CUDA_OPS_CONV2D_SIMT_PROBLEM_CUH

#include <limits.h>

#include "common/common.cuh"
#include "conv2d/stride_phase.h"

// What an index of one axis adds to an element's offset in a tensor, and to its row and column in the image.
struct __align__(16) coordinate {
    int64_t offset;
    int y, x;
};
// The row and column of indices past the end of an axis: outside of any image whatever is added.
static constexpr int OUT_OF_BOUNDS = INT_MIN / 2;

// An axis enumerates three nested indices: an image or a channel `a`, a row `y` and a column `x`.
struct axis {
    int64_t extent, a_size, y_size, x_size;
    int a_fastest; // a varies fastest; else x does
};

struct axis_index {
    int64_t a, y, x;
};

// The strides of an axis in a tensor, in elements; and its steps in rows and columns of the image.
struct view {
    int64_t base, a, y, x;
    int y_start, y_step, x_start, x_step;
};

enum tensor_name { SOURCE, WEIGHT, OUTPUT };
enum axis_name { OUT, PIXEL, TAP };

struct image_strides {
    int64_t n, c, y, x;
};

struct problem {
    struct axis axes[3];
    struct view views[3][3]; // [tensor_name][axis_name]
    int64_t group_offset[3];
    int height, width; // of the source

    int row, column, inner;                  // axis_name; inner: the summed axis, k
    int left, right, result;                 // tensor_name
    int left_along_inner, right_along_inner; // whether neighbouring threads load neighbours along k
    unsigned int row_tiles, column_tiles, splits, phases;
    int64_t split_extent; // extent of k in one split
    int64_t result_size;  // elements of the result

    // backward_input: the stride phases of rows and of columns, and their numbers.
    struct stride_phase_axis phase_axes[2];
    int64_t phases_y, phases_x;
};

__host__ __device__ static inline axis_index unravel(const axis &a, int64_t index)
{
    axis_index i;
    if (a.a_fastest) {
        i.a = index % a.a_size;
        index /= a.a_size;
        i.x = index % a.x_size;
        i.y = index / a.x_size;
    } else {
        i.x = index % a.x_size;
        index /= a.x_size;
        i.y = index % a.y_size;
        i.a = index / a.y_size;
    }
    return i;
}

__device__ __forceinline__ coordinate coordinate_of(const view &v, const axis_index &i)
{
    coordinate c;
    c.offset = v.base + i.a * v.a + i.y * v.y + i.x * v.x;
    c.y = v.y_start + (int)i.y * v.y_step;
    c.x = v.x_start + (int)i.x * v.x_step;
    return c;
}

// Narrows a backward_input problem to one stride phase.
__host__ __device__ static inline void select_phase(problem &p, int64_t phase)
{
    const int64_t y = phase / p.phases_x, x = phase % p.phases_x;
    const stride_phase_axis &rows = p.phase_axes[0], &columns = p.phase_axes[1];
    const stride_phase_taps taps_y = taps_of_stride_phase(rows, y), taps_x = taps_of_stride_phase(columns, x);
    axis &pixel = p.axes[PIXEL], &tap = p.axes[TAP];
    pixel.y_size = y < rows.extent ? ceil_div(rows.extent - y, rows.stride) : 0;
    pixel.x_size = x < columns.extent ? ceil_div(columns.extent - x, columns.stride) : 0;
    pixel.extent = pixel.a_size * pixel.y_size * pixel.x_size;
    tap.y_size = taps_y.count;
    tap.x_size = taps_x.count;
    tap.extent = tap.a_size * tap.y_size * tap.x_size;

    view &source_pixel = p.views[SOURCE][PIXEL], &source_tap = p.views[SOURCE][TAP];
    source_pixel.base = taps_y.start * rows.source + taps_x.start * columns.source;
    source_pixel.y_start = (int)taps_y.start;
    source_pixel.x_start = (int)taps_x.start;
    source_tap.y = -taps_y.back * rows.source;
    source_tap.x = -taps_x.back * columns.source;
    source_tap.y_step = -(int)taps_y.back;
    source_tap.x_step = -(int)taps_x.back;
    view &weight_tap = p.views[WEIGHT][TAP];
    weight_tap.base = taps_y.first * rows.weight + taps_x.first * columns.weight;
    weight_tap.y = taps_y.step * rows.weight;
    weight_tap.x = taps_x.step * columns.weight;
    p.views[OUTPUT][PIXEL].base = y * rows.output + x * columns.output;
}

static image_strides strides_of(int64_t channels, int64_t height, int64_t width, int channels_last)
{
    image_strides s;
    s.n = channels * height * width;
    s.c = channels_last ? 1 : height * width;
    s.y = channels_last ? width * channels : width;
    s.x = channels_last ? channels : 1;
    return s;
}

static view channel_view(int64_t stride)
{
    view v = {};
    v.a = stride;
    return v;
}

static view image_view(const image_strides &s)
{
    view v = {};
    v.a = s.n;
    v.y = s.y;
    v.x = s.x;
    return v;
}

static axis channel_axis(int64_t channels)
{
    return axis{channels, channels, 1, 1, 0};
}

// Forward and backward_weight.
static problem make_problem(const cuda_ops_conv2d_sizes &s)
{
    const int64_t in_channels = s.in_channels / s.groups, out_channels = s.out_channels / s.groups;
    const image_strides input = strides_of(s.in_channels, s.in_height, s.in_width, s.input_channels_last);
    const image_strides output = strides_of(s.out_channels, s.out_height, s.out_width, s.output_channels_last);
    const image_strides weight = strides_of(in_channels, s.kernel_height, s.kernel_width, s.weight_channels_last);
    problem p = {};
    p.axes[OUT] = channel_axis(out_channels);
    p.axes[PIXEL] = axis{s.batch * s.out_height * s.out_width, s.batch, s.out_height, s.out_width, 0};
    p.axes[TAP] = axis{in_channels * s.kernel_height * s.kernel_width, in_channels, s.kernel_height, s.kernel_width,
                       s.input_channels_last};

    view &source_pixel = p.views[SOURCE][PIXEL], &source_tap = p.views[SOURCE][TAP];
    source_pixel.base = -s.padding_top * input.y - s.padding_left * input.x;
    source_pixel.a = input.n;
    source_pixel.y = s.stride_height * input.y;
    source_pixel.x = s.stride_width * input.x;
    source_pixel.y_start = -(int)s.padding_top;
    source_pixel.x_start = -(int)s.padding_left;
    source_pixel.y_step = (int)s.stride_height;
    source_pixel.x_step = (int)s.stride_width;
    source_tap.a = input.c;
    source_tap.y = s.dilation_height * input.y;
    source_tap.x = s.dilation_width * input.x;
    source_tap.y_step = (int)s.dilation_height;
    source_tap.x_step = (int)s.dilation_width;
    p.views[WEIGHT][OUT] = channel_view(weight.n);
    p.views[WEIGHT][TAP] = image_view(weight);
    p.views[WEIGHT][TAP].a = weight.c;
    p.views[OUTPUT][OUT] = channel_view(output.c);
    p.views[OUTPUT][PIXEL] = image_view(output);

    p.group_offset[SOURCE] = in_channels * input.c;
    p.group_offset[WEIGHT] = out_channels * weight.n;
    p.group_offset[OUTPUT] = out_channels * output.c;
    p.height = (int)s.in_height;
    p.width = (int)s.in_width;
    p.splits = p.phases = 1;
    p.split_extent = INT64_MAX / 2;
    return p;
}

// backward_input: grad_output is the source, grad_input the output, and the weight's two channels are swapped.
static problem make_input_problem(const cuda_ops_conv2d_sizes &s)
{
    const int64_t in_channels = s.in_channels / s.groups, out_channels = s.out_channels / s.groups;
    const image_strides input = strides_of(s.in_channels, s.in_height, s.in_width, s.input_channels_last);
    const image_strides output = strides_of(s.out_channels, s.out_height, s.out_width, s.output_channels_last);
    const image_strides weight = strides_of(in_channels, s.kernel_height, s.kernel_width, s.weight_channels_last);
    problem p = {};
    p.phase_axes[0] = stride_phase_rows(s, output.y, weight.y, input.y);
    p.phase_axes[1] = stride_phase_columns(s, output.x, weight.x, input.x);
    p.axes[OUT] = channel_axis(in_channels);
    p.axes[PIXEL].a_size = s.batch;
    p.axes[TAP].a_size = out_channels;
    p.axes[TAP].a_fastest = s.output_channels_last;

    p.views[SOURCE][PIXEL] = image_view(output);
    p.views[SOURCE][PIXEL].y_step = p.views[SOURCE][PIXEL].x_step = 1;
    p.views[SOURCE][TAP] = channel_view(output.c);
    p.views[WEIGHT][OUT] = channel_view(weight.c);
    p.views[WEIGHT][TAP] = channel_view(weight.n);
    p.views[OUTPUT][OUT] = channel_view(input.c);
    p.views[OUTPUT][PIXEL] = image_view(input);
    p.views[OUTPUT][PIXEL].y = s.stride_height * input.y;
    p.views[OUTPUT][PIXEL].x = s.stride_width * input.x;

    p.group_offset[SOURCE] = out_channels * output.c;
    p.group_offset[WEIGHT] = out_channels * weight.n;
    p.group_offset[OUTPUT] = in_channels * input.c;
    p.height = (int)s.out_height;
    p.width = (int)s.out_width;
    p.splits = 1;
    p.split_extent = INT64_MAX / 2;
    p.phases_y = stride_phase_count(p.phase_axes[0]);
    p.phases_x = stride_phase_count(p.phase_axes[1]);
    // Phase 0 has the most pixels: tiles are counted for it.
    select_phase(p, 0);
    return p;
}

// Columns are pixels where a channel's pixels are contiguous in the result, else channels.
static void multiply_weight_and_source(problem &p, bool source_channels_last, bool result_channels_last,
                                       bool weight_along_taps)
{
    p.inner = TAP;
    p.result = OUTPUT;
    p.row = result_channels_last ? PIXEL : OUT;
    p.column = result_channels_last ? OUT : PIXEL;
    p.left = result_channels_last ? SOURCE : WEIGHT;
    p.right = result_channels_last ? WEIGHT : SOURCE;
    p.left_along_inner = result_channels_last ? source_channels_last : weight_along_taps;
    p.right_along_inner = result_channels_last ? weight_along_taps : source_channels_last;
}

#endif
