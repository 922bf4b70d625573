// conv2d on Hopper's tensor cores, channels_last: implicit GEMMs by gemm/sm90/kernel.cuh (wgmma, persistent blocks in
// clusters, a ring of TMA stages), in which TMA im2col descriptors gather one operand and write zeros for the padding.
//
//   forward           output[pixel][o]   = sum over (tap, c) of input[pixel + tap][c] * weight[o][tap][c]
//   backward_input    the same over grad_output, with a mirrored kernel; one product per stride phase (stride_phase.h)
//   backward_weight   weight[o][tap][c]  = sum over pixels of grad_output[pixel][o] * input[pixel + tap][c], split-K
//
// A group of channels is a product of its own, whose operands begin some channels further on; all are one launch.
//
// wgmma takes TF32 K-major only: backward_input transposes the weight first, backward_weight grad_output, and its input
// goes through registers or, where faster, is transposed too. Where there are few tiles, the blocks of a cluster share
// one (cluster.cuh). Bound by the rate at which tiles are loaded, which one of 128 x 256 just hides; what was measured
// is in benchmarks/notes/conv2d.md.
#include <math.h>

#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "conv2d/sm90/problem.h"
#include "conv2d/sm90/transpose.h"
#include "conv2d/split_k.h"
#include "conv2d/tma_im2col.h"
#include "ptx/wgmma.cuh"

// The tiles and what one costs in microseconds: `start` once, `sum` for 1024 of k, `rest` for prologue and epilogue,
// `share` more where blocks share it. A row's index is the case of the switches in the files of instances. Of forward
// and 16 bits' backward_weight by least squares over 61 convolutions of models on an H100, others of an H200.
struct ConvTile {
    int m, n, cluster_m, cluster_n;
    int most; // blocks that share a tile, each with a split of k, a power of two; 0: none (cluster.cuh)
    double start, sum, rest, share;
    int group;
};
// clang-format off
static const ConvTile FORWARD_16BIT[] = {
    {128, 256, 2, 1, 0, 0.00,  9.33, 4.88, 0.00, 16},
    {128, 128, 2, 1, 0, 0.71,  5.27, 2.83, 0.00,  8},
    {128,  64, 2, 1, 0, 1.11,  3.94, 1.97, 0.00,  8},
    {128, 128, 1, 2, 0, 0.62,  5.03, 2.86, 0.00,  8},
    {128, 192, 2, 1, 0, 0.38,  7.52, 3.53, 0.00,  8},
    {128,  64, 1, 1, 8, 0.00,  3.66, 4.31, 0.43,  8},
    {128, 256, 1, 1, 8, 0.00,  9.22, 9.99, 0.08,  8},
};
static const ConvTile FORWARD_TF32[] = {
    {128, 256, 2, 1, 0, 0.00, 17.52, 9.66, 0.00,  8},
    {128, 128, 2, 1, 0, 0.00,  9.14, 6.98, 0.00,  8},
    {128,  64, 2, 1, 0, 0.00,  7.03, 4.49, 0.00,  8},
    {128, 128, 1, 2, 0, 0.29,  9.85, 4.94, 0.00,  8},
    {128, 192, 2, 1, 0, 0.00, 13.95, 7.94, 0.00,  8},
    {128,  64, 1, 1, 8, 0.00,  8.11, 4.74, 0.37,  8},
    {128, 128, 1, 1, 8, 0.00, 11.18, 6.39, 0.00,  8},
};
// Of groups, for whose times an H100's beside these are known (conv2d_sm90_microseconds): the first of the same tiles.
static const ConvTile GROUPS_FORWARD_16BIT[] = {
    {128, 256, 2, 1, 0, 0.00, 12.20, 1.50, 0.00, 16},
    {128, 128, 2, 1, 0, 0.00,  7.40, 0.55, 0.00,  8},
    {128,  64, 2, 1, 0, 0.00,  6.20, 1.00, 0.00,  8},
    {128, 128, 1, 2, 0, 0.00,  6.70, 1.00, 0.00,  8},
};
static const ConvTile GROUPS_FORWARD_TF32[] = {
    {128, 256, 2, 1, 0, 0.00, 22.00, 3.30, 0.00,  8},
    {128, 128, 2, 1, 0, 0.00, 14.10, 1.70, 0.00,  8},
    {128,  64, 2, 1, 0, 0.00, 11.20, 1.65, 0.00,  8},
    {128, 128, 1, 2, 0, 0.00, 13.00, 1.50, 0.00,  8},
};
static const ConvTile GROUPS_WEIGHT_16BIT[] = {
    {128, 256, 2, 1, 0, 0.00, 12.40, 1.20, 0.00, 16},
    {128, 192, 2, 1, 0, 0.00,  9.30, 0.50, 0.00,  6},
    { 64, 192, 1, 1, 0, 0.00,  6.00, 0.50, 0.00,  8},
};
// backward_input with a stride: a tile is of one stride phase.
static const ConvTile STRIDED_16BIT[] = {
    {128, 128, 2, 1, 0, 0.00,  9.00, 1.00, 0.00,  8},
    {128,  64, 2, 1, 0, 0.00,  4.80, 1.20, 0.00,  8},
};
static const ConvTile STRIDED_TF32[] = {
    {128, 128, 2, 1, 0, 0.00, 15.00, 2.50, 0.00,  8},
    {128,  64, 2, 1, 0, 0.00, 10.00, 1.70, 0.00,  8},
};
// weight_plan has their sums.
static const ConvTile WEIGHT_16BIT[] = {
    {128, 256, 2, 1, 0, 1.26,  0.00, 2.45, 0.00, 16},
    {128, 192, 2, 1, 0, 2.15,  0.00, 1.43, 0.00,  6},
    { 64, 192, 1, 1, 0, 1.27,  0.00, 0.00, 0.00,  8},
    {128,  64, 1, 1, 8, 1.89,  0.00, 2.26, 0.00,  8},
    {128, 128, 1, 1, 8, 1.26,  0.00, 3.73, 0.00,  8},
    {128,  64, 2, 1, 0, 2.45,  0.00, 0.42, 0.00,  8},
};
static const ConvTile WEIGHT_TF32[] = {
    {256, 128, 1, 2, 0, 0.00, 33.00, 2.60, 0.00,  8},
    {128, 128, 2, 1, 0, 0.00, 21.00, 0.50, 0.00,  8},
    {256, 128, 1, 1, 0, 0.00, 28.00, 2.60, 0.00,  8},
    {256,  64, 1, 1, 0, 0.00, 26.00, 2.00, 0.00,  8},
};
static const ConvTile SHIFTED_TF32[] = {
    {128, 256, 2, 1, 0, 0.00, 20.50, 3.30, 0.00, 16},
    {128, 192, 2, 1, 0, 0.00, 15.50, 2.50, 0.00,  8},
    { 64, 192, 1, 1, 0, 0.00, 15.00, 1.00, 0.00,  8},
    {128, 128, 2, 1, 0, 0.00, 12.00, 1.70, 0.00,  8},
};
// clang-format on
static constexpr int THREADS = 256; // of the kernel that writes zeros
// To add splits up: microseconds; bytes written and read, a microsecond.
static constexpr double SUM_START = 2.5, SUM_RATE = 1.93e6, SUM_START_TF32 = 4,
                        SUM_RATE_TF32 = 3e6; // TF32: and of groups
static constexpr double TRANSPOSE_START = 3, TRANSPOSE_RATE = 2.4e6;
static constexpr int64_t SMALLEST_SPLIT = 256, MOST_SPLITS = 256, MOST_PHASES = 16;

// Clusters of `size` blocks, one an SM, that run at once. A GPC has 16 or 18 SMs, so that those of more than two leave
// some over. One at the least, of however few SMs explain is asked about.
static int64_t clusters_at_once(int size, ConvDevice device)
{
    const int64_t blocks = size > 2 ? device.multiprocessors - device.multiprocessors / 16 : device.multiprocessors;
    return blocks > size ? blocks / size : 1;
}

// most_splits: of k, which another kernel adds up. relays: that kernel is needed to rearrange the gradient of the
// weight anyway, but by tiles that clusters share. shares: whether they may. depth: k of a stage.
template <int COUNT>
static ConvPlan fastest_plan(const ConvTile (&tiles)[COUNT], int64_t groups, int64_t m, int64_t n, int64_t k,
                             int64_t depth, int64_t most_splits, bool relays, bool shares, ConvDevice device)
{
    ConvPlan best = {};
    const bool fitted = depth != 32 && groups == 1;
    const double sum_start = fitted ? SUM_START : SUM_START_TF32, sum_rate = fitted ? SUM_RATE : SUM_RATE_TF32;
    const int64_t steps = ceil_div(k, depth);
    for (int tile = 0; tile < COUNT; tile++) {
        const ConvTile &t = tiles[tile];
        if (t.most > 0 && !shares)
            continue;
        const int64_t clusters = groups * ceil_div(m, t.m * t.cluster_m) * ceil_div(n, t.n * t.cluster_n);
        for (int sharing = 1; sharing == 1 || sharing <= t.most; sharing *= 2) {
            if (ceil_div(steps, ceil_div(steps, sharing)) < sharing)
                break; // not a stage for each
            const int64_t room = clusters_at_once(t.cluster_m * t.cluster_n * sharing, device);
            for (int64_t splits = 1; splits <= (t.most > 0 ? 1 : most_splits); splits++) {
                if (splits > 1 && (k / splits < SMALLEST_SPLIT || clusters * splits > room))
                    break;
                const int64_t waves = ceil_div(clusters * splits, room),
                              depth_of_split = ceil_div(steps, splits * sharing) * depth;
                double time = t.start + (double)waves * (t.sum * (double)depth_of_split / 1024 + t.rest +
                                                         (sharing > 1 ? t.share : 0));
                if (splits > 1 || (relays && groups == 1 && t.most == 0))
                    time += sum_start + (double)(8 * splits * groups * m * n) / sum_rate;
                if (best.splits == 0 || time < best.time)
                    best = {tile, (int)splits, t.group, sharing, time};
            }
        }
    }
    return best;
}

// Of backward_weight in 16 bits of one group, whose tiles wait for their products or for their rows of 128 bytes, one of
// which costs more where it begins amid a line of the cache. By least squares over 56 convolutions on an H100.
static ConvPlan weight_plan(int64_t outs, int64_t channels, int64_t columns, int64_t pixels, bool relays, bool shares,
                            ConvDevice device)
{
    constexpr double PRODUCTS = 2.74e-4, ROW = 0.027, OUTS_APART = 1.65, CHANNELS_APART = 1.45;
    constexpr int COUNT = sizeof(WEIGHT_16BIT) / sizeof(WEIGHT_16BIT[0]), DEPTH = SWIZZLE_ROW / 2;
    ConvTile tiles[COUNT];
    for (int i = 0; i < COUNT; i++) {
        ConvTile &t = tiles[i] = WEIGHT_16BIT[i];
        const double rows =
            t.m * (outs % DEPTH ? OUTS_APART : 1) + (double)t.n / t.cluster_m * (channels % DEPTH ? CHANNELS_APART : 1);
        t.sum = hypot(PRODUCTS * t.m * t.n, ROW * rows);
    }
    return fastest_plan(tiles, 1, outs, columns, pixels, DEPTH, MOST_SPLITS, relays, shares, device);
}

static int64_t taps_of(const ConvProduct &phase)
{
    return phase.taps_y.count * phase.taps_x.count;
}

// The same for stride phases in one launch, the longest first. Clusters take tiles as they get done, so that the time
// is all tiles' over the clusters that run at once, and no less than the longest tile's. row: channels of a chunk.
template <int COUNT>
static ConvPlan fastest_plan_of_phases(const ConvTile (&tiles)[COUNT], const ConvProduct *products, int count,
                                       int64_t row, ConvDevice device)
{
    ConvPlan best = {};
    for (int tile = 0; tile < COUNT; tile++) {
        const ConvTile &t = tiles[tile];
        const int64_t room = device.multiprocessors / (t.cluster_m * t.cluster_n);
        double time = 0, longest = 0;
        for (int i = 0; i < count; i++) {
            const ConvProduct &p = products[i];
            const int64_t k = taps_of(p) * ceil_div(p.grid.channels, row) * row;
            const int64_t clusters = p.group_count * ceil_div(conv2d_pixels(p.grid), t.m * t.cluster_m) *
                                     ceil_div(p.columns, t.n * t.cluster_n);
            const double one = t.sum * (double)k / 1024 + t.rest;
            time += (double)clusters * one / (double)room;
            longest = longest > one ? longest : one;
        }
        time = time > longest ? time : longest;
        if (tile == 0 || time < best.time)
            best = {tile, 1, t.group, 1, time};
    }
    return best;
}

// What a call needs: copies, the product, the sum of its splits.
struct Steps {
    ConvProduct product;
    bool relayouts; // of the weight
    Relayout relayout;
    int transposes; // in TF32. 1: the weight (backward_input) or grad_output (backward_weight); 2: the input as well
    Transpose transpose_other, transpose_source;
    size_t other_bytes, source_bytes; // of the copies, at the front of the workspace
    ConvPlan plan;
    bool sums_splits;
    int64_t padded_width; // of (tap, channel), in backward_weight
    size_t split_bytes;
};

// The input with zeros after its rows and images, as many as any tap reads out of bounds, and in a grid that holds the
// output too. A copy for each column of the kernel, shifted by it, since the innermost coordinate of a TMA copy is a
// multiple of 16 bytes; so is a row of the grid.
static Transpose shifted_transpose(const cuda_ops_conv2d_sizes &s)
{
    const int64_t after_y = s.out_height - 1 + (s.kernel_height - 1) * s.dilation_height - s.padding_top;
    const int64_t after_x = s.out_width - 1 + (s.kernel_width - 1) * s.dilation_width - s.padding_left;
    Transpose transpose = conv2d_transpose_of(s.batch, s.in_height, s.in_width, s.in_channels);
    const int64_t heights[] = {s.out_height, s.in_height + s.padding_top, after_y + 1};
    const int64_t widths[] = {s.out_width, s.in_width + s.padding_left, after_x + 1};
    for (int i = 0; i < 3; i++) {
        transpose.grid_height = transpose.grid_height > heights[i] ? transpose.grid_height : heights[i];
        transpose.grid_width = transpose.grid_width > widths[i] ? transpose.grid_width : widths[i];
    }
    transpose.grid_width = ceil_div(transpose.grid_width, 4) * 4;
    transpose.copies = (int)s.kernel_width;
    transpose.first_shift = -(int)s.padding_left;
    transpose.shift = (int)s.dilation_width;
    return transpose;
}

static bool can_shift(const cuda_ops_conv2d_sizes &s, const Transpose &transpose)
{
    const int64_t most = INT32_MAX - 1024;
    return s.stride_height == 1 && s.stride_width == 1 &&
           (s.kernel_width - 1) * s.dilation_width <= CONV2D_MOST_SHIFT && s.kernel_width * s.in_channels < most &&
           s.batch * transpose.grid_height + s.kernel_height * s.dilation_height < most / transpose.grid_width;
}

static bool is_strided(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT &&
           (call.sizes.stride_height != 1 || call.sizes.stride_width != 1);
}

// The product narrowed to one stride phase of rows and columns. One without taps is zeros.
static ConvProduct phase_product(const ConvProduct &product, const cuda_ops_conv2d_sizes &s, int64_t y, int64_t x)
{
    ConvProduct p = product;
    p.strided = true;
    p.taps_y = taps_of_stride_phase(stride_phase_rows(s), y),
    p.taps_x = taps_of_stride_phase(stride_phase_columns(s), x);
    p.result_height = s.in_height, p.result_width = s.in_width;
    p.result_y = y, p.result_x = x, p.stride_y = s.stride_height, p.stride_x = s.stride_width;
    p.grid = {s.batch,
              s.out_height,
              s.out_width,
              s.out_channels / s.groups,
              ceil_div(s.in_height - y, s.stride_height),
              ceil_div(s.in_width - x, s.stride_width),
              p.taps_y.start - (p.taps_y.count - 1) * p.taps_y.back,
              p.taps_x.start - (p.taps_x.count - 1) * p.taps_x.back,
              1,
              1};
    return p;
}

static bool has_taps(const ConvProduct &p)
{
    return p.taps_y.count > 0 && p.taps_x.count > 0;
}

// Those with taps, the longest sums first; returns how many there are.
static int products_of_phases(ConvProduct (&products)[MOST_PHASES], const ConvProduct &product,
                              const cuda_ops_conv2d_sizes &s)
{
    const int64_t rows = stride_phase_count(stride_phase_rows(s)),
                  columns = stride_phase_count(stride_phase_columns(s));
    int count = 0;
    for (int64_t i = 0; i < rows * columns; i++) {
        const ConvProduct p = phase_product(product, s, i / columns, i % columns);
        if (!has_taps(p))
            continue;
        int at = count++;
        for (; at > 0 && taps_of(products[at - 1]) < taps_of(p); at--)
            products[at] = products[at - 1];
        products[at] = p;
    }
    return count;
}

static int phases_together(int left)
{
    return left < MOST_PHASES_TOGETHER ? left : MOST_PHASES_TOGETHER;
}

static ConvPlan plan_of_phases(const ConvProduct *products, int count, ConvDevice device)
{
    return products[0].dtype == CUDA_OPS_FLOAT32
               ? fastest_plan_of_phases(STRIDED_TF32, products, count, SWIZZLE_ROW / 4, device)
               : fastest_plan_of_phases(STRIDED_16BIT, products, count, SWIZZLE_ROW / 2, device);
}

// Whether every stride phase has a TMA im2col descriptor.
static bool phases_possible(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.stride_height * s.stride_width > MOST_PHASES)
        return false;
    for (int64_t y = 0; y < stride_phase_count(stride_phase_rows(s)); y++)
        for (int64_t x = 0; x < stride_phase_count(stride_phase_columns(s)); x++) {
            ConvProduct p = phase_product({}, s, y, x);
            p.grid.channels = s.out_channels;
            if (has_taps(p) && !pixel_map_possible(p.grid, call.output, call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2))
                return false;
        }
    return true;
}

static void set_backward_weight(Steps &steps, const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32;
    const int64_t taps = s.kernel_height * s.kernel_width, c = s.in_channels / s.groups, o = s.out_channels / s.groups;
    ConvProduct &p = steps.product;
    p.grid = conv2d_input_grid(s);
    p.grid.channels = c;
    p.pixel_stride = s.in_channels;
    p.source = call.input;
    p.other = call.output;
    p.columns = o;
    p.result_is_float = tf32;
    const int64_t pixels = conv2d_pixels(p.grid), row = SWIZZLE_ROW / (tf32 ? 4 : 2);
    steps.padded_width = taps * ceil_div(c, row) * row;
    p.weight_channels_last = conv2d_weight_is_channels_last(s);
    const bool relays = c % row != 0 || !conv2d_weight_is_ready(call);
    const bool shares = s.groups == 1 && call.weight_outs == 0; // a weight of other sizes is rearranged
    if (tf32) {
        const PixelGrid &g = p.grid;
        steps.transposes = 1;
        steps.transpose_other = conv2d_transpose_of(s.batch, s.out_height, s.out_width, s.out_channels);
        steps.plan =
            fastest_plan(WEIGHT_TF32, s.groups, steps.padded_width, o, pixels, row, MOST_SPLITS, relays, false, device);
        const Transpose shifted = shifted_transpose(s);
        const int64_t shifted_pixels = s.batch * shifted.grid_height * shifted.grid_width;
        if (can_shift(s, shifted)) {
            const ConvPlan plan = fastest_plan(SHIFTED_TF32, s.groups, o, steps.padded_width, shifted_pixels, row,
                                               MOST_SPLITS, relays, false, device);
            const double transpose =
                TRANSPOSE_START + (double)(4 * shifted_pixels * s.in_channels * (1 + s.kernel_width)) / TRANSPOSE_RATE;
            if (plan.time + transpose < steps.plan.time) {
                steps.transposes = 2;
                steps.plan = plan;
                steps.transpose_source = shifted;
                steps.transpose_other.grid_height = p.grid.grid_height = shifted.grid_height;
                steps.transpose_other.grid_width = p.grid.grid_width = shifted.grid_width;
            }
        }
        p.other_pitch = ceil_div(conv2d_pixels(g), 4) * 4;
        steps.transpose_other.pitch = steps.transpose_source.pitch = p.other_pitch;
        steps.other_bytes = conv2d_round_to_256(s.out_channels * p.other_pitch * 4);
        if (steps.transposes == 2)
            steps.source_bytes = conv2d_round_to_256(s.kernel_width * s.in_channels * p.other_pitch * 4);
    } else {
        steps.plan = s.groups > 1 ? fastest_plan(GROUPS_WEIGHT_16BIT, s.groups, o, steps.padded_width, pixels, row,
                                                 MOST_SPLITS, relays, false, device)
                                  : weight_plan(o, c, steps.padded_width, pixels, relays, shares, device);
    }
    steps.sums_splits = steps.plan.splits > 1 || (relays && (tf32 || WEIGHT_16BIT[steps.plan.tile].most == 0));
    if (steps.sums_splits)
        steps.split_bytes = (size_t)(steps.plan.splits * s.out_channels * steps.padded_width) * 4;
}

// Forward and backward_input.
static void set_forward(Steps &steps, const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32, ready = conv2d_weight_is_ready(call);
    const int64_t element = tf32 ? 4 : 2, taps = s.kernel_height * s.kernel_width;
    const int64_t c = s.in_channels / s.groups, o = s.out_channels; // of a row, and rows, of the weight
    ConvProduct &p = steps.product;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    p.grid = forward ? conv2d_input_grid(s) : conv2d_output_grid(s);
    p.pixel_stride = p.grid.channels;
    p.grid.channels /= s.groups;
    p.source = forward ? call.input : call.output;
    p.other = call.weight;
    p.columns = forward ? o / s.groups : c;
    p.bias = call.bias;
    p.activation = conv2d_gemm_activation(call);
    p.mirrored = !forward;
    p.weight_by_channel = !forward && !tf32;
    p.groups_inside = !forward && tf32;
    // TMA reads rows of whole 16-byte vectors.
    p.other_pitch = ceil_div(c, 16 / element) * (16 / element);
    if (ready && tf32 && !forward && p.other_pitch == c) {
        // The weight as [c][tap][o]: o are the pixels, taps the images.
        steps.transposes = 1;
        steps.transpose_other = {taps, 1, o, c, c, 0, taps * c, 1, o, taps * o, 1, 0, 0};
        steps.other_bytes = conv2d_round_to_256(o * taps * c * element);
    } else if (!ready || (tf32 && !forward) || p.other_pitch != c) {
        steps.relayouts = true;
        steps.relayout = conv2d_weight_relayout(call, tf32 && !forward);
        if (p.weight_by_channel)
            steps.relayout.pitch = p.other_pitch;
        steps.other_bytes = conv2d_round_to_256(steps.relayout.a.extent * taps * steps.relayout.pitch * element);
    }
    if (is_strided(call))
        return; // a plan for each launch of stride phases
    const int64_t m = conv2d_pixels(p.grid), row = SWIZZLE_ROW / element;
    const int64_t k = taps * ceil_div(p.grid.channels, row) * row;
    if (s.groups > 1)
        steps.plan = tf32 ? fastest_plan(GROUPS_FORWARD_TF32, s.groups, m, p.columns, k, row, 1, false, false, device)
                          : fastest_plan(GROUPS_FORWARD_16BIT, s.groups, m, p.columns, k, row, 1, false, false, device);
    else
        steps.plan = tf32 ? fastest_plan(FORWARD_TF32, 1, m, p.columns, k, row, 1, false, true, device)
                          : fastest_plan(FORWARD_16BIT, 1, m, p.columns, k, row, 1, false, true, device);
}

static Steps steps_of(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    Steps steps = {};
    ConvProduct &p = steps.product;
    p.groups = p.group_count = s.groups;
    p.kernel_height = s.kernel_height, p.kernel_width = s.kernel_width;
    p.dilation_height = s.dilation_height, p.dilation_width = s.dilation_width;
    p.result = call.result;
    p.dtype = call.dtype;
    p.stream = call.stream;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        set_backward_weight(steps, call, device);
    else
        set_forward(steps, call, device);
    return steps;
}

Answer conv2d_sm90_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    const bool is_16_bit = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    const int64_t element = tf32 ? 4 : 2, most = INT32_MAX - 1024, taps = s.kernel_height * s.kernel_width;
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (!tf32 && !is_16_bit)
        return CONV_NEEDS_TENSOR_CORES;
    if (!conv2d_images_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    // TMA reads channels of a group in whole 16-byte vectors.
    const int64_t channels = s.in_channels / s.groups, outs = s.out_channels / s.groups;
    if ((!input && channels * element % 16 != 0) || (!forward && outs * element % 16 != 0))
        return s.groups == 1 ? CONV_NEEDS_VECTORS : CONV_NEEDS_GROUPS_OF_VECTORS;
    // A tap's offset in a TMA im2col copy has 8 bits.
    if ((s.kernel_height - 1) * s.dilation_height > 255 || (s.kernel_width - 1) * s.dilation_width > 255)
        return no("the dilated kernel is larger than 256");
    if (taps * (s.in_channels + 256 * s.groups) > most || taps * (s.out_channels + 256 * s.groups) > most ||
        channels * taps * s.out_channels > most || outs * taps * s.in_channels > most || s.groups > most / 512)
        return CONV_IS_LARGE;
    const void *const other = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? call.output : call.weight;
    if (!is_aligned_16(other) || !is_aligned_16(call.result))
        return NEEDS_ALIGNMENT;
    if (is_strided(call))
        return phases_possible(call) ? YES : no("its strides or sizes have no TMA descriptors for grad_input");
    return pixel_map_possible(input ? conv2d_output_grid(s) : conv2d_input_grid(s), input ? call.output : call.input,
                              element)
               ? YES
               : no("its strides, padding or sizes have no TMA im2col descriptor, or images are not aligned");
}

size_t conv2d_sm90_workspace(const ConvCall &call, ConvDevice device)
{
    const Steps steps = steps_of(call, device);
    return steps.other_bytes + steps.source_bytes + steps.split_bytes;
}

// How many groups one launch has maps for, of so many stride phases.
static int64_t groups_at_once(const ConvProduct &p, int64_t phases)
{
    return conv2d_has_group_maps(p) ? MOST_MAPS / phases : p.groups;
}

// The product of `count` groups at most, from `first` on.
static ConvProduct product_of_groups(const ConvProduct &product, int64_t first, int64_t count)
{
    const int64_t element = product.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    ConvProduct p = product;
    p.first_group = first;
    p.group_count = count < p.groups - first ? count : p.groups - first;
    p.result = (char *)p.result + first * p.columns * element;
    if (p.bias)
        p.bias = (const char *)p.bias + first * p.columns * element;
    return p;
}

static cuda_ops_status launch_groups(const ConvProduct &p, ConvDevice device, const ConvPlan &plan, bool is_weight,
                                     bool is_shifted)
{
    switch (p.dtype) {
    case CUDA_OPS_BFLOAT16:
        return is_weight             ? conv2d_sm90_backward_weight_bfloat16(p, device, plan)
               : p.weight_by_channel ? conv2d_sm90_backward_input_bfloat16(p, device, plan)
                                     : conv2d_sm90_forward_bfloat16(p, device, plan);
    case CUDA_OPS_FLOAT16:
        return is_weight             ? conv2d_sm90_backward_weight_float16(p, device, plan)
               : p.weight_by_channel ? conv2d_sm90_backward_input_float16(p, device, plan)
                                     : conv2d_sm90_forward_float16(p, device, plan);
    case CUDA_OPS_FLOAT32:
        return is_shifted  ? conv2d_sm90_backward_weight_stride1_tf32(p, device, plan)
               : is_weight ? conv2d_sm90_backward_weight_tf32(p, device, plan)
                           : conv2d_sm90_forward_tf32(p, device, plan);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}

static cuda_ops_status launch_product(const ConvProduct &product, ConvDevice device, const ConvPlan &plan,
                                      bool is_weight, bool is_shifted)
{
    if (is_weight)
        return launch_groups(product, device, plan, true, is_shifted);
    const int64_t count = groups_at_once(product, 1);
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    for (int64_t first = 0; first < product.groups && status == CUDA_OPS_SUCCESS; first += count)
        status = launch_groups(product_of_groups(product, first, count), device, plan, false, false);
    return status;
}

// By 16-byte vectors, and bytes after the last; for stride phases without taps.
__global__ void __launch_bounds__(THREADS) conv2d_sm90_zero_kernel(uint4 *to, int64_t bytes)
{
    wait_for_predecessor();
    release_successor();
    const int64_t index = global_thread_index(), count = bytes / 16;
    for (int64_t i = index; i < count; i += global_thread_count())
        to[i] = make_uint4(0, 0, 0, 0);
    if (index < bytes % 16)
        ((char *)(to + count))[index] = 0;
}

static cuda_ops_status launch_phases(const ConvProduct &product, const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t rows = stride_phase_count(stride_phase_rows(s)),
                  columns = stride_phase_count(stride_phase_columns(s));
    const int64_t element = call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    bool all_have_taps = true;
    for (int64_t i = 0; i < rows * columns; i++)
        all_have_taps = all_have_taps && has_taps(phase_product(product, s, i / columns, i % columns));
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (!all_have_taps) {
        const int64_t bytes = s.batch * s.in_height * s.in_width * s.in_channels * element;
        launch_dependent(conv2d_sm90_zero_kernel, dim3(clamp_grid(ceil_div(bytes, 16 * THREADS))), THREADS, 0,
                         call.stream, (uint4 *)call.result, bytes);
        status = launch_status();
    }
    ConvProduct products[MOST_PHASES];
    const int count = products_of_phases(products, product, s);
    for (int i = 0; i < count && status == CUDA_OPS_SUCCESS; i += MOST_PHASES_TOGETHER) {
        const int together = phases_together(count - i);
        const int64_t groups = groups_at_once(product, together);
        for (int64_t first = 0; first < product.groups && status == CUDA_OPS_SUCCESS; first += groups) {
            ConvProduct of_groups[MOST_PHASES_TOGETHER];
            for (int phase = 0; phase < together; phase++)
                of_groups[phase] = product_of_groups(products[i + phase], first, groups);
            const ConvPlan plan = plan_of_phases(of_groups, together, device);
            status = call.dtype == CUDA_OPS_FLOAT32
                         ? conv2d_sm90_backward_input_strided_tf32(of_groups, together, device, plan)
                     : call.dtype == CUDA_OPS_FLOAT16
                         ? conv2d_sm90_backward_input_strided_float16(of_groups, together, device, plan)
                         : conv2d_sm90_backward_input_strided_bfloat16(of_groups, together, device, plan);
        }
    }
    return status;
}

cuda_ops_status conv2d_sm90(const ConvCall &call, ConvDevice device)
{
    Steps steps = steps_of(call, device);
    ConvProduct &p = steps.product;
    const bool is_weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    char *workspace = (char *)call.workspace;
    if (steps.relayouts || steps.transposes > 0) {
        status = steps.relayouts ? conv2d_relayout(workspace, p.other, steps.relayout, call.dtype, call.stream)
                                 : conv2d_transpose(workspace, p.other, steps.transpose_other, call.stream);
        p.other = workspace;
        workspace += steps.other_bytes;
    }
    if (steps.transposes > 1 && status == CUDA_OPS_SUCCESS) {
        status = conv2d_transpose(workspace, p.source, steps.transpose_source, call.stream);
        p.source = workspace;
        workspace += steps.source_bytes;
    }
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (is_strided(call))
        return launch_phases(p, call, device);
    if (!steps.sums_splits)
        return launch_product(p, device, steps.plan, is_weight, steps.transposes > 1);
    const float *const partial = (const float *)workspace;
    p.result = workspace;
    p.result_is_float = 1;
    status = launch_product(p, device, steps.plan, is_weight, steps.transposes > 1);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int64_t taps = call.sizes.kernel_height * call.sizes.kernel_width, pixels = conv2d_pixels(p.grid);
    const int64_t depth = call.dtype == CUDA_OPS_FLOAT32 ? 32 : 64;
    const int64_t chunk = ceil_div(ceil_div(pixels, steps.plan.splits), depth) * depth;
    return conv2d_sum_weight_splits(call, partial, steps.padded_width / taps, ceil_div(pixels, chunk));
}

double conv2d_sm90_microseconds(const ConvCall &call, ConvDevice device)
{
    // A launch, and how fast small kernels copy, and write a weight out of one sum, in vectors of four.
    constexpr double START = 2, COPY_RATE = 1.5e6, WRITE_RATE = 60e3;
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const Steps steps = steps_of(call, device);
    // Of one group the tiles' times are an H100's, but of TF32's weight and of strides, and are whole calls'.
    const bool weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    const bool whole = s.groups == 1 && !is_strided(call) && !(weight && call.dtype == CUDA_OPS_FLOAT32);
    double time = whole ? 0 : START;
    if (steps.relayouts || steps.transposes > 0)
        time += START + 2 * (double)steps.other_bytes / COPY_RATE;
    if (steps.transposes > 1)
        time += TRANSPOSE_START + 2 * (double)steps.source_bytes / TRANSPOSE_RATE;
    if (s.groups > 1 && steps.sums_splits && steps.plan.splits == 1) // else the plan has counted it
        time += START + (double)(s.out_channels * steps.padded_width) / 4 / WRITE_RATE;
    // On an H100 the tiles of groups take longer than the table's, the more the fewer of a stage's channels are there.
    const int64_t channels = steps.product.grid.channels, row = SWIZZLE_ROW / (call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2);
    const double missing = 1 - (double)channels / (double)(ceil_div(channels, row) * row);
    const double slower = s.groups == 1      ? 1
                          : is_strided(call) ? 1.05 + 0.7 * missing
                                             : 1.1 + (weight ? 2 : 1) * missing;
    if (!is_strided(call))
        return time + slower * steps.plan.time +
               START * (double)(ceil_div(s.groups, groups_at_once(steps.product, 1)) - 1);
    ConvProduct products[MOST_PHASES];
    const int count = products_of_phases(products, steps.product, s);
    for (int i = 0; i < count; i += MOST_PHASES_TOGETHER) {
        const int together = phases_together(count - i);
        const int64_t launches = ceil_div(s.groups, groups_at_once(steps.product, together));
        time += slower * plan_of_phases(products + i, together, device).time + START * (double)(launches - (i == 0));
    }
    return time;
}
