// attention's backward kernels on Hopper and their launcher, to be instantiated by dtype;
// attention/sm90/backward_bfloat16.cu says what they do.
#ifndef CUDA_OPS_ATTENTION_SM90_BACKWARD_CUH
#define CUDA_OPS_ATTENTION_SM90_BACKWARD_CUH

#include "attention/dropout.cuh"
#include "attention/mma/remainder.h"
#include "attention/sm90/added_mask.h"
#include "attention/sm90/band.h"
#include "attention/sm90/fragments.cuh"
#include "attention/sm90/maps.h"
#include "attention/sm90/mask.h"
#include "attention/sm90/order.h"
#include "attention/sm90/prepare.cuh"
#include "attention/sm90/sequences.h"
#include "attention/sm90/sm90.h"
#include "common/common.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

// A block has N = 128 keys, 64 a consumer warpgroup, and walks over blocks of M queries.
template <typename T_, int D_, int M_, bool DROPS_, bool PACKED_, MaskWay MASK>
struct BackwardTile {
    typedef T_ T;
    static constexpr bool DROPS = DROPS_, PACKED = PACKED_, MASKED = MASK == BOOLEAN_MASK, ADDED = MASK == ADDED_MASK;
    static constexpr int D = D_, M = M_, N = 128, THREADS = 3 * WARPGROUP, STAGES = 2, SUM_STAGES = 2;
    static constexpr int COLUMNS = D / 64; // of 64 elements, SWIZZLE_ROW bytes
    static constexpr int KEY_COLUMN = N * SWIZZLE_ROW, QUERY_COLUMN = M * SWIZZLE_ROW, BOX_BYTES = 64 * SWIZZLE_ROW;
    static constexpr int KEY_BYTES = COLUMNS * KEY_COLUMN, QUERY_BYTES = COLUMNS * QUERY_COLUMN;
    static constexpr int SCORE_BYTES = M / 64 * KEY_COLUMN; // dS, as rows of keys
    static constexpr int SUM_BYTES = M * D * 4, STATISTICS_BYTES = 2 * M * 4;
    static constexpr int VALUES_FROM = KEY_BYTES, QUERIES_FROM = 2 * KEY_BYTES;
    static constexpr int GRADS_FROM = QUERIES_FROM + STAGES * QUERY_BYTES;
    static constexpr int SCORES_FROM = GRADS_FROM + STAGES * QUERY_BYTES;
    static constexpr int SUMS_FROM = SCORES_FROM + 2 * SCORE_BYTES;
    static constexpr int STATISTICS_FROM = SUMS_FROM + SUM_STAGES * SUM_BYTES;
    static constexpr int ITEMS = 4, ITEM_BYTES = PACKED ? 48 : 16; // blocks of keys, announced by the producer
    static constexpr int ITEMS_FROM = STATISTICS_FROM + STAGES * STATISTICS_BYTES;
    static constexpr int KINDS_FROM = ITEMS_FROM + ITEMS * ITEM_BYTES;
    static constexpr int BARRIERS_FROM = KINDS_FROM + SUM_STAGES * 4;
    static constexpr int SHARED_BYTES = BARRIERS_FROM + (4 + 2 * ITEMS + 4 * STAGES + 4 * SUM_STAGES) * 8;
    static constexpr bool EARLY = M == 64; // whether there are registers for statistics that are loaded ahead
    // Consumers want what they get; the producer's warps spill some addresses where they have fewer than 40.
    static constexpr int REGISTERS = 240, PRODUCER_REGISTERS = 24;
    // The product for the queries' gradients has 64 rows and 64 columns a warpgroup: transposed, 64 of D rows by M, or
    // 64 of M rows by D.
    static constexpr bool TRANSPOSED = M == 64;
    static_assert(STAGES == 2 && SUM_STAGES == 2, "what the consumers count with");
    static_assert(BARRIERS_FROM % 8 == 0, "mbarriers");
    static_assert(M == attention_sm90_queries(D == 64) && SUM_BYTES + STATISTICS_BYTES == 4 * M * (D + 2),
                  "what attention_sm90_workspace counts with");
    static_assert(TRANSPOSED ? D == 128 : D == 64 && M == 128, "64 x 64 a warpgroup");
    static_assert(COLUMNS * KEY_COLUMN <= 2 * SCORE_BYTES, "the keys' gradients take the place of dS");
    static_assert(SHARED_BYTES <= 232448, "an SM's shared memory");
};

struct BackwardWork {
    const float *statistics; // of each block of queries: M times logsumexp * log2(e), M times delta (statistics_place)
    float *sums;             // the queries' gradients, block by block, as the kernel's registers have them
    uint32_t *turns;         // of each block of queries: how many blocks of keys have been added to its sums
    uint32_t *handed_out;    // how many blocks of keys
    Band band;
    int heads, key_heads, group;
    int blocks_m, blocks_n;
    int all_key_heads;
    int section, early;      // heads that are walked together; how many of their blocks of keys are `early`
    float scale, scale_log2; // scale times dropout's; scale * log2(e)
    DropoutWork dropout;
    PackedWork packed; // of packed sequences, which have no band or section of the whole call
    MaskBits mask;     // where MASKED
    AddedMask added;   // where ADDED
};

#if defined(CUDA_OPS_HOPPER_CODE)

template <bool PACKED>
struct BackwardItem {
    int n, key_head, batch;
    int last, count, finished; // BlocksOfQueries, which are walked downwards
    PackedSequence sequence;   // where PACKED

    __device__ __forceinline__ const Band &band(const BackwardWork &work) const
    {
        if constexpr (PACKED)
            return sequence.band;
        else
            return work.band;
    }
    __device__ __forceinline__ RowsPlace<PACKED> queries() const
    {
        if constexpr (PACKED)
            return {sequence.first_query, sequence.band.queries};
        else
            return {batch};
    }
    __device__ __forceinline__ RowsPlace<PACKED> keys() const
    {
        if constexpr (PACKED)
            return {sequence.first_key, sequence.band.keys};
        else
            return {batch};
    }
    // The first of a head's blocks of queries among those of all heads.
    __device__ __forceinline__ int64_t first_block(const BackwardWork &work, int head) const
    {
        if constexpr (PACKED)
            return (int64_t)head * work.blocks_m + sequence.first_block;
        else
            return (int64_t)(batch * work.heads + head) * work.blocks_m;
    }
    // What follows from n.
    template <typename C>
    __device__ __forceinline__ void find_queries(const BackwardWork &work)
    {
        const BlocksOfQueries blocks = blocks_of_queries(band(work), n, C::M, C::N);
        last = blocks.last, count = blocks.count, finished = blocks.finished;
    }
};

// The next block of keys; n < 0: there are no more.
template <typename C>
__device__ __forceinline__ BackwardItem<C::PACKED> next_item(const BackwardWork &work)
{
    const int place = (int)atomicAdd(work.handed_out, 1u);
    BackwardItem<C::PACKED> item = {};
    item.n = -1;
    if constexpr (C::PACKED) {
        const PackedSchedule &schedule = *work.packed.schedule;
        const int tiles = schedule.tiles, section = schedule.section;
        if (place < tiles * work.all_key_heads) {
            const int early = section < work.all_key_heads ? (tiles + 1) / 2 : tiles;
            const BlockOfKeys block = block_of_keys(place, tiles, work.all_key_heads, section, early);
            const PackedTile tile = work.packed.tiles[block.n];
            item.sequence = work.packed.sequences[tile.sequence];
            item.n = tile.number, item.key_head = block.head;
        }
    } else if (place < work.blocks_n * work.all_key_heads) {
        const BlockOfKeys block = block_of_keys(place, work.blocks_n, work.all_key_heads, work.section, work.early);
        item.batch = block.head / work.key_heads;
        item.n = block.n, item.key_head = block.head - item.batch * work.key_heads;
    }
    item.template find_queries<C>(work);
    return item;
}

struct BackwardShared {
    uint32_t keys, values, queries, grads, scores, sums, statistics, items, kinds;
    uint32_t item_full, item_empty, key_full, key_empty, value_full, value_empty, query_full, query_empty, grad_full,
        grad_empty, sum_full, sum_empty;
    uint32_t score_full, score_empty;
};

// What the place of a step's sums is for: they are added to those in device memory, or they are the last ones, and are
// rounded, alone or on top of those before, which have been loaded into the place.
enum { SUMS_ADD = 0, SUMS_ROUND = 1, SUMS_ROUND_TOTAL = 2 };

// A block of keys as the producer announces it to the others, in a ring.
template <typename C>
__device__ __forceinline__ uint32_t item_place(const BackwardShared &s, int announced)
{
    return s.items + announced % C::ITEMS * C::ITEM_BYTES;
}
template <typename C>
__device__ __forceinline__ void announce_item(const BackwardItem<C::PACKED> &item, const BackwardShared &s,
                                              int announced)
{
    const int slot = announced % C::ITEMS;
    mbarrier_wait(s.item_empty + 8 * slot, announced / C::ITEMS % 2 ^ 1);
    st_shared(item_place<C>(s, announced), (uint32_t)item.n);
    st_shared(item_place<C>(s, announced) + 4, (uint32_t)item.key_head);
    st_shared(item_place<C>(s, announced) + 8, (uint32_t)item.batch);
    if constexpr (C::PACKED) {
        const PackedSequence &sequence = item.sequence;
        const int words[7] = {sequence.band.queries, sequence.band.keys, sequence.band.low,   sequence.band.high,
                              sequence.first_query,  sequence.first_key, sequence.first_block};
#pragma unroll
        for (int i = 0; i < 7; i++)
            st_shared(item_place<C>(s, announced) + 16 + 4 * i, (uint32_t)words[i]);
    }
    mbarrier_arrive(s.item_full + 8 * slot);
}
// What was announced, all but the queries.
template <typename C>
__device__ __forceinline__ BackwardItem<C::PACKED> look_up_item(const BackwardShared &s, int announced)
{
    uint32_t n, key_head, batch, unused;
    ld_shared_v4(n, key_head, batch, unused, item_place<C>(s, announced));
    BackwardItem<C::PACKED> item = {};
    item.n = (int)n, item.key_head = (int)key_head, item.batch = (int)batch;
    if constexpr (C::PACKED) {
        uint32_t queries, keys, low, high, first_query, first_key, first_block;
        ld_shared_v4(queries, keys, low, high, item_place<C>(s, announced) + 16);
        ld_shared_v4(first_query, first_key, first_block, unused, item_place<C>(s, announced) + 32);
        item.sequence = {
            {(int)queries, (int)keys, (int)low, (int)high}, (int)first_query, (int)first_key, (int)first_block};
    }
    return item;
}
// Its band alone: there are no registers to keep that of a packed sequence.
template <typename C>
__device__ __forceinline__ Band look_up_band(const BackwardWork &work, const BackwardShared &s, int announced)
{
    if constexpr (C::PACKED) {
        uint32_t queries, keys, low, high;
        ld_shared_v4(queries, keys, low, high, item_place<C>(s, announced) + 16);
        return {(int)queries, (int)keys, (int)low, (int)high};
    } else {
        return work.band;
    }
}
template <typename C>
__device__ __forceinline__ bool announced_item(BackwardItem<C::PACKED> &item, const BackwardWork &work,
                                               const BackwardShared &s, int announced)
{
    mbarrier_wait(s.item_full + 8 * (announced % C::ITEMS), announced / C::ITEMS % 2);
    item = look_up_item<C>(s, announced);
    item.template find_queries<C>(work);
    return item.n >= 0;
}
template <typename C>
__device__ __forceinline__ void release_item(const BackwardShared &s, int announced)
{
    mbarrier_arrive(s.item_empty + 8 * (announced % C::ITEMS));
}

template <typename C>
__device__ __forceinline__ void backward_produce(const BackwardWork &work, const CUtensorMap *map_query,
                                                 const CUtensorMap *map_key, const CUtensorMap *map_value,
                                                 const CUtensorMap *map_grad, const BackwardShared &s)
{
    int stage = 0, phase = 0, key_phase = 0;
    for (int announced = 0;; announced++) {
        const BackwardItem<C::PACKED> item = next_item<C>(work);
        announce_item<C>(item, s, announced);
        if (item.n < 0)
            break;
        const int first_key = item.n * C::N;
        // Keys and values, which nobody has read before, have no place until the block of keys before is done.
        for (int column = 0; column < C::COLUMNS && item.count > 0; column++) {
            prefetch_rows(map_key, 64 * column, first_key, item.key_head, item.keys());
            prefetch_rows(map_value, 64 * column, first_key, item.key_head, item.keys());
        }
        for (int i = 0; i < work.group; i++) {
            const int head = item.key_head * work.group + i;
            const int64_t blocks = item.first_block(work, head);
            if constexpr (C::ADDED)
                fetch_mask<typename C::T>(work.added, item.batch, head);
#pragma unroll 1
            for (int m = item.last; m > item.last - item.count; m--) {
                const uint32_t query_full = s.query_full + 8 * stage, grad_full = s.grad_full + 8 * stage;
                mbarrier_wait(s.query_empty + 8 * stage, phase ^ 1);
                mbarrier_arrive_expect_tx(query_full, C::QUERY_BYTES + C::STATISTICS_BYTES);
                for (int column = 0; column < C::COLUMNS; column++)
                    load_rows(s.queries + stage * C::QUERY_BYTES + column * C::QUERY_COLUMN, map_query, query_full,
                              64 * column, m * C::M, head, item.queries());
                bulk_load(s.statistics + stage * C::STATISTICS_BYTES, work.statistics + (blocks + m) * (2 * C::M),
                          C::STATISTICS_BYTES, query_full);
                // The first queries come to a free stage while the block of keys before is still being worked at.
                const bool begins = i == 0 && m == item.last;
                if (begins) {
                    mbarrier_wait(s.key_empty, key_phase ^ 1);
                    mbarrier_arrive_expect_tx(s.key_full, C::KEY_BYTES);
                    for (int column = 0; column < C::COLUMNS; column++)
                        load_rows(s.keys + column * C::KEY_COLUMN, map_key, s.key_full, 64 * column, first_key,
                                  item.key_head, item.keys());
                }
                mbarrier_wait(s.grad_empty + 8 * stage, phase ^ 1);
                mbarrier_arrive_expect_tx(grad_full, C::QUERY_BYTES);
                for (int column = 0; column < C::COLUMNS; column++)
                    load_rows(s.grads + stage * C::QUERY_BYTES + column * C::QUERY_COLUMN, map_grad, grad_full,
                              64 * column, m * C::M, head, item.queries());
                if (begins) {
                    mbarrier_wait(s.value_empty, key_phase ^ 1);
                    key_phase ^= 1;
                    mbarrier_arrive_expect_tx(s.value_full, C::KEY_BYTES);
                    for (int column = 0; column < C::COLUMNS; column++)
                        load_rows(s.values + column * C::KEY_COLUMN, map_value, s.value_full, 64 * column, first_key,
                                  item.key_head, item.keys());
                }
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        }
    }
}

__device__ __forceinline__ void wait_for_sums(const uint32_t *turn, int rank)
{
    while (ld_acquire_gpu(turn) != (uint32_t)rank)
        ;
    fence_proxy_async_global();
}

// Adds the sums that the consumers leave in shared memory to those in device memory, each block of queries' in the
// order of the blocks of keys, so that results repeat. The last block of keys' go the other way: the sums of those
// before come to shared memory, and what the consumers make of both is stored. Two threads take turns, since a step's
// wait for the blocks before, and until its own sums are there for those after, may take longer than a step's products.
template <typename C>
__device__ __forceinline__ void backward_add(const BackwardWork &work, const CUtensorMap *map_grad_query,
                                             const BackwardShared &s, int mine)
{
    const uint32_t sums = s.sums + mine * C::SUM_BYTES, full = s.sum_full + 8 * mine, empty = s.sum_empty + 8 * mine;
    int step = 0, phase = 0;
    bool given = false; // the consumers have the place for the next step
    BackwardItem<C::PACKED> item;
    for (int announced = 0; announced_item<C>(item, work, s, announced); announced++) {
        release_item<C>(s, announced);
        for (int i = 0; i < work.group; i++) {
            const int head = item.key_head * work.group + i;
            const int64_t blocks = item.first_block(work, head);
            const int end = item.last - item.count;
#pragma unroll 1
            for (int m = item.last; m > end; m--, step ^= 1) {
                if (step != mine)
                    continue;
                float *const to = work.sums + (blocks + m) * (C::M * C::D);
                uint32_t *const turn = work.turns + blocks + m;
                const int rank = item.n - first_block_of_keys(item.band(work), m * C::M, C::N);
                const bool finishes = m <= item.finished;
                if (!given) {
                    st_shared(s.kinds + 4 * mine, finishes ? rank > 0 ? SUMS_ROUND_TOTAL : SUMS_ROUND : SUMS_ADD);
                    if (finishes && rank > 0) {
                        wait_for_sums(turn, rank);
                        mbarrier_arrive_expect_tx(empty, C::SUM_BYTES);
                        bulk_load(sums, to, C::SUM_BYTES, empty);
                    } else {
                        mbarrier_arrive(empty);
                    }
                }
                mbarrier_wait(full, phase);
                phase ^= 1;
                if (finishes) {
                    for (int group = 0; group < 2; group++)
                        store_rows(map_grad_query, sums + group * (C::SUM_BYTES / 2), C::TRANSPOSED ? 64 * group : 0,
                                   m * C::M + (C::TRANSPOSED ? 0 : 64 * group), head, item.queries());
                } else if (rank == 0) {
                    bulk_store(to, sums, C::SUM_BYTES);
                } else {
                    wait_for_sums(turn, rank);
                    bulk_reduce_add_f32(to, sums, C::SUM_BYTES);
                }
                bulk_commit_group();
                bulk_wait_group_read<0>();
                given = !finishes && m - 2 > end && m - 2 > item.finished;
                if (given)
                    mbarrier_arrive(empty);
                if (!finishes) {
                    bulk_wait_group<0>();
                    fence_proxy_async_global();
                    red_release_gpu_add(turn, 1);
                }
            }
        }
    }
}

static constexpr int STORE_BARRIER = 1; // named barriers, one a consumer warpgroup

// left (64 keys of the warpgroup, K-major) times right^T (M queries, K-major), over D.
template <typename C>
__device__ __forceinline__ void multiply_rows(float (&d)[C::M / 2], uint64_t left, uint64_t right)
{
    wgmma_forget(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::D / 16; k++)
        wgmma<typename C::T, C::M, 0, 0>(d, wgmma_advance(left, k / 4 * C::KEY_COLUMN + k % 4 * 32),
                                         wgmma_advance(right, k / 4 * C::QUERY_COLUMN + k % 4 * 32), k > 0);
    wgmma_commit_group();
}

// A consumer warpgroup. The queries' gradients of a step want dS of both warpgroups; they are multiplied a step later,
// so that neither waits for the other, and one's exponentials run beside the other's products. Dropout's numbers are
// drawn once: a weight's sign, which is free, keeps whether it is dropped until dS wants to know. The scale of those
// that are kept is that of the sums' and of delta, which is 1 / scale of what it would be.
template <typename C>
__device__ __forceinline__ void backward_consume(const BackwardWork &work, const CUtensorMap *map_grad_key,
                                                 const CUtensorMap *map_grad_value, const BackwardShared &s)
{
    typedef typename C::T T;
    const int group = warp_uniform(threadIdx.x / WARPGROUP) - 1, thread = threadIdx.x % WARPGROUP;
    const int warp = thread / WARP_SIZE, lane = thread % WARP_SIZE, quad = lane % 4;
    const int matrix_row = 16 * warp + lane % 16; // whose address this lane gives to stmatrix
    const uint64_t my_keys = wgmma_descriptor(s.keys + group * C::BOX_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t my_values = wgmma_descriptor(s.values + group * C::BOX_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    // Of MN-major operands `leading` counts, of K-major ones it does not.
    const uint64_t queries_first = wgmma_descriptor(s.queries, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::QUERY_COLUMN);
    const uint64_t grads_first = wgmma_descriptor(s.grads, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::QUERY_COLUMN);
    const uint64_t all_keys = wgmma_descriptor(s.keys + (C::TRANSPOSED ? group * C::KEY_COLUMN : 0), WGMMA_SWIZZLE_128,
                                               SWIZZLE_ATOM, C::KEY_COLUMN);
    const uint64_t all_scores_first = wgmma_descriptor(s.scores + (C::TRANSPOSED ? 0 : group * C::KEY_COLUMN),
                                                       WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::KEY_COLUMN);
    const uint32_t my_sums = s.sums + group * (C::SUM_BYTES / 2);
    // The gradients of this warpgroup's keys take the place of its rows of values and of dS.
    const uint32_t grad_values = s.values + group * C::BOX_BYTES, grad_keys = s.scores + group * C::BOX_BYTES;
    int key_phase = 0;
    // Steps whose dS is in shared memory, and whose product with the keys has been taken. All rings have two stages,
    // and a step one in each: the lowest bit of its number is that stage, the next one the parity of the stage's phase.
    uint32_t written = 0, summed = 0;
    float p[C::M / 2], dp[C::M / 2], dq[32], dk[C::D / 2], dv[C::D / 2];
    uint32_t packed[C::M / 16][4], packed_scores[C::M / 16][4];

    const auto multiply_scores = [&](bool there) {
        const uint32_t buffer = summed % 2;
        if (there)
            mbarrier_wait(s.score_full + 8 * buffer, summed / 2 % 2);
        const uint64_t scores = wgmma_advance(all_scores_first, buffer * C::SCORE_BYTES);
        wgmma_forget(dq);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < C::N / 16; k++)
            wgmma<T, 64, 1, 1>(dq, wgmma_advance(C::TRANSPOSED ? all_keys : scores, k * 2 * SWIZZLE_ATOM),
                               wgmma_advance(C::TRANSPOSED ? scores : all_keys, k * 2 * SWIZZLE_ATOM), k > 0);
        wgmma_commit_group();
    };
    const auto hand_over_sums = [&]() {
        const uint32_t buffer = summed % 2;
        wgmma_pin(dq);
        if (thread == 0)
            mbarrier_arrive(s.score_empty + 8 * buffer);
        mbarrier_wait(s.sum_empty + 8 * buffer, summed / 2 % 2);
        const uint32_t place = my_sums + buffer * C::SUM_BYTES, to = place + thread * 16;
        uint32_t kind;
        ld_shared(kind, s.kinds + 4 * buffer);
        if (kind == SUMS_ADD) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                st_shared_v4_f32(to + i * (WARPGROUP * 16),
                                 make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]));
        } else {
            if (kind == SUMS_ROUND_TOTAL) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float4 before = ld_shared_v4_f32(to + i * (WARPGROUP * 16));
                    dq[4 * i] += before.x, dq[4 * i + 1] += before.y, dq[4 * i + 2] += before.z;
                    dq[4 * i + 3] += before.w;
                }
            }
            bar_sync<WARPGROUP>(STORE_BARRIER + group);
#pragma unroll
            for (int i = 0; i < 32; i++)
                dq[i] *= work.scale;
            if (C::TRANSPOSED)
                pack_and_store_transposed<T>(place, dq, warp, lane);
            else
                pack_and_store<T>(place, dq, 0, matrix_row, lane);
        }
        summed++;
    };
    // The sums that were handed over last. A step later, when the fence has nothing left to wait for.
    const auto publish_sums = [&]() {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(s.sum_full + 8 * ((summed - 1) % 2));
    };

    // Of the stage whose scores are being computed, before they are waited for.
    float4 lse[C::M / 16];
    const auto load_lse = [&]() {
        if (C::EARLY)
#pragma unroll
            for (int i = 0; i < C::M / 16; i++)
                lse[i] = ld_shared_v4_f32(s.statistics + written % 2 * C::STATISTICS_BYTES + quad * 16 + i * 64);
    };

    BackwardItem<C::PACKED> item;
    // Gradients of this warpgroup's keys. Where they go is looked up again, which costs no register until then.
    const auto store_keys = [&](int announced, const CUtensorMap *map, uint32_t from) {
        const BackwardItem<C::PACKED> item = look_up_item<C>(s, announced);
#pragma unroll
        for (int column = 0; column < C::COLUMNS; column++)
            store_rows(map, from + column * C::KEY_COLUMN, 64 * column, item.n * C::N + 64 * group, item.key_head,
                       item.keys());
        bulk_commit_group();
    };

    const DropoutSeed seed(C::DROPS ? work.dropout.philox : cuda_ops_philox_state{});
    bool stored = false; // gradients of keys are being copied out of dS's place
    for (int announced = 0; announced_item<C>(item, work, s, announced); announced++) {
#pragma unroll
        for (int i = 0; i < C::D / 2; i++)
            dk[i] = dv[i] = 0;
        if (C::PACKED) // into uniform registers: there are few others
            item.n = warp_uniform(item.n), item.last = warp_uniform(item.last), item.count = warp_uniform(item.count);
        const int steps = item.count * work.group, top = item.n * C::N + 64 * group;
        const int key = top + 16 * warp + lane / 4; // this thread's: key and key + 8
        int m = item.last, head = item.key_head * work.group;
        uint32_t dropout_row = (uint32_t)cuda_ops_attention_dropout_row(
            item.batch * work.heads + item.key_head * work.group, work.band.queries, m * C::M);
        const uint32_t *hidden = nullptr; // the mask's words of this thread's keys, of the head
        if constexpr (C::MASKED)
            hidden = work.mask.of(item.batch * work.heads + item.key_head * work.group, work.heads) + key / 32;
        if (steps > 0) {
            mbarrier_wait(s.key_full, key_phase);
            mbarrier_wait(s.query_full + written % 2 * 8, written / 2 % 2);
            multiply_rows<C>(p, my_keys, wgmma_advance(queries_first, written % 2 * C::QUERY_BYTES));
            load_lse();
            mbarrier_wait(s.value_full, key_phase);
            key_phase ^= 1;
            wgmma_wait_group<0>();
            wgmma_pin(p);
        }
        if (stored) {
            if (thread == 0)
                bulk_wait_group_read<0>();
            bar_sync<WARPGROUP>(STORE_BARRIER + group);
        }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint32_t stage = written % 2, phase = written / 2 % 2;
            const uint64_t queries = wgmma_advance(queries_first, stage * C::QUERY_BYTES);
            const uint64_t grads = wgmma_advance(grads_first, stage * C::QUERY_BYTES);
            const uint32_t statistics = s.statistics + stage * C::STATISTICS_BYTES + quad * 16;
            const int first_query = m * C::M;
            mbarrier_wait(s.grad_full + 8 * stage, phase);
            wgmma_pin(dv);
            multiply_rows<C>(dp, my_values, grads);
            if (step > 1)
                publish_sums();
            // A thread's keys see queries from key - high to key - low.
            const Band band = look_up_band<C>(work, s, announced);
            const int all_head = item.batch * work.heads + head; // where ADDED
            if constexpr (C::ADDED)
                add_mask_to_columns<T, C::M>(p, work.added, item.batch, head, first_query, band.queries - 1, key,
                                             band.keys - 1);
            if (top + 63 > min(first_query + band.high, band.keys - 1) || top < first_query + C::M - 1 + band.low) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int at_key = key + 8 * r, base = first_query + 2 * quad;
                    const int low = at_key < band.keys ? at_key - band.high - base : C::M;
                    const int high = at_key - band.low - base;
#pragma unroll
                    for (int i = 0; i < C::M / 2; i++)
                        if (i / 2 % 2 == r) {
                            const int at = i / 4 * 8 + i % 2;
                            p[i] = at < low || at > high ? -INFINITY : p[i];
                        }
                }
            }
            if constexpr (C::MASKED) {
                const int last = band.queries - 1, base = first_query + 2 * quad;
#pragma unroll
                for (int c = 0; c < C::M / 8; c++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const uint32_t word = hidden[(int64_t)min(base + 8 * c + e, last) * work.mask.row] >> key % 32;
                        p[4 * c + e] = word & 1 ? p[4 * c + e] : -INFINITY;
                        p[4 * c + 2 + e] = word >> 8 & 1 ? p[4 * c + 2 + e] : -INFINITY;
                    }
            }
            // From the end, which ptxas finds registers for.
#pragma unroll
            for (int i = C::M / 16 - 1; i >= 0; i--) {
                const float4 x = C::EARLY ? lse[i] : ld_shared_v4_f32(statistics + i * 64);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float shift = j / 4 ? (j % 2 ? x.w : x.z) : j % 2 ? x.y : x.x;
                    if (C::ADDED)
                        p[8 * i + j] = ex2_approx_ftz((p[8 * i + j] - shift) * 1.4426950408889634f);
                    else
                        p[8 * i + j] = ex2_approx_ftz(fmaf(p[8 * i + j], work.scale_log2, -shift));
                }
            }
            if constexpr (C::ADDED)
                if (has_remainder<C::M>(work.added, all_head, band.queries, first_query))
                    take_off_remainders<C::M>(p, work.added, all_head, band.queries, first_query);
            if (C::DROPS) {
#pragma unroll
                for (int i = 0; i < C::M / 16; i++) {
                    uint32_t words[4];
                    dropout_words_of_keys(words, seed, dropout_row + 32 * i, (uint32_t)(top / 16 + warp));
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float &x = p[8 * i + j];
                        x = dropout_keeps(words[j / 4 + j / 2 % 2 * 2], j % 2, work.dropout.threshold) ? x : -x;
                    }
                }
            }
            pack_fragments<T, C::DROPS>(packed, p);
            wgmma_pin(dv);
            wgmma_pin(packed);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < C::M / 16; k++)
                wgmma<T, C::D, 1>(dv, packed[k], wgmma_advance(grads, k * 2 * SWIZZLE_ATOM), 1);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_pin(dp);
#pragma unroll
            for (int i = 0; i < C::M / 16; i++) {
                const float4 delta = ld_shared_v4_f32(statistics + C::M * 4 + i * 64);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float mean = j / 4 ? (j % 2 ? delta.w : delta.z) : j % 2 ? delta.y : delta.x;
                    if (C::DROPS)
                        dp[8 * i + j] = fabsf(p[8 * i + j]) * ((p[8 * i + j] < 0 ? 0 : dp[8 * i + j]) - mean);
                    else
                        dp[8 * i + j] = p[8 * i + j] * (dp[8 * i + j] - mean);
                }
            }
            pack_fragments<T>(packed_scores, dp);
            // dS for the product with the keys; the fence that follows waits less once the keys' gradients are issued.
            mbarrier_wait(s.score_empty + 8 * stage, phase ^ 1);
            store_fragments(s.scores + stage * C::SCORE_BYTES + group * C::BOX_BYTES, C::KEY_COLUMN, packed_scores,
                            matrix_row, lane);
            if constexpr (C::ADDED)
                if (work.added.gradient) {
                    if (C::DROPS) { // these lack the scale of what is kept
                        uint32_t scaled[C::M / 16][4];
#pragma unroll
                        for (int i = 0; i < C::M / 2; i++)
                            dp[i] *= work.dropout.scale;
                        pack_fragments<T>(scaled, dp);
                        store_grad_mask<T, C::M>(work.added, scaled, all_head, band.queries, band.keys, first_query,
                                                 key);
                    } else {
                        store_grad_mask<T, C::M>(work.added, packed_scores, all_head, band.queries, band.keys,
                                                 first_query, key);
                    }
                }
            wgmma_wait_group<0>();
            wgmma_pin(dv);
            wgmma_pin(packed);
            wgmma_pin(dk);
            wgmma_pin(packed_scores);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < C::M / 16; k++)
                wgmma<T, C::D, 1>(dk, packed_scores[k], wgmma_advance(queries, k * 2 * SWIZZLE_ATOM), 1);
            wgmma_commit_group();
            fence_proxy_async();
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(s.score_full + 8 * stage);
            written++;
            // Of the step before. In the first step the product is of what the buffer held, and of no use; so are the
            // next scores in the last. Under a condition the compiler would run products one by one.
            multiply_scores(step > 0);
            dropout_row -= 2 * C::M;
            if (--m == item.last - item.count) {
                m = item.last; // of the next head
                dropout_row += 32 * ceil_div(work.band.queries, 16) + item.count * (2 * C::M);
                if constexpr (C::MASKED)
                    hidden += work.mask.head;
                head++;
            }
            if (step + 1 < steps)
                mbarrier_wait(s.query_full + written % 2 * 8, written / 2 % 2);
            multiply_rows<C>(p, my_keys, wgmma_advance(queries_first, written % 2 * C::QUERY_BYTES));
            wgmma_wait_group<1>();
            wgmma_pin(dk);
            wgmma_pin(packed_scores);
            if (thread == 0) {
                mbarrier_arrive(s.grad_empty + 8 * stage);
                mbarrier_arrive(s.query_empty + 8 * stage);
            }
            if (step > 0)
                hand_over_sums();
            load_lse();
            wgmma_wait_group<0>();
            wgmma_pin(p);
        }
        if (steps > 1)
            publish_sums();
        // What has been read is overwritten, and no wait for sums stands between this block of keys and the next.
        if (C::DROPS)
#pragma unroll
            for (int i = 0; i < C::D / 2; i++)
                dv[i] *= work.dropout.scale;
        if (steps > 0) {
            multiply_scores(true);
            pack_and_store<T>(grad_values, dv, C::KEY_COLUMN, matrix_row, lane);
            fence_proxy_async();
            bar_sync<WARPGROUP>(STORE_BARRIER + group);
            if (thread == 0)
                store_keys(announced, map_grad_value, grad_values);
            wgmma_wait_group<0>();
            if (thread == 0)
                mbarrier_arrive(s.key_empty);
            hand_over_sums();
            publish_sums();
        }
        mbarrier_wait(s.score_empty + 8 * (written % 2), written / 2 % 2 ^ 1);
        mbarrier_wait(s.score_empty + 8 * ((written + 1) % 2), (written + 1) / 2 % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < C::D / 2; i++)
            dk[i] *= work.scale;
        pack_and_store<T>(grad_keys, dk, C::KEY_COLUMN, matrix_row, lane);
        fence_proxy_async();
        bar_sync<WARPGROUP>(STORE_BARRIER + group);
        if (thread == 0) {
            if (steps == 0) // no query sees these keys: zeros
                store_keys(announced, map_grad_value, grad_keys);
            store_keys(announced, map_grad_key, grad_keys);
            release_item<C>(s, announced);
            if (steps > 0) {
                bulk_wait_group_read<1>();
                mbarrier_arrive(s.value_empty);
            }
        }
        stored = true;
    }
    if (thread == 0)
        bulk_wait_group_read<0>();
}

#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attention_sm90_backward_kernel(
    const __grid_constant__ CUtensorMap map_query, const __grid_constant__ CUtensorMap map_key,
    const __grid_constant__ CUtensorMap map_value, const __grid_constant__ CUtensorMap map_grad,
    const __grid_constant__ CUtensorMap map_grad_query, const __grid_constant__ CUtensorMap map_grad_key,
    const __grid_constant__ CUtensorMap map_grad_value, const __grid_constant__ BackwardWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(SWIZZLE_ATOM) char shared_aligned[];
    const uint32_t first = shared_address(shared_aligned);
    BackwardShared s;
    s.keys = first, s.values = first + C::VALUES_FROM, s.queries = first + C::QUERIES_FROM;
    s.grads = first + C::GRADS_FROM, s.scores = first + C::SCORES_FROM, s.sums = first + C::SUMS_FROM;
    s.statistics = first + C::STATISTICS_FROM, s.items = first + C::ITEMS_FROM, s.kinds = first + C::KINDS_FROM;
    s.key_full = first + C::BARRIERS_FROM, s.key_empty = s.key_full + 8;
    s.value_full = s.key_empty + 8, s.value_empty = s.value_full + 8;
    s.item_full = s.value_empty + 8, s.item_empty = s.item_full + 8 * C::ITEMS;
    s.query_full = s.item_empty + 8 * C::ITEMS, s.query_empty = s.query_full + 8 * C::STAGES;
    s.grad_full = s.query_empty + 8 * C::STAGES, s.grad_empty = s.grad_full + 8 * C::STAGES;
    s.sum_full = s.grad_empty + 8 * C::STAGES, s.sum_empty = s.sum_full + 8 * C::SUM_STAGES;
    s.score_full = s.sum_empty + 8 * C::SUM_STAGES, s.score_empty = s.score_full + 8 * C::SUM_STAGES;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_query);
        prefetch_tensormap(&map_key);
        prefetch_tensormap(&map_value);
        prefetch_tensormap(&map_grad);
        mbarrier_init(s.key_full, 1);
        mbarrier_init(s.key_empty, 2);
        mbarrier_init(s.value_full, 1);
        mbarrier_init(s.value_empty, 2);
        for (int slot = 0; slot < C::ITEMS; slot++) {
            mbarrier_init(s.item_full + 8 * slot, 1);
            mbarrier_init(s.item_empty + 8 * slot, 4);
        }
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(s.query_full + 8 * stage, 1);
            mbarrier_init(s.query_empty + 8 * stage, 2);
            mbarrier_init(s.grad_full + 8 * stage, 1);
            mbarrier_init(s.grad_empty + 8 * stage, 2);
        }
        for (int stage = 0; stage < C::SUM_STAGES; stage++) {
            mbarrier_init(s.sum_full + 8 * stage, 2 * WARPGROUP / WARP_SIZE);
            mbarrier_init(s.sum_empty + 8 * stage, 1);
            mbarrier_init(s.score_full + 8 * stage, 2 * WARPGROUP / WARP_SIZE);
            mbarrier_init(s.score_empty + 8 * stage, 2);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x / WARPGROUP == 0) {
        setmaxnreg_dec<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            backward_produce<C>(work, &map_query, &map_key, &map_value, &map_grad, s);
        else if (threadIdx.x == WARP_SIZE || threadIdx.x == 2 * WARP_SIZE)
            backward_add<C>(work, &map_grad_query, s, threadIdx.x / WARP_SIZE - 1);
    } else {
        setmaxnreg_inc<C::REGISTERS>();
        backward_consume<C>(work, &map_grad_key, &map_grad_value, s);
    }
#endif
}

template <typename C>
static cuda_ops_status launch_backward(const AttentionCall &call, const Device &device)
{
    typedef typename C::T T;
    const cuda_ops_attention &p = call.problem;
    const auto make = make_rows_map<C::PACKED>;
    CUtensorMap map_query, map_key, map_value, map_grad, map_grad_query, map_grad_key, map_grad_value;
    if (!make(&map_query, call.query, call.dtype, query_layout(p, p.head_dim, p.query), C::M) ||
        !make(&map_key, call.key, call.dtype, key_layout(p, p.head_dim, p.key), C::N) ||
        !make(&map_value, call.value, call.dtype, key_layout(p, p.value_dim, p.value), C::N) ||
        !make(&map_grad, call.grad_output, call.dtype, query_layout(p, p.value_dim, p.grad_output), C::M) ||
        !make(&map_grad_query, call.grad_query, call.dtype, query_layout(p, p.head_dim, p.grad_query), 64) ||
        !make(&map_grad_key, call.grad_key, call.dtype, key_layout(p, p.head_dim, p.grad_key), 64) ||
        !make(&map_grad_value, call.grad_value, call.dtype, key_layout(p, p.value_dim, p.grad_value), 64))
        return CUDA_OPS_INVALID_ARGUMENT;
    // Packed sequences are a batch of one whose blocks of queries are those of all of them.
    const int64_t batch = C::PACKED ? 1 : p.batch, blocks = attention_sm90_query_blocks(p);
    const int64_t blocks_m = blocks / (batch * p.heads);
    BackwardWork work = {};
    work.sums = (float *)call.workspace;
    float *const statistics = work.sums + blocks * (C::SUM_BYTES / 4);
    work.statistics = statistics;
    work.turns = (uint32_t *)(statistics + blocks * (C::STATISTICS_BYTES / 4));
    work.handed_out = work.turns + blocks;
    if (!C::PACKED)
        work.band = band_of(cuda_ops_attention_only_sequence(&p));
    work.heads = (int)p.heads, work.key_heads = (int)p.key_heads, work.group = (int)(p.heads / p.key_heads);
    work.blocks_m = (int)blocks_m;
    work.blocks_n = (int)(C::PACKED ? packed_blocks(p.sequences.key_rows, p.batch, C::N) : ceil_div(p.keys, C::N));
    work.all_key_heads = (int)(batch * p.key_heads);
    const int64_t total = (int64_t)work.blocks_n * work.all_key_heads;
    const int64_t resident = total < device.multiprocessors ? total : device.multiprocessors;
    // The heads of two sections are walked together: those whose queries, gradients and sums are in the L2. A few more
    // where they are long, since a head's blocks go through its queries side by side, and wait for each other.
    const int64_t rows = C::PACKED ? p.sequences.query_rows : p.queries;
    const int64_t head_bytes = rows * C::D * 8 * work.group, least = C::D / 16;
    int64_t section = ((int64_t)20 << 20) / head_bytes;
    section = section < least ? least : section;
    work.section = (int)(section < work.all_key_heads ? section : work.all_key_heads);
    work.early = work.section < work.all_key_heads ? (work.blocks_n + 1) / 2 : work.blocks_n;
    if constexpr (C::PACKED) {
        work.packed = attention_sm90_sequences_at((char *)call.workspace + attention_sm90_backward_bytes(p), call);
        const cuda_ops_status status = attention_sm90_sequences(work.packed, call, C::M, resident, work.section);
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    work.dropout = dropout_work_of(p, nullptr);
    work.scale = (float)p.scale * work.dropout.scale, work.scale_log2 = (float)(p.scale * 1.4426950408889634);

    if constexpr (C::MASKED) {
        char *const room = (char *)call.workspace + attention_sm90_backward_bytes(p);
        const cuda_ops_status status = attention_sm90_mask(work.mask, room, call);
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }

    if constexpr (C::ADDED) {
        work.added = added_mask_of(call);
        float *const remainder = (float *)((char *)call.workspace + attention_sm90_backward_bytes(p));
        int *const large = (int *)(remainder + attention_rows(p));
        work.added.gradient = call.grad_mask;
        work.added.remainder = remainder, work.added.large = large;
        // Blocks of keys and queries of which none sees another are left out below.
        const bool all_seen = work.band.high >= work.band.keys - 1 && work.band.queries - 1 + work.band.low <= 0;
        if (call.grad_mask && !all_seen)
            cudaMemsetAsync(call.grad_mask, 0, p.batch * p.heads * p.queries * p.keys * sizeof(T), call.stream);
        const cuda_ops_status status = attention_mma_remainder(remainder, large, call);
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }

    BackwardPrepare prepare = prepare_of(call, statistics, work.band, blocks_m);
    if (C::ADDED)
        prepare.to_units = 1;
    prepare.grad_query = call.grad_query;
    prepare.turns = work.turns, prepare.handed_out = work.handed_out;
    prepare.kept = work.dropout.scale > 0 ? 1.0f / work.dropout.scale : 0.0f;
    prepare.packed = work.packed;
    const dim3 grid((unsigned int)blocks_m, (unsigned int)(batch * p.heads));
    launch_dependent(attention_sm90_prepare_kernel<T, C::D / 8, C::M, C::PACKED>, grid, dim3(256), 0, call.stream,
                     prepare);

    launch_dependent_clusters(attention_sm90_backward_kernel<C>, resident, C::THREADS, 1, C::SHARED_BYTES, call.stream,
                              map_query, map_key, map_value, map_grad, map_grad_query, map_grad_key, map_grad_value,
                              work);
    return launch_status();
}

template <typename T, bool DROPS, bool PACKED = false, MaskWay MASK = NO_MASK>
static cuda_ops_status launch_backward_of(const AttentionCall &call, const Device &device)
{
    if (attention_sm90_is_narrow(call.problem))
        return launch_backward<BackwardTile<T, 64, 128, DROPS, PACKED, MASK>>(call, device);
    return launch_backward<BackwardTile<T, 128, 64, DROPS, PACKED, MASK>>(call, device);
}

#endif
