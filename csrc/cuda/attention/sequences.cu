// attention of packed sequences on Hopper: the table of sequences, and the list of tiles in the order in which they are
// worked at, by one block. Starts are clamped and made ascending by a running maximum, so that no two sequences share a
// row, whatever the numbers are; then eight lanes have a sequence, count its tiles by how long they take, and put them
// into the list behind those that take longer. Bound by latency.
#include "attention/sm90/sequences.h"

#include "common/common.cuh"

static constexpr int THREADS = 1024, WARPS = THREADS / WARP_SIZE;
static constexpr int LANES = 8, GROUPS = THREADS / LANES; // so many lanes look for a sequence's tiles
// Tiles that have more blocks to walk over count as having so many: one after the other takes about as long.
static constexpr int MOST = THREADS - 1;

struct SequencesWork {
    PackedSequence *sequences;
    PackedTile *tiles;
    PackedSchedule *schedule;
    int *blocks; // NULL forward
    const int32_t *query_starts, *key_starts;
    int64_t diagonal, window_left, window_right;
    int bottom_right;
    int batch, query_rows, key_rows, queries, keys; // the last two: the most that a sequence may have
    int all_blocks;                                 // of queries: packed_blocks()
    int grid, heads, section;
};

// Of the threads up to this one the sum, or the largest of what they have and of `before`; that of those before it goes
// to `before`. Values are 0 or more. last: of all threads.
template <bool SUM>
static __device__ int running(int value, int &before, int &last, int *scratch)
{
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const auto join = [](int a, int b) { return SUM ? a + b : max(a, b); };
    const auto along_warp = [&](int x) {
#pragma unroll
        for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, x, offset);
            x = lane >= offset ? join(x, other) : x;
        }
        return x;
    };
    const int mine = along_warp(value);
    if (lane == WARP_SIZE - 1)
        scratch[warp] = mine;
    __syncthreads();
    if (warp == 0) {
        const int all = along_warp(scratch[lane]);
        __syncwarp();
        scratch[lane] = all;
    }
    __syncthreads();
    const int from = warp > 0 ? join(before, scratch[warp - 1]) : before;
    const int previous = __shfl_up_sync(FULL_WARP, mine, 1);
    last = join(before, scratch[WARPS - 1]);
    before = lane > 0 ? join(from, previous) : from;
    __syncthreads();
    return join(from, mine);
}

// Tiles of M queries and N keys; of keys: the tiles are blocks of keys that walk over queries. The sizes are constants,
// since one block waits for each of its divisions.
template <int M, int N, bool OF_KEYS>
struct Tiles {
    // How long tile `number` takes: its blocks of keys, or for a tile of keys the blocks of queries from the first that
    // sees it to the last there is. The latter never increases from a tile to the next, so that they stay in order.
    static __device__ int length(const Band &band, int number)
    {
        if (!OF_KEYS) {
            const int row = number * M - rows_before(band.queries, M);
            return blocks_of_keys(band, max(row, 0), min(row + M, band.queries) - 1, N).count;
        }
        const int first = max(number * N - band.high, 0);
        return first < band.queries ? (band.queries - 1) / M - first / M + 1 : 0;
    }
    static __device__ int place(const Band &band, int number)
    {
        return MOST - min(length(band, number), MOST);
    }
    static __device__ int count(const Band &band)
    {
        return OF_KEYS ? (band.keys + N - 1) / N : (band.queries + M - 1) / M;
    }
};

static __device__ int start_at(const int32_t *starts, int index, int rows)
{
    return (int)cuda_ops_attention_clamp(starts[index], 0, rows);
}

template <int M, int N, bool OF_KEYS>
__global__ void __launch_bounds__(THREADS) attention_sm90_sequences_kernel(const __grid_constant__ SequencesWork work)
{
    typedef Tiles<M, N, OF_KEYS> TilesOf;
    __shared__ int scratch[WARPS], places[MOST + 1];
    places[threadIdx.x] = 0;
    wait_for_predecessor();
    release_successor();
    int queries_end = start_at(work.query_starts, 0, work.query_rows);
    int keys_end = start_at(work.key_starts, 0, work.key_rows);
    for (int first = 0; first < work.batch; first += THREADS) {
        const int index = first + threadIdx.x;
        const bool there = index < work.batch;
        PackedSequence sequence;
        sequence.first_query = queries_end, sequence.first_key = keys_end;
        const int query_end = running<false>(there ? start_at(work.query_starts, index + 1, work.query_rows) : 0,
                                             sequence.first_query, queries_end, scratch);
        const int key_end = running<false>(there ? start_at(work.key_starts, index + 1, work.key_rows) : 0,
                                           sequence.first_key, keys_end, scratch);
        cuda_ops_attention_sequence s = {};
        s.queries = min(query_end - sequence.first_query, work.queries);
        s.keys = min(key_end - sequence.first_key, work.keys);
        s.diagonal = work.diagonal + (work.bottom_right ? s.keys - s.queries : 0);
        s.window_left = work.window_left, s.window_right = work.window_right;
        sequence.band = band_of(s);
        sequence.first_block = sequence.first_query / M + index;
        if (there)
            work.sequences[index] = sequence;
    }
    __syncthreads();
    // How many tiles are how long: places[0] of the longest.
    const int group = threadIdx.x / LANES, member = threadIdx.x % LANES;
    for (int index = group; index < work.batch; index += GROUPS) {
        const Band band = work.sequences[index].band;
        for (int i = member, tiles = TilesOf::count(band); i < tiles; i += LANES)
            atomicAdd(&places[TilesOf::place(band, i)], 1);
        if (OF_KEYS) {
            // Up to the next sequence's, and from the first on.
            const int first = work.sequences[index].first_block, end = first + (band.queries + M - 1) / M;
            const int to = index + 1 < work.batch ? work.sequences[index + 1].first_block : work.all_blocks;
            for (int i = (index == 0 ? 0 : first) + member; i < to; i += LANES)
                work.blocks[i] = first <= i && i < end ? index : -1;
        }
    }
    __syncthreads();
    int place = 0, count;
    running<true>(places[threadIdx.x], place, count, scratch);
    places[threadIdx.x] = place;
    __syncthreads();
    // Into the list. Of the lanes of a sequence those with tiles as long as each other take places in their order.
    const int lane = threadIdx.x % WARP_SIZE;
    const unsigned int lanes = ((1u << LANES) - 1) << lane / LANES * LANES;
    for (int first = 0; first < work.batch; first += GROUPS) {
        const int index = first + group;
        const Band band = index < work.batch ? work.sequences[index].band : Band{};
        const int tiles = TilesOf::count(band);
        for (int i = member; __any_sync(FULL_WARP, i < tiles); i += LANES) {
            const int mine = i < tiles ? TilesOf::place(band, i) : -1;
            const unsigned int alike = __match_any_sync(FULL_WARP, mine) & lanes;
            const int before = __popc(alike & ((1u << lane) - 1));
            int at = 0;
            if (mine >= 0 && before == 0)
                at = atomicAdd(&places[mine], __popc(alike));
            at = __shfl_sync(FULL_WARP, at, __ffs((int)alike) - 1) + before;
            if (mine >= 0)
                work.tiles[at] = {index, i};
        }
    }
    if (threadIdx.x == THREADS - 1) { // which has no sequence as a rule
        const int some = max(count, 1), least = (work.grid + some - 1) / some;
        const int section = min(max(work.section, least), work.heads), size = some * section;
        *work.schedule = {{count * work.heads, size, (size + work.grid - 1) / work.grid, 1}, section, count};
    }
}

// Tiles have 64 rows or more.
static int64_t tiles_at_most(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    return packed_blocks(call.backward ? p.sequences.key_rows : p.sequences.query_rows, p.batch, 64);
}

PackedWork attention_sm90_sequences_at(void *workspace, const AttentionCall &call)
{
    PackedWork work = {};
    PackedSequence *const sequences = (PackedSequence *)workspace;
    PackedSchedule *const schedule = (PackedSchedule *)(sequences + call.problem.batch);
    PackedTile *const tiles = (PackedTile *)(schedule + 1);
    work.sequences = sequences, work.schedule = schedule, work.tiles = tiles;
    work.blocks = call.backward ? (const int *)(tiles + tiles_at_most(call)) : nullptr;
    work.query_rows = (int)call.problem.sequences.query_rows;
    return work;
}

int64_t attention_sm90_sequences_bytes(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    const int64_t blocks = call.backward ? packed_blocks(p.sequences.query_rows, p.batch, 64) : 0;
    return p.batch * (int64_t)sizeof(PackedSequence) + (int64_t)sizeof(PackedSchedule) +
           tiles_at_most(call) * (int64_t)sizeof(PackedTile) + blocks * 4;
}

cuda_ops_status attention_sm90_sequences(const PackedWork &to, const AttentionCall &call, int queries, int64_t grid,
                                         int64_t section)
{
    const cuda_ops_attention &p = call.problem;
    const cuda_ops_attention_sequences &q = p.sequences;
    SequencesWork work = {};
    work.sequences = const_cast<PackedSequence *>(to.sequences), work.tiles = const_cast<PackedTile *>(to.tiles);
    work.schedule = const_cast<PackedSchedule *>(to.schedule), work.blocks = const_cast<int *>(to.blocks);
    work.query_starts = q.query_starts, work.key_starts = q.key_starts;
    work.diagonal = p.diagonal, work.window_left = p.window_left, work.window_right = p.window_right;
    work.bottom_right = q.bottom_right;
    work.batch = (int)p.batch, work.query_rows = (int)q.query_rows, work.key_rows = (int)q.key_rows;
    work.queries = (int)(p.queries < q.query_rows ? p.queries : q.query_rows);
    work.keys = (int)(p.keys < q.key_rows ? p.keys : q.key_rows);
    work.all_blocks = (int)packed_blocks(q.query_rows, p.batch, queries);
    work.grid = (int)grid, work.heads = (int)(call.backward ? p.key_heads : p.heads), work.section = (int)section;
    const auto kernel = call.backward    ? (queries == 128 ? attention_sm90_sequences_kernel<128, 128, true>
                                                           : attention_sm90_sequences_kernel<64, 128, true>)
                        : queries == 192 ? attention_sm90_sequences_kernel<192, 128, false>
                                         : attention_sm90_sequences_kernel<128, 128, false>;
    launch_dependent(kernel, dim3(1), dim3(THREADS), 0, call.stream, work);
    return launch_status();
}
