// conv2d on Hopper's tensor cores: all three products as implicit GEMMs of channels_last tensors, by rung 13's kernel
// (gemm/sm90/kernel.cuh: TMA into a ring, wgmma, persistent blocks in clusters) with a producer of its own.
//
//   forward           output[place][o]     = sum over (tap, c) of picture[place + tap][c] * weight[o][tap][c]
//   backward_input    the same over grad_output, with the kernel mirrored and o and c changing places; with a stride
//                     one product for each residue of rows and columns modulo the stride (conv2d/stride_phase.h)
//   backward_weight   weight[o][tap][c]    = sum over places of grad_output[place][o] * input[place + tap][c]
//
// The copy engine gathers the rows of the picture itself, in its im2col mode: a tile is so many places one after the
// other, over the ends of lines and of images, for one tap and 128 bytes of channels; what lies in the padding comes as
// zeros. No thread computes an address, and channels that do not fill 128 bytes are filled up with zeros.
//
// 16-bit operands are read as they lie. wgmma takes TF32 along the summed axis only, so that for it backward_input
// copies the weight as [c][tap][o] first, and backward_weight grad_output as [o][place], its picture going through
// registers; or, with stride 1 and where that is faster, the picture too as [c][place], a copy for each column of the
// kernel. A weight that is not channels_last is copied so. backward_weight cuts the places in pieces to fill the
// device; a second kernel adds them in order. Where there are few tiles forward and backward_input let two blocks share
// one.
//
// Bound by the tensor cores' shared memory: a tile of 128 x 256 needs all of its bandwidth, smaller ones more than it
// has.
#include "conv2d/sm90/kernel.cuh"
#include "conv2d/tma_im2col.h"

static constexpr int THREADS = 256;

// to[copy][channel][place] = picture[place + first_shift + copy * shift][channel], rows of `to` `pitch` long, for TF32:
// places are those of a grid at least as large as the picture, with zeros where there is none. Channels are a multiple
// of 4. A block turns LINES places of COLUMNS channels around, and what the copies see beyond; 16-byte loads.
static constexpr int LINES = 128, COLUMNS = 32, MOST_BEYOND = 32;

struct Turn {
    int64_t images, height, width, channels;
    int64_t image_size, line_size, place_size; // distances in the picture
    int64_t grid_height, grid_width, pitch;
    int copies, first_shift, shift;
};

__global__ void __launch_bounds__(THREADS)
    conv2d_turn_kernel(float *to, const float *picture, const __grid_constant__ Turn t)
{
    constexpr int FOURS = COLUMNS / 4, PASS = THREADS / FOURS; // threads along a line, lines at a time
    constexpr int LOADED = LINES + MOST_BEYOND;
    __shared__ float patch[COLUMNS][LOADED + 1]; // 4 columns on are 4 banks on
    const int places = (int)(t.images * t.grid_height * t.grid_width), beyond = (t.copies - 1) * t.shift;
    const int64_t across = ceil_div(t.channels, COLUMNS), patches = across * ceil_div(places, LINES);
    const int x = threadIdx.x % FOURS * 4, y = threadIdx.x / FOURS;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < patches; index += gridDim.x) {
        const int64_t first = index / across * LINES, channel = index % across * COLUMNS;
        float4 values[LOADED / PASS];
#pragma unroll
        for (int i = 0; i < LOADED / PASS; i++) {
            // Places are below 2^31.
            const int place = (int)first + t.first_shift + y + i * PASS, line = place / (int)t.grid_width;
            const int column = place - line * (int)t.grid_width, image = line / (int)t.grid_height;
            const int row = line - image * (int)t.grid_height;
            values[i] = make_float4(0, 0, 0, 0);
            if (y + i * PASS < LINES + beyond && place >= 0 && place < places && column < t.width && row < t.height &&
                channel + x < t.channels)
                values[i] = *(const float4 *)(picture + image * t.image_size + row * t.line_size +
                                              column * t.place_size + channel + x);
        }
#pragma unroll
        for (int i = 0; i < LOADED / PASS; i++) {
            patch[x][y + i * PASS] = values[i].x;
            patch[x + 1][y + i * PASS] = values[i].y;
            patch[x + 2][y + i * PASS] = values[i].z;
            patch[x + 3][y + i * PASS] = values[i].w;
        }
        __syncthreads();
        for (int copy = 0; copy < t.copies; copy++) {
            float *const rows = to + copy * t.channels * t.pitch;
#pragma unroll
            for (int c = warp; c < COLUMNS; c += THREADS / WARP_SIZE)
#pragma unroll
                for (int r = lane; r < LINES; r += WARP_SIZE)
                    if (channel + c < t.channels && first + r < places)
                        rows[(channel + c) * t.pitch + first + r] = patch[c][r + copy * t.shift];
        }
        __syncthreads();
    }
}

// The tiles, and how long one takes on an H200, as in gemm.cu: `sum` for 1024 of the summed axis, `rest` for its start
// and its results, in microseconds. The rows' numbers are those of the switches in conv2d_sm90_*.cu.
struct ConvTile {
    int m, n, cluster_m, cluster_n;
    int blocks; // that share a tile, each with a part of the sum
    double sum, rest;
    int group;
};
// clang-format off
static const ConvTile PIXELS_HALVES[] = {
    {128, 256, 2, 1, 1, 12.20, 1.50, 16},
    {128, 128, 2, 1, 1,  7.40, 0.55,  8},
    {128,  64, 2, 1, 1,  6.20, 1.00,  8},
    {128, 128, 1, 2, 1,  6.70, 1.00,  8},
    {128, 256, 1, 1, 2, 11.00, 5.00, 16},
};
static const ConvTile PIXELS_TF32[] = {
    {128, 256, 2, 1, 1, 22.00, 3.30,  8},
    {128, 128, 2, 1, 1, 14.10, 1.70,  8},
    {128,  64, 2, 1, 1, 11.20, 1.65,  8},
    {128, 128, 1, 2, 1, 13.00, 1.50,  8},
    {128, 256, 1, 1, 2, 19.30, 9.00, 16},
};
// With a stride: a tile of one residue.
static const ConvTile STRIDED_HALVES[] = {
    {128, 128, 2, 1, 1,  9.00, 1.00,  8},
    {128,  64, 2, 1, 1,  4.80, 1.20,  8},
};
static const ConvTile STRIDED_TF32[] = {
    {128, 128, 2, 1, 1, 15.00, 2.50,  8},
    {128,  64, 2, 1, 1, 10.00, 1.70,  8},
};
static const ConvTile WEIGHT_HALVES[] = {
    {128, 256, 2, 1, 1, 12.40, 1.20, 16},
    {128, 192, 2, 1, 1,  9.30, 0.50,  6},
    { 64, 192, 1, 1, 1,  6.00, 0.50,  8},
};
static const ConvTile WEIGHT_TF32[] = {
    {256, 128, 1, 2, 1, 33.00, 2.60,  8},
    {128, 128, 2, 1, 1, 21.00, 0.50,  8},
    {256, 128, 1, 1, 1, 28.00, 2.60,  8},
    {256,  64, 1, 1, 1, 26.00, 2.00,  8},
};
static const ConvTile SHIFTED_TF32[] = {
    {128, 256, 2, 1, 1, 20.50, 3.30, 16},
    {128, 192, 2, 1, 1, 15.50, 2.50,  8},
    { 64, 192, 1, 1, 1, 15.00, 1.00,  8},
    {128, 128, 2, 1, 1, 12.00, 1.70,  8},
};
// clang-format on
static constexpr double PIECES_START = 4, PIECES_RATE = 3e6; // microseconds, and bytes in one
static constexpr double TURN_START = 3, TURN_RATE = 2.4e6;
static constexpr int64_t SMALLEST_PIECE = 256, MOST_PIECES = 256, MOST_RESIDUES = 16;

template <int COUNT>
static ConvPlan quickest(const ConvTile (&tiles)[COUNT], int64_t m, int64_t n, int64_t k, bool cut, ConvDevice device)
{
    ConvPlan best = {};
    double least = 0;
    for (int tile = 0; tile < COUNT; tile++) {
        const ConvTile &t = tiles[tile];
        if (t.blocks > 1 && k < t.blocks * 64)
            continue; // nothing for each of them
        const int64_t clusters = ceil_div(m, t.m * t.cluster_m) * ceil_div(n, t.n * t.cluster_n);
        const int64_t room = device.multiprocessors / (t.cluster_m * t.cluster_n * t.blocks);
        for (int64_t pieces = 1; pieces <= (cut ? MOST_PIECES : 1); pieces++) {
            if (pieces > 1 && (k / pieces < SMALLEST_PIECE || clusters * pieces > room))
                break;
            const int64_t waves = ceil_div(clusters * pieces, room);
            double time = (double)waves * (t.sum * (double)ceil_div(k, pieces * t.blocks) / 1024 + t.rest);
            if (pieces > 1)
                time += PIECES_START + (double)(8 * pieces * m * n) / PIECES_RATE;
            if (best.pieces == 0 || time < least) {
                least = time;
                best = {tile, (int)pieces, t.group, time};
            }
        }
    }
    return best;
}

static int64_t taps_of(const ConvProduct &residue)
{
    return residue.taps_y.count * residue.taps_x.count;
}

// The same for residues in one go, the longest first: a cluster takes the next tile when it is done with one, so that
// together they take their sum's share, but no less than the longest. row: channels of a chunk.
template <int COUNT>
static ConvPlan quickest_together(const ConvTile (&tiles)[COUNT], const ConvProduct *products, int count, int64_t row,
                                  ConvDevice device)
{
    ConvPlan best = {};
    for (int tile = 0; tile < COUNT; tile++) {
        const ConvTile &t = tiles[tile];
        const int64_t room = device.multiprocessors / (t.cluster_m * t.cluster_n);
        double time = 0, longest = 0;
        for (int i = 0; i < count; i++) {
            const ConvProduct &p = products[i];
            const int64_t k = taps_of(p) * ceil_div(p.grid.channels, row) * row;
            const int64_t clusters =
                ceil_div(conv2d_places(p.grid), t.m * t.cluster_m) * ceil_div(p.columns, t.n * t.cluster_n);
            const double one = t.sum * (double)k / 1024 + t.rest;
            time += (double)clusters * one / (double)room;
            longest = longest > one ? longest : one;
        }
        time = time > longest ? time : longest;
        if (tile == 0 || time < best.time)
            best = {tile, 1, t.group, time};
    }
    return best;
}

// What the kernel and the copies around it do for a call.
struct Steps {
    ConvProduct product;
    bool relayouts; // the weight
    Relayout relayout;
    int turns; // TF32: 1, the weight (backward_input) or grad_output (backward_weight); 2, the input as well
    Turn turn_other, turn_picture;
    size_t other_bytes, picture_bytes; // of what is relaid or turned: the front of the workspace
    ConvPlan plan;
    bool sums_pieces;
    int64_t width;
    size_t piece_bytes;
};

// A channels_last picture as it is.
static Turn turn_of(int64_t images, int64_t height, int64_t width, int64_t channels)
{
    const int64_t line = width * channels;
    return {images, height, width, channels, height * line, line, channels, height, width, 0, 1, 0, 0};
}

// The input with zeros after its lines and images, enough that what a tap sees before and after is zeros, and with room
// for the output's. A copy for each column of the kernel, moved by as much, since the copy engine begins at whole
// pieces of 16 bytes; lines are a multiple of that.
static Turn shifted_turn(const cuda_ops_conv2d_sizes &s)
{
    const int64_t after_y = s.out_height - 1 + (s.kernel_height - 1) * s.dilation_height - s.padding_top;
    const int64_t after_x = s.out_width - 1 + (s.kernel_width - 1) * s.dilation_width - s.padding_left;
    Turn turn = turn_of(s.batch, s.in_height, s.in_width, s.in_channels);
    const int64_t heights[] = {s.out_height, s.in_height + s.padding_top, after_y + 1};
    const int64_t widths[] = {s.out_width, s.in_width + s.padding_left, after_x + 1};
    for (int i = 0; i < 3; i++) {
        turn.grid_height = turn.grid_height > heights[i] ? turn.grid_height : heights[i];
        turn.grid_width = turn.grid_width > widths[i] ? turn.grid_width : widths[i];
    }
    turn.grid_width = ceil_div(turn.grid_width, 4) * 4;
    turn.copies = (int)s.kernel_width;
    turn.first_shift = -(int)s.padding_left;
    turn.shift = (int)s.dilation_width;
    return turn;
}

static bool can_shift(const cuda_ops_conv2d_sizes &s, const Turn &turn)
{
    const int64_t most = INT32_MAX - 1024;
    return s.stride_height == 1 && s.stride_width == 1 && (s.kernel_width - 1) * s.dilation_width <= MOST_BEYOND &&
           s.kernel_width * s.in_channels < most &&
           s.batch * turn.grid_height + s.kernel_height * s.dilation_height < most / turn.grid_width;
}

static bool is_strided(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT &&
           (call.sizes.stride_height != 1 || call.sizes.stride_width != 1);
}

// The product narrowed to one residue of rows and columns; no taps: its part of the result is zeros.
static ConvProduct residue_product(const ConvProduct &product, const cuda_ops_conv2d_sizes &s, int64_t y, int64_t x)
{
    ConvProduct p = product;
    p.strided = true;
    p.taps_y = taps_of_residue(residue_rows(s), y), p.taps_x = taps_of_residue(residue_columns(s), x);
    p.result_height = s.in_height, p.result_width = s.in_width;
    p.result_y = y, p.result_x = x, p.stride_y = s.stride_height, p.stride_x = s.stride_width;
    p.grid = {s.batch,
              s.out_height,
              s.out_width,
              s.out_channels,
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

// Whether the copy engine can walk each residue.
static bool residues_possible(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.stride_height * s.stride_width > MOST_RESIDUES)
        return false;
    for (int64_t y = 0; y < residues_of(residue_rows(s)); y++)
        for (int64_t x = 0; x < residues_of(residue_columns(s)); x++) {
            const ConvProduct p = residue_product({}, s, y, x);
            if (has_taps(p) && !pixel_map_possible(p.grid, call.output, call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2))
                return false;
        }
    return true;
}

static Steps steps_of(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32;
    const int64_t element = tf32 ? 4 : 2, taps = s.kernel_height * s.kernel_width;
    Steps steps = {};
    ConvProduct &p = steps.product;
    p.kernel_height = s.kernel_height, p.kernel_width = s.kernel_width;
    p.dilation_height = s.dilation_height, p.dilation_width = s.dilation_width;
    p.result = call.result;
    p.dtype = call.dtype;
    p.stream = call.stream;
    const int64_t c = s.in_channels, o = s.out_channels;
    const bool last = conv2d_weight_is_channels_last(s);
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT) {
        p.grid = conv2d_input_grid(s);
        p.picture = call.input;
        p.other = call.output;
        p.columns = o;
        p.result_is_float = tf32;
        const int64_t places = conv2d_places(p.grid), row = SWIZZLE_ROW / element;
        steps.width = taps * ceil_div(c, row) * row;
        if (tf32) {
            const PixelGrid &g = p.grid;
            steps.turns = 1;
            steps.turn_other = turn_of(s.batch, s.out_height, s.out_width, o);
            steps.plan = quickest(WEIGHT_TF32, steps.width, o, places, true, device);
            const Turn shifted = shifted_turn(s);
            const int64_t shifted_places = s.batch * shifted.grid_height * shifted.grid_width;
            if (can_shift(s, shifted)) {
                const ConvPlan plan = quickest(SHIFTED_TF32, o, steps.width, shifted_places, true, device);
                const double turn = TURN_START + (double)(4 * shifted_places * c * (1 + s.kernel_width)) / TURN_RATE;
                if (plan.time + turn < steps.plan.time) {
                    steps.turns = 2;
                    steps.plan = plan;
                    steps.turn_picture = shifted;
                    steps.turn_other.grid_height = p.grid.grid_height = shifted.grid_height;
                    steps.turn_other.grid_width = p.grid.grid_width = shifted.grid_width;
                }
            }
            p.other_pitch = ceil_div(conv2d_places(g), 4) * 4;
            steps.turn_other.pitch = steps.turn_picture.pitch = p.other_pitch;
            steps.other_bytes = conv2d_round_to_256(o * p.other_pitch * 4);
            if (steps.turns == 2)
                steps.picture_bytes = conv2d_round_to_256(s.kernel_width * c * p.other_pitch * 4);
        } else {
            steps.plan = quickest(WEIGHT_HALVES, o, steps.width, places, true, device);
        }
        steps.sums_pieces = steps.plan.pieces > 1 || c % row != 0 || !last;
        if (steps.sums_pieces)
            steps.piece_bytes = (size_t)(steps.plan.pieces * o * steps.width) * 4;
        return steps;
    }
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    p.grid = forward ? conv2d_input_grid(s) : conv2d_output_grid(s);
    p.picture = forward ? call.input : call.output;
    p.other = call.weight;
    p.columns = forward ? o : c;
    p.bias = call.bias;
    p.mirrored = !forward;
    p.weight_by_channel = !forward && !tf32;
    if (last && tf32 && !forward) {
        // The weight as [c][tap][o]: o are the places, taps the images.
        steps.turns = 1;
        steps.turn_other = {taps, 1, o, c, c, 0, taps * c, 1, o, taps * o, 1, 0, 0};
        steps.other_bytes = conv2d_round_to_256(o * taps * c * element);
    } else if (!last || (tf32 && !forward)) {
        steps.relayouts = true;
        steps.relayout = conv2d_weight_relayout(s, tf32 && !forward);
        steps.other_bytes = conv2d_round_to_256(o * taps * c * element);
    }
    if (is_strided(call))
        return steps; // a plan for each residue
    const int64_t m = conv2d_places(p.grid), k = taps * ceil_div(p.grid.channels, 128 / element) * (128 / element);
    steps.plan = tf32 ? quickest(PIXELS_TF32, m, p.columns, k, false, device)
                      : quickest(PIXELS_HALVES, m, p.columns, k, false, device);
    return steps;
}

#if defined(CUDA_OPS_SM90A)
static constexpr bool HAS_KERNELS = true;
#else
static constexpr bool HAS_KERNELS = false;
#endif

Answer conv2d_sm90_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    const bool halves = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    const int64_t element = tf32 ? 4 : 2, most = INT32_MAX - 1024, taps = s.kernel_height * s.kernel_width;
    if (!HAS_KERNELS)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (!tf32 && !halves)
        return CONV_NEEDS_TENSOR_CORES;
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    if (s.batch < 1 || s.in_channels < 1 || s.out_channels < 1)
        return CONV_IS_EMPTY;
    if (!conv2d_pictures_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    // Channels in whole pieces of 16 bytes, of all that the copy engine reads.
    if (s.in_channels * element % 16 != 0 || (!forward && s.out_channels * element % 16 != 0))
        return CONV_NEEDS_VECTORS;
    // A tap's place in the kernel has 8 bits.
    if ((s.kernel_height - 1) * s.dilation_height > 255 || (s.kernel_width - 1) * s.dilation_width > 255)
        return no("the dilated kernel is larger than 256");
    if (taps * (s.in_channels + 256) > most || taps * (s.out_channels + 256) > most ||
        s.in_channels * taps * s.out_channels > most)
        return CONV_IS_LARGE;
    const void *const other = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? call.output : call.weight;
    if (!is_aligned_16(other) || !is_aligned_16(call.result))
        return NEEDS_ALIGNMENT;
    if (is_strided(call))
        return residues_possible(call) ? YES : no("its strides or sizes have no TMA descriptors for grad_input");
    return pixel_map_possible(input ? conv2d_output_grid(s) : conv2d_input_grid(s), input ? call.output : call.input,
                              element)
               ? YES
               : no("its strides, padding or sizes have no TMA im2col descriptor, or images are not aligned");
}

size_t conv2d_sm90_workspace(const ConvCall &call, ConvDevice device)
{
    const Steps steps = steps_of(call, device);
    return steps.other_bytes + steps.picture_bytes + steps.piece_bytes;
}

static cuda_ops_status turn(void *to, const void *picture, const Turn &t, cudaStream_t stream)
{
    const int64_t places = t.images * t.grid_height * t.grid_width;
    launch_dependent(conv2d_turn_kernel, dim3(clamp_grid(ceil_div(places, LINES) * ceil_div(t.channels, COLUMNS))),
                     THREADS, 0, stream, (float *)to, (const float *)picture, t);
    return launch_status();
}

bool conv2d_turns_input(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    return HAS_KERNELS && device.capability == 90 && call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32 &&
           s.in_channels % 4 == 0 && s.batch * s.out_height * s.out_width < INT32_MAX - 1024 &&
           is_aligned_16(call.input);
}

cuda_ops_status conv2d_turn_input(void *to, const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    Turn t = turn_of(s.batch, s.out_height, s.out_width, s.in_channels);
    t.image_size = s.in_height * s.in_width * s.in_channels;
    t.line_size = s.stride_height * s.in_width * s.in_channels;
    t.place_size = s.stride_width * s.in_channels;
    t.pitch = conv2d_turned_pitch(s);
    return turn(to, call.input, t, call.stream);
}

static cuda_ops_status run_product(const ConvProduct &p, ConvDevice device, const ConvPlan &plan, bool is_weight,
                                   bool is_shifted)
{
    switch (p.dtype) {
    case CUDA_OPS_BFLOAT16:
        return is_weight             ? conv2d_weight_bfloat16(p, device, plan)
               : p.weight_by_channel ? conv2d_pixels_bfloat16_by_channel(p, device, plan)
                                     : conv2d_pixels_bfloat16(p, device, plan);
    case CUDA_OPS_FLOAT16:
        return is_weight             ? conv2d_weight_float16(p, device, plan)
               : p.weight_by_channel ? conv2d_pixels_float16_by_channel(p, device, plan)
                                     : conv2d_pixels_float16(p, device, plan);
    case CUDA_OPS_FLOAT32:
        return is_shifted  ? conv2d_shifted_tf32(p, device, plan)
               : is_weight ? conv2d_weight_tf32(p, device, plan)
                           : conv2d_pixels_tf32(p, device, plan);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}

// Pieces of 16 bytes.
__global__ void __launch_bounds__(THREADS) conv2d_zeros_kernel(uint4 *to, int64_t count)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count())
        to[i] = make_uint4(0, 0, 0, 0);
}

static cuda_ops_status run_residues(const ConvProduct &product, const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t rows = residues_of(residue_rows(s)), columns = residues_of(residue_columns(s));
    const int64_t element = call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2, row = SWIZZLE_ROW / element;
    bool all_have_taps = true;
    for (int64_t i = 0; i < rows * columns; i++)
        all_have_taps = all_have_taps && has_taps(residue_product(product, s, i / columns, i % columns));
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (!all_have_taps) {
        const int64_t pieces = s.batch * s.in_height * s.in_width * (s.in_channels * element / 16);
        launch_dependent(conv2d_zeros_kernel, dim3(clamp_grid(ceil_div(pieces, THREADS))), THREADS, 0, call.stream,
                         (uint4 *)call.result, pieces);
        status = launch_status();
    }
    // The longest sums first.
    ConvProduct products[MOST_RESIDUES];
    int count = 0;
    for (int64_t i = 0; i < rows * columns; i++) {
        const ConvProduct p = residue_product(product, s, i / columns, i % columns);
        if (!has_taps(p))
            continue;
        int at = count++;
        for (; at > 0 && taps_of(products[at - 1]) < taps_of(p); at--)
            products[at] = products[at - 1];
        products[at] = p;
    }
    for (int i = 0; i < count && status == CUDA_OPS_SUCCESS; i += MOST_TOGETHER) {
        const int together = count - i < MOST_TOGETHER ? count - i : MOST_TOGETHER;
        const ConvPlan plan = call.dtype == CUDA_OPS_FLOAT32
                                  ? quickest_together(STRIDED_TF32, products + i, together, row, device)
                                  : quickest_together(STRIDED_HALVES, products + i, together, row, device);
        status = call.dtype == CUDA_OPS_FLOAT32   ? conv2d_strided_tf32(products + i, together, device, plan)
                 : call.dtype == CUDA_OPS_FLOAT16 ? conv2d_strided_float16(products + i, together, device, plan)
                                                  : conv2d_strided_bfloat16(products + i, together, device, plan);
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
    if (steps.relayouts || steps.turns > 0) {
        status = steps.relayouts ? conv2d_relayout(workspace, p.other, steps.relayout, call.dtype, call.stream)
                                 : turn(workspace, p.other, steps.turn_other, call.stream);
        p.other = workspace;
        workspace += steps.other_bytes;
    }
    if (steps.turns > 1 && status == CUDA_OPS_SUCCESS) {
        status = turn(workspace, p.picture, steps.turn_picture, call.stream);
        p.picture = workspace;
        workspace += steps.picture_bytes;
    }
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (is_strided(call))
        return run_residues(p, call, device);
    if (!steps.sums_pieces)
        return run_product(p, device, steps.plan, is_weight, steps.turns > 1);
    const float *const pieces = (const float *)workspace;
    p.result = workspace;
    p.result_is_float = 1;
    status = run_product(p, device, steps.plan, is_weight, steps.turns > 1);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int64_t taps = call.sizes.kernel_height * call.sizes.kernel_width, places = conv2d_places(p.grid);
    const int64_t depth = call.dtype == CUDA_OPS_FLOAT32 ? 32 : 64;
    const int64_t chunk = ceil_div(ceil_div(places, steps.plan.pieces), depth) * depth;
    return conv2d_sum_pieces(call.result, pieces, call.sizes, steps.width / taps, ceil_div(places, chunk), call.dtype,
                             call.stream);
}
