// Short rows: one flat array, cut into chunks of whole rows that come to shared memory by cp.async, the next one while
// this one is summed up. A thread has eight neighbouring vectors, a warp scans the threads' sums by shuffles, and each scan
// stops where a row starts, which arithmetic tells.
#ifndef CUDA_OPS_CUMSUM_SHORT_ROWS_CUH
#define CUDA_OPS_CUMSUM_SHORT_ROWS_CUH

#include "common/fast_division.cuh"
#include "cumsum/chunk.cuh"

// Blocks that run at once on a large GPU; a constant, so that arrays are cut alike on every device.
static constexpr int64_t WANTED_BLOCKS = 264;
static constexpr int ROW_BUFFERS = 2;

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

#endif
