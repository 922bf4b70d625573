// Rows longer than that have a block each, which goes along them a tile at a time, the next tile on its way; where these
// were few, a row has parts, whose sums a kernel before leaves in the workspace.
#ifndef CUDA_OPS_CUMSUM_LONG_ROWS_CUH
#define CUDA_OPS_CUMSUM_LONG_ROWS_CUH

#include "cumsum/chunk.cuh"

// Blocks that run at once on a large GPU; a constant, so that arrays are cut alike on every device.
static constexpr int64_t WANTED_ROW_BLOCKS = 396;

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

#endif
