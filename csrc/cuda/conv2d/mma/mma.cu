// conv2d on the tensor cores from compute capability 8.0 on, by mma.sync: implicit GEMMs of channels_last tensors in
// bf16, fp16 and TF32. On Hopper it takes what its own paths do not: groups of few channels, and kernels and strides
// beyond TMA's limits.
//
//   forward           output[pixel][o]   = sum over (tap, c) of input[pixel + tap][c] * weight[o][tap][c]
//   backward_input    the same over grad_output with the weight as [c][tap][o], one product per stride phase
//   backward_weight   weight[o][tap][c]  = sum over pixels of grad_output[pixel][o] * input[pixel + tap][c], split-K
//
// A block of 256 threads computes a tile of 128 x 128 or 128 x 64, a warp 64 x 32 or 32 x 32 of it. cp.async fills a
// ring of four stages, 64 bytes of k deep, and writes zeros for the padding. k = (tap, channel) has no gaps: each
// thread counts its own coordinate. Bound by loading fragments from shared memory and by address arithmetic: 0.16 to
// 0.78 of cuDNN's wgmma kernels on an H200, 2.3 to 8.6 times the simt path (benchmarks/notes/conv2d.md).
#include <math.h>

#include "common/aligned_vector.cuh"
#include "conv2d/mma/kernel.cuh"
#include "conv2d/split_k.h"

static constexpr int64_t SMALLEST_SPLIT = 256, MOST_SPLITS = 256, MOST_BLOCKS = 65535; // of a grid's y or z

static int64_t element_size(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

static int64_t at_most(int64_t value, int64_t most)
{
    return value < most ? value : most;
}

// The tile's width or height: the smaller where the larger would be half empty or leave multiprocessors idle.
static int tile_of(int64_t extent, int64_t other_tiles, ConvDevice device)
{
    return extent <= 64 || ceil_div(extent, 128) * other_tiles < device.multiprocessors ? 64 : 128;
}

struct WeightPlan {
    int tile;
    int64_t tiles_m, tiles_n, splits, chunk;
    bool sums_splits;
};

static WeightPlan weight_plan(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t outs = s.out_channels / s.groups, pixels = s.batch * s.out_height * s.out_width;
    const int64_t depth = 64 / element_size(call);
    WeightPlan plan = {};
    plan.tile = outs <= 64 ? 64 : 128;
    plan.tiles_m = ceil_div(outs, plan.tile);
    plan.tiles_n = ceil_div(s.kernel_height * s.kernel_width * (s.in_channels / s.groups), 128);
    const int64_t wanted = 2 * device.multiprocessors / (plan.tiles_m * plan.tiles_n * s.groups);
    int64_t splits = at_most(at_most(wanted, pixels / SMALLEST_SPLIT), MOST_SPLITS);
    splits = splits < 1 ? 1 : splits;
    plan.chunk = ceil_div(ceil_div(pixels, splits), depth) * depth;
    plan.splits = ceil_div(pixels, plan.chunk);
    plan.sums_splits = plan.splits > 1 || !conv2d_weight_is_ready(call);
    return plan;
}

// Whether the weight is copied to another order first.
static bool relayouts(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ||
           (call.pass == CUDA_OPS_CONV2D_FORWARD && !conv2d_weight_is_ready(call));
}

Answer conv2d_mma_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    const bool is_16_bit = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    const int64_t most = INT32_MAX - 1024, taps = s.kernel_height * s.kernel_width, element = tf32 ? 4 : 2;
    if (device.capability < 80)
        return NEEDS_80;
    if (!tf32 && !is_16_bit)
        return CONV_NEEDS_TENSOR_CORES;
    if (!conv2d_images_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    if (s.groups > MOST_BLOCKS)
        return CONV_IS_LARGE;
    const int64_t channels = s.in_channels / s.groups, outs = s.out_channels / s.groups;
    if (s.in_channels * taps > most || s.out_channels * taps > most || s.in_channels > most / s.out_channels ||
        s.batch * s.in_height > most / s.in_width || s.batch * s.out_height > most / s.out_width)
        return CONV_IS_LARGE;
    // cp.async copies 16-byte vectors, each of one pixel and one group.
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT, forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    if ((!input && channels * element % 16 != 0) || (!forward && outs * element % 16 != 0))
        return CONV_NEEDS_GROUPS_OF_VECTORS;
    if (input && stride_phase_count(stride_phase_rows(s)) * stride_phase_count(stride_phase_columns(s)) > MOST_BLOCKS)
        return CONV_IS_LARGE;
    const void *const other = forward ? call.weight : call.output;
    return is_aligned_16(input ? call.output : call.input) && is_aligned_16(other) && is_aligned_16(call.result)
               ? YES
               : NEEDS_ALIGNMENT;
}

size_t conv2d_mma_workspace(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t weight = s.out_channels * (s.in_channels / s.groups) * s.kernel_height * s.kernel_width;
    if (call.pass != CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return relayouts(call) ? conv2d_round_to_256(weight * element_size(call)) : 0;
    const WeightPlan plan = weight_plan(call, device);
    return plan.sums_splits ? conv2d_round_to_256(plan.splits * weight * 4) : 0;
}

static cuda_ops_status backward_weight(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const WeightPlan plan = weight_plan(call, device);
    MmaBackwardWeight work = {};
    work.grad_output = call.output, work.source = call.input;
    work.result = plan.sums_splits ? call.workspace : call.result;
    work.is_float = plan.sums_splits;
    work.grad_pixel = s.out_channels, work.source_pixel = s.in_channels;
    work.height = (int)s.in_height, work.width = (int)s.in_width;
    work.start_y = -(int)s.padding_top, work.start_x = -(int)s.padding_left;
    work.step_y = (int)s.stride_height, work.step_x = (int)s.stride_width;
    work.dilation_y = (int)s.dilation_height, work.dilation_x = (int)s.dilation_width;
    work.outs = (int)(s.out_channels / s.groups), work.channels = (int)(s.in_channels / s.groups);
    work.taps = (int)(s.kernel_height * s.kernel_width), work.kernel_width = (int)s.kernel_width;
    work.pixels = (int)(s.batch * s.out_height * s.out_width), work.chunk = (int)plan.chunk;
    work.grid_height = (int)s.out_height, work.grid_width = (int)s.out_width;
    work.by_width = divider_by((uint32_t)s.out_width), work.by_height = divider_by((uint32_t)s.out_height);
    work.tiles_n = (int)plan.tiles_n;
    const dim3 grid((unsigned int)(plan.tiles_m * plan.tiles_n), (unsigned int)plan.splits, (unsigned int)s.groups);
    const cuda_ops_status status = conv2d_mma_backward_weight(work, plan.tile, grid, call.dtype, call.stream);
    if (status != CUDA_OPS_SUCCESS || !plan.sums_splits)
        return status;
    return conv2d_sum_weight_splits(call, (const float *)call.workspace, work.channels, plan.splits);
}

cuda_ops_status conv2d_mma(const ConvCall &call, ConvDevice device)
{
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return backward_weight(call, device);
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    const int64_t taps = s.kernel_height * s.kernel_width, channels = s.in_channels / s.groups;
    const int64_t outs = s.out_channels / s.groups;
    MmaForward work = {};
    work.source = forward ? call.input : call.output;
    work.weight = call.weight, work.bias = call.bias, work.result = call.result;
    work.activation = conv2d_gemm_activation(call);
    if (relayouts(call)) {
        const cuda_ops_status status = conv2d_relayout(call.workspace, call.weight,
                                                       conv2d_weight_relayout(call, !forward), call.dtype, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        work.weight = call.workspace;
    }
    work.images = (int)s.batch;
    work.kernel_width = (int)s.kernel_width;
    int64_t pixels, phase_count = 1;
    if (forward) {
        work.source_pixel = s.in_channels, work.result_pixel = s.out_channels;
        work.weight_row = taps * channels, work.weight_tap = channels, work.weight_group = outs * taps * channels;
        work.height = (int)s.in_height, work.width = (int)s.in_width;
        work.result_height = (int)s.out_height, work.result_width = (int)s.out_width;
        work.channels = (int)channels, work.columns = (int)outs;
        work.grid = {work.result_height,
                     work.result_width,
                     -(int)s.padding_top,
                     -(int)s.padding_left,
                     (int)s.stride_height,
                     (int)s.stride_width,
                     (int)s.kernel_height,
                     (int)s.kernel_width,
                     (int)s.dilation_height,
                     (int)s.dilation_width,
                     0,
                     0,
                     1,
                     1,
                     0,
                     0,
                     1,
                     1};
        pixels = s.batch * s.out_height * s.out_width;
    } else {
        work.source_pixel = s.out_channels, work.result_pixel = s.in_channels;
        work.weight_row = taps * s.out_channels, work.weight_tap = s.out_channels, work.weight_group = outs;
        work.height = (int)s.out_height, work.width = (int)s.out_width;
        work.result_height = (int)s.in_height, work.result_width = (int)s.in_width;
        work.channels = (int)outs, work.columns = (int)channels;
        work.by_phases = true;
        work.phase_axes[0] = stride_phase_rows(s);
        work.phase_axes[1] = stride_phase_columns(s);
        work.phases_x = (int)stride_phase_count(work.phase_axes[1]);
        phase_count = work.phases_x * stride_phase_count(work.phase_axes[0]);
        pixels = s.batch * ceil_div(s.in_height, s.stride_height) * ceil_div(s.in_width, s.stride_width);
    }
    const int64_t tiles_m = ceil_div(pixels, 128);
    const int tile = tile_of(work.columns, tiles_m * phase_count * s.groups, device);
    work.tiles_n = (int)ceil_div(work.columns, tile);
    if (tiles_m * work.tiles_n > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const dim3 grid((unsigned int)(tiles_m * work.tiles_n), (unsigned int)phase_count, (unsigned int)s.groups);
    return conv2d_mma_forward(work, tile, grid, call.dtype, call.stream);
}

double conv2d_mma_microseconds(const ConvCall &call, ConvDevice device)
{
    // On an H200, of a block with another one on its SM: 1024 of k in 16 bits, and prologue and epilogue; and of the
    // kernels around the product to start, and bytes in one.
    struct Times {
        double sum, rest;
    };
    constexpr Times WIDE = {33, 4}, NARROW = {21, 3.5};
    constexpr double START = 2, RELAYOUT_RATE = 1.5e6, SUM_RATE = 3e6;
    constexpr double UNEVEN = 1.35; // stride phases have sums of different lengths, and the longest are waited for
    if (device.multiprocessors < 1)
        return 0;
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t channels = s.in_channels / s.groups, outs = s.out_channels / s.groups;
    const int64_t taps = s.kernel_height * s.kernel_width, weight = s.out_channels * channels * taps;
    const double element = (double)element_size(call);
    double blocks, k, time = START;
    int tile;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT) {
        const WeightPlan plan = weight_plan(call, device);
        tile = plan.tile;
        blocks = (double)(plan.tiles_m * plan.tiles_n * plan.splits * s.groups);
        k = (double)plan.chunk;
        if (plan.sums_splits)
            time += START + (double)(plan.splits * weight) * 8 / SUM_RATE;
    } else {
        const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
        const int64_t phases =
            forward ? 1 : stride_phase_count(stride_phase_rows(s)) * stride_phase_count(stride_phase_columns(s));
        const int64_t pixels =
            forward ? s.batch * s.out_height * s.out_width
                    : s.batch * ceil_div(s.in_height, s.stride_height) * ceil_div(s.in_width, s.stride_width);
        const int64_t tiles_m = ceil_div(pixels, 128), columns = forward ? outs : channels;
        tile = tile_of(columns, tiles_m * phases * s.groups, device);
        blocks = (double)(tiles_m * ceil_div(columns, tile) * phases * s.groups);
        k = (double)(taps * (forward ? channels : outs)) / (double)phases;
        if (relayouts(call))
            time += START + 2 * (double)weight * element / RELAYOUT_RATE;
    }
    const Times &t = tile == 128 ? WIDE : NARROW;
    const bool strided = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && s.stride_height * s.stride_width > 1;
    const double rounds = blocks / (2 * device.multiprocessors);
    return time +
           (strided ? UNEVEN : 1) * (rounds < 4 ? ceil(rounds) : rounds) * (t.sum * k * element / 2 / 1024 + t.rest);
}
