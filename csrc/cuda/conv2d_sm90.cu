// conv2d on Hopper's tensor cores: all three products as implicit GEMMs of channels_last tensors, by rung 13's kernel
// (gemm/13_cluster_persistent.cuh: TMA into a ring, wgmma, persistent blocks in clusters) with a producer of its own.
//
//   forward           output[place][o]     = sum over (tap, c) of picture[place + tap][c] * weight[o][tap][c]
//   backward_input    the same over grad_output, with the kernel mirrored and o and c changing places; stride 1
//   backward_weight   weight[o][tap][c]    = sum over places of grad_output[place][o] * input[place + tap][c]
//
// The copy engine gathers the rows of the picture itself, in its im2col mode: a tile is so many places one after the
// other, over the ends of lines and of images, for one tap and 128 bytes of channels; what lies in the padding comes as
// zeros. No thread computes an address, and channels that do not fill 128 bytes are filled up with zeros.
//
// 16-bit operands are read as they lie. wgmma takes TF32 along the summed axis only, so that for it backward_input
// copies the weight as [c][tap][o] first, and backward_weight grad_output as [o][place], its picture going through
// registers. A weight that is not channels_last is copied so. backward_weight cuts the places in pieces to fill the
// device; a second kernel adds them in order.
#include "conv2d_layout.h"
#include "conv2d_sm90.cuh"

static constexpr int THREADS = 256;
static constexpr int PATCH = 32, PATCH_ROWS = 8;

// Through patches in shared memory: read along the axis that lies closer in `from`, written along b.
template <typename T>
__global__ void __launch_bounds__(PATCH *PATCH_ROWS)
    conv2d_relayout_kernel(T *to, const T *from, const __grid_constant__ Relayout r)
{
    __shared__ T patch[PATCH][PATCH + 1];
    const bool along_a = r.a_size < r.b_size;
    const int64_t across = ceil_div(r.b, PATCH), patches = across * ceil_div(r.a, PATCH);
    const int x = threadIdx.x % PATCH, y = threadIdx.x / PATCH;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < patches * r.t; index += gridDim.x) {
        const int64_t t = index / patches, a = index % patches / across * PATCH, b = index % patches % across * PATCH;
#pragma unroll
        for (int i = y; i < PATCH; i += PATCH_ROWS) {
            const int da = along_a ? x : i, db = along_a ? i : x;
            if (a + da < r.a && b + db < r.b)
                patch[da][db] = from[(a + da) * r.a_size + t * r.t_size + (b + db) * r.b_size];
        }
        __syncthreads();
#pragma unroll
        for (int i = y; i < PATCH; i += PATCH_ROWS)
            if (a + i < r.a && b + x < r.b)
                to[((a + i) * r.t + t) * r.pitch + b + x] = patch[i][x];
        __syncthreads();
    }
}

// to[column][row] = from[row][column], rows of `to` `pitch` long: grad_output for TF32's backward_weight. Columns are a
// multiple of 4. A block turns LINES x COLUMNS around; four 16-byte loads in flight a thread.
static constexpr int LINES = 128, COLUMNS = 32;

__global__ void __launch_bounds__(THREADS)
    conv2d_transpose_kernel(float *to, const float *from, int64_t rows, int64_t columns, int64_t pitch)
{
    constexpr int FOURS = COLUMNS / 4, PASS = THREADS / FOURS; // threads along a line, lines at a time
    __shared__ float patch[COLUMNS][LINES + 1];                // 4 columns on are 4 banks on
    const int64_t across = ceil_div(columns, COLUMNS), patches = across * ceil_div(rows, LINES);
    const int x = threadIdx.x % FOURS * 4, y = threadIdx.x / FOURS;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < patches; index += gridDim.x) {
        const int64_t row = index / across * LINES, column = index % across * COLUMNS;
        float4 values[LINES / PASS];
#pragma unroll
        for (int i = 0; i < LINES / PASS; i++)
            if (row + y + i * PASS < rows && column + x < columns)
                values[i] = *(const float4 *)(from + (row + y + i * PASS) * columns + column + x);
#pragma unroll
        for (int i = 0; i < LINES / PASS; i++) {
            patch[x][y + i * PASS] = values[i].x;
            patch[x + 1][y + i * PASS] = values[i].y;
            patch[x + 2][y + i * PASS] = values[i].z;
            patch[x + 3][y + i * PASS] = values[i].w;
        }
        __syncthreads();
#pragma unroll
        for (int c = warp; c < COLUMNS; c += THREADS / WARP_SIZE)
#pragma unroll
            for (int r = lane; r < LINES; r += WARP_SIZE)
                if (column + c < columns && row + r < rows)
                    to[(column + c) * pitch + row + r] = patch[c][r];
        __syncthreads();
    }
}

// weight = sum over pieces, in order, of partial[piece][o][tap][width] (of which the first `channels` count). Four
// channels a thread; the threads of a block that are 32 apart take every 8th piece where there are many.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_sum_pieces_kernel(T *weight, const float *partial, int64_t outs, int64_t taps, int64_t channels,
                             int64_t width, int64_t pieces, int channels_last)
{
    constexpr int WARPS = THREADS / WARP_SIZE;
    __shared__ float4 sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t fours = channels / 4, count = outs * taps * fours, piece_size = outs * taps * width;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t index = first + lane, line = index / fours, channel = (index - line * fours) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        if (index < count)
#pragma unroll 4
            for (int64_t piece = warp; piece < pieces; piece += WARPS) {
                const float4 more = *(const float4 *)(partial + piece * piece_size + line * width + channel);
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && index < count) {
            const int others = pieces < WARPS ? (int)pieces : WARPS;
            for (int w = 1; w < others; w++) {
                const float4 more = sums[w][lane];
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
            const int64_t o = line / taps, tap = line - o * taps;
#pragma unroll
            for (int i = 0; i < 4; i++)
                weight[channels_last ? line * channels + channel + i : (o * channels + channel + i) * taps + tap] =
                    store_from_accumulate<T>(values[i]);
        }
        __syncthreads();
    }
}

// The tiles, and how long one takes on an H200, as in gemm.cu: `sum` for 1024 of the summed axis, `rest` for its start
// and its results, in microseconds. The rows' numbers are those of the switches in conv2d_sm90_*.cu.
struct ConvTile {
    int m, n, cluster_m, cluster_n, depth;
    double sum, rest;
    int group;
};
// clang-format off
static const ConvTile PIXELS_HALVES[] = {
    {128, 256, 2, 1, 64, 12.40, 1.20, 16},
    {128, 128, 2, 1, 64,  6.28, 0.55,  8},
    {128, 192, 2, 1, 64,  9.30, 0.50,  6},
    {128,  64, 2, 1, 64,  3.85, 0.70,  8},
    {128, 128, 1, 2, 64, 99, 0.55,  8},
    {128, 128, 1, 2, 64, 99, 0.55,  8},
    {128, 128, 1, 4, 64, 99, 0.55,  8},
    {128, 256, 1, 2, 64, 99, 0.55,  8},
};
static const ConvTile PIXELS_TF32[] = {
    {128, 256, 2, 1, 32, 24.40, 3.30,  8},
    {128, 128, 2, 1, 32, 12.25, 1.70,  8},
    {128,  64, 2, 1, 32,  9.70, 0.70,  8},
    {128, 128, 1, 2, 32, 99, 0.55,  8},
    {128, 128, 1, 2, 32, 99, 0.55,  8},
    {128, 128, 1, 4, 32, 99, 0.55,  8},
    {128, 256, 1, 2, 32, 99, 0.55,  8},
};
static const ConvTile WEIGHT_HALVES[] = {
    {128, 256, 2, 1, 64, 12.40, 1.20, 16},
    {128, 192, 2, 1, 64,  9.30, 0.50,  6},
    { 64, 192, 1, 1, 64,  6.00, 0.50,  8},
};
static const ConvTile WEIGHT_TF32[] = {
    {256, 128, 1, 2, 32, 26.80, 2.60,  8},
    {128, 128, 2, 1, 32, 16.30, 0.50,  8},
    {256, 128, 1, 4, 32, 99, 0.50,  8},
    {128, 128, 1, 2, 32, 99, 0.50,  8},
    {128, 128, 1, 4, 32, 99, 0.50,  8},
};
// clang-format on
static constexpr double PIECES_START = 4, PIECES_RATE = 3e6; // microseconds, and bytes in one
static constexpr int64_t SMALLEST_PIECE = 256, MOST_PIECES = 256;

template <int COUNT>
static ConvPlan quickest(const ConvTile (&tiles)[COUNT], int64_t m, int64_t n, int64_t k, bool cut, ConvDevice device)
{
    ConvPlan best = {};
    double least = 0;
    for (int tile = 0; tile < COUNT; tile++) {
        const ConvTile &t = tiles[tile];
        const int64_t clusters = ceil_div(m, t.m * t.cluster_m) * ceil_div(n, t.n * t.cluster_n);
        const int64_t room = device.multiprocessors / (t.cluster_m * t.cluster_n);
        for (int64_t pieces = 1; pieces <= (cut ? MOST_PIECES : 1); pieces++) {
            if (pieces > 1 && (k / pieces < SMALLEST_PIECE || clusters * pieces > room))
                break;
            const int64_t waves = ceil_div(clusters * pieces, room);
            double time = (double)waves * (t.sum * (double)ceil_div(k, pieces) / 1024 + t.rest);
            if (pieces > 1)
                time += PIECES_START + (double)(8 * pieces * m * n) / PIECES_RATE;
            if ((tile == 0 && pieces == 1) || time < least) {
                least = time;
                best = {tile, (int)pieces, t.group};
            }
        }
    }
    return best;
}

// What the kernel and the copies around it do for a call.
struct Steps {
    ConvProduct product;
    bool relayouts; // the weight, or grad_output
    Relayout relayout;
    size_t relaid_bytes; // in front of the pieces in the workspace
    ConvPlan plan;
    bool sums_pieces;
    int64_t width;
    size_t piece_bytes;
};

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
        const int64_t places = conv2d_places(p.grid), row = SWIZZLE_ROW / element;
        steps.width = taps * ceil_div(c, row) * row;
        if (tf32) {
            steps.relayouts = true;
            p.other_pitch = ceil_div(places, 4) * 4;
            steps.relaid_bytes = conv2d_round_to_256(o * p.other_pitch * 4);
        }
        steps.plan = tf32 ? quickest(WEIGHT_TF32, steps.width, o, places, true, device)
                          : quickest(WEIGHT_HALVES, o, steps.width, places, true, device);
        steps.sums_pieces = tf32 || steps.plan.pieces > 1 || c % row != 0 || !last;
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
    steps.relayouts = !last || (tf32 && !forward);
    if (steps.relayouts) {
        steps.relayout = conv2d_weight_relayout(s, tf32 && !forward);
        steps.relaid_bytes = conv2d_round_to_256(o * taps * c * element);
    }
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

bool conv2d_tensor_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    const bool halves = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    const int64_t element = tf32 ? 4 : 2, most = INT32_MAX - 1024, taps = s.kernel_height * s.kernel_width;
    if (!HAS_KERNELS || device.capability != 90 || !(tf32 || halves) || s.groups != 1 || s.batch < 1 ||
        s.in_channels < 1 || s.out_channels < 1)
        return false;
    if (!conv2d_pictures_are_channels_last(s))
        return false;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    if (input && (s.stride_height != 1 || s.stride_width != 1))
        return false;
    // Channels in whole pieces of 16 bytes, of all that the copy engine reads.
    if (s.in_channels * element % 16 != 0 || (!forward && s.out_channels * element % 16 != 0))
        return false;
    // A tap's place in the kernel has 8 bits.
    if ((s.kernel_height - 1) * s.dilation_height > 255 || (s.kernel_width - 1) * s.dilation_width > 255)
        return false;
    if (taps * (s.in_channels + 256) > most || taps * (s.out_channels + 256) > most ||
        s.in_channels * taps * s.out_channels > most)
        return false;
    const void *const other = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? call.output : call.weight;
    return pixel_map_possible(input ? conv2d_output_grid(s) : conv2d_input_grid(s), input ? call.output : call.input,
                              element) &&
           is_aligned_16(other) && is_aligned_16(call.result);
}

bool conv2d_tensor_is_fast(const ConvCall &, ConvDevice)
{
    return true;
}

size_t conv2d_tensor_workspace(const ConvCall &call, ConvDevice device)
{
    const Steps steps = steps_of(call, device);
    return steps.relaid_bytes + steps.piece_bytes;
}

cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &r, cuda_ops_dtype dtype,
                                cudaStream_t stream)
{
    const dim3 grid(clamp_grid(ceil_div(r.a, PATCH) * ceil_div(r.b, PATCH) * r.t));
    CUDA_OPS_DISPATCH(
        dtype, T,
        launch_dependent(conv2d_relayout_kernel<T>, grid, PATCH * PATCH_ROWS, 0, stream, (T *)to, (const T *)from, r));
    return launch_status();
}

static cuda_ops_status transpose_output(const ConvCall &call, const ConvProduct &p)
{
    const int64_t places = conv2d_places(p.grid);
    launch_dependent(conv2d_transpose_kernel, dim3(clamp_grid(ceil_div(places, LINES) * ceil_div(p.columns, COLUMNS))),
                     THREADS, 0, call.stream, (float *)call.workspace, (const float *)p.other, places, p.columns,
                     p.other_pitch);
    return launch_status();
}

static cuda_ops_status run_product(const ConvProduct &p, ConvDevice device, const ConvPlan &plan, bool is_weight)
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
        return is_weight ? conv2d_weight_tf32(p, device, plan) : conv2d_pixels_tf32(p, device, plan);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}

cuda_ops_status conv2d_tensor(const ConvCall &call, ConvDevice device)
{
    Steps steps = steps_of(call, device);
    ConvProduct &p = steps.product;
    const bool is_weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (steps.relayouts) {
        status = is_weight ? transpose_output(call, p)
                           : conv2d_relayout(call.workspace, p.other, steps.relayout, call.dtype, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        p.other = call.workspace;
    }
    if (!steps.sums_pieces)
        return run_product(p, device, steps.plan, is_weight);
    float *const pieces = (float *)((char *)call.workspace + steps.relaid_bytes);
    p.result = pieces;
    p.result_is_float = 1;
    status = run_product(p, device, steps.plan, is_weight);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t taps = s.kernel_height * s.kernel_width, depth = call.dtype == CUDA_OPS_FLOAT32 ? 32 : 64;
    const int64_t places = conv2d_places(p.grid), chunk = ceil_div(ceil_div(places, steps.plan.pieces), depth) * depth;
    const dim3 grid(clamp_grid(ceil_div(s.out_channels * taps * s.in_channels / 4, WARP_SIZE)));
    CUDA_OPS_DISPATCH(call.dtype, T,
                      launch_dependent(conv2d_sum_pieces_kernel<T>, grid, THREADS, 0, call.stream, (T *)call.result,
                                       (const float *)pieces, s.out_channels, taps, s.in_channels, steps.width / taps,
                                       ceil_div(places, chunk), (int)conv2d_weight_is_channels_last(s)));
    return launch_status();
}
