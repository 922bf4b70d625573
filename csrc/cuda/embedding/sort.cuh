// The slots of each row of the table: the positions at which an index names it, in their order. A stable sort of (index,
// position) by the digits of the index, the lowest first: two passes for up to 65535 rows, one for up to 255. A pass is
// two kernels: each block counts the digits of its tile, then finds from the table of all counts where its own go, and
// puts them there. Integers alone are added, so that nothing depends on which thread comes first.
#ifndef CUDA_OPS_EMBEDDING_SORT_CUH
#define CUDA_OPS_EMBEDDING_SORT_CUH

#include "common/loss.cuh"
#include "embedding/rows.cuh"

static constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS; // a thread of a block for each
static constexpr int SORT_WARPS = DIGITS / WARP_SIZE;
static constexpr int ITEMS = 4, ROUND = ITEMS * DIGITS; // elements of a thread, and of a block, at a time
static constexpr int MAX_TILES = 128;                   // every block reads the counts of all

// What is sorted: of the first pass the indices themselves, else (key, slot) pairs.
struct SortInput {
    const int *keys, *slots; // NULL in the first pass
    const void *indices;
    int index_bytes;
    int64_t count, rows, padding_index;
};

// The key at position i: the index, or `rows` for one that names no row.
__device__ __forceinline__ int key_at(const SortInput &in, int64_t i)
{
    if (in.keys)
        return in.keys[i];
    const int64_t index = index_at(in.indices, in.index_bytes, i);
    return (int)(is_class(index, in.rows) && index != in.padding_index ? index : in.rows);
}

static inline int64_t sort_tile(int64_t count)
{
    return ceil_div(ceil_div(count, MAX_TILES), ROUND) * ROUND;
}

// counts: [tiles, DIGITS]. ranges, where it is not NULL, is set to zero on the way.
static __global__ void __launch_bounds__(DIGITS)
    count_digits_kernel(int *counts, int2 *ranges, const SortInput in, int64_t tile, int shift, int mask)
{
    __shared__ int found[DIGITS];
    found[threadIdx.x] = 0;
    wait_for_predecessor();
    release_successor();
    for (int64_t row = global_thread_index(); ranges && row < in.rows; row += global_thread_count())
        ranges[row] = make_int2(0, 0);
    __syncthreads();
    const int64_t begin = blockIdx.x * tile, end = begin + tile < in.count ? begin + tile : in.count;
    for (int64_t first = begin; first < end; first += DIGITS) { // whole warps go round together
        const int64_t i = first + threadIdx.x;
        const int digit = i < end ? key_at(in, i) >> shift & mask : DIGITS;
        const unsigned int peers = __match_any_sync(FULL_WARP, digit);
        // One of those that are alike adds for all of them, since a text has few different letters.
        if (digit < DIGITS && threadIdx.x % WARP_SIZE == __ffs(peers) - 1)
            atomicAdd(&found[digit], __popc(peers));
    }
    __syncthreads();
    counts[blockIdx.x * DIGITS + threadIdx.x] = found[threadIdx.x];
}

// Over the block's threads, what comes before each.
__device__ __forceinline__ int exclusive_sum(int value, int *scratch)
{
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, sum, offset);
        sum += lane >= offset ? other : 0;
    }
    if (lane == WARP_SIZE - 1)
        scratch[warp] = sum;
    __syncthreads();
    int before = 0;
#pragma unroll
    for (int w = 0; w < SORT_WARPS; w++)
        before += w < warp ? scratch[w] : 0;
    return before + sum - value;
}

static __global__ void __launch_bounds__(DIGITS)
    place_by_digit_kernel(int *keys, int *slots, const int *counts, const SortInput in, int tiles, int64_t tile,
                          int shift, int mask)
{
    __shared__ int next[DIGITS];                 // where the block's next element of a digit goes
    __shared__ int of_warps[SORT_WARPS][DIGITS]; // each warp's elements of a digit in this round; then where they go
    __shared__ int scratch[SORT_WARPS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, own = threadIdx.x;
    wait_for_predecessor();
    release_successor();
    int before = 0, total = 0;
#pragma unroll 8
    for (int t = 0; t < tiles; t++) {
        const int found = counts[t * DIGITS + own];
        before += t < (int)blockIdx.x ? found : 0;
        total += found;
    }
    next[own] = exclusive_sum(total, scratch) + before;
    const int64_t begin = blockIdx.x * tile, end = begin + tile < in.count ? begin + tile : in.count;
    for (int64_t first = begin; first < end; first += ROUND) {
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++)
            of_warps[w][own] = 0;
        __syncthreads();
        // A warp has ITEMS * 32 neighbours, 32 at a time, so that the order is that of the positions.
        const int64_t mine = first + warp * (ITEMS * WARP_SIZE) + lane;
        int key[ITEMS], slot[ITEMS], digit[ITEMS], rank[ITEMS];
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int64_t i = mine + k * WARP_SIZE;
            key[k] = i < end ? key_at(in, i) : 0;
            slot[k] = i < end && in.slots ? in.slots[i] : (int)i;
            digit[k] = i < end ? key[k] >> shift & mask : DIGITS;
        }
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const unsigned int peers = __match_any_sync(FULL_WARP, digit[k]);
            const int earlier = digit[k] < DIGITS ? of_warps[warp][digit[k]] : 0;
            rank[k] = earlier + __popc(peers & ((1u << lane) - 1));
            __syncwarp(); // all have read before one writes
            if (digit[k] < DIGITS && lane == __ffs(peers) - 1)
                of_warps[warp][digit[k]] = earlier + __popc(peers);
            __syncwarp();
        }
        __syncthreads();
        int at = next[own];
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++) {
            const int found = of_warps[w][own];
            of_warps[w][own] = at;
            at += found;
        }
        next[own] = at;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (digit[k] < DIGITS) {
                const int to = of_warps[warp][digit[k]] + rank[k];
                keys[to] = key[k];
                slots[to] = slot[k];
            }
        __syncthreads(); // before of_warps is written again
    }
}

// ranges[row]: where its slots begin and end; a row without any keeps zeros.
static __global__ void __launch_bounds__(DIGITS)
    find_ranges_kernel(int2 *ranges, const int *keys, int64_t count, int64_t rows)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const int key = keys[i];
        if (key >= rows)
            continue;
        if (i == 0 || keys[i - 1] != key)
            ranges[key].x = (int)i;
        if (i == count - 1 || keys[i + 1] != key)
            ranges[key].y = (int)(i + 1);
    }
}

// Positions of indices in the order of what they name; those of an index keep theirs.
struct SortedIndices {
    const int *keys, *slots; // the index at a place, `rows` of those that name no row; and its position
    const int2 *ranges;      // of a row: where its places begin and end
};

static inline int64_t padded_to_16(int64_t bytes)
{
    return ceil_div(bytes, 16) * 16;
}

// Two buffers of keys and of slots, the counts of digits, the ranges.
static inline int64_t sort_bytes(int64_t count, int64_t rows)
{
    return 4 * padded_to_16(4 * count) + 4 * MAX_TILES * DIGITS + padded_to_16(8 * rows);
}

// workspace: sort_bytes, aligned to 16. count and rows are below 2^31 - 1.
static inline SortedIndices sort_indices(void *workspace, const void *indices, int index_bytes, int64_t count,
                                         int64_t rows, int64_t padding_index, cudaStream_t stream)
{
    char *at = (char *)workspace;
    const auto take = [&](int64_t bytes) {
        char *const taken = at;
        at += padded_to_16(bytes);
        return taken;
    };
    int *keys[2], *slots[2];
    for (int i = 0; i < 2; i++) {
        keys[i] = (int *)take(4 * count);
        slots[i] = (int *)take(4 * count);
    }
    int *const counts = (int *)take(4 * MAX_TILES * DIGITS);
    int2 *const ranges = (int2 *)take(8 * rows);
    // Keys go up to `rows`.
    int bits = 1;
    while (rows >> bits != 0)
        bits++;
    const int passes = (int)ceil_div(bits, DIGIT_BITS), digit_bits = (int)ceil_div(bits, passes);
    const int64_t tile = count == 0 ? ROUND : sort_tile(count);
    const int tiles = count == 0 ? 1 : (int)ceil_div(count, tile);
    SortInput in = {nullptr, nullptr, indices, index_bytes, count, rows, padding_index};
    for (int pass = 0; pass < passes; pass++) {
        const int shift = pass * digit_bits, mask = (1 << digit_bits) - 1, to = pass % 2;
        launch_dependent(count_digits_kernel, tiles, DIGITS, 0, stream, counts, pass == 0 ? ranges : nullptr, in, tile,
                         shift, mask);
        launch_dependent(place_by_digit_kernel, tiles, DIGITS, 0, stream, keys[to], slots[to], (const int *)counts, in,
                         tiles, tile, shift, mask);
        in.keys = keys[to];
        in.slots = slots[to];
    }
    launch_dependent(find_ranges_kernel, clamp_grid(ceil_div(count == 0 ? 1 : count, DIGITS)), DIGITS, 0, stream,
                     ranges, in.keys, count, rows);
    return {in.keys, in.slots, ranges};
}

#endif
