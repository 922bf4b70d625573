// cumsum: output[c] = input[0] + ... + input[c] along a dimension; backwards if `reverse`.
// Short rows (inner == 1) are one flat array, cut into chunks of whole rows that come to shared memory by cp.async, the
// next one while this one is summed up: a thread has eight neighbouring vectors, a warp scans the threads' sums by
// shuffles, and each scan stops where a row starts, which arithmetic tells. Longer rows have a block each, which goes along
// them a tile at a time, the next tile on its way; where these were few, a row has parts, whose sums a kernel before leaves
// in the workspace. Columns (inner > 1): a block has `across` neighbouring vectors and goes down `height` rows, eight to a
// thread; blocks above each other look up what those before them have left (cuda_ops/cumsum.h), and take their places by a
// ticket, so that whoever is waited for already runs. Bound by memory: one read and one write; rows of parts that are
// larger than the L2 cache are read twice.
#include "cuda_ops/cumsum.h"

#include <math_constants.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/device.h"
#include "common/fast_division.cuh"
#include "ptx/cp_async.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
// Blocks that run at once on a large GPU, of chunks and of long rows; constants, so that arrays are cut alike on every
// device.
static constexpr int64_t WANTED_BLOCKS = 264, WANTED_ROW_BLOCKS = 396;
static constexpr int64_t MOST_IN_GROUP = THREADS;
static constexpr int64_t LEAST_IN_GROUP = 16;

static constexpr int HELD = 8; // vectors of a thread
static constexpr int CHUNK_BYTES = THREADS * HELD * 16;
static constexpr int ROW_BUFFERS = 2, COLUMN_BUFFERS = 3;
static constexpr int WIDEST = 64; // elements across, of parts above each other
// Single elements of a thread, where columns are no whole vectors: they are loaded to registers.
static constexpr int HELD_SINGLES = 16;

// ---- Sums that blocks leave for each other -------------------------------------------------------------------------

// The launch before has filled the workspace with ones: a NaN that no sum is stored as. One store of a word is both the
// sum and the message that it is there.
__device__ __forceinline__ float peek(const float *at)
{
    return *(const volatile float *)at;
}

__device__ __forceinline__ double peek(const double *at)
{
    return *(const volatile double *)at;
}

__device__ __forceinline__ bool is_missing(float value)
{
    return __float_as_uint(value) == 0xffffffffu;
}

__device__ __forceinline__ bool is_missing(double value)
{
    return __double_as_longlong(value) == -1;
}

__device__ __forceinline__ void publish(float *at, float value)
{
    *(volatile float *)at = value == value ? value : CUDART_NAN_F;
}

__device__ __forceinline__ void publish(double *at, double value)
{
    *(volatile double *)at = value == value ? value : CUDART_NAN;
}

// The sum of every `step`-th one of values[first ... end - 1], as soon as they are there; their loads do not wait for
// each other.
template <typename A>
__device__ __forceinline__ A wait_for_sum(const A *values, int64_t first, int64_t end, int step, int pitch)
{
    constexpr int IN_FLIGHT = 4;
    A sum = 0;
    for (; first < end; first += IN_FLIGHT * step) {
        A value[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (first + k * step < end)
                value[k] = peek(values + (first + k * step) * pitch);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (first + k * step < end) {
                while (is_missing(value[k]))
                    value[k] = peek(values + (first + k * step) * pitch);
                sum += value[k];
            }
    }
    return sum;
}

// How chunks are grouped, of each of `chains` that have `parts` chunks of `width` sums, a power of two. In the workspace
// lie the ticket (16 bytes), the chunks' sums [chain][part][width], and the groups' [chain][group][width].
struct Chains {
    int64_t chains, parts, groups;
    int group, width;

    __host__ __device__ int64_t sums() const
    {
        return chains * (parts + groups) * width;
    }
};

static Chains chains_of(int64_t chains, int64_t parts, int width)
{
    int64_t group = LEAST_IN_GROUP;
    while (group < MOST_IN_GROUP && group * group < parts)
        group *= 2;
    return {chains, parts, ceil_div(parts, group), (int)group, width};
}

template <typename A>
__device__ __forceinline__ A *chunk_sums(const Chains &c, void *workspace, int64_t chain)
{
    return (A *)((char *)workspace + 16) + chain * c.parts * c.width;
}

template <typename A>
__device__ __forceinline__ A *group_sums(const Chains &c, void *workspace, int64_t chain)
{
    return (A *)((char *)workspace + 16) + (c.chains * c.parts + chain * c.groups) * c.width;
}

// The next chunk to be taken: each once, in order.
__device__ __forceinline__ int64_t take_ticket(void *workspace)
{
    return (int64_t)(uint32_t)(atomicAdd((unsigned int *)workspace, 1u) + 1u);
}

// The block's sum of what threads of the same column have, columns being threadIdx.x % width. `kept` has THREADS
// elements.
template <typename A>
__device__ __forceinline__ A sum_of_columns(A *kept, A sum, int width)
{
    for (int offset = WARP_SIZE / 2; offset >= width; offset /= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const bool few = width < WARP_SIZE;
    __syncthreads(); // whoever still reads the last sums
    if (!few || lane < width)
        kept[few ? warp * width + lane : threadIdx.x] = sum;
    __syncthreads();
    const int column = threadIdx.x % width, rows = few ? WARPS : THREADS / width;
    A total = 0;
    for (int row = 0; row < rows; row++)
        total += kept[row * width + column];
    return total;
}

// What lies before `part` in its chain: the sum of column threadIdx.x % width. `own`: this chunk's sums of the columns,
// which the group's last chunk adds to what its group has. For a whole block.
template <typename A>
__device__ __forceinline__ A look_back(A *kept, const A *own, const Chains &c, void *workspace, int64_t chain,
                                       int64_t part)
{
    const int column = threadIdx.x % c.width, lane = threadIdx.x / c.width, lanes = THREADS / c.width;
    const int64_t group = part / c.group, first_of_group = group * c.group;
    A sum = wait_for_sum(chunk_sums<A>(c, workspace, chain) + column, first_of_group + lane, part, lanes, c.width);
    A in_group = 0;
    if (part == first_of_group + c.group - 1) {
        in_group = sum_of_columns(kept, sum, c.width);
        if (threadIdx.x < c.width)
            publish(group_sums<A>(c, workspace, chain) + group * c.width + column, in_group + own[column]);
        if (group == 0)
            return in_group;
        sum = 0;
    }
    sum += wait_for_sum(group_sums<A>(c, workspace, chain) + column, (int64_t)lane, group, lanes, c.width);
    return in_group + sum_of_columns(kept, sum, c.width);
}

template <typename V>
__device__ __forceinline__ void copy_to_shared(V *to, const void *from)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async_16(shared_address(to), from);
#else
    *to = *(const V *)from;
#endif
}

// ---- Short rows ----------------------------------------------------------------------------------------------------

template <typename T, int COUNT>
__device__ __forceinline__ void reverse_vector(aligned_vector<T, COUNT> &v)
{
#pragma unroll
    for (int e = 0; e < COUNT / 2; e++) {
        const T first = v.element[e];
        v.element[e] = v.element[COUNT - 1 - e];
        v.element[COUNT - 1 - e] = first;
    }
}

struct RowPlan {
    int64_t total, chunks;
    int chunk, cols; // elements; a chunk is whole rows, and a multiple of a vector's
    Divider by_cols;
    bool reverse, aligned;
};

// A chunk, in the order of the sums: chunk 0 is the array's last if `reverse`.
struct RowUnit {
    int64_t base; // first element in memory
    int length;   // 0 beyond the last chunk
    int start;    // where the first row starts, counted from the chunk's first vector
};

__device__ __forceinline__ RowUnit row_unit(const RowPlan &plan, int64_t index, int count)
{
    RowUnit unit = {};
    if (index >= plan.chunks)
        return unit;
    unit.base = (plan.reverse ? plan.chunks - 1 - index : index) * plan.chunk;
    const int64_t left = plan.total - unit.base;
    unit.length = left < plan.chunk ? (int)left : plan.chunk;
    unit.start = plan.reverse ? (count - unit.length % count) % count : 0;
    return unit;
}

// Where vector `at` of a chunk lies in shared memory: a thread's eight, which it reads one after the other, meet other
// banks than its neighbours'.
__device__ __forceinline__ int swizzled(int at)
{
    return (at & ~7) | ((at ^ at >> 3) & 7);
}

template <typename T>
__device__ __forceinline__ void fetch_rows(vector16<T> *buffer, const T *input, const RowPlan &plan,
                                           const RowUnit &unit)
{
    constexpr int SIZE = vector16<T>::size;
    if (unit.length == 0)
        return;
    const int lane = threadIdx.x % WARP_SIZE, vectors = (unit.length + SIZE - 1) / SIZE;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = (threadIdx.x / WARP_SIZE * HELD + i) * WARP_SIZE + lane;
        const int place = (plan.reverse ? vectors - 1 - at : at) * SIZE;
        const T *const from = input + unit.base + place;
        vector16<T> *const to = buffer + swizzled(at);
        if (plan.aligned && at < vectors && place + SIZE <= unit.length) {
            copy_to_shared(to, from);
        } else {
            vector16<T> x;
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                x.element[e] = at < vectors && place + e < unit.length ? from[e] : store_from_accumulate<T>(0);
            *to = x;
        }
    }
}

// What a thread knows of its elements of a chunk, counted from the first of them.
template <typename A>
struct RowState {
    A prefix;  // what lies before them in the row of the first one
    int start; // where the next row starts
};

// Sums up a chunk in shared memory. totals and closed have an element a warp, and no other round's.
template <typename T>
__device__ __forceinline__ RowState<accumulate_type<T>>
sum_rows(const vector16<T> *buffer, const RowPlan &plan, const RowUnit &unit, accumulate_type<T> *totals, bool *closed)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size, MINE = HELD * SIZE;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, first = threadIdx.x * HELD;
    const int vectors = (unit.length + SIZE - 1) / SIZE;
    const int end = (vectors - first) * SIZE; // past the chunk's end there are zeros, and no rows
    const bool has_starts = unit.start + plan.cols < vectors * SIZE;
    int start = MINE, back = WARP_SIZE; // threads back, the start of the row before
    if (has_starts && end > 0) {
        const int behind = first * SIZE - unit.start;
        if (behind <= 0) {
            start = -behind;
        } else {
            const int into = behind - (int)plan.by_cols.of((uint32_t)behind) * plan.cols;
            start = into == 0 ? 0 : plan.cols - into;
            back = (into + MINE - 1) / MINE;
        }
        if (start >= end)
            start = MINE;
    }
    A sum = 0;
    int reset = start;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        V x = buffer[swizzled(first + i)];
        if (plan.reverse)
            reverse_vector(x);
        if (!has_starts) {
            A part = element_of(x, 0);
#pragma unroll
            for (int e = 1; e < SIZE; e++)
                part += element_of(x, e);
            sum += part;
        } else {
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                if (i * SIZE + e == reset) {
                    sum = 0;
                    reset += reset + plan.cols < end ? plan.cols : MINE;
                }
                sum += element_of(x, e);
            }
        }
    }
    const int reach = start < MINE ? 0 : back;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
        const A other = __shfl_up_sync(FULL_WARP, sum, offset);
        if (offset <= lane && offset <= reach)
            sum += other;
    }
    const A above = __shfl_up_sync(FULL_WARP, sum, 1);
    RowState<A> state = {lane > 0 ? above : A(0), start};
    if (lane == WARP_SIZE - 1) {
        totals[warp] = sum;
        closed[warp] = reach <= lane; // whether a row starts in the warp
    }
    __syncthreads();
    A before = 0; // in the row that reaches the warp
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (w < warp)
            before = closed[w] ? totals[w] : before + totals[w];
    if (back > lane)
        state.prefix += before;
    return state;
}

// Writes the chunk, by way of its shared memory.
template <typename T>
__device__ __forceinline__ void write_rows(T *output, vector16<T> *buffer, const RowPlan &plan, const RowUnit &unit,
                                           const RowState<accumulate_type<T>> &state)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    const int first = threadIdx.x * HELD, vectors = (unit.length + SIZE - 1) / SIZE;
    const bool has_starts = unit.start + plan.cols < vectors * SIZE;
    A prefix = state.prefix, sum = 0;
    int reset = state.start;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        V x = buffer[swizzled(first + i)];
        if (plan.reverse)
            reverse_vector(x);
        A sums[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            if (has_starts && i * SIZE + e == reset) {
                prefix = sum = 0;
                reset += plan.cols;
            }
            sum += element_of(x, e);
            sums[e] = prefix + sum;
        }
        V y = vector_of<T>(sums);
        if (plan.reverse)
            reverse_vector(y);
        buffer[swizzled(first + i)] = y;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = (threadIdx.x / WARP_SIZE * HELD + i) * WARP_SIZE + threadIdx.x % WARP_SIZE;
        const int place = (plan.reverse ? vectors - 1 - at : at) * SIZE;
        T *const to = output + unit.base + place;
        if (at >= vectors)
            break;
        const V y = buffer[swizzled(at)];
        if (plan.aligned && place + SIZE <= unit.length) {
            store_vector(reinterpret_cast<V *>(to), y);
        } else {
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                if (place + e < unit.length)
                    to[e] = y.element[e];
        }
    }
    __syncwarp(); // before the next chunk comes to where this one was
}

// A warp reads of a chunk what it fetched itself, and so waits for no other one's copies.
template <typename T>
__global__ void __launch_bounds__(THREADS, 3)
    cumsum_short_rows_kernel(T *output, const T *input, const __grid_constant__ RowPlan plan)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    extern __shared__ __align__(16) unsigned char buffers[];
    __shared__ A totals[2][WARPS];
    __shared__ bool closed[2][WARPS];
    wait_for_predecessor();
    release_successor();
    RowUnit unit = row_unit(plan, blockIdx.x, SIZE);
    fetch_rows((V *)buffers, input, plan, unit);
    cp_async_commit_group();
    int round = 0;
    for (int64_t index = blockIdx.x; index < plan.chunks; index += gridDim.x, round ^= 1) {
        const RowUnit behind = row_unit(plan, index + gridDim.x, SIZE);
        fetch_rows((V *)(buffers + (round ^ 1) * CHUNK_BYTES), input, plan, behind);
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncwarp();
        V *const buffer = (V *)(buffers + round * CHUNK_BYTES);
        write_rows(output, buffer, plan, unit, sum_rows<T>(buffer, plan, unit, totals[round], closed[round]));
        unit = behind;
    }
}

// A plan of no chunks if rows are too long for it.
static RowPlan plan_short_rows(int64_t outer, int64_t cols, bool reverse, bool aligned, int count)
{
    const int64_t most = (int64_t)THREADS * HELD * count, total = outer * cols;
    RowPlan plan = {};
    int64_t step = count; // so many rows are whole vectors
    while (step > 1 && cols * (step / 2) % count == 0)
        step /= 2;
    int64_t rows = most / cols / step * step;
    if (rows * cols < most / 2 && total > most)
        return plan;
    plan.total = total;
    plan.cols = (int)cols;
    plan.by_cols = divider_by((uint32_t)cols);
    plan.reverse = reverse;
    plan.aligned = aligned;
    // Of fewer threads where that makes blocks for all multiprocessors.
    const int64_t share = ceil_div(ceil_div(outer, WANTED_BLOCKS), step) * step;
    rows = share < rows ? share : rows;
    plan.chunk = (int)(rows > 0 ? rows * cols : most);
    plan.chunks = ceil_div(total, plan.chunk);
    return plan;
}

// ---- Long rows -----------------------------------------------------------------------------------------------------

static constexpr int TILE_HELD = 4; // vectors of a thread
static constexpr int TILE = THREADS * TILE_HELD;
static constexpr int64_t TILES_OF_PART = 16, MOST_ROUNDS = 5; // of blocks that run at once, where parts are so long
static_assert(TILE_HELD * WARPS == WARP_SIZE, "the sums of a tile's vectors, warp by warp, are scanned by one warp");

// Rows in vectors, as they lie in memory; the first and the last one of a row may be a neighbour's too.
struct LongRowPlan {
    int64_t outer, cols, parts, part; // part: vectors
    bool reverse, aligned;
};

static LongRowPlan plan_long_rows(int64_t outer, int64_t cols, bool reverse, bool aligned, int count)
{
    const int64_t vectors = ceil_div(cols, count);
    int64_t parts = 1;
    if (3 * outer < WANTED_ROW_BLOCKS) {
        const int64_t rounds = outer * vectors / (TILES_OF_PART * TILE * WANTED_ROW_BLOCKS);
        parts = WANTED_ROW_BLOCKS * (rounds < 1 ? 1 : rounds < MOST_ROUNDS ? rounds : MOST_ROUNDS) / outer;
    }
    // Vectors that all threads have; a row that is not aligned may have one more.
    const int64_t part = ceil_div(ceil_div(vectors + 1, parts), THREADS) * THREADS;
    return {outer, cols, ceil_div(vectors + 1, part), part, reverse, aligned};
}

// A row, and how its vectors are found, counted in the order of the sums.
struct LongRow {
    int64_t first;   // element of the array
    int64_t vectors; // that have elements of the row
    int pad;         // elements of the first vector in memory that belong to the row before
    int edge;        // 1 if the first or the last vector may be a neighbour's too

    __device__ __forceinline__ int64_t element(const LongRowPlan &plan, int64_t at, int count) const
    {
        return (plan.reverse ? vectors - 1 - at : at) * count - pad;
    }
    // Whether what of a tile lies before `end` is loaded and stored by vectors.
    __device__ __forceinline__ bool has_vectors(const LongRowPlan &plan, int64_t begin, int64_t end) const
    {
        return plan.aligned && begin >= edge && (begin + TILE < end ? begin + TILE : end) <= vectors - edge;
    }
};

__device__ __forceinline__ LongRow long_row(const LongRowPlan &plan, int64_t row, int count)
{
    const int64_t first = row * plan.cols;
    const int pad = plan.aligned ? (int)(first % count) : 0;
    return {first, (pad + plan.cols + count - 1) / count, pad, pad > 0 || plan.cols % count > 0};
}

// A thread's vectors of a tile, which are THREADS apart, so that loads and stores are of whole lines; beyond `end`, and of
// other rows' elements, zeros. As words, since halves of their own would take a register each.
template <typename T>
__device__ __forceinline__ void load_tile(uint4 (&x)[TILE_HELD], const T *input, const LongRowPlan &plan,
                                          const LongRow &row, int64_t begin, int64_t end)
{
    typedef vector16<T> V;
    const int64_t first = row.element(plan, begin + threadIdx.x, V::size);
    const int step = plan.reverse ? -THREADS * V::size : THREADS * V::size;
    const T *const from = input + row.first + first;
    if (row.has_vectors(plan, begin, end)) {
#pragma unroll
        for (int i = 0; i < TILE_HELD; i++) {
            x[i] = make_uint4(0, 0, 0, 0);
            if (i * THREADS + threadIdx.x < end - begin)
                x[i] = *reinterpret_cast<const uint4 *>(from + i * step);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < TILE_HELD; i++) {
        V v;
#pragma unroll
        for (int e = 0; e < V::size; e++) {
            const int64_t at = first + i * step + e;
            const bool is_there = begin + i * THREADS + threadIdx.x < end && 0 <= at && at < plan.cols;
            v.element[e] = is_there ? from[i * step + e] : store_from_accumulate<T>(0);
        }
        x[i] = reinterpret_cast<const uint4 &>(v);
    }
}

template <typename T>
__device__ __forceinline__ void store_tile(T *output, const uint4 (&x)[TILE_HELD], const LongRowPlan &plan,
                                           const LongRow &row, int64_t begin, int64_t end)
{
    typedef vector16<T> V;
    const int64_t first = row.element(plan, begin + threadIdx.x, V::size);
    const int step = plan.reverse ? -THREADS * V::size : THREADS * V::size;
    T *const to = output + row.first + first;
    if (row.has_vectors(plan, begin, end)) {
#pragma unroll
        for (int i = 0; i < TILE_HELD; i++)
            if (i * THREADS + threadIdx.x < end - begin)
                store_vector(reinterpret_cast<V *>(to + i * step), reinterpret_cast<const V &>(x[i]));
        return;
    }
#pragma unroll
    for (int i = 0; i < TILE_HELD; i++)
#pragma unroll
        for (int e = 0; e < V::size; e++) {
            const int64_t at = first + i * step + e;
            if (begin + i * THREADS + threadIdx.x < end && 0 <= at && at < plan.cols)
                to[i * step + e] = reinterpret_cast<const V &>(x[i]).element[e];
        }
}

template <typename T>
__device__ __forceinline__ accumulate_type<T> sum_of_vector(const uint4 &words)
{
    const vector16<T> &x = reinterpret_cast<const vector16<T> &>(words);
    accumulate_type<T> sum = element_of(x, 0);
#pragma unroll
    for (int e = 1; e < vector16<T>::size; e++)
        sum += element_of(x, e);
    return sum;
}

// sums[row][part], but of each row's last part, which nothing lies behind. A block goes through its part from behind, so
// that what the next kernel reads first is still in the L2 cache.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_parts_kernel(accumulate_type<T> *sums, const T *input, const __grid_constant__ LongRowPlan plan)
{
    typedef accumulate_type<T> A;
    __shared__ A scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor();
    for (int64_t unit = blockIdx.x; unit < plan.outer * plan.parts; unit += gridDim.x) {
        const int64_t number = unit / plan.parts, part = unit - number * plan.parts;
        if (part == plan.parts - 1)
            continue;
        const LongRow row = long_row(plan, number, vector16<T>::size);
        const int64_t first = part * plan.part, end = first + plan.part;
        A sum = 0;
        for (int64_t begin = first + (plan.part - 1) / TILE * TILE; begin >= first; begin -= TILE) {
            uint4 x[TILE_HELD];
            load_tile(x, input, plan, row, begin, end);
#pragma unroll
            for (int i = 0; i < TILE_HELD; i++)
                sum += sum_of_vector<T>(x[i]);
        }
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0)
            sums[unit] = sum;
    }
}

// Of a tile, in the order of the sums, each warp scans each of its rows of vectors, and all warps the sums of these.
template <typename T>
__global__ void __launch_bounds__(THREADS, 3)
    cumsum_long_rows_kernel(T *output, const accumulate_type<T> *sums, const T *input,
                            const __grid_constant__ LongRowPlan plan)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    __shared__ A scratch[WARP_SIZE], totals[2][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    const int64_t units = plan.outer * plan.parts;
    int round = 0;
    for (int64_t block = blockIdx.x; block < units; block += gridDim.x) {
        const int64_t unit = units - 1 - block; // those first that the kernel before had last
        const int64_t number = unit / plan.parts, part = unit - number * plan.parts;
        const LongRow row = long_row(plan, number, SIZE);
        const int64_t behind = (part + 1) * plan.part, end = behind < row.vectors ? behind : row.vectors;
        uint4 x[TILE_HELD], next[TILE_HELD];
        load_tile(x, input, plan, row, part * plan.part, end);
        A carry = 0;
        if (part > 0) {
            for (int64_t k = threadIdx.x; k < part; k += THREADS)
                carry += sums[number * plan.parts + k];
            carry = block_sum(carry, scratch);
        }
        for (int64_t begin = part * plan.part; begin < end; begin += TILE, round ^= 1) {
            if (begin + TILE < end)
                load_tile(next, input, plan, row, begin + TILE, end);
            A sum[TILE_HELD];
#pragma unroll
            for (int i = 0; i < TILE_HELD; i++) {
                if (plan.reverse)
                    reverse_vector(reinterpret_cast<V &>(x[i]));
                sum[i] = sum_of_vector<T>(x[i]);
            }
#pragma unroll
            for (int offset = 1; offset < WARP_SIZE; offset *= 2)
#pragma unroll
                for (int i = 0; i < TILE_HELD; i++) {
                    const A other = __shfl_up_sync(FULL_WARP, sum[i], offset);
                    if (offset <= lane)
                        sum[i] += other;
                }
            if (lane == WARP_SIZE - 1)
#pragma unroll
                for (int i = 0; i < TILE_HELD; i++)
                    totals[round][i * WARPS + warp] = sum[i];
            __syncthreads();
            A total = totals[round][lane];
#pragma unroll
            for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
                const A other = __shfl_up_sync(FULL_WARP, total, offset);
                if (offset <= lane)
                    total += other;
            }
#pragma unroll
            for (int i = 0; i < TILE_HELD; i++) {
                // What lies before this thread's vector: in the tile before the warp's row of them, and in that row.
                const A above = __shfl_up_sync(FULL_WARP, sum[i], 1);
                const A others = __shfl_sync(FULL_WARP, total, (i * WARPS + warp + WARP_SIZE - 1) % WARP_SIZE);
                const A prefix = carry + (i * WARPS + warp > 0 ? others : A(0)) + (lane > 0 ? above : A(0));
                A inside = 0, y[SIZE];
#pragma unroll
                for (int e = 0; e < SIZE; e++) {
                    inside += element_of(reinterpret_cast<const V &>(x[i]), e);
                    y[e] = prefix + inside;
                }
                V result = vector_of<T>(y);
                if (plan.reverse)
                    reverse_vector(result);
                x[i] = reinterpret_cast<const uint4 &>(result);
            }
            store_tile(output, x, plan, row, begin, end);
            carry += __shfl_sync(FULL_WARP, total, WARP_SIZE - 1);
#pragma unroll
            for (int i = 0; i < TILE_HELD; i++)
                x[i] = next[i];
        }
    }
}

// ---- Columns -------------------------------------------------------------------------------------------------------

struct ColumnPlan {
    int64_t cols, inner, width, tiles; // width: vectors of a row
    int across, height;                // of a block: vectors (a power of two), rows
    bool reverse;
    Chains chains; // of parts above each other, for each tile of each outer
};

struct ColumnUnit {
    int64_t index, chain, part, outer, tile;
};

__device__ __forceinline__ ColumnUnit column_unit(const ColumnPlan &plan, int64_t index)
{
    ColumnUnit unit = {};
    unit.index = index;
    unit.part = index / plan.chains.chains; // the upper ones first
    unit.chain = index - unit.part * plan.chains.chains;
    unit.outer = unit.chain / plan.tiles;
    unit.tile = unit.chain - unit.outer * plan.tiles;
    return unit;
}

// A block has three chunks: it sums up and publishes one, then writes the one before, whose look-back so has had a round
// for others to publish, while the one behind is on its way. Single elements (COUNT 1) are not buffered but loaded twice.
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS, 2)
    cumsum_columns_kernel(T *output, void *workspace, const T *input, const __grid_constant__ ColumnPlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    constexpr bool BUFFERED = COUNT > 1;
    constexpr int ROWS = BUFFERED ? HELD : HELD_SINGLES;
    extern __shared__ __align__(16) unsigned char buffers[];
    __shared__ ColumnUnit shared_units[2];
    __shared__ A totals[WARPS][WARP_SIZE * COUNT], own[2][WIDEST], kept[THREADS], above_chunk[WIDEST];
    const int across = plan.across, column = threadIdx.x % across, down = threadIdx.x / across;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int apart = across > WARP_SIZE ? across / WARP_SIZE : 1; // warps of which one is below the other
    const int place = (lane % across) * COUNT;                     // of this thread's columns in a warp's totals
    const bool chained = plan.chains.parts > 1;
    const int64_t units = plan.chains.chains * plan.chains.parts;
    int64_t next = blockIdx.x;
    const auto take = [&] {
        const int64_t taken = next;
        next = chained ? take_ticket(workspace) : next + gridDim.x;
        return taken;
    };
    // This thread's row i of a unit, and how many rows it has there.
    const auto offset = [&](const ColumnUnit &unit, int i) {
        const int64_t row = unit.part * plan.height + down * ROWS + i;
        return (unit.outer * plan.cols + (plan.reverse ? plan.cols - 1 - row : row)) * plan.inner +
               (unit.tile * across + column) * COUNT;
    };
    const auto rows_of = [&](const ColumnUnit &unit) {
        const bool is_there = unit.index < units && unit.tile * across + column < plan.width;
        return is_there ? plan.cols - unit.part * plan.height - down * ROWS : 0;
    };
    // A thread reads what it fetched itself.
    const auto buffer_of = [&](int round) {
        return (V *)(buffers + round % COLUMN_BUFFERS * CHUNK_BYTES) + threadIdx.x;
    };
    const auto fetch = [&](int round, const ColumnUnit &unit) {
        const int64_t left = rows_of(unit);
        if constexpr (BUFFERED) {
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (i < left)
                    copy_to_shared(buffer_of(round) + i * THREADS, input + offset(unit, i));
        }
        cp_async_commit_group();
    };
    const auto read = [&](int round, const ColumnUnit &unit, int i) {
        if constexpr (BUFFERED)
            return buffer_of(round)[i * THREADS];
        else
            return *reinterpret_cast<const V *>(input + offset(unit, i));
    };
    if (threadIdx.x == 0) {
        if (chained)
            take();
        shared_units[0] = column_unit(plan, take());
        shared_units[1] = column_unit(plan, take());
    }
    __syncthreads();
    ColumnUnit before = {}, unit = shared_units[0], behind = shared_units[1];
    before.index = units;
    A prefix_before[COUNT] = {}; // of the chunk that is to be written
    fetch(0, unit);
    fetch(1, behind);
    for (int round = 0; unit.index < units || before.index < units; round++) {
        __syncthreads(); // all have read shared_units, and totals
        if (threadIdx.x == 0)
            shared_units[0] = column_unit(plan, take());
        cp_async_wait_group<1>();
        A prefix[COUNT] = {};
        const int64_t left = rows_of(unit);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (i < left) {
                const V x = read(round, unit, i);
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    prefix[e] += element_of(x, e);
            }
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            A sum = prefix[e];
            for (int step = across; step < WARP_SIZE; step *= 2) {
                const A above = __shfl_up_sync(FULL_WARP, sum, step);
                if (step <= lane)
                    sum += above;
            }
            if (lane >= WARP_SIZE - across)
                totals[warp][place + e] = sum;
            const A above = __shfl_up_sync(FULL_WARP, sum, across < WARP_SIZE ? across : 0);
            prefix[e] = across < WARP_SIZE && lane >= across ? above : A(0);
        }
        __syncthreads();
        const ColumnUnit later = shared_units[0];
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            A above = 0;
            for (int w = warp % apart; w < warp; w += apart)
                above += totals[w][place + e];
            if (chained && unit.index < units && warp + apart >= WARPS && lane >= WARP_SIZE - across) {
                const A total = above + totals[warp][place + e];
                own[round % 2][column * COUNT + e] = total;
                publish(chunk_sums<A>(plan.chains, workspace, unit.chain) + unit.part * plan.chains.width +
                            column * COUNT + e,
                        total);
            }
            prefix[e] += above;
        }
        if (before.index < units) {
            if (before.part > 0) {
                const A sum = look_back(kept, own[(round + 1) % 2], plan.chains, workspace, before.chain, before.part);
                if (threadIdx.x < plan.chains.width)
                    above_chunk[threadIdx.x] = sum;
                __syncthreads();
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    prefix_before[e] += above_chunk[column * COUNT + e];
            }
            const int64_t left_before = rows_of(before);
            A sums[COUNT] = {};
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (i >= left_before)
                    break;
                const V x = read(round + 2, before, i);
                A y[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    sums[e] += element_of(x, e);
                    y[e] = prefix_before[e] + sums[e];
                }
                store_vector(reinterpret_cast<V *>(output + offset(before, i)), vector_of<T>(y));
            }
        }
        fetch(round + 2, later);
        before = unit, unit = behind, behind = later;
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            prefix_before[e] = prefix[e];
    }
}

static ColumnPlan plan_columns(int64_t outer, int64_t cols, int64_t inner, bool reverse, int count)
{
    const int rows = count == 1 ? HELD_SINGLES : HELD;
    ColumnPlan plan = {};
    plan.cols = cols;
    plan.inner = inner;
    plan.reverse = reverse;
    plan.width = inner / count;
    // As many columns beside each other as leave the block's threads rows; lines of 128 bytes at the least.
    plan.across = 1;
    const int least = count == 1 ? WARP_SIZE : 8;
    while (plan.across < THREADS && plan.across < plan.width &&
           (plan.across < least || THREADS / (2 * plan.across) * rows >= cols))
        plan.across *= 2;
    plan.height = THREADS / plan.across * rows;
    plan.tiles = ceil_div(plan.width, plan.across);
    plan.chains = chains_of(outer * plan.tiles, ceil_div(cols, plan.height), plan.across * count);
    return plan;
}

// ---- Launchers -----------------------------------------------------------------------------------------------------

static int64_t chains_bytes(const Chains &chains, cuda_ops_dtype dtype)
{
    return chains.parts > 1 ? 16 + chains.sums() * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

template <typename T>
static cuda_ops_status cumsum_rows(T *output, void *workspace, const T *input, int64_t outer, int64_t cols,
                                   bool reverse, bool aligned, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = vector16<T>::size, BYTES = ROW_BUFFERS * CHUNK_BYTES;
    const RowPlan plan = plan_short_rows(outer, cols, reverse, aligned, SIZE);
    if (plan.chunks > 0) {
        if (allow_shared_memory(cumsum_short_rows_kernel<T>, BYTES) != cudaSuccess)
            return launch_status();
        const int64_t resident =
            (int64_t)current_device().multiprocessors * active_blocks(cumsum_short_rows_kernel<T>, THREADS, BYTES);
        launch_dependent(cumsum_short_rows_kernel<T>,
                         dim3((unsigned int)(plan.chunks < resident ? plan.chunks : resident)), dim3(THREADS), BYTES,
                         stream, output, input, plan);
        return launch_status();
    }
    const LongRowPlan rows = plan_long_rows(outer, cols, reverse, aligned, SIZE);
    const dim3 grid(clamp_grid(outer * rows.parts));
    if (rows.parts > 1)
        launch_dependent(sum_parts_kernel<T>, grid, dim3(THREADS), 0, stream, (A *)workspace, input, rows);
    launch_dependent(cumsum_long_rows_kernel<T>, grid, dim3(THREADS), 0, stream, output, (const A *)workspace, input,
                     rows);
    return launch_status();
}

template <typename T, int COUNT>
static cuda_ops_status cumsum_columns(T *output, void *workspace, const T *input, const ColumnPlan &plan,
                                      cuda_ops_dtype dtype, cudaStream_t stream)
{
    const int shared_bytes = COUNT > 1 ? COLUMN_BUFFERS * CHUNK_BYTES : 0;
    const int64_t bytes = chains_bytes(plan.chains, dtype), units = plan.chains.chains * plan.chains.parts;
    const auto kernel = cumsum_columns_kernel<T, COUNT>;
    if (allow_shared_memory(kernel, shared_bytes) != cudaSuccess ||
        (bytes > 0 && cudaMemsetAsync(workspace, 0xff, (size_t)bytes, stream) != cudaSuccess))
        return launch_status();
    const int64_t resident = (int64_t)current_device().multiprocessors * active_blocks(kernel, THREADS, shared_bytes);
    kernel<<<(unsigned int)(units < resident ? units : resident), THREADS, shared_bytes, stream>>>(output, workspace,
                                                                                                   input, plan);
    return launch_status();
}

template <typename T>
static cuda_ops_status cumsum(T *output, void *workspace, const T *input, int64_t outer, int64_t cols, int64_t inner,
                              bool reverse, cuda_ops_dtype dtype, cudaStream_t stream)
{
    constexpr int SIZE = vector16<T>::size;
    const bool aligned = is_aligned_16(output) && is_aligned_16(input);
    if (inner == 1)
        return cumsum_rows(output, workspace, input, outer, cols, reverse, aligned, stream);
    const int count = aligned && inner % SIZE == 0 ? SIZE : 1;
    const ColumnPlan plan = plan_columns(outer, cols, inner, reverse, count);
    if (count > 1)
        return cumsum_columns<T, SIZE>(output, workspace, input, plan, dtype, stream);
    return cumsum_columns<T, 1>(output, workspace, input, plan, dtype, stream);
}

extern "C" int64_t cuda_ops_cumsum_workspace_cuda(int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return 0;
    const int size = (int)(16 / dtype_size(dtype));
    if (inner == 1) {
        if (plan_short_rows(outer, cols, false, true, size).chunks > 0)
            return 0;
        const int64_t parts = plan_long_rows(outer, cols, false, true, size).parts;
        return parts > 1 ? outer * parts * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
    }
    int64_t most = 0;
    for (int count : {size, 1}) { // misaligned arrays are cut differently
        const int64_t bytes = chains_bytes(plan_columns(outer, cols, inner, false, count).chains, dtype);
        most = bytes > most ? bytes : most;
    }
    return most;
}

extern "C" cuda_ops_status cuda_ops_cumsum_cuda(void *output, void *workspace, const void *input, int64_t outer,
                                                int64_t cols, int64_t inner, int reverse, cuda_ops_dtype dtype,
                                                cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T,
        return cumsum((T *)output, workspace, (const T *)input, outer, cols, inner, reverse != 0, dtype, stream));
    return CUDA_OPS_SUCCESS;
}
