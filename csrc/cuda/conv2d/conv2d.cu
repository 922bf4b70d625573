// conv2d: output = bias + sum over taps (c, r, s) of weight[o][c][r][s] * input[n][c][y * stride - padding + r *
// dilation]... and its gradients. All three products are one matrix multiplication over three tensors and three axes,
//
//   source (pixel, tap)    weight (out, tap)    output (out, pixel)
//
// of which two are multiplied and summed over the axis that they share: forward sums over taps, backward_weight over
// pixels. backward_input is forward with grad_output as the source: the rows of grad_input with the same remainder
// modulo the stride meet the same taps, so that each such residue is a product of its own (and no zeros are
// multiplied).
//
// An implicit GEMM: no im2col buffer. The address of an element is the sum of a part for each of its two axes, and
// whether it lies in the image is seen from the sums of two rows and two columns. A block keeps these parts in tables
// in shared memory (for the summed axis one step ahead), so that the loads of a tile do no division.
//
// Maps one block of 256 threads to a tile of the result; a warp to some of its rows, a lane to every 32nd column, so
// that left operands are broadcast, and stores are coalesced. Columns are the axis along which the result is
// contiguous. Two tiles in shared memory: one is multiplied while the next is on its way to registers. Groups, residues
// and parts of the sum (backward_weight) are further blocks. Partial sums are added by a second kernel, in order: no
// atomics. Bound by arithmetic (plain FMA), by the writing of the output for few input channels.
#include "cuda_ops/conv2d.h"

#include <limits.h>

#include <type_traits>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "conv2d/paths.h"
#include "conv2d/stride_phase.h"
#include "cuda_ops/linear.h"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;

// Where an index of an axis lies in a tensor: what it adds to the address, and to the row and column of the image.
struct __align__(16) place {
    int64_t offset;
    int y, x;
};
// Added to whatever else, it is a row that is in no image: for indices past the end of an axis.
static constexpr int NOWHERE = INT_MIN / 2;

// An axis counts through three digits: an image or a channel `a`, a row `y` and a column `x`.
struct axis {
    int64_t extent, a_size, y_size, x_size;
    int a_fastest; // else x is
};

struct digits {
    int64_t a, y, x;
};

// How a tensor sees an axis.
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

    int row, column, inner;                  // axis_name
    int left, right, result;                 // tensor_name
    int left_along_inner, right_along_inner; // whether lanes that load run along the inner axis
    unsigned int row_tiles, column_tiles, parts, residues;
    int64_t part_inner; // extent of the inner axis in one part
    int64_t part_size;  // elements of the result

    // backward_input: rows and columns, and how many residues there are (no more than rows and columns of grad_input).
    struct residue_line lines[2];
    int64_t residues_y, residues_x;
};

__host__ __device__ static inline digits digits_of(const axis &a, int64_t index)
{
    digits d;
    if (a.a_fastest) {
        d.a = index % a.a_size;
        index /= a.a_size;
        d.x = index % a.x_size;
        d.y = index / a.x_size;
    } else {
        d.x = index % a.x_size;
        index /= a.x_size;
        d.y = index % a.y_size;
        d.a = index / a.y_size;
    }
    return d;
}

__device__ __forceinline__ place place_of(const view &v, const digits &d)
{
    place p;
    p.offset = v.base + d.a * v.a + d.y * v.y + d.x * v.x;
    p.y = v.y_start + (int)d.y * v.y_step;
    p.x = v.x_start + (int)d.x * v.x_step;
    return p;
}

// Narrows a backward_input problem to one residue.
__host__ __device__ static inline void select_residue(problem &p, int64_t residue)
{
    const int64_t y = residue / p.residues_x, x = residue % p.residues_x;
    const residue_line &rows = p.lines[0], &columns = p.lines[1];
    const residue_taps taps_y = taps_of_residue(rows, y), taps_x = taps_of_residue(columns, x);
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

// How a thread takes part in loading one operand's tile: its elements are at other + i * other_step in one of the two
// tables of places, and always at `own` in the other one.
struct loader {
    int own, other, other_step; // indices into the tables; what belongs to the inner axis moves with the slot
    int own_slot, other_slot;   // by how much
    int tile, tile_step;
};

template <int EXTENT, int DEPTH, int PITCH>
__device__ __forceinline__ loader make_loader(bool along_inner, int first_place, int first_inner, int slot_size)
{
    const int thread = threadIdx.x;
    loader l;
    if (along_inner) {
        const int k = thread % DEPTH, e = thread / DEPTH;
        l.own = first_inner + k;
        l.own_slot = slot_size;
        l.other = first_place + e;
        l.other_slot = 0;
        l.other_step = THREADS / DEPTH;
        l.tile = k * PITCH + e;
        l.tile_step = THREADS / DEPTH;
    } else {
        const int k = thread / EXTENT, e = thread % EXTENT;
        l.own = first_place + e;
        l.own_slot = 0;
        l.other = first_inner + k;
        l.other_slot = slot_size;
        l.other_step = THREADS / EXTENT;
        l.tile = k * PITCH + e;
        l.tile_step = THREADS / EXTENT * PITCH;
    }
    return l;
}

template <typename T, int COUNT>
__device__ __forceinline__ void load_values(T (&values)[COUNT], const T *tensor, const place *places, const loader &l,
                                            int slot, int height, int width)
{
    const place own = places[l.own + slot * l.own_slot];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const place other = places[l.other + slot * l.other_slot + i * l.other_step];
        // As unsigned numbers, what is negative is too large as well.
        const bool inside = (unsigned int)(own.y + other.y) < (unsigned int)height &&
                            (unsigned int)(own.x + other.x) < (unsigned int)width;
        values[i] = inside ? tensor[own.offset + other.offset] : store_from_accumulate<T>(0);
    }
}

template <typename T, int COUNT>
__device__ __forceinline__ void store_values(accumulate_type<T> *tile, const T (&values)[COUNT], const loader &l)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        tile[l.tile + i * l.tile_step] = load_as_accumulate(values[i]);
}

// COUNT values side by side in shared memory, in pieces of 16 bytes where they make whole ones.
template <typename A, int COUNT>
__device__ __forceinline__ void load_fragment(A (&fragment)[COUNT], const A *tile)
{
    constexpr int SIZE = vector16<A>::size;
    if constexpr (COUNT % SIZE == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += SIZE) {
            const vector16<A> piece = *reinterpret_cast<const vector16<A> *>(tile + i);
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                fragment[i + e] = piece.element[e];
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            fragment[i] = tile[i];
    }
}

// A thread sums LEFT rows x RIGHT columns. `partial` takes the results where there are several parts, else `result`.
template <typename T, int LEFT, int RIGHT>
__global__ void __launch_bounds__(THREADS, sizeof(accumulate_type<T>) == 8 ? 1 : 2)
    conv2d_kernel(T *result, accumulate_type<T> *partial, const T *left, const T *right, const T *bias,
                  const __grid_constant__ problem parameters)
{
    typedef accumulate_type<T> A;
    constexpr int ROWS = WARPS * LEFT, COLUMNS = WARP_SIZE * RIGHT, DEPTH = 64 / sizeof(A);
    // A pitch past a multiple of 32 words spreads the stores of lanes that run along the inner axis over the banks.
    constexpr int ROW_PITCH = ROWS + vector16<A>::size, COLUMN_PITCH = COLUMNS + vector16<A>::size;
    constexpr int LEFT_LOADS = ROWS * DEPTH < THREADS ? 1 : ROWS * DEPTH / THREADS;
    constexpr int RIGHT_LOADS = COLUMNS * DEPTH / THREADS;
    static_assert(COLUMNS * DEPTH % THREADS == 0 && (ROWS * DEPTH < THREADS || ROWS * DEPTH % THREADS == 0), "whole");
    __shared__ __align__(16) A left_tile[2][DEPTH * ROW_PITCH];
    __shared__ __align__(16) A right_tile[2][DEPTH * COLUMN_PITCH];
    __shared__ place places[ROWS + COLUMNS + 2 * 2 * DEPTH]; // rows, columns, two slots of left and right inner
    __shared__ int64_t result_offset[ROWS + COLUMNS];
    __shared__ problem p;

    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    for (int i = thread; i < (int)(sizeof(problem) / sizeof(int)); i += THREADS)
        reinterpret_cast<int *>(&p)[i] = reinterpret_cast<const int *>(&parameters)[i];
    __syncthreads();

    // Blocks that run at the same time share what they read if the shorter of the two axes is walked first.
    unsigned int block = blockIdx.x, row_tile, column_tile;
    if (p.row_tiles < p.column_tiles) {
        row_tile = block % p.row_tiles;
        block /= p.row_tiles;
        column_tile = block % p.column_tiles;
        block /= p.column_tiles;
    } else {
        column_tile = block % p.column_tiles;
        block /= p.column_tiles;
        row_tile = block % p.row_tiles;
        block /= p.row_tiles;
    }
    const unsigned int part = block % p.parts;
    block /= p.parts;
    const unsigned int residue = block % p.residues, group = block / p.residues;
    if (p.residues > 1) {
        if (thread == 0)
            select_residue(p, residue);
        __syncthreads();
    }

    const axis &rows = p.axes[p.row], &columns = p.axes[p.column], &inner = p.axes[p.inner];
    const int64_t first_row = (int64_t)row_tile * ROWS, first_column = (int64_t)column_tile * COLUMNS;
    if (first_row >= rows.extent || first_column >= columns.extent)
        return; // the whole block: a residue smaller than the largest
    const int64_t inner_begin = part * p.part_inner;
    const int64_t inner_end = inner.extent - inner_begin < p.part_inner ? inner.extent : inner_begin + p.part_inner;
    const int64_t steps = inner_end > inner_begin ? ceil_div(inner_end - inner_begin, DEPTH) : 0;

    for (int i = thread; i < ROWS + COLUMNS; i += THREADS) {
        const bool is_row = i < ROWS;
        const int name = is_row ? p.row : p.column, tensor = is_row ? p.left : p.right;
        const int64_t index = is_row ? first_row + i : first_column + i - ROWS;
        place at = {0, NOWHERE, NOWHERE};
        int64_t offset = 0;
        if (index < p.axes[name].extent) {
            const digits d = digits_of(p.axes[name], index);
            at = place_of(p.views[tensor][name], d);
            offset = place_of(p.views[p.result][name], d).offset;
        }
        places[i] = at;
        result_offset[i] = offset;
    }
    // The places of one step along the inner axis, by the first threads.
    const auto fill_inner = [&](int64_t step) {
        if (thread >= 2 * DEPTH)
            return;
        const int64_t index = inner_begin + step * DEPTH + thread % DEPTH;
        place at = {0, NOWHERE, NOWHERE};
        if (index < inner_end)
            at = place_of(p.views[thread < DEPTH ? p.left : p.right][p.inner], digits_of(inner, index));
        places[ROWS + COLUMNS + (step % 2) * 2 * DEPTH + thread] = at;
    };
    fill_inner(0);
    fill_inner(1);
    __syncthreads();

    left += group * p.group_offset[p.left];
    right += group * p.group_offset[p.right];
    const loader left_loader = make_loader<ROWS, DEPTH, ROW_PITCH>(p.left_along_inner, 0, ROWS + COLUMNS, 2 * DEPTH);
    const loader right_loader =
        make_loader<COLUMNS, DEPTH, COLUMN_PITCH>(p.right_along_inner, ROWS, ROWS + COLUMNS + DEPTH, 2 * DEPTH);
    const bool loads_left = ROWS * DEPTH >= THREADS || thread < ROWS * DEPTH;
    const int height = p.height, width = p.width;

    T left_values[LEFT_LOADS], right_values[RIGHT_LOADS];
    A sum[LEFT][RIGHT];
#pragma unroll
    for (int i = 0; i < LEFT; i++)
#pragma unroll
        for (int j = 0; j < RIGHT; j++)
            sum[i][j] = 0;

    if (steps > 0) {
        if (loads_left) {
            load_values(left_values, left, places, left_loader, 0, height, width);
            store_values<T>(left_tile[0], left_values, left_loader);
        }
        load_values(right_values, right, places, right_loader, 0, height, width);
        store_values<T>(right_tile[0], right_values, right_loader);
    }
    __syncthreads();
    for (int64_t step = 0; step < steps; step++) {
        const int now = step % 2, next = 1 - now;
        const bool more = step + 1 < steps;
        if (more) {
            if (loads_left)
                load_values(left_values, left, places, left_loader, next, height, width);
            load_values(right_values, right, places, right_loader, next, height, width);
        }
        // The slot of this step was last read one iteration ago, before its barrier.
        if (step + 2 < steps)
            fill_inner(step + 2);
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            A a[LEFT], b[RIGHT];
            load_fragment(a, left_tile[now] + k * ROW_PITCH + warp * LEFT);
#pragma unroll
            for (int j = 0; j < RIGHT; j++)
                b[j] = right_tile[now][k * COLUMN_PITCH + lane + j * WARP_SIZE];
#pragma unroll
            for (int i = 0; i < LEFT; i++)
#pragma unroll
                for (int j = 0; j < RIGHT; j++)
                    sum[i][j] += a[i] * b[j];
        }
        if (more) {
            if (loads_left)
                store_values<T>(left_tile[next], left_values, left_loader);
            store_values<T>(right_tile[next], right_values, right_loader);
        }
        __syncthreads();
    }

    const int64_t group_offset = group * p.group_offset[p.result];
    const int64_t first_channel = group * p.axes[OUT].extent;
#pragma unroll
    for (int i = 0; i < LEFT; i++) {
        const int r = warp * LEFT + i;
        if (first_row + r >= rows.extent)
            break;
#pragma unroll
        for (int j = 0; j < RIGHT; j++) {
            const int c = lane + j * WARP_SIZE;
            if (first_column + c >= columns.extent)
                break;
            const int64_t offset = group_offset + result_offset[r] + result_offset[ROWS + c];
            A value = sum[i][j];
            if (bias != nullptr)
                value += load_as_accumulate(bias[first_channel + (p.row == OUT ? first_row + r : first_column + c)]);
            if (p.parts > 1)
                partial[part * p.part_size + offset] = value;
            else
                result[offset] = store_from_accumulate<T>(value);
        }
    }
}

// output[i] = sum over parts of partial[part][i]. A warp's lanes are neighbouring elements, and each warp takes every
// 8th part; the 8 sums are then added in order.
template <typename T>
__global__ void conv2d_sum_parts_kernel(T *output, const accumulate_type<T> *partial, int64_t count, int64_t parts)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t i = first + lane;
        A sum = 0;
        if (i < count)
#pragma unroll 8
            for (int64_t part = warp; part < parts; part += WARPS)
                sum += partial[part * count + i];
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && i < count) {
            for (int w = 1; w < WARPS; w++)
                sum += sums[w][lane];
            output[i] = store_from_accumulate<T>(sum);
        }
        __syncthreads();
    }
}

// partial[part][channel] = sum over the part's runs of pixels of contiguous grad_output. A block takes one of them, a
// warp a run at a time, COUNT elements a piece: 16 bytes, or one.
template <typename T, int COUNT>
__global__ void conv2d_bias_planes_kernel(accumulate_type<T> *partial, const T *grad_output, int64_t batch,
                                          int64_t channels, int64_t pixels, int64_t run, int64_t parts)
{
    typedef accumulate_type<T> A;
    typedef piece<T, COUNT> P;
    constexpr int UNDER_WAY = 8;
    __shared__ A scratch[WARP_SIZE];
    const int64_t runs = ceil_div(pixels, run), units = batch * runs;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t block = blockIdx.x; block < channels * parts; block += gridDim.x) {
        const int64_t channel = block % channels, part = block / channels;
        A sum = 0;
        for (int64_t unit = part + warp * parts; unit < units; unit += WARPS * parts) {
            const int64_t image = unit / runs, begin = unit % runs * run;
            const int64_t end = begin + run < pixels ? begin + run : pixels;
            const T *const plane = grad_output + (image * channels + channel) * pixels + begin;
            const int count = (int)((end - begin) / COUNT);
            for (int i = lane; i < count; i += UNDER_WAY * WARP_SIZE) {
                P pieces[UNDER_WAY];
#pragma unroll
                for (int k = 0; k < UNDER_WAY; k++)
                    if (i + k * WARP_SIZE < count)
                        pieces[k] = *reinterpret_cast<const P *>(plane + (i + k * WARP_SIZE) * COUNT);
#pragma unroll
                for (int k = 0; k < UNDER_WAY; k++)
                    if (i + k * WARP_SIZE < count)
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            sum += element_of(pieces[k], e);
            }
        }
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0)
            partial[block] = sum;
    }
}

// The tiles that are compiled. The fastest has as many rows as fit; the others are there for results with few rows or
// few columns. `cost` is for an element of the tile, against the first. float32 alone has them all: halves come here
// where no tensor core takes them, float64 for its precision, and both have the first and the smallest.
struct tile {
    int left, right;
    double cost;
    bool any_dtype;
};
static constexpr tile TILES[] = {{8, 4, 1.0, true},   {4, 8, 1.1, false}, {16, 2, 1.1, false},
                                 {16, 1, 1.4, false}, {4, 1, 2.2, true},  {1, 8, 1.9, false}};
static constexpr int TILE_COUNT = sizeof(TILES) / sizeof(TILES[0]);

// Parts of backward_weight are cut for this many blocks: two or three on every multiprocessor of a large GPU.
static constexpr int64_t WANTED_BLOCKS = 512;
static constexpr int64_t FEWEST_INNER = 128;
static constexpr int64_t BIAS_RUN = 4096;

static image_strides strides_of(int64_t channels, int64_t height, int64_t width, int channels_last)
{
    image_strides s;
    s.n = channels * height * width;
    s.c = channels_last ? 1 : height * width;
    s.y = channels_last ? width * channels : width;
    s.x = channels_last ? channels : 1;
    return s;
}

// Picks the tile with the least work, counting what its edges waste, and cuts the result into tiles of it.
static int choose_tile(const problem &p, cuda_ops_dtype dtype)
{
    const int64_t rows = p.axes[p.row].extent, columns = p.axes[p.column].extent;
    int best = 0;
    double best_cost = 0;
    for (int t = 0; t < TILE_COUNT; t++) {
        if (!TILES[t].any_dtype && dtype != CUDA_OPS_FLOAT32)
            continue;
        const int64_t tile_rows = WARPS * TILES[t].left, tile_columns = WARP_SIZE * TILES[t].right;
        const double cost = TILES[t].cost * (double)(ceil_div(rows, tile_rows) * tile_rows) *
                            (double)(ceil_div(columns, tile_columns) * tile_columns);
        if (t == 0 || cost < best_cost) {
            best = t;
            best_cost = cost;
        }
    }
    return best;
}

static int64_t row_tiles(const problem &p, int t)
{
    return ceil_div(p.axes[p.row].extent, WARPS * TILES[t].left);
}

static int64_t column_tiles(const problem &p, int t)
{
    return ceil_div(p.axes[p.column].extent, WARP_SIZE * TILES[t].right);
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
    p.parts = p.residues = 1;
    p.part_inner = INT64_MAX / 2;
    return p;
}

// backward_input: grad_output is the source, grad_input the output, and the weight's two channels change places.
static problem make_input_problem(const cuda_ops_conv2d_sizes &s)
{
    const int64_t in_channels = s.in_channels / s.groups, out_channels = s.out_channels / s.groups;
    const image_strides input = strides_of(s.in_channels, s.in_height, s.in_width, s.input_channels_last);
    const image_strides output = strides_of(s.out_channels, s.out_height, s.out_width, s.output_channels_last);
    const image_strides weight = strides_of(in_channels, s.kernel_height, s.kernel_width, s.weight_channels_last);
    problem p = {};
    p.lines[0] = residue_rows(s, output.y, weight.y, input.y);
    p.lines[1] = residue_columns(s, output.x, weight.x, input.x);
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
    p.parts = 1;
    p.part_inner = INT64_MAX / 2;
    p.residues_y = residues_of(p.lines[0]);
    p.residues_x = residues_of(p.lines[1]);
    // Residue 0 has the most pixels: tiles are counted for it.
    select_residue(p, 0);
    return p;
}

// Columns are pixels where a channel's pixels lie together, else channels.
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

template <typename T>
static cuda_ops_status launch(problem p, int64_t groups, int64_t residues, int t, T *result,
                              accumulate_type<T> *partial, const T *left, const T *right, const T *bias,
                              cudaStream_t stream)
{
    const int64_t rows = row_tiles(p, t), columns = column_tiles(p, t);
    // In floating point, where the product can't overflow.
    if ((double)rows * (double)columns * p.parts * (double)residues * (double)groups > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    p.row_tiles = (unsigned int)rows;
    p.column_tiles = (unsigned int)columns;
    p.residues = (unsigned int)residues;
    const unsigned int grid = (unsigned int)(rows * columns * p.parts * residues * groups);
    const auto start = [&](auto kernel) {
        kernel<<<grid, THREADS, 0, stream>>>(result, partial, left, right, bias, p);
        return launch_status();
    };
    if (t == 0)
        return start(conv2d_kernel<T, 8, 4>);
    if (t == 4)
        return start(conv2d_kernel<T, 4, 1>);
    if constexpr (std::is_same<T, float>::value) {
        if (t == 1)
            return start(conv2d_kernel<T, 4, 8>);
        if (t == 2)
            return start(conv2d_kernel<T, 16, 2>);
        if (t == 3)
            return start(conv2d_kernel<T, 16, 1>);
        return start(conv2d_kernel<T, 1, 8>);
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status forward(T *output, const T *input, const T *weight, const T *bias,
                               const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype, cudaStream_t stream)
{
    problem p = make_problem(s);
    multiply_weight_and_source(p, s.input_channels_last, s.output_channels_last, true);
    const bool weight_left = p.left == WEIGHT;
    return launch<T>(p, s.groups, 1, choose_tile(p, dtype), output, nullptr, weight_left ? weight : input,
                     weight_left ? input : weight, bias, stream);
}

template <typename T>
static cuda_ops_status backward_input(T *grad_input, const T *grad_output, const T *weight,
                                      const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype, cudaStream_t stream)
{
    problem p = make_input_problem(s);
    multiply_weight_and_source(p, s.output_channels_last, s.input_channels_last, !s.weight_channels_last);
    const bool weight_left = p.left == WEIGHT;
    return launch<T>(p, s.groups, p.residues_y * p.residues_x, choose_tile(p, dtype), grad_input, nullptr,
                     weight_left ? weight : grad_output, weight_left ? grad_output : weight, nullptr, stream);
}

// backward_weight's problem, its tile and its parts: the launcher and the query for the workspace must agree.
static problem make_weight_problem(const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype, int &t)
{
    problem p = make_problem(s);
    p.inner = PIXEL;
    p.row = OUT;
    p.column = TAP;
    p.left = OUTPUT;
    p.right = SOURCE;
    p.result = WEIGHT;
    p.left_along_inner = !s.output_channels_last;
    p.right_along_inner = !s.input_channels_last;
    p.part_size = s.out_channels * p.axes[TAP].extent;
    t = choose_tile(p, dtype);
    const int64_t tiles = row_tiles(p, t) * column_tiles(p, t) * s.groups, inner = p.axes[PIXEL].extent;
    int64_t parts = tiles > 0 ? WANTED_BLOCKS / tiles : 1;
    if (parts > inner / FEWEST_INNER)
        parts = inner / FEWEST_INNER;
    if (parts < 1)
        parts = 1;
    p.part_inner = ceil_div(ceil_div(inner, parts), FEWEST_INNER / 8) * (FEWEST_INNER / 8);
    if (p.part_inner > 0)
        parts = ceil_div(inner, p.part_inner);
    p.parts = (unsigned int)(parts > 0 ? parts : 1);
    return p;
}

template <typename T>
static cuda_ops_status sum_parts(T *output, const accumulate_type<T> *partial, int64_t count, int64_t parts,
                                 cudaStream_t stream)
{
    launch_dependent(conv2d_sum_parts_kernel<T>, dim3(clamp_grid(ceil_div(count, WARP_SIZE))), THREADS, 0, stream,
                     output, partial, count, parts);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward_weight(T *grad_weight, const T *grad_output, const T *input,
                                       const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype,
                                       accumulate_type<T> *partial, cudaStream_t stream)
{
    int t;
    const problem p = make_weight_problem(s, dtype, t);
    const cuda_ops_status status =
        launch<T>(p, s.groups, 1, t, grad_weight, partial, grad_output, input, nullptr, stream);
    if (status != CUDA_OPS_SUCCESS || p.parts == 1)
        return status;
    return sum_parts(grad_weight, partial, p.part_size, p.parts, stream);
}

// Enough to keep a large GPU's memory busy, but not so many that a block's warps have no run each.
static int64_t bias_parts(int64_t batch, int64_t channels, int64_t pixels)
{
    const int64_t units = ceil_div(batch * ceil_div(pixels, BIAS_RUN), WARPS);
    const int64_t parts = 2 * WANTED_BLOCKS / (channels > 0 ? channels : 1);
    return parts < 1 || units < 1 ? 1 : parts < units ? parts : units;
}

template <typename T>
static cuda_ops_status backward_bias(T *grad_bias, const T *grad_output, int64_t batch, int64_t channels,
                                     int64_t pixels, accumulate_type<T> *partial, cudaStream_t stream)
{
    const int64_t parts = bias_parts(batch, channels, pixels);
    constexpr int COUNT = whole_piece<T>::size;
    static_assert(BIAS_RUN % COUNT == 0, "runs of whole pieces");
    const bool whole = pixels % COUNT == 0 && is_aligned_16(grad_output);
    launch_dependent(whole ? conv2d_bias_planes_kernel<T, COUNT> : conv2d_bias_planes_kernel<T, 1>,
                     dim3(clamp_grid(channels * parts)), THREADS, 0, stream, partial, grad_output, batch, channels,
                     pixels, BIAS_RUN, parts);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    return sum_parts(grad_bias, partial, channels, parts, stream);
}

static size_t accumulate_size(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
}

static Answer simt_supports(const ConvCall &, ConvDevice)
{
    return YES;
}

static size_t simt_workspace(const ConvCall &call, ConvDevice)
{
    if (call.pass != CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return 0;
    int t;
    const problem p = make_weight_problem(call.sizes, call.dtype, t);
    return p.parts > 1 ? (size_t)(p.parts * p.part_size) * accumulate_size(call.dtype) : 0;
}

static cuda_ops_status simt(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    switch (call.pass) {
    case CUDA_OPS_CONV2D_FORWARD:
        CUDA_OPS_DISPATCH(call.dtype, T,
                          return forward((T *)call.result, (const T *)call.input, (const T *)call.weight,
                                         (const T *)call.bias, s, call.dtype, call.stream));
        break;
    case CUDA_OPS_CONV2D_BACKWARD_INPUT:
        CUDA_OPS_DISPATCH(call.dtype, T,
                          return backward_input((T *)call.result, (const T *)call.output, (const T *)call.weight, s,
                                                call.dtype, call.stream));
        break;
    case CUDA_OPS_CONV2D_BACKWARD_WEIGHT:
        CUDA_OPS_DISPATCH(call.dtype, T,
                          return backward_weight((T *)call.result, (const T *)call.output, (const T *)call.input, s,
                                                 call.dtype, (accumulate_type<T> *)call.workspace, call.stream));
        break;
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

// The table of paths, and the choice: the first row that can make the product and is fast at its size. The last takes
// everything.
static const ConvPath PATHS[] = {
    {CUDA_OPS_CONV2D_FEW_CHANNELS, "few_channels", "conv2d/few_channels/",
     "conv2d_few_forward_kernel conv2d_few_input_kernel conv2d_few_input_taps_kernel conv2d_few_input_fma_kernel "
     "conv2d_few_strided_input_kernel conv2d_few_weight_kernel",
     conv2d_few_channels_supports, conv2d_few_channels_is_fast, conv2d_few_channels_workspace, conv2d_few_channels},
    {CUDA_OPS_CONV2D_DEPTHWISE, "depthwise", "conv2d/depthwise/",
     "conv2d_depthwise_planes_kernel conv2d_depthwise_pixels_kernel conv2d_depthwise_any_forward_kernel "
     "conv2d_depthwise_any_input_kernel conv2d_depthwise_planes_weight_kernel conv2d_depthwise_pixels_weight_kernel "
     "conv2d_depthwise_any_weight_kernel",
     conv2d_depthwise_supports, conv2d_depthwise_is_fast, conv2d_depthwise_workspace, conv2d_depthwise},
    {CUDA_OPS_CONV2D_GEMM_1X1, "gemm_1x1", "conv2d/gemm_1x1.cu", "", conv2d_gemm_1x1_supports, conv2d_gemm_1x1_is_fast,
     conv2d_gemm_1x1_workspace, conv2d_gemm_1x1},
    {CUDA_OPS_CONV2D_SM90_HALO, "sm90_halo", "conv2d/sm90_halo/", "conv2d_sm90_halo_kernel", conv2d_sm90_halo_supports,
     conv2d_sm90_halo_is_fast, conv2d_sm90_halo_workspace, conv2d_sm90_halo},
    {CUDA_OPS_CONV2D_SM90, "sm90", "conv2d/sm90/", "conv2d_sm90_kernel conv2d_strided_kernel conv2d_halved_kernel",
     conv2d_sm90_supports, nullptr, conv2d_sm90_workspace, conv2d_sm90},
    {CUDA_OPS_CONV2D_MMA, "mma", "conv2d/mma/", "conv2d_mma_pixels_kernel conv2d_mma_weight_kernel",
     conv2d_mma_supports, nullptr, conv2d_mma_workspace, conv2d_mma},
    {CUDA_OPS_CONV2D_SIMT, "simt", "conv2d/conv2d.cu", "conv2d_kernel", simt_supports, nullptr, simt_workspace, simt},
};

// Whether a row may take a call that asks for path `number`.
static bool takes(const ConvPath &path, const ConvCall &call, int number, ConvDevice device)
{
    return (number == CUDA_OPS_CONV2D_FASTEST ? !path.is_fast || path.is_fast(call, device) : number == path.number) &&
           path.supports(call, device);
}

static ConvCall call_of_sizes(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype)
{
    ConvCall call = {};
    call.pass = pass;
    call.sizes = *sizes;
    call.dtype = dtype;
    return call;
}

extern "C" const char *cuda_ops_conv2d_path_name_cuda(int number)
{
    for (const ConvPath &path : PATHS)
        if (path.number == number)
            return path.name;
    return nullptr;
}

static int path_on(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path,
                   ConvDevice device)
{
    if (cuda_ops_conv2d_check_sizes(sizes) != CUDA_OPS_SUCCESS)
        return -1;
    const ConvCall call = call_of_sizes(pass, sizes, dtype);
    for (const ConvPath &row : PATHS)
        if (takes(row, call, path, device))
            return row.number;
    return -1;
}

extern "C" int cuda_ops_conv2d_path_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                         cuda_ops_dtype dtype, int path)
{
    return path_on(pass, sizes, dtype, path, current_device());
}

extern "C" int cuda_ops_conv2d_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_conv2d_pass pass,
                                          const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path,
                                          const cuda_ops_device_facts *device)
{
    if (cuda_ops_conv2d_check_sizes(sizes) != CUDA_OPS_SUCCESS)
        return -1;
    const ConvCall call = call_of_sizes(pass, sizes, dtype);
    const ConvDevice on = device ? *device : current_device();
    bool chosen = false;
    int count = 0;
    for (const ConvPath &row : PATHS) {
        const Answer supports = row.supports(call, on), is_fast = row.is_fast ? row.is_fast(call, on) : YES;
        const bool takes_it = !chosen && takes(row, call, path, on);
        if (count < room)
            reports[count] = {row.name,    row.file,
                              row.kernels, supports ? is_fast.why_not : supports.why_not,
                              supports,    supports && is_fast,
                              takes_it};
        chosen = chosen || takes_it;
        count++;
    }
    return count;
}

// What the simt path takes of multiply-adds in a microsecond, and PyTorch's copies from one order to the other of
// bytes and for their start; an H200.
static constexpr double PLAIN_RATE = 13e6, COPY_RATE = 1e6, COPIES_START = 12;

extern "C" int cuda_ops_conv2d_wants_channels_last_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                                        cuda_ops_dtype dtype, int path,
                                                        const cuda_ops_device_facts *device)
{
    const ConvDevice on = device ? *device : current_device();
    cuda_ops_conv2d_sizes last = *sizes;
    last.input_channels_last = last.output_channels_last = 1;
    if (path != CUDA_OPS_CONV2D_FASTEST || path_on(pass, sizes, dtype, path, on) != CUDA_OPS_CONV2D_SIMT)
        return 0;
    const int better = path_on(pass, &last, dtype, path, on);
    const bool tensor_cores =
        dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16 || (dtype == CUDA_OPS_FLOAT32 && sizes->allow_tf32);
    if (better != CUDA_OPS_CONV2D_SM90 && better != CUDA_OPS_CONV2D_SM90_HALO && better != CUDA_OPS_CONV2D_MMA &&
        !(better == CUDA_OPS_CONV2D_GEMM_1X1 && tensor_cores))
        return 0;
    const double input = (double)sizes->batch * (double)(sizes->in_channels * sizes->in_height * sizes->in_width);
    const double output = (double)sizes->batch * (double)(sizes->out_channels * sizes->out_height * sizes->out_width);
    const int64_t depth = sizes->in_channels / sizes->groups * sizes->kernel_height * sizes->kernel_width;
    const double products = output * (double)depth;
    const double copied = (sizes->input_channels_last ? 0 : input) + (sizes->output_channels_last ? 0 : output);
    const double element = dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    // The better path is at least four times as fast.
    return 0.75 * products / PLAIN_RATE > 2 * element * copied / COPY_RATE + COPIES_START;
}

extern "C" size_t cuda_ops_conv2d_workspace_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                                 cuda_ops_dtype dtype, int number)
{
    if (cuda_ops_conv2d_check_sizes(sizes) != CUDA_OPS_SUCCESS)
        return 0;
    const ConvCall call = call_of_sizes(pass, sizes, dtype);
    const ConvDevice device = current_device();
    // The call's pointers may be less aligned than those that are not known here, and then it falls to a later row.
    size_t bytes = 0;
    for (const ConvPath &path : PATHS)
        if (path.workspace && takes(path, call, number, device)) {
            const size_t wanted = path.workspace(call, device);
            bytes = wanted > bytes ? wanted : bytes;
        }
    return bytes;
}

// A path may find, when it launches, that it cannot after all (no driver that makes tensor maps): then the next does
// it.
static cuda_ops_status run(const ConvCall &call, int number)
{
    const ConvDevice device = current_device();
    cuda_ops_status status = CUDA_OPS_INVALID_ARGUMENT;
    for (const ConvPath &path : PATHS) {
        if (status != CUDA_OPS_INVALID_ARGUMENT)
            break;
        if (takes(path, call, number, device))
            status = path.launch(call, device);
    }
    return status;
}

extern "C" cuda_ops_status cuda_ops_conv2d_forward_cuda(void *output, const void *input, const void *weight,
                                                        const void *bias, const cuda_ops_conv2d_sizes *sizes,
                                                        void *workspace, int path, cuda_ops_dtype dtype,
                                                        cuda_ops_stream stream)
{
    const cuda_ops_status status = cuda_ops_conv2d_check_sizes(sizes);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (sizes->batch * sizes->out_channels * sizes->out_height * sizes->out_width == 0)
        return CUDA_OPS_SUCCESS;
    return run({CUDA_OPS_CONV2D_FORWARD, output, input, weight, nullptr, bias, workspace, *sizes, dtype, stream}, path);
}

extern "C" cuda_ops_status cuda_ops_conv2d_backward_input_cuda(void *grad_input, const void *grad_output,
                                                               const void *weight, const cuda_ops_conv2d_sizes *sizes,
                                                               void *workspace, int path, cuda_ops_dtype dtype,
                                                               cuda_ops_stream stream)
{
    const cuda_ops_status status = cuda_ops_conv2d_check_sizes(sizes);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (sizes->batch * sizes->in_channels * sizes->in_height * sizes->in_width == 0)
        return CUDA_OPS_SUCCESS;
    return run({CUDA_OPS_CONV2D_BACKWARD_INPUT, grad_input, nullptr, weight, grad_output, nullptr, workspace, *sizes,
                dtype, stream},
               path);
}

extern "C" cuda_ops_status cuda_ops_conv2d_backward_weight_cuda(void *grad_weight, const void *grad_output,
                                                                const void *input, const cuda_ops_conv2d_sizes *sizes,
                                                                void *workspace, int path, cuda_ops_dtype dtype,
                                                                cuda_ops_stream stream)
{
    const cuda_ops_status status = cuda_ops_conv2d_check_sizes(sizes);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (sizes->out_channels * sizes->in_channels == 0)
        return CUDA_OPS_SUCCESS;
    return run({CUDA_OPS_CONV2D_BACKWARD_WEIGHT, grad_weight, input, nullptr, grad_output, nullptr, workspace, *sizes,
                dtype, stream},
               path);
}

extern "C" size_t cuda_ops_conv2d_backward_bias_workspace_cuda(int64_t batch, int64_t channels, int64_t pixels,
                                                               int channels_last, cuda_ops_dtype dtype)
{
    if (channels_last)
        return (size_t)cuda_ops_linear_backward_bias_workspace_cuda(batch * pixels, channels, dtype);
    return (size_t)(bias_parts(batch, channels, pixels) * channels) * accumulate_size(dtype);
}

extern "C" cuda_ops_status cuda_ops_conv2d_backward_bias_cuda(void *grad_bias, const void *grad_output, int64_t batch,
                                                              int64_t channels, int64_t pixels, int channels_last,
                                                              void *workspace, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    if (channels == 0)
        return CUDA_OPS_SUCCESS;
    if (channels_last) // pixels are rows
        return cuda_ops_linear_backward_bias_cuda(grad_bias, grad_output, workspace, batch * pixels, channels, dtype,
                                                  stream);
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward_bias((T *)grad_bias, (const T *)grad_output, batch, channels, pixels,
                                           (accumulate_type<T> *)workspace, stream));
    return CUDA_OPS_SUCCESS;
}
