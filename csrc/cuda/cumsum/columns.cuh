// Columns: a block has `across` neighbouring vectors and goes down `height` rows, eight to a thread; blocks above each
// other look up what those before them have left (chains.cuh), and take their places by a ticket, so that whoever is waited
// for already runs.
#ifndef CUDA_OPS_CUMSUM_COLUMNS_CUH
#define CUDA_OPS_CUMSUM_COLUMNS_CUH

#include "cumsum/chains.cuh"
#include "cumsum/chunk.cuh"

static constexpr int COLUMN_BUFFERS = 3;
static constexpr int WIDEST = 64; // elements across, of parts above each other
// Single elements of a thread, where columns are no whole vectors: they are loaded to registers.
static constexpr int HELD_SINGLES = 16;

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

#endif
