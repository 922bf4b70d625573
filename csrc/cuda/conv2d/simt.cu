// conv2d on CUDA cores: any sizes, strides, groups, layouts and dtypes. An implicit GEMM, with no im2col buffer:
//
//   forward           output[o][pixel]      = sum over taps   of weight[o][tap] * source[pixel, tap]
//   backward_weight   weight[o][tap]        = sum over pixels of output[o][pixel] * source[pixel, tap]
//   backward_input    forward with grad_output as the source, one product for each stride phase (stride_phase.h)
//
// A tap is (c, r, s). The offset of source[pixel, tap], and its row and column in the image, are each a sum of one term
// of the pixel and one of the tap. A block keeps these coordinates in shared memory, for the summed axis one step
// ahead, so that loads divide nothing. A block of 256 threads per tile, a warp per group of rows, a lane per every 32nd
// column; two stages in shared memory. k is split over blocks where tiles are few. Bound by plain FMA, or by writing
// the output where input channels are few; a block alone on its SM by the latency of its steps.
#include <math.h>

#include <type_traits>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "conv2d/paths.h"
#include "conv2d/simt_problem.cuh"
#include "conv2d/split_k.h"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;

// A thread's share of one operand's tile: elements i at coordinates[own] + coordinates[other + i * other_step]. The
// coordinates of k have two stages, which are `own_stage` or `other_stage` apart; those of rows and columns do not
// move.
struct loader {
    int own, other, other_step;
    int own_stage, other_stage;
    int tile, tile_step;
};

template <int EXTENT, int DEPTH, int PITCH>
__device__ __forceinline__ loader make_loader(bool along_inner, int first_coordinate, int first_inner, int stage_size)
{
    const int thread = threadIdx.x;
    loader l;
    if (along_inner) {
        const int k = thread % DEPTH, e = thread / DEPTH;
        l.own = first_inner + k;
        l.own_stage = stage_size;
        l.other = first_coordinate + e;
        l.other_stage = 0;
        l.other_step = THREADS / DEPTH;
        l.tile = k * PITCH + e;
        l.tile_step = THREADS / DEPTH;
    } else {
        const int k = thread / EXTENT, e = thread % EXTENT;
        l.own = first_coordinate + e;
        l.own_stage = 0;
        l.other = first_inner + k;
        l.other_stage = stage_size;
        l.other_step = THREADS / EXTENT;
        l.tile = k * PITCH + e;
        l.tile_step = THREADS / EXTENT * PITCH;
    }
    return l;
}

template <typename T, int COUNT>
__device__ __forceinline__ void load_values(T (&values)[COUNT], const T *tensor, const coordinate *coordinates,
                                            const loader &l, int stage, int height, int width)
{
    const coordinate own = coordinates[l.own + stage * l.own_stage];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const coordinate other = coordinates[l.other + stage * l.other_stage + i * l.other_step];
        // Compared as unsigned: a negative row is too large as well.
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

// COUNT neighbours in shared memory, by 16-byte loads where they are whole ones.
template <typename A, int COUNT>
__device__ __forceinline__ void load_fragment(A (&fragment)[COUNT], const A *tile)
{
    constexpr int SIZE = vector16<A>::size;
    if constexpr (COUNT % SIZE == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += SIZE) {
            const vector16<A> vector = *reinterpret_cast<const vector16<A> *>(tile + i);
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                fragment[i + e] = vector.element[e];
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            fragment[i] = tile[i];
    }
}

// A thread sums LEFT rows x RIGHT columns. Results go to `partial` where k is split, else to `result`. One long
// function: block index, tables of coordinates, main loop and epilogue share nearly all of their variables.
template <typename T, int LEFT, int RIGHT>
__global__ void __launch_bounds__(THREADS, sizeof(accumulate_type<T>) == 8 ? 1 : 2)
    conv2d_simt_kernel(T *result, accumulate_type<T> *partial, const T *left, const T *right, const T *bias,
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
    __shared__ coordinate coordinates[ROWS + COLUMNS + 2 * 2 * DEPTH]; // rows, columns, two stages of k, left and right
    __shared__ int64_t result_offset[ROWS + COLUMNS];
    __shared__ problem p;

    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    for (int i = thread; i < (int)(sizeof(problem) / sizeof(int)); i += THREADS)
        reinterpret_cast<int *>(&p)[i] = reinterpret_cast<const int *>(&parameters)[i];
    __syncthreads();

    // The shorter axis of tiles varies fastest: blocks that run at the same time then share more of what they read.
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
    const unsigned int split = block % p.splits;
    block /= p.splits;
    const unsigned int phase = block % p.phases, group = block / p.phases;
    if (p.phases > 1) {
        if (thread == 0)
            select_phase(p, phase);
        __syncthreads();
    }

    const axis &rows = p.axes[p.row], &columns = p.axes[p.column], &inner = p.axes[p.inner];
    const int64_t first_row = (int64_t)row_tile * ROWS, first_column = (int64_t)column_tile * COLUMNS;
    if (first_row >= rows.extent || first_column >= columns.extent)
        return; // the whole block: a phase with fewer pixels than the largest
    const int64_t inner_begin = split * p.split_extent;
    const int64_t inner_end = inner.extent - inner_begin < p.split_extent ? inner.extent : inner_begin + p.split_extent;
    const int64_t steps = inner_end > inner_begin ? ceil_div(inner_end - inner_begin, DEPTH) : 0;

    for (int i = thread; i < ROWS + COLUMNS; i += THREADS) {
        const bool is_row = i < ROWS;
        const int name = is_row ? p.row : p.column, tensor = is_row ? p.left : p.right;
        const int64_t index = is_row ? first_row + i : first_column + i - ROWS;
        coordinate at = {0, OUT_OF_BOUNDS, OUT_OF_BOUNDS};
        int64_t offset = 0;
        if (index < p.axes[name].extent) {
            const axis_index unraveled = unravel(p.axes[name], index);
            at = coordinate_of(p.views[tensor][name], unraveled);
            offset = coordinate_of(p.views[p.result][name], unraveled).offset;
        }
        coordinates[i] = at;
        result_offset[i] = offset;
    }
    // The coordinates of one step along k, by the first threads.
    const auto fill_inner = [&](int64_t step) {
        if (thread >= 2 * DEPTH)
            return;
        const int64_t index = inner_begin + step * DEPTH + thread % DEPTH;
        coordinate at = {0, OUT_OF_BOUNDS, OUT_OF_BOUNDS};
        if (index < inner_end)
            at = coordinate_of(p.views[thread < DEPTH ? p.left : p.right][p.inner], unravel(inner, index));
        coordinates[ROWS + COLUMNS + (step % 2) * 2 * DEPTH + thread] = at;
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
            load_values(left_values, left, coordinates, left_loader, 0, height, width);
            store_values<T>(left_tile[0], left_values, left_loader);
        }
        load_values(right_values, right, coordinates, right_loader, 0, height, width);
        store_values<T>(right_tile[0], right_values, right_loader);
    }
    __syncthreads();
    for (int64_t step = 0; step < steps; step++) {
        const int now = step % 2, next = 1 - now;
        const bool more = step + 1 < steps;
        if (more) {
            if (loads_left)
                load_values(left_values, left, coordinates, left_loader, next, height, width);
            load_values(right_values, right, coordinates, right_loader, next, height, width);
        }
        // This stage of coordinates was last read one iteration ago, before its barrier.
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
            if (bias != nullptr && split == 0)
                value += load_as_accumulate(bias[first_channel + (p.row == OUT ? first_row + r : first_column + c)]);
            if (p.splits > 1)
                partial[split * p.result_size + offset] = value;
            else
                result[offset] = store_from_accumulate<T>(value);
        }
    }
}

// The tiles that are compiled; `cost` is that of an element, against the first. The first has as many rows as fit, the
// others are for results with few rows or few columns. float32 has all of them. fp16 and bf16, which come here where no
// tensor-core path takes them, and float64 have the first and the smallest.
struct tile {
    int left, right;
    double cost;
    bool any_dtype;
};
static constexpr tile TILES[] = {{8, 4, 1.0, true},   {4, 8, 1.1, false}, {16, 2, 1.1, false},
                                 {16, 1, 1.4, false}, {4, 1, 2.2, true},  {1, 8, 1.9, false}};
static constexpr int TILE_COUNT = sizeof(TILES) / sizeof(TILES[0]);

// k is split for this many blocks, on every multiprocessor of a large GPU two of forward and backward_input, three or
// four of backward_weight; and no split is shorter. Constants, so that sums are split alike everywhere.
static constexpr int64_t WANTED_BLOCKS = 264, WANTED_WEIGHT_BLOCKS = 512;
static constexpr int64_t FEWEST_TAPS = 32, FEWEST_PIXELS = 128;
static constexpr int64_t WHOLE_STEPS = 16; // splits are multiples of it

// The tile with the least work, counting what its edges waste.
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

// A call's problem, its tile and its splits, for the launch and for the workspace query.
struct Plan {
    problem p;
    int tile;
    int64_t phases;
};

// k, `inner` at the most, in as many splits as make `wanted` blocks, none of them shorter than `fewest`.
static void split_inner(problem &p, int64_t inner, int64_t tiles, int64_t wanted, int64_t fewest)
{
    int64_t splits = tiles > 0 ? wanted / tiles : 1;
    if (splits > inner / fewest)
        splits = inner / fewest;
    if (splits < 1)
        splits = 1;
    p.split_extent = ceil_div(ceil_div(inner, splits), WHOLE_STEPS) * WHOLE_STEPS;
    if (p.split_extent > 0)
        splits = ceil_div(inner, p.split_extent);
    p.splits = (unsigned int)(splits > 0 ? splits : 1);
}

static Plan plan_forward(const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype)
{
    problem p = make_problem(s);
    multiply_weight_and_source(p, s.input_channels_last, s.output_channels_last, true);
    p.result_size = s.batch * s.out_channels * s.out_height * s.out_width;
    const int t = choose_tile(p, dtype);
    split_inner(p, p.axes[TAP].extent, row_tiles(p, t) * column_tiles(p, t) * s.groups, WANTED_BLOCKS, FEWEST_TAPS);
    return {p, t, 1};
}

// Of any of an axis's stride phases.
static int64_t most_taps(const stride_phase_axis &axis)
{
    int64_t most = 0;
    for (int64_t phase = 0; phase < stride_phase_count(axis); phase++) {
        const int64_t count = taps_of_stride_phase(axis, phase).count;
        most = count > most ? count : most;
    }
    return most;
}

static Plan plan_backward_input(const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype)
{
    problem p = make_input_problem(s);
    multiply_weight_and_source(p, s.output_channels_last, s.input_channels_last, !s.weight_channels_last);
    p.result_size = s.batch * s.in_channels * s.in_height * s.in_width;
    const int t = choose_tile(p, dtype);
    const int64_t phases = p.phases_y * p.phases_x;
    // Of a phase with fewer taps the last splits are empty.
    const int64_t taps = p.axes[TAP].a_size * most_taps(p.phase_axes[0]) * most_taps(p.phase_axes[1]);
    split_inner(p, taps, row_tiles(p, t) * column_tiles(p, t) * phases * s.groups, WANTED_BLOCKS, FEWEST_TAPS);
    return {p, t, phases};
}

static Plan plan_backward_weight(const cuda_ops_conv2d_sizes &s, cuda_ops_dtype dtype)
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
    p.result_size = s.out_channels * p.axes[TAP].extent;
    const int t = choose_tile(p, dtype);
    split_inner(p, p.axes[PIXEL].extent, row_tiles(p, t) * column_tiles(p, t) * s.groups, WANTED_WEIGHT_BLOCKS,
                FEWEST_PIXELS);
    return {p, t, 1};
}

static Plan plan_of(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_FORWARD          ? plan_forward(call.sizes, call.dtype)
           : call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? plan_backward_input(call.sizes, call.dtype)
                                                         : plan_backward_weight(call.sizes, call.dtype);
}

template <typename T>
static cuda_ops_status launch(const ConvCall &call, const Plan &plan)
{
    problem p = plan.p;
    const int64_t rows = row_tiles(p, plan.tile), columns = column_tiles(p, plan.tile), groups = call.sizes.groups;
    // In floating point, where the product can't overflow.
    if ((double)rows * (double)columns * p.splits * (double)plan.phases * (double)groups > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    p.row_tiles = (unsigned int)rows;
    p.column_tiles = (unsigned int)columns;
    p.phases = (unsigned int)plan.phases;
    const unsigned int grid = (unsigned int)(rows * columns * p.splits * plan.phases * groups);
    const void *const source = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? call.output : call.input;
    const void *const tensors[] = {source, call.weight, call.output}; // [tensor_name]
    const auto start = [&](auto kernel) {
        kernel<<<grid, THREADS, 0, call.stream>>>((T *)call.result, (accumulate_type<T> *)call.workspace,
                                                  (const T *)tensors[p.left], (const T *)tensors[p.right],
                                                  (const T *)call.bias, p);
        return launch_status();
    };
    if (plan.tile == 0)
        return start(conv2d_simt_kernel<T, 8, 4>);
    if (plan.tile == 4)
        return start(conv2d_simt_kernel<T, 4, 1>);
    if constexpr (std::is_same<T, float>::value) {
        if (plan.tile == 1)
            return start(conv2d_simt_kernel<T, 4, 8>);
        if (plan.tile == 2)
            return start(conv2d_simt_kernel<T, 16, 2>);
        if (plan.tile == 3)
            return start(conv2d_simt_kernel<T, 16, 1>);
        return start(conv2d_simt_kernel<T, 1, 8>);
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

double conv2d_simt_microseconds(const ConvCall &call, ConvDevice device)
{
    // Multiply-adds of an SM in a microsecond on an H200 or H100 with two blocks, and how much longer a block takes
    // that has an SM to itself than one of two; microseconds to start a kernel, and the one that adds parts, and how
    // many bytes of these that moves in one.
    constexpr double START = 2.5, WEIGHT_PARTS_START = 1.2, PARTS_START = 4, SPEED = 102e3, ALONE = 1.75;
    constexpr double PARTS_BYTES_RATE = 3e6;
    constexpr double STEP = 1.53; // microseconds of a step of k at the least, by its latency
    if (device.multiprocessors < 1)
        return 0;
    const Plan plan = plan_of(call);
    const problem &p = plan.p;
    int64_t inner = p.axes[p.inner].extent;
    if (plan.phases > 1) // their mean, of which the plan's, phase 0, may be far from
        inner =
            ceil_div(call.sizes.out_channels / call.sizes.groups * call.sizes.kernel_height * call.sizes.kernel_width,
                     plan.phases);
    const int64_t depth = p.split_extent < inner ? p.split_extent : inner;
    const double blocks = (double)row_tiles(p, plan.tile) * (double)column_tiles(p, plan.tile) * p.splits *
                          (double)plan.phases * (double)call.sizes.groups;
    const tile &t = TILES[plan.tile];
    const double block = t.cost * (double)(WARPS * t.left) * (double)(WARP_SIZE * t.right) * (double)depth;
    const double rounds = ceil(blocks / device.multiprocessors);
    const double products = (rounds == 1 ? ALONE : rounds) * block / SPEED;
    // Of the gradient of the weight steps are many, and hidden by more blocks.
    const bool weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    const double steps = weight ? 0 : STEP * (double)ceil_div(depth, call.dtype == CUDA_OPS_FLOAT64 ? 8 : 16);
    double parts = 0;
    if (p.splits > 1)
        parts = weight ? WEIGHT_PARTS_START
                       : PARTS_START + 2.0 * p.splits * (double)p.result_size * sizeof(float) / PARTS_BYTES_RATE;
    return START + parts + (rounds <= 2 && steps > products ? steps : products);
}

Answer conv2d_simt_supports(const ConvCall &, ConvDevice)
{
    return YES;
}

size_t conv2d_simt_workspace(const ConvCall &call, ConvDevice)
{
    const problem p = plan_of(call).p;
    const size_t element = call.dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
    return p.splits > 1 ? (size_t)(p.splits * p.result_size) * element : 0;
}

cuda_ops_status conv2d_simt(const ConvCall &call, ConvDevice)
{
    const Plan plan = plan_of(call);
    cuda_ops_status status = CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(call.dtype, T, status = launch<T>(call, plan));
    return status != CUDA_OPS_SUCCESS || plan.p.splits == 1
               ? status
               : conv2d_sum_splits(call.result, call.workspace, plan.p.result_size, plan.p.splits, call.dtype,
                                   call.stream);
}
