// The gradients of queries of rows of 129 to 256 elements: grad_query = scale dS key. A block has 128 queries, 64 a
// consumer warpgroup, and walks over the blocks of 64 keys that they see, as forward does: S and dP are computed anew,
// which costs less than sums over blocks of keys in device memory would, and dS stays in registers as the left operand
// of the third product.
#ifndef CUDA_OPS_ATTENTION_SM90_WIDE_QUERIES_CUH
#define CUDA_OPS_ATTENTION_SM90_WIDE_QUERIES_CUH

#include "attention/sm90/prepare.cuh"
#include "attention/sm90/wide.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"

// D: elements of keys and queries; VALUE_D: of values and grad_output.
template <typename T_, int D_, int VALUE_D_>
struct WideQueriesTile {
    typedef T_ T;
    static constexpr int COLUMNS = D_ / 64, VALUE_COLUMNS = VALUE_D_ / 64, M = 2 * WIDE_ROWS;
    static constexpr int TILE = COLUMNS * WIDE_COLUMN, VALUE_TILE = VALUE_COLUMNS * WIDE_COLUMN;
    static constexpr int RING_BYTES = WIDE_RING_BYTES<COLUMNS>, VALUE_RING_BYTES = WIDE_RING_BYTES<VALUE_COLUMNS>;
    static constexpr int KEY_STAGES = 2, VALUE_STAGES = D_ == 256 ? 1 : 2;
    static constexpr int GRADS_FROM = 2 * TILE, KEYS_FROM = GRADS_FROM + 2 * VALUE_TILE;
    static constexpr int VALUES_FROM = KEYS_FROM + KEY_STAGES * TILE;
    static constexpr int BARRIERS_FROM = VALUES_FROM + VALUE_STAGES * VALUE_TILE;
    static constexpr int SHARED_BYTES =
        BARRIERS_FROM + KEY_STAGES * RING_BYTES + VALUE_STAGES * VALUE_RING_BYTES + 4 * 8;
    static_assert(SHARED_BYTES <= WIDE_SHARED_BYTES, "an SM's shared memory");
};

struct WideQueriesShared {
    uint32_t queries, grads, keys, values;
    uint32_t key_ring, value_ring, query_full, grad_full; // barriers; of queries and gradients one a warpgroup
};

template <typename C>
__device__ __forceinline__ WideQueriesShared wide_queries_shared(uint32_t first)
{
    WideQueriesShared s;
    s.queries = first, s.grads = first + C::GRADS_FROM, s.keys = first + C::KEYS_FROM;
    s.values = first + C::VALUES_FROM;
    s.key_ring = first + C::BARRIERS_FROM, s.value_ring = s.key_ring + C::KEY_STAGES * C::RING_BYTES;
    s.query_full = s.value_ring + C::VALUE_STAGES * C::VALUE_RING_BYTES, s.grad_full = s.query_full + 2 * 8;
    return s;
}

#if defined(CUDA_OPS_HOPPER_CODE)

template <typename C>
__device__ __forceinline__ void wide_queries_produce(const WideWork &work, const WideItem &item, int first_query,
                                                     const Blocks &blocks, const CUtensorMap *map_query,
                                                     const CUtensorMap *map_key, const CUtensorMap *map_value,
                                                     const CUtensorMap *map_grad, const WideQueriesShared &s)
{
    const RowsPlace<false> place = {item.batch};
    const int key_head = item.head / work.group;
    WideStage<C::KEY_STAGES> key_stage = {0, 0};
    WideStage<C::VALUE_STAGES> value_stage = {0, 0};
    const auto load_queries = [&](int group) {
        const int row = first_query + WIDE_ROWS * group;
        mbarrier_arrive_expect_tx(s.query_full + 8 * group, C::TILE);
        for (int column = 0; column < C::COLUMNS; column++)
            load_rows(s.queries + group * C::TILE + column * WIDE_COLUMN, map_query, s.query_full + 8 * group,
                      64 * column, row, item.head, place);
    };
    const auto load_grads = [&](int group) {
        const int row = first_query + WIDE_ROWS * group;
        mbarrier_arrive_expect_tx(s.grad_full + 8 * group, C::VALUE_TILE);
        for (int column = 0; column < C::VALUE_COLUMNS; column++)
            load_rows(s.grads + group * C::VALUE_TILE + column * WIDE_COLUMN, map_grad, s.grad_full + 8 * group,
                      64 * column, row, item.head, place);
    };
    for (int step = 0; step < blocks.count; step++) {
        const int n = blocks.last - blocks.count + 1 + step;
        // The second warpgroup's rows come last, so that it does not compute what the first does at the same time.
        if (step == 0)
            load_queries(0);
        wide_load<C::COLUMNS>(map_key, s.keys, s.key_ring, key_stage.index, key_stage.phase, n * WIDE_ROWS, key_head,
                              place);
        if (step == 0)
            load_grads(0);
        wide_load<C::VALUE_COLUMNS>(map_value, s.values, s.value_ring, value_stage.index, value_stage.phase,
                                    n * WIDE_ROWS, key_head, place);
        if (step == 0) {
            load_queries(1);
            load_grads(1);
        }
        key_stage.advance();
        value_stage.advance();
    }
}

template <typename C>
__device__ __forceinline__ void wide_queries_consume(const WideWork &work, const WideItem &item, int first_query,
                                                     const Blocks &blocks, const CUtensorMap *map_grad_query,
                                                     const WideQueriesShared &s)
{
    typedef typename C::T T;
    const int group = warp_uniform(threadIdx.x / WARPGROUP) - 1, thread = threadIdx.x % WARPGROUP;
    const int warp = thread / WARP_SIZE, lane = thread % WARP_SIZE, quad = lane % 4;
    const uint32_t own_place = s.queries + group * C::TILE;
    const uint64_t own_queries = wgmma_descriptor(own_place, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t own_grads = wgmma_descriptor(s.grads + group * C::VALUE_TILE, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t keys = wgmma_descriptor(s.keys, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, WIDE_COLUMN);
    const uint64_t values = wgmma_descriptor(s.values, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, WIDE_COLUMN);
    const int top = first_query + group * WIDE_ROWS, row = 16 * warp + lane / 4; // this thread's: row and row + 8
    // The predecessor is the kernel for the keys' gradients, and the one before it, which wrote these, has ended: see
    // the launcher. Past the L1, which may have a former call's.
    float logsumexp[2] = {INFINITY, INFINITY}, delta[2] = {0, 0};
    if (top < work.band.queries) {
        const float *const statistics =
            work.statistics +
            ((int64_t)(item.batch * work.heads + item.head) * work.blocks_m + top / WIDE_ROWS) * (2 * WIDE_ROWS);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            logsumexp[r] = __ldcg(statistics + statistics_place(row + 8 * r));
            delta[r] = __ldcg(statistics + WIDE_ROWS + statistics_place(row + 8 * r));
        }
    }
    float p[32], dp[32], sums[32 * C::COLUMNS];
    uint32_t packed[4][4];
    const uint32_t none[1][4] = {};
#pragma unroll
    for (int i = 0; i < 32 * C::COLUMNS; i++)
        sums[i] = 0;

    // dS of a step, whose S and dP have been issued.
    const auto make_scores = [&](int n, int value_index) {
        wgmma_wait_group<1>();
        wgmma_pin(p);
        const int first_key = n * WIDE_ROWS;
        if (!wide_all_seen(work.band, top, first_key)) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int query = top + row + 8 * r, base = first_key + 2 * quad;
                const int low = query + work.band.low - base;
                const int high = min(query + work.band.high, work.band.keys - 1) - base;
#pragma unroll
                for (int i = 0; i < 32; i++)
                    if (i / 2 % 2 == r) {
                        const int at = i / 4 * 8 + i % 2;
                        p[i] = at < low || at > high ? -INFINITY : p[i];
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < 32; i++)
            p[i] = ex2_approx_ftz(fmaf(p[i], work.scale_log2, -logsumexp[i / 2 % 2]));
        wgmma_pin(p); // the exponentials stand before the wait
        wgmma_wait_group<0>();
        wgmma_pin(dp);
        if (lane == 0)
            mbarrier_arrive(wide_empty<C::VALUE_COLUMNS>(s.value_ring, value_index));
#pragma unroll
        for (int i = 0; i < 32; i++)
            dp[i] = p[i] * (dp[i] - delta[i / 2 % 2]);
        pack_fragments<T>(packed, dp);
    };

    if (blocks.count > 0) {
        WideStage<C::KEY_STAGES> key_stage = {0, 0};
        WideStage<C::VALUE_STAGES> value_stage = {0, 0};
        int n = blocks.last - blocks.count + 1;
        mbarrier_wait(s.query_full + 8 * group, 0);
        wide_scores<T, C::COLUMNS, 0>(p, none, own_queries, keys, wide_full<C::COLUMNS>(s.key_ring, 0), 0);
        mbarrier_wait(s.grad_full + 8 * group, 0);
        wide_scores<T, C::VALUE_COLUMNS, 0>(dp, none, own_grads, values, wide_full<C::VALUE_COLUMNS>(s.value_ring, 0),
                                            0);
        make_scores(n, 0);
        if (group == 1)
            wide_pass_turn(group);
#pragma unroll 1
        while (n < blocks.last) {
            n++;
            const int before = key_stage.index;
            key_stage.advance();
            value_stage.advance();
            wide_wait_for_turn(group);
            wide_add<T, C::COLUMNS>(sums, packed, wgmma_advance(keys, before * C::TILE));
            wide_scores<T, C::COLUMNS, 0>(p, none, own_queries, wgmma_advance(keys, key_stage.index * C::TILE),
                                          wide_full<C::COLUMNS>(s.key_ring, key_stage.index), key_stage.phase);
            wide_scores<T, C::VALUE_COLUMNS, 0>(
                dp, none, own_grads, wgmma_advance(values, value_stage.index * C::VALUE_TILE),
                wide_full<C::VALUE_COLUMNS>(s.value_ring, value_stage.index), value_stage.phase);
            wide_pass_turn(group);
            wgmma_wait_group<2>();
            wgmma_pin(sums);
            wgmma_pin(packed);
            if (lane == 0)
                mbarrier_arrive(wide_empty<C::COLUMNS>(s.key_ring, before));
            make_scores(n, value_stage.index);
        }
        wide_add<T, C::COLUMNS>(sums, packed, wgmma_advance(keys, key_stage.index * C::TILE));
        wgmma_wait_group<0>();
        wgmma_pin(sums);
    }
    wide_store<T, C::COLUMNS>(sums, work.scale, own_place, group, map_grad_query, top, item.head, item.batch);
}

#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    attention_sm90_wide_queries_kernel(const __grid_constant__ CUtensorMap map_query,
                                       const __grid_constant__ CUtensorMap map_key,
                                       const __grid_constant__ CUtensorMap map_value,
                                       const __grid_constant__ CUtensorMap map_grad,
                                       const __grid_constant__ CUtensorMap map_grad_query,
                                       const __grid_constant__ WideWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(SWIZZLE_ATOM) char shared_aligned[];
    const WideQueriesShared s = wide_queries_shared<C>(shared_address(shared_aligned));
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_query);
        prefetch_tensormap(&map_key);
        prefetch_tensormap(&map_value);
        prefetch_tensormap(&map_grad);
        wide_init<C::COLUMNS>(s.key_ring, C::KEY_STAGES);
        wide_init<C::VALUE_COLUMNS>(s.value_ring, C::VALUE_STAGES);
        for (int group = 0; group < 2; group++) {
            mbarrier_init(s.query_full + 8 * group, 1);
            mbarrier_init(s.grad_full + 8 * group, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    release_successor();
    WideItem item = wide_item(work, work.heads);
    item.number = work.blocks - 1 - item.number; // the last queries see the most keys where attention is causal
    const int first_query = item.number * C::M, last_query = min(first_query + C::M, work.band.queries) - 1;
    const Blocks blocks = blocks_of_keys(work.band, first_query, last_query, WIDE_ROWS);
    if (threadIdx.x / WARPGROUP == 0) {
        setmaxnreg_dec<WIDE_PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            wide_queries_produce<C>(work, item, first_query, blocks, &map_query, &map_key, &map_value, &map_grad, s);
    } else {
        setmaxnreg_inc<WIDE_REGISTERS>();
        wide_queries_consume<C>(work, item, first_query, blocks, &map_grad_query, s);
    }
    // Nothing here waits for the kernel before; but who waits for this one waits for both.
    wait_for_predecessor();
#endif
}

#endif
