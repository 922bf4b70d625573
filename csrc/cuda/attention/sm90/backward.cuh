// attention's backward kernels on Hopper and their launcher, to be instantiated by dtype;
// attention/sm90/backward_bfloat16.cu says what they do.
#ifndef CUDA_OPS_ATTENTION_SM90_BACKWARD_CUH
#define CUDA_OPS_ATTENTION_SM90_BACKWARD_CUH

#include "attention/dropout.cuh"
#include "attention/sm90/band.h"
#include "attention/sm90/sm90.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/cvt_relu.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// A block has N = 128 keys, 64 a consumer warpgroup, and walks over blocks of M queries.
template <typename T_, int D_, int M_, bool DROPS_>
struct BackwardTile {
    typedef T_ T;
    static constexpr bool DROPS = DROPS_;
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
    static constexpr int BARRIERS_FROM = STATISTICS_FROM + STAGES * STATISTICS_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS_FROM + (2 + 4 * STAGES + 4 * SUM_STAGES) * 8;
    static constexpr bool EARLY = M == 64; // whether there are registers for statistics that are loaded ahead
    // Consumers want what they get; the producer's warps spill some addresses where they have fewer than 40.
    static constexpr int REGISTERS = 240, PRODUCER_REGISTERS = 24;
    // The product for the queries' gradients has 64 rows and 64 columns a warpgroup: transposed, 64 of D rows by M, or
    // 64 of M rows by D.
    static constexpr bool TRANSPOSED = M == 64;
    static_assert(M == attention_sm90_queries(D == 64) && SUM_BYTES + STATISTICS_BYTES == 4 * M * (D + 2),
                  "what attention_sm90_workspace counts with");
    static_assert(TRANSPOSED ? D == 128 : D == 64 && M == 128, "64 x 64 a warpgroup");
    static_assert(64 * D * 2 <= SUM_BYTES / 2, "a warpgroup's gradients take the place of its sums");
    static_assert(SHARED_BYTES <= 232448, "an SM's shared memory");
};

struct BackwardWork {
    const float *statistics; // of each block of queries: M times logsumexp * log2(e), M times delta (statistics_place)
    float *sums;             // the queries' gradients, block by block, as the kernel's registers have them
    uint32_t *turns;         // of each block of queries: how many blocks of keys have been added to its sums
    Band band;
    int heads, key_heads, group;
    int blocks_m, blocks_n;
    int section, all_key_heads; // heads that are walked together
    Schedule schedule;          // of blocks of keys
    float scale, scale_log2;    // scale times dropout's; scale * log2(e)
    DropoutWork dropout;
};

// Blocks of keys add to a block of queries' sums in ascending order; the first that sees it stores them.
__device__ __forceinline__ int first_block_of_keys(const Band &band, int first_query, int block)
{
    return max(first_query + band.low, 0) / block;
}

#if defined(CUDA_OPS_HOPPER_CODE)

struct BackwardItem {
    int n, key_head, batch;
    int last, count; // blocks of queries, which are walked downwards
};

// The round-th block of keys of this block: those of a section of heads go by key, so that those that many queries see
// come first where attention is causal. A block of keys waits for the ones before it alone, which are earlier in this
// order, and all blocks of the grid run at once (a cooperative launch): no wait is forever.
template <typename C>
__device__ __forceinline__ bool backward_item(BackwardItem &item, const BackwardWork &work, int round)
{
    int section, rank;
    if (!scheduled_item(work.schedule, round, section, rank))
        return false;
    item.count = -1;
    if (rank < 0)
        return true;
    const int first_head = section * work.section, heads = min(work.section, work.all_key_heads - first_head);
    item.n = rank / heads;
    const int head = first_head + rank - item.n * heads;
    item.batch = head / work.key_heads;
    item.key_head = head - item.batch * work.key_heads;
    const Band &band = work.band;
    const int first_key = item.n * C::N, last_key = min(first_key + C::N, band.keys) - 1;
    const int first = max(first_key - band.high, 0), last = min(last_key - band.low, band.queries - 1);
    item.last = last / C::M;
    item.count = first <= last ? item.last - first / C::M + 1 : 0;
    return true;
}

struct BackwardShared {
    uint32_t keys, values, queries, grads, scores, sums, statistics;
    uint32_t key_full, key_empty, query_full, query_empty, grad_full, grad_empty, sum_full, sum_empty;
    uint32_t score_full, score_empty;
};

template <typename C>
__device__ __forceinline__ void backward_produce(const BackwardWork &work, const CUtensorMap *map_query,
                                                 const CUtensorMap *map_key, const CUtensorMap *map_value,
                                                 const CUtensorMap *map_grad, const BackwardShared &s)
{
    int stage = 0, phase = 0, key_phase = 0;
    BackwardItem item;
    for (int round = 0; backward_item<C>(item, work, round); round++) {
        if (item.count < 0)
            continue;
        const int first_key = item.n * C::N;
        for (int i = 0; i < work.group; i++) {
            const int head = item.key_head * work.group + i;
            const int64_t blocks = (int64_t)(item.batch * work.heads + head) * work.blocks_m;
#pragma unroll 1
            for (int m = item.last; m > item.last - item.count; m--) {
                const uint32_t query_full = s.query_full + 8 * stage, grad_full = s.grad_full + 8 * stage;
                mbarrier_wait(s.query_empty + 8 * stage, phase ^ 1);
                mbarrier_arrive_expect_tx(query_full, C::QUERY_BYTES + C::STATISTICS_BYTES);
                for (int column = 0; column < C::COLUMNS; column++)
                    tma_load_4d(s.queries + stage * C::QUERY_BYTES + column * C::QUERY_COLUMN, map_query, query_full,
                                64 * column, m * C::M, head, item.batch);
                bulk_load(s.statistics + stage * C::STATISTICS_BYTES, work.statistics + (blocks + m) * (2 * C::M),
                          C::STATISTICS_BYTES, query_full);
                // The first queries come to a free stage while the block of keys before is still being worked at.
                if (i == 0 && m == item.last) {
                    mbarrier_wait(s.key_empty, key_phase ^ 1);
                    key_phase ^= 1;
                    mbarrier_arrive_expect_tx(s.key_full, 2 * C::KEY_BYTES);
                    for (int column = 0; column < C::COLUMNS; column++) {
                        tma_load_4d(s.keys + column * C::KEY_COLUMN, map_key, s.key_full, 64 * column, first_key,
                                    item.key_head, item.batch);
                        tma_load_4d(s.values + column * C::KEY_COLUMN, map_value, s.key_full, 64 * column, first_key,
                                    item.key_head, item.batch);
                    }
                }
                mbarrier_wait(s.grad_empty + 8 * stage, phase ^ 1);
                mbarrier_arrive_expect_tx(grad_full, C::QUERY_BYTES);
                for (int column = 0; column < C::COLUMNS; column++)
                    tma_load_4d(s.grads + stage * C::QUERY_BYTES + column * C::QUERY_COLUMN, map_grad, grad_full,
                                64 * column, m * C::M, head, item.batch);
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        }
    }
}

// Adds the sums that the consumers leave in shared memory to those in device memory, each block of queries' in the order
// of the blocks of keys, so that results repeat. Two threads take turns, since a step's wait for the blocks before, and
// until its own sums are there for those after, may take longer than a step's products.
template <typename C>
__device__ __forceinline__ void backward_add(const BackwardWork &work, const BackwardShared &s, int mine)
{
    int step = 0, phase = 0;
    BackwardItem item;
    for (int round = 0; backward_item<C>(item, work, round); round++) {
        if (item.count < 0)
            continue;
        for (int i = 0; i < work.group; i++) {
            const int head = item.key_head * work.group + i;
            const int64_t blocks = (int64_t)(item.batch * work.heads + head) * work.blocks_m;
#pragma unroll 1
            for (int m = item.last; m > item.last - item.count; m--, step ^= 1) {
                if (step != mine)
                    continue;
                const uint32_t from = s.sums + mine * C::SUM_BYTES;
                float *const to = work.sums + (blocks + m) * (C::M * C::D);
                uint32_t *const turn = work.turns + blocks + m;
                const int rank = item.n - first_block_of_keys(work.band, m * C::M, C::N);
                mbarrier_wait(s.sum_full + 8 * mine, phase);
                phase ^= 1;
                if (rank == 0) {
                    bulk_store(to, from, C::SUM_BYTES);
                } else {
                    while (ld_acquire_gpu(turn) != (uint32_t)rank)
                        ;
                    fence_proxy_async_global();
                    bulk_reduce_add_f32(to, from, C::SUM_BYTES);
                }
                bulk_commit_group();
                bulk_wait_group_read<0>();
                mbarrier_arrive(s.sum_empty + 8 * mine);
                bulk_wait_group<0>();
                fence_proxy_async_global();
                red_release_gpu_add(turn, 1);
            }
        }
    }
}

// POSITIVE: 0 in place of what is negative.
template <typename T, bool POSITIVE = false>
__device__ __forceinline__ uint32_t pack_pair(float low, float high)
{
    if (POSITIVE)
        return is_bfloat16<T> ? cvt_rn_relu_bf16x2_f32(high, low) : cvt_rn_relu_f16x2_f32(high, low);
    return is_bfloat16<T> ? cvt_rn_bf16x2_f32(high, low) : cvt_rn_f16x2_f32(high, low);
}

// A product's registers as the operand of one whose k are its columns.
template <typename T, bool POSITIVE = false, int ROWS>
__device__ __forceinline__ void pack_fragments(uint32_t (&packed)[ROWS][4], const float (&x)[8 * ROWS])
{
#pragma unroll
    for (int k = 0; k < ROWS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[k][i] = pack_pair<T, POSITIVE>(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
}

// These as rows of 64 elements, the columns of rows column_bytes apart. row: that whose addresses this lane gives.
template <int ROWS>
__device__ __forceinline__ void store_fragments(uint32_t to, int column_bytes, const uint32_t (&packed)[ROWS][4],
                                                int row, int lane)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int vector = (2 * i + lane / 16) % 8 ^ row % 8;
        stmatrix_x4(to + i / 4 * column_bytes + row * SWIZZLE_ROW + vector * 16, packed[i][0], packed[i][1],
                    packed[i][2], packed[i][3]);
    }
}

template <typename T, int COUNT>
__device__ __forceinline__ void pack_and_store(uint32_t to, const float (&x)[COUNT], int row, int lane)
{
    uint32_t packed[COUNT / 8][4];
    pack_fragments<T>(packed, x);
    store_fragments(to, 64 * SWIZZLE_ROW, packed, row, lane);
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

// A consumer warpgroup. The queries' gradients of a step want dS of both warpgroups; they are multiplied a step later, so
// that neither waits for the other, and one's exponentials run beside the other's products.
// Dropout's numbers are drawn once: a weight's sign, which is free, keeps whether it is dropped until dS wants to know.
// The scale of those that are kept is that of the sums' and of delta, which is 1 / scale of what it would be.
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
    int stage = 0, phase = 0, key_phase = 0;
    int written = 0, summed = 0; // steps whose dS is in shared memory, and whose product with the keys has been taken
    float p[C::M / 2], dp[C::M / 2], dq[32], dk[C::D / 2], dv[C::D / 2];
    uint32_t packed[C::M / 16][4], packed_scores[C::M / 16][4];

    const auto multiply_scores = [&](bool there) {
        const int buffer = summed % 2;
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
        const int buffer = summed % 2;
        wgmma_pin(dq);
        if (thread == 0)
            mbarrier_arrive(s.score_empty + 8 * buffer);
        mbarrier_wait(s.sum_empty + 8 * buffer, summed / 2 % 2 ^ 1);
        const uint32_t to = my_sums + buffer * C::SUM_BYTES + thread * 16;
#pragma unroll
        for (int i = 0; i < 8; i++)
            st_shared_v4_f32(to + i * (WARPGROUP * 16),
                             make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]));
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
                lse[i] = ld_shared_v4_f32(s.statistics + stage * C::STATISTICS_BYTES + quad * 16 + i * 64);
    };

    const DropoutSeed seed(C::DROPS ? work.dropout.philox : cuda_ops_philox_state{});
    bool stored = false; // gradients of keys and values are being copied out of the sums' place
    BackwardItem item;
    for (int round = 0; backward_item<C>(item, work, round); round++) {
        if (item.count < 0)
            continue;
#pragma unroll
        for (int i = 0; i < C::D / 2; i++)
            dk[i] = dv[i] = 0;
        const int steps = item.count * work.group, top = item.n * C::N + 64 * group;
        const int key = top + 16 * warp + lane / 4; // this thread's: key and key + 8
        int m = item.last;
        uint32_t dropout_row = (uint32_t)cuda_ops_attention_dropout_row(
            item.batch * work.heads + item.key_head * work.group, work.band.queries, m * C::M);
        if (steps > 0) {
            mbarrier_wait(s.key_full, key_phase);
            key_phase ^= 1;
            mbarrier_wait(s.query_full + 8 * stage, phase);
            multiply_rows<C>(p, my_keys, wgmma_advance(queries_first, stage * C::QUERY_BYTES));
            load_lse();
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
            if (top + 63 > min(first_query + work.band.high, work.band.keys - 1) ||
                top < first_query + C::M - 1 + work.band.low) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int at_key = key + 8 * r, base = first_query + 2 * quad;
                    const int low = at_key < work.band.keys ? at_key - work.band.high - base : C::M;
                    const int high = at_key - work.band.low - base;
#pragma unroll
                    for (int i = 0; i < C::M / 2; i++)
                        if (i / 2 % 2 == r) {
                            const int at = i / 4 * 8 + i % 2;
                            p[i] = at < low || at > high ? -INFINITY : p[i];
                        }
                }
            }
#pragma unroll
            for (int i = 0; i < C::M / 16; i++) {
                const float4 x = C::EARLY ? lse[i] : ld_shared_v4_f32(statistics + i * 64);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float shift = j / 4 ? (j % 2 ? x.w : x.z) : j % 2 ? x.y : x.x;
                    p[8 * i + j] = ex2_approx_ftz(fmaf(p[8 * i + j], work.scale_log2, -shift));
                }
            }
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
            mbarrier_wait(s.score_empty + 8 * (written % 2), written / 2 % 2 ^ 1);
            store_fragments(s.scores + written % 2 * C::SCORE_BYTES + group * C::BOX_BYTES, C::KEY_COLUMN,
                            packed_scores, matrix_row, lane);
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
                mbarrier_arrive(s.score_full + 8 * (written % 2));
            written++;
            // Of the step before. In the first step the product is of what the buffer held, and of no use; so are the
            // next scores in the last. Under a condition the compiler would run products one by one.
            multiply_scores(step > 0);
            const int now = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
            dropout_row -= 2 * C::M;
            if (--m == item.last - item.count) {
                m = item.last; // of the next head
                dropout_row += 32 * ceil_div(work.band.queries, 16) + item.count * (2 * C::M);
            }
            if (step + 1 < steps)
                mbarrier_wait(s.query_full + 8 * stage, phase);
            multiply_rows<C>(p, my_keys, wgmma_advance(queries_first, stage * C::QUERY_BYTES));
            wgmma_wait_group<1>();
            wgmma_pin(dk);
            wgmma_pin(packed_scores);
            if (thread == 0) {
                mbarrier_arrive(s.grad_empty + 8 * now);
                mbarrier_arrive(s.query_empty + 8 * now);
            }
            if (step > 0)
                hand_over_sums();
            load_lse();
            wgmma_wait_group<0>();
            wgmma_pin(p);
        }
        if (steps > 1)
            publish_sums();
        if (steps > 0) {
            multiply_scores(true);
            wgmma_wait_group<0>();
            if (thread == 0)
                mbarrier_arrive(s.key_empty);
            hand_over_sums();
            publish_sums();
        }
        // The gradients take the place of this warpgroup's sums, as soon as those have been read.
        mbarrier_wait(s.sum_empty + 8 * (summed % 2), summed / 2 % 2 ^ 1);
        mbarrier_wait(s.sum_empty + 8 * ((summed + 1) % 2), (summed + 1) / 2 % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < C::D / 2; i++)
            dk[i] *= work.scale;
        if (C::DROPS)
#pragma unroll
            for (int i = 0; i < C::D / 2; i++)
                dv[i] *= work.dropout.scale;
        pack_and_store<T>(my_sums, dv, matrix_row, lane);
        pack_and_store<T>(my_sums + C::SUM_BYTES, dk, matrix_row, lane);
        fence_proxy_async();
        bar_sync<WARPGROUP>(STORE_BARRIER + group);
        if (thread == 0) {
#pragma unroll
            for (int column = 0; column < C::COLUMNS; column++) {
                const uint32_t from = my_sums + column * C::BOX_BYTES;
                tma_store_4d(map_grad_value, from, 64 * column, top, item.key_head, item.batch);
                tma_store_4d(map_grad_key, from + C::SUM_BYTES, 64 * column, top, item.key_head, item.batch);
            }
            bulk_commit_group();
        }
        stored = true;
    }
    if (thread == 0)
        bulk_wait_group_read<0>();
}

#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_sm90_backward_kernel(const __grid_constant__ CUtensorMap map_query,
                                   const __grid_constant__ CUtensorMap map_key,
                                   const __grid_constant__ CUtensorMap map_value,
                                   const __grid_constant__ CUtensorMap map_grad,
                                   const __grid_constant__ CUtensorMap map_grad_key,
                                   const __grid_constant__ CUtensorMap map_grad_value,
                                   const __grid_constant__ BackwardWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(SWIZZLE_ATOM) char shared_aligned[];
    const uint32_t first = shared_address(shared_aligned);
    BackwardShared s;
    s.keys = first, s.values = first + C::VALUES_FROM, s.queries = first + C::QUERIES_FROM;
    s.grads = first + C::GRADS_FROM, s.scores = first + C::SCORES_FROM, s.sums = first + C::SUMS_FROM;
    s.statistics = first + C::STATISTICS_FROM;
    s.key_full = first + C::BARRIERS_FROM, s.key_empty = s.key_full + 8;
    s.query_full = s.key_empty + 8, s.query_empty = s.query_full + 8 * C::STAGES;
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
            backward_add<C>(work, s, threadIdx.x / WARP_SIZE - 1);
    } else {
        setmaxnreg_inc<C::REGISTERS>();
        backward_consume<C>(work, &map_grad_key, &map_grad_value, s);
    }
#endif
}

// Where a query's number stands among those of its block: the four that a lane wants of 16 columns of a product,
// 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, are neighbours.
__device__ __forceinline__ int statistics_place(int query)
{
    return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2;
}

// Before: what backward needs of each query, and turns of zero. Rows beyond the queries have a logsumexp of infinity,
// and so weights of zero, as have queries without keys. A thread has 16 bytes of a row.
struct BackwardPrepare {
    float *statistics;
    uint32_t *turns;
    const float *logsumexp, *grad_logsumexp; // the latter may be NULL
    const void *output, *grad_output;
    cuda_ops_attention_strides output_strides, grad_strides;
    int heads, queries, blocks_m, value_dim;
    float kept; // 1 / dropout's scale, which delta is multiplied by
};

template <typename T, int LANES, int M>
__global__ void __launch_bounds__(256) attention_sm90_prepare_kernel(const __grid_constant__ BackwardPrepare work)
{
    constexpr int ROWS = 256 / LANES;
    typedef aligned_vector<T, 8> Vector;
    wait_for_predecessor();
    release_successor();
    const int head = blockIdx.y % work.heads, batch = blockIdx.y / work.heads;
    const int lane = threadIdx.x % LANES, first = blockIdx.x * M;
    const T *const output =
        (const T *)work.output + batch * work.output_strides.batch + head * work.output_strides.head + 8 * lane;
    const T *const grad =
        (const T *)work.grad_output + batch * work.grad_strides.batch + head * work.grad_strides.head + 8 * lane;
    const int64_t block = (int64_t)blockIdx.y * work.blocks_m + blockIdx.x;
    if (threadIdx.x == 0)
        work.turns[block] = 0;
    Vector o[M / ROWS] = {}, g[M / ROWS] = {};
#pragma unroll
    for (int i = 0; i < M / ROWS; i++) {
        const int row = first + threadIdx.x / LANES + i * ROWS;
        if (row < work.queries && 8 * lane < work.value_dim) {
            o[i] = *(const Vector *)(output + row * work.output_strides.row);
            g[i] = *(const Vector *)(grad + row * work.grad_strides.row);
        }
    }
#pragma unroll
    for (int i = 0; i < M / ROWS; i++) {
        const int local = threadIdx.x / LANES + i * ROWS, row = first + local;
        float delta = 0;
#pragma unroll
        for (int e = 0; e < 8; e++)
            delta += load_as_accumulate(o[i].element[e]) * load_as_accumulate(g[i].element[e]);
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            delta += __shfl_xor_sync(FULL_WARP, delta, offset);
        if (lane == 0) {
            const int64_t at = (int64_t)blockIdx.y * work.queries + row;
            const bool inside = row < work.queries;
            const float lse = inside ? work.logsumexp[at] : -INFINITY;
            float *const to = work.statistics + block * (2 * M) + statistics_place(local);
            to[0] = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
            to[M] = (inside && work.grad_logsumexp ? delta - work.grad_logsumexp[at] : delta) * work.kept;
        }
    }
}

// After: the queries' gradients from the sums, rounded. A block of 256 threads has the sums of two consumer warpgroups
// and a block of queries.
struct BackwardFinish {
    const float *sums;
    void *grad_query;
    cuda_ops_attention_strides strides;
    Band band;
    int heads, blocks_m, blocks_n, head_dim;
    float scale;
};

template <typename T, int D, int M, bool TRANSPOSED>
__global__ void __launch_bounds__(256) attention_sm90_finish_kernel(const __grid_constant__ BackwardFinish work)
{
    constexpr int PITCH = D + 8;
    __shared__ __align__(16) T tile[M * PITCH];
    wait_for_predecessor();
    release_successor();
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const int first = blockIdx.x * M, rows = min(M, work.band.queries - first);
    const int64_t block = (int64_t)blockIdx.y * work.blocks_m + blockIdx.x;
    const float4 *const sums = (const float4 *)(work.sums + block * (M * D)) + group * (8 * WARPGROUP) + thread;
    // Whether some key is seen by these queries, and the sums have been written.
    const int low = max(first + work.band.low, 0), high = min(first + rows - 1 + work.band.high, work.band.keys - 1);
    const bool written = low <= high;
    const int across = 64 * group + thread / 32 * 16 + thread % 32 / 4, along = thread % 4 * 2;
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = written ? sums[i * WARPGROUP] : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const T a = store_from_accumulate<T>(x[i].x * work.scale), b = store_from_accumulate<T>(x[i].y * work.scale);
        const T c = store_from_accumulate<T>(x[i].z * work.scale), d = store_from_accumulate<T>(x[i].w * work.scale);
        if (TRANSPOSED) { // rows of the product are elements, columns queries
            tile[(8 * i + along) * PITCH + across] = a;
            tile[(8 * i + along + 1) * PITCH + across] = b;
            tile[(8 * i + along) * PITCH + across + 8] = c;
            tile[(8 * i + along + 1) * PITCH + across + 8] = d;
        } else {
            tile[across * PITCH + 8 * i + along] = a;
            tile[across * PITCH + 8 * i + along + 1] = b;
            tile[(across + 8) * PITCH + 8 * i + along] = c;
            tile[(across + 8) * PITCH + 8 * i + along + 1] = d;
        }
    }
    __syncthreads();
    const int head = blockIdx.y % work.heads, batch = blockIdx.y / work.heads;
    T *const to = (T *)work.grad_query + batch * work.strides.batch + head * work.strides.head;
    constexpr int VECTORS = D / 8;
#pragma unroll
    for (int v = threadIdx.x; v < M * VECTORS; v += 256) {
        const int row = v / VECTORS, column = v % VECTORS * 8;
        if (row < rows && column < work.head_dim)
            *(uint4 *)(to + (first + row) * work.strides.row + column) = *(const uint4 *)(tile + row * PITCH + column);
    }
}

template <typename C>
static cuda_ops_status launch_backward(const AttentionCall &call, const Device &device)
{
    typedef typename C::T T;
    const cuda_ops_attention &p = call.problem;
    CUtensorMap map_query, map_key, map_value, map_grad, map_grad_key, map_grad_value;
    if (!make_heads_map(&map_query, call.query, call.dtype,
                        heads_layout(p.batch, p.heads, p.queries, p.head_dim, p.query), C::M) ||
        !make_heads_map(&map_key, call.key, call.dtype, heads_layout(p.batch, p.key_heads, p.keys, p.head_dim, p.key),
                        C::N) ||
        !make_heads_map(&map_value, call.value, call.dtype,
                        heads_layout(p.batch, p.key_heads, p.keys, p.value_dim, p.value), C::N) ||
        !make_heads_map(&map_grad, call.grad_output, call.dtype,
                        heads_layout(p.batch, p.heads, p.queries, p.value_dim, p.grad_output), C::M) ||
        !make_heads_map(&map_grad_key, call.grad_key, call.dtype,
                        heads_layout(p.batch, p.key_heads, p.keys, p.head_dim, p.grad_key), 64) ||
        !make_heads_map(&map_grad_value, call.grad_value, call.dtype,
                        heads_layout(p.batch, p.key_heads, p.keys, p.value_dim, p.grad_value), 64))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t blocks_m = ceil_div(p.queries, C::M), blocks = p.batch * p.heads * blocks_m;
    BackwardWork work = {};
    work.sums = (float *)call.workspace;
    float *const statistics = work.sums + blocks * (C::SUM_BYTES / 4);
    work.statistics = statistics;
    work.turns = (uint32_t *)(statistics + blocks * (C::STATISTICS_BYTES / 4));
    work.band = band_of(p);
    work.heads = (int)p.heads, work.key_heads = (int)p.key_heads, work.group = (int)(p.heads / p.key_heads);
    work.blocks_m = (int)blocks_m, work.blocks_n = (int)ceil_div(p.keys, C::N);
    work.all_key_heads = (int)(p.batch * p.key_heads);
    const int64_t total = (int64_t)work.blocks_n * work.all_key_heads;
    const int64_t resident = total < device.multiprocessors ? total : device.multiprocessors;
    // As many heads are walked together as have queries, gradients and sums in the L2: the more, the fewer blocks of
    // keys of one head run at once and wait for each other. At least a block of keys for every block.
    const int64_t head_bytes = p.queries * C::D * 8 * work.group, least = ceil_div(resident, work.blocks_n);
    int64_t section = ((int64_t)40 << 20) / head_bytes;
    section = section < least ? least : section;
    work.section = (int)(section < work.all_key_heads ? section : work.all_key_heads);
    // Where all are as long, the ones that end last, since they wait for those before, begin last again.
    const bool as_long = work.band.low <= -work.band.queries && work.band.high >= work.band.keys - 1;
    work.schedule = make_schedule(total, (int64_t)work.section * work.blocks_n, resident, !as_long);
    work.dropout = dropout_work_of(p, nullptr);
    work.scale = (float)p.scale * work.dropout.scale, work.scale_log2 = (float)(p.scale * 1.4426950408889634);

    BackwardPrepare prepare = {};
    prepare.statistics = statistics, prepare.turns = work.turns;
    prepare.logsumexp = (const float *)call.logsumexp, prepare.grad_logsumexp = (const float *)call.grad_logsumexp;
    prepare.output = call.output, prepare.grad_output = call.grad_output;
    prepare.output_strides = p.output, prepare.grad_strides = p.grad_output;
    prepare.heads = work.heads, prepare.queries = work.band.queries, prepare.blocks_m = work.blocks_m;
    prepare.value_dim = (int)p.value_dim;
    prepare.kept = work.dropout.scale > 0 ? 1.0f / work.dropout.scale : 0.0f;
    const dim3 grid((unsigned int)blocks_m, (unsigned int)(p.batch * p.heads));
    launch_dependent(attention_sm90_prepare_kernel<T, C::D / 8, C::M>, grid, dim3(256), 0, call.stream, prepare);

    // All blocks at once, or none: blocks wait for each other's sums.
    const auto kernel = attention_sm90_backward_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned int)resident);
    config.blockDim = dim3(C::THREADS);
    config.dynamicSmemBytes = C::SHARED_BYTES;
    config.stream = call.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    // Its error is launch_status()'s.
    cudaLaunchKernelEx(&config, kernel, map_query, map_key, map_value, map_grad, map_grad_key, map_grad_value, work);

    BackwardFinish finish = {};
    finish.sums = work.sums, finish.grad_query = call.grad_query, finish.strides = p.grad_query;
    finish.band = work.band, finish.heads = work.heads, finish.blocks_m = work.blocks_m;
    finish.blocks_n = work.blocks_n, finish.head_dim = (int)p.head_dim, finish.scale = work.scale;
    launch_dependent(attention_sm90_finish_kernel<T, C::D, C::M, C::TRANSPOSED>, grid, dim3(256), 0, call.stream,
                     finish);
    return launch_status();
}

template <typename T, bool DROPS>
static cuda_ops_status launch_backward_of(const AttentionCall &call, const Device &device)
{
    if (attention_sm90_is_narrow(call.problem))
        return launch_backward<BackwardTile<T, 64, 128, DROPS>>(call, device);
    return launch_backward<BackwardTile<T, 128, 64, DROPS>>(call, device);
}

#endif
