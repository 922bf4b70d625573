// conv2d for few channels on Hopper's tensor cores, stride 1, channels_last:
//
//   forward          output[pixel][o] = sum over (tap, c) of input[pixel + tap][c] * weight[o][tap][c]
//   backward_input   the same over grad_output, with a mirrored kernel
//
// A halo tile serves all taps: pixels are numbered through the padded images, so that a tap is a constant number of
// rows further on, and one TMA im2col copy of a tile with its halo is, read from another row, wgmma's operand of every
// tap. Products of pixels that are padding are thrown away. 64 output channels' weights stay in shared memory; they are
// wgmma's A, and 128 to 256 pixels its B, since the other way round shared memory's bandwidth is the bound. Persistent
// blocks of a producer warp and two warpgroups that alternate tiles, one's epilogue under the other's products. Bound
// by wgmma and TMA; 2.0 to 2.5 times cuDNN's forward on an H200 (benchmarks/notes/conv2d.md).
#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "conv2d/sm90_halo/kernel.cuh"
#include "conv2d/tma_im2col.h"
#include "ptx/wgmma.cuh"

static constexpr int SHARED_BYTES = 232448; // what one block may have of an SM's

struct Steps {
    HaloProduct product;
    int row_bytes;
    bool by_channel, relayouts;
};

static int element_size(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

// Sizes must be within the limits that conv2d_sm90_halo_supports checks. No stages: shared memory is too small.
static Steps steps_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, tf32 = call.dtype == CUDA_OPS_FLOAT32;
    const int element = element_size(call);
    Steps steps = {};
    HaloProduct &p = steps.product;
    p.grid = forward ? conv2d_input_grid(s) : conv2d_output_grid(s);
    p.grid.grid_height += (s.kernel_height - 1) * s.dilation_height;
    p.grid.grid_width += (s.kernel_width - 1) * s.dilation_width;
    p.source = forward ? call.input : call.output;
    p.weight = call.weight;
    p.dtype = call.dtype;
    p.stream = call.stream;
    const int64_t channels = p.grid.channels;
    steps.row_bytes = channels * element <= 64 && !tf32 ? 64 : 128;
    steps.by_channel = !forward && !tf32;
    steps.relayouts = !conv2d_weight_is_ready(call) || (!forward && tf32);

    HaloWork &w = p.work;
    w.result = call.result;
    w.bias = call.bias;
    w.activation = conv2d_gemm_activation(call);
    w.images = (int)s.batch;
    w.grid_height = (int)p.grid.grid_height, w.grid_width = (int)p.grid.grid_width;
    w.start_y = (int)p.grid.start_y, w.start_x = (int)p.grid.start_x;
    w.height = (int)(forward ? s.out_height : s.in_height), w.width = (int)(forward ? s.out_width : s.in_width);
    w.columns = (int)(forward ? s.out_channels : s.in_channels);
    // 32 columns where there are no more, and their weights' half of the memory is not needed for a pixel's short rows.
    p.tile_columns = w.columns <= 32 && steps.row_bytes == 128 ? 32 : 64;
    w.column_tiles = (int)ceil_div(w.columns, p.tile_columns);
    w.kernel_height = (int)s.kernel_height, w.kernel_width = (int)s.kernel_width;
    w.dilation_y = (int)s.dilation_height, w.dilation_x = (int)s.dilation_width;
    w.mirrored = !forward;
    w.chunks = (int)ceil_div(channels * element, steps.row_bytes);
    const int pixels = conv2d_halo_tile_pixels(element, steps.row_bytes);
    const int64_t halo =
        (s.kernel_height - 1) * s.dilation_height * w.grid_width + (s.kernel_width - 1) * s.dilation_width;
    const int64_t rows = ceil_div(pixels + halo, 8) * 8;
    const int64_t stage = ceil_div(rows * steps.row_bytes, SWIZZLE_ATOM) * SWIZZLE_ATOM;
    const int64_t fixed = SWIZZLE_ATOM +
                          w.chunks * s.kernel_height * s.kernel_width * p.tile_columns * steps.row_bytes +
                          (tf32 ? 0 : pixels * 128) + 256;
    const int64_t stages = fixed < SHARED_BYTES && rows <= 1024 ? (SHARED_BYTES - fixed) / stage : 0;
    w.rows = (int)rows;
    w.stage_bytes = (int)stage;
    w.stages = (int)(stages < 6 ? stages : 6);
    w.by_width = divider_by((uint32_t)w.grid_width);
    w.by_height = divider_by((uint32_t)w.grid_height);
    w.tiles = (int)ceil_div(s.batch * p.grid.grid_height * p.grid.grid_width, pixels);
    return steps;
}

Answer conv2d_sm90_halo_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    const bool is_16_bit = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    const int element = tf32 ? 4 : 2;
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return no("does not make the gradient of weight");
    if (!tf32 && !is_16_bit)
        return CONV_NEEDS_TENSOR_CORES;
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    if (s.stride_height != 1 || s.stride_width != 1)
        return no("takes stride 1");
    if (!conv2d_images_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    if (s.in_channels > 4096 || s.out_channels > 4096 || s.kernel_height * s.kernel_width > 64)
        return CONV_IS_LARGE;
    // TMA copies channels, and the epilogue stores 16-bit results, in whole 16-byte vectors.
    if (s.in_channels * element % 16 != 0 || (!(forward && tf32) && s.out_channels * element % 16 != 0))
        return CONV_NEEDS_VECTORS;
    PixelGrid grid = forward ? conv2d_input_grid(s) : conv2d_output_grid(s);
    grid.grid_height += (s.kernel_height - 1) * s.dilation_height;
    grid.grid_width += (s.kernel_width - 1) * s.dilation_width;
    if (!is_aligned_16(call.weight) || !is_aligned_16(call.result))
        return NEEDS_ALIGNMENT;
    if (!pixel_map_possible(grid, forward ? call.input : call.output, element))
        return no("its padding or sizes have no TMA im2col descriptor, or images are not aligned");
    const HaloWork work = steps_of(call).product.work;
    return work.stages >= 2 && work.column_tiles <= device.multiprocessors
               ? YES
               : no("a tile with its halo, and the weights, do not fit into shared memory");
}

// By least squares over 21 products on an H100: cycles of wgmma a microsecond, and how much of a tile's products its
// time is; microseconds of a tile beside them, of a call, and to load 1 KB of the weight, which the first tile awaits.
static constexpr double CYCLES = 1755, PRODUCTS = 0.92, TILE = 1.2, START = 1.5, WEIGHT_KB = 0.0137;
static constexpr double AS_FAST = 1.05; // of two that take as long this one, which loads each pixel once

double conv2d_sm90_halo_microseconds(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const Steps steps = steps_of(call);
    const HaloWork &w = steps.product.work;
    const double rows = (double)(w.chunks * s.kernel_height * s.kernel_width); // of the weight's memory, a column each
    const double products =
        rows * steps.row_bytes / 32 * conv2d_halo_tile_pixels(element_size(call), steps.row_bytes) / 2;
    const double rounds = (double)ceil_div(w.tiles, device.multiprocessors / w.column_tiles);
    // As conv2d_sm90_microseconds has it, so that both are compared without.
    const double relayout = steps.relayouts ? 2 + 2 * (double)conv2d_sm90_halo_workspace(call, device) / 1.5e6 : 0;
    return relayout + START + WEIGHT_KB * rows * steps.product.tile_columns * steps.row_bytes / 1024 +
           rounds * (TILE + PRODUCTS * products / CYCLES);
}

// Both times are expected ones. What counts is how many of its products are of the halo, of columns past a tile, and,
// with few channels, how few of them fill a slice of the sm90 path's k, which is of one tap.
Answer conv2d_sm90_halo_is_fast(const ConvCall &call, ConvDevice device)
{
    return !conv2d_sm90_supports(call, device) ||
                   conv2d_sm90_halo_microseconds(call, device) < AS_FAST * conv2d_sm90_microseconds(call, device)
               ? YES
               : no("the sm90 path is expected to be faster");
}

size_t conv2d_sm90_halo_workspace(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    return steps_of(call).relayouts ? conv2d_round_to_256(s.out_channels * s.in_channels * s.kernel_height *
                                                          s.kernel_width * element_size(call))
                                    : 0;
}

cuda_ops_status conv2d_sm90_halo(const ConvCall &call, ConvDevice device)
{
    Steps steps = steps_of(call);
    HaloProduct &p = steps.product;
    if (steps.relayouts) {
        const bool transposed = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && call.dtype == CUDA_OPS_FLOAT32;
        const cuda_ops_status status = conv2d_relayout(
            call.workspace, call.weight, conv2d_weight_relayout(call, transposed), call.dtype, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        p.weight = call.workspace;
    }
    switch (call.dtype) {
    case CUDA_OPS_BFLOAT16:
        return conv2d_sm90_halo_bfloat16(p, device, steps.row_bytes, steps.by_channel);
    case CUDA_OPS_FLOAT16:
        return conv2d_sm90_halo_float16(p, device, steps.row_bytes, steps.by_channel);
    case CUDA_OPS_FLOAT32:
        return conv2d_sm90_halo_tf32(p, device);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
