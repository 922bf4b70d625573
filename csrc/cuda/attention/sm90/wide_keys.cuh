// The gradients of keys and values of rows of 129 to 256 elements: grad_value = P^T grad_output, grad_key = scale dS^T
// query. A block has 64 keys and walks over all blocks of 64 queries that see some, of all heads of its key head. The
// first consumer warpgroup computes S^T and P^T, and sums P^T grad_output. The second computes dP^T, gets P^T from the
// first's registers by way of shared memory, rounded as it is for the product, makes dS^T of both, and sums dS^T query.
// Either has two products and its sums (64 x D, in registers) to itself, no product is made twice, and what one does
// with its scores runs beside the other's products.
#ifndef CUDA_OPS_ATTENTION_SM90_WIDE_KEYS_CUH
#define CUDA_OPS_ATTENTION_SM90_WIDE_KEYS_CUH

#include "attention/sm90/wide.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"

// D: elements of keys and queries; VALUE_D: of values and grad_output. HELD: how many columns of its keys or values a
// warpgroup has in registers at most, all that there is room for.
template <typename T_, int D_, int VALUE_D_>
struct WideKeysTile {
    typedef T_ T;
    static constexpr int COLUMNS = D_ / 64, VALUE_COLUMNS = VALUE_D_ / 64, HELD = D_ == 256 ? 2 : 3;
    static constexpr int TILE = COLUMNS * WIDE_COLUMN, VALUE_TILE = VALUE_COLUMNS * WIDE_COLUMN;
    static constexpr int WEIGHT_BYTES = 64 * 64 * 2; // P^T
    static constexpr int RING_BYTES = WIDE_RING_BYTES<COLUMNS>, VALUE_RING_BYTES = WIDE_RING_BYTES<VALUE_COLUMNS>;
    static constexpr int FIXED_BYTES = TILE + VALUE_TILE + 2 * WEIGHT_BYTES + 6 * 8;
    static constexpr int STAGE_BYTES = TILE + VALUE_TILE + WIDE_STATISTICS + RING_BYTES + VALUE_RING_BYTES;
    static constexpr int STAGES = (WIDE_SHARED_BYTES - FIXED_BYTES) / STAGE_BYTES;
    static constexpr int VALUES_FROM = TILE, QUERIES_FROM = TILE + VALUE_TILE;
    static constexpr int GRADS_FROM = QUERIES_FROM + STAGES * TILE, WEIGHTS_FROM = GRADS_FROM + STAGES * VALUE_TILE;
    static constexpr int STATISTICS_FROM = WEIGHTS_FROM + 2 * WEIGHT_BYTES;
    static constexpr int BARRIERS_FROM = STATISTICS_FROM + STAGES * WIDE_STATISTICS;
    static constexpr int SHARED_BYTES = FIXED_BYTES + STAGES * STAGE_BYTES;
    static_assert(STAGES >= 2, "one is loaded while another is computed with");
};

struct WideKeysShared {
    uint32_t keys, values, queries, grads, weights, statistics;
    uint32_t query_ring, grad_ring, key_full, value_full, weight_full, weight_empty; // barriers
};

template <typename C>
__device__ __forceinline__ WideKeysShared wide_keys_shared(uint32_t first)
{
    WideKeysShared s;
    s.keys = first, s.values = first + C::VALUES_FROM, s.queries = first + C::QUERIES_FROM;
    s.grads = first + C::GRADS_FROM, s.weights = first + C::WEIGHTS_FROM, s.statistics = first + C::STATISTICS_FROM;
    s.query_ring = first + C::BARRIERS_FROM, s.grad_ring = s.query_ring + C::STAGES * C::RING_BYTES;
    s.key_full = s.grad_ring + C::STAGES * C::VALUE_RING_BYTES, s.value_full = s.key_full + 8;
    s.weight_full = s.value_full + 8, s.weight_empty = s.weight_full + 2 * 8;
    return s;
}

#if defined(CUDA_OPS_HOPPER_CODE)

template <typename C>
__device__ __forceinline__ void wide_keys_produce(const WideWork &work, const WideItem &item,
                                                  const BlocksOfQueries &blocks, const CUtensorMap *map_query,
                                                  const CUtensorMap *map_key, const CUtensorMap *map_value,
                                                  const CUtensorMap *map_grad, const WideKeysShared &s)
{
    const RowsPlace<false> place = {item.batch};
    const int first_key = item.number * WIDE_ROWS;
    WideStage<C::STAGES> stage = {0, 0};
    const auto load_left = [&](const CUtensorMap *map, uint32_t to, int columns, uint32_t full) {
        mbarrier_arrive_expect_tx(full, columns * WIDE_COLUMN);
        for (int column = 0; column < columns; column++)
            load_rows(to + column * WIDE_COLUMN, map, full, 64 * column, first_key, item.head, place);
    };
    for (int i = 0; i < work.group; i++) {
        const int head = item.head * work.group + i;
        const int64_t first_block = (int64_t)(item.batch * work.heads + head) * work.blocks_m;
#pragma unroll 1
        for (int m = blocks.last; m > blocks.last - blocks.count; m--) {
            const bool begins = i == 0 && m == blocks.last;
            if (begins)
                load_left(map_key, s.keys, C::COLUMNS, s.key_full);
            wide_load<C::COLUMNS>(map_query, s.queries, s.query_ring, stage.index, stage.phase, m * WIDE_ROWS, head,
                                  place, WIDE_STATISTICS);
            bulk_load(s.statistics + stage.index * WIDE_STATISTICS,
                      work.statistics + (first_block + m) * (2 * WIDE_ROWS), WIDE_STATISTICS,
                      wide_full<C::COLUMNS>(s.query_ring, stage.index));
            if (begins)
                load_left(map_value, s.values, C::VALUE_COLUMNS, s.value_full);
            wide_load<C::VALUE_COLUMNS>(map_grad, s.grads, s.grad_ring, stage.index, stage.phase, m * WIDE_ROWS, head,
                                        place);
            stage.advance();
        }
    }
}

// A consumer warpgroup, the first or the second (`group`): `left` is its keys or values, `first` what these are
// multiplied by, and `second` what its sums are of. A step's sums and the next step's scores are issued together, the
// sums first: their operand is released while the scores are computed, so that the tile after the next comes in time.
template <typename C, int group>
__device__ __forceinline__ void wide_keys_consume(const WideWork &work, const WideItem &item,
                                                  const BlocksOfQueries &blocks, const CUtensorMap *map_grad,
                                                  const WideKeysShared &s)
{
    typedef typename C::T T;
    constexpr int COLUMNS = group ? C::VALUE_COLUMNS : C::COLUMNS, SUM_COLUMNS = group ? C::COLUMNS : C::VALUE_COLUMNS;
    constexpr int HELD = C::HELD < COLUMNS ? C::HELD : COLUMNS;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP_SIZE, lane = thread % WARP_SIZE, quad = lane % 4;
    const uint32_t left_place = group ? s.values : s.keys;
    const uint64_t left = wgmma_descriptor(left_place, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t first = wgmma_descriptor(group ? s.grads : s.queries, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t second = wgmma_descriptor(group ? s.queries : s.grads, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, WIDE_COLUMN);
    const uint32_t first_ring = group ? s.grad_ring : s.query_ring, second_ring = group ? s.query_ring : s.grad_ring;
    const int steps = blocks.count * work.group, first_key = item.number * WIDE_ROWS;
    float scores[32], sums[32 * SUM_COLUMNS];
    uint32_t packed[4][4];
#pragma unroll
    for (int i = 0; i < 32 * SUM_COLUMNS; i++)
        sums[i] = 0;

    // P^T of S^T, or dS^T of dP^T, of a step.
    const auto make_weights = [&](int step, int m, const WideStage<C::STAGES> &stage) {
        const uint32_t statistics = s.statistics + stage.index * WIDE_STATISTICS + quad * 16;
        const int slot = step % 2;
        const uint32_t parity = step / 2 % 2, weights = s.weights + slot * C::WEIGHT_BYTES + thread * 16;
        if (group == 0) {
            const int first_query = m * WIDE_ROWS;
            if (!wide_all_seen(work.band, first_query, first_key)) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int key = first_key + 16 * warp + lane / 4 + 8 * r, base = first_query + 2 * quad;
                    const int low = key < work.band.keys ? key - work.band.high - base : WIDE_ROWS;
                    const int high = key - work.band.low - base;
#pragma unroll
                    for (int i = 0; i < 32; i++)
                        if (i / 2 % 2 == r) {
                            const int at = i / 4 * 8 + i % 2;
                            scores[i] = at < low || at > high ? -INFINITY : scores[i];
                        }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 x = ld_shared_v4_f32(statistics + i * 64);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float shift = j / 4 ? (j % 2 ? x.w : x.z) : j % 2 ? x.y : x.x;
                    scores[8 * i + j] = ex2_approx_ftz(fmaf(scores[8 * i + j], work.scale_log2, -shift));
                }
            }
            pack_fragments<T>(packed, scores);
            mbarrier_wait(s.weight_empty + 8 * slot, parity ^ 1);
#pragma unroll
            for (int i = 0; i < 4; i++)
                st_shared_v4_f32(weights + i * (WARPGROUP * 16),
                                 make_float4(__uint_as_float(packed[i][0]), __uint_as_float(packed[i][1]),
                                             __uint_as_float(packed[i][2]), __uint_as_float(packed[i][3])));
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(s.weight_full + 8 * slot);
        } else {
            mbarrier_wait(wide_full<C::COLUMNS>(s.query_ring, stage.index), stage.phase); // delta
            mbarrier_wait(s.weight_full + 8 * slot, parity);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t p[4];
                ld_shared_v4(p[0], p[1], p[2], p[3], weights + i * (WARPGROUP * 16));
                const float4 delta = ld_shared_v4_f32(statistics + WIDE_ROWS * 4 + i * 64);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 weight = unpack_pair<T>(p[j]);
                    float &low = scores[8 * i + 2 * j], &high = scores[8 * i + 2 * j + 1];
                    low = weight.x * (low - (j / 2 ? delta.z : delta.x));
                    high = weight.y * (high - (j / 2 ? delta.w : delta.y));
                }
            }
            pack_fragments<T>(packed, scores);
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(s.weight_empty + 8 * slot);
        }
        if (lane == 0)
            mbarrier_arrive(wide_empty<COLUMNS>(first_ring, stage.index));
    };

    const auto add = [&](const WideStage<C::STAGES> &stage) {
#pragma unroll
        for (int column = 0; column < SUM_COLUMNS; column++)
            mbarrier_wait(wide_full<SUM_COLUMNS>(second_ring, stage.index) + 8 * column, stage.phase);
        wide_add<T, SUM_COLUMNS>(sums, packed, wgmma_advance(second, stage.index * SUM_COLUMNS * WIDE_COLUMN));
    };
    if (steps > 0) {
        WideStage<C::STAGES> stage = {0, 0};
        int m = blocks.last;
        uint32_t held[HELD == 0 ? 1 : 4 * HELD][4];
        const auto multiply = [&]() {
            wide_scores<T, COLUMNS, HELD>(scores, held, left, wgmma_advance(first, stage.index * COLUMNS * WIDE_COLUMN),
                                          wide_full<COLUMNS>(first_ring, stage.index), stage.phase);
        };
        mbarrier_wait(group ? s.value_full : s.key_full, 0);
        wide_hold<HELD>(held, left_place);
        multiply();
        wgmma_wait_group<0>();
        wgmma_pin(scores);
        make_weights(0, m, stage);
        if (group == 1)
            wide_pass_turn(group);
#pragma unroll 1
        for (int step = 1; step < steps; step++) {
            const WideStage<C::STAGES> before = stage;
            stage.advance();
            if (--m == blocks.last - blocks.count)
                m = blocks.last; // of the next head
            wide_wait_for_turn(group);
            add(before);
            multiply();
            wide_pass_turn(group);
            wgmma_wait_group<1>();
            wgmma_pin(sums);
            wgmma_pin(packed);
            if (lane == 0)
                mbarrier_arrive(wide_empty<SUM_COLUMNS>(second_ring, before.index));
            wgmma_wait_group<0>();
            wgmma_pin(scores);
            make_weights(step, m, stage);
        }
        add(stage);
        wgmma_wait_group<0>();
        wgmma_pin(sums);
    }
    // A wait is for the waiting warp's products; the others' may still read the queries.
    if constexpr (SUM_COLUMNS > COLUMNS)
        bar_sync<WARPGROUP>(WIDE_STORE_BARRIER + group);
    // In the place of this warpgroup's keys or values, which the other does not read, and where the keys' gradients are
    // wider than the values, of queries too, whose last reader this warpgroup was.
    wide_store<T, SUM_COLUMNS>(sums, group ? work.scale : 1.0f, left_place, group, map_grad, first_key, item.head,
                               item.batch);
}

#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    attention_sm90_wide_keys_kernel(const __grid_constant__ CUtensorMap map_query,
                                    const __grid_constant__ CUtensorMap map_key,
                                    const __grid_constant__ CUtensorMap map_value,
                                    const __grid_constant__ CUtensorMap map_grad,
                                    const __grid_constant__ CUtensorMap map_grad_key,
                                    const __grid_constant__ CUtensorMap map_grad_value,
                                    const __grid_constant__ WideWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(SWIZZLE_ATOM) char shared_aligned[];
    const WideKeysShared s = wide_keys_shared<C>(shared_address(shared_aligned));
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_query);
        prefetch_tensormap(&map_key);
        prefetch_tensormap(&map_value);
        prefetch_tensormap(&map_grad);
        wide_init<C::COLUMNS>(s.query_ring, C::STAGES);
        wide_init<C::VALUE_COLUMNS>(s.grad_ring, C::STAGES);
        mbarrier_init(s.key_full, 1);
        mbarrier_init(s.value_full, 1);
        for (int slot = 0; slot < 2; slot++) {
            mbarrier_init(s.weight_full + 8 * slot, WARPGROUP / WARP_SIZE);
            mbarrier_init(s.weight_empty + 8 * slot, WARPGROUP / WARP_SIZE);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor(); // before the release: the queries' kernel takes it that what was before this one has ended
    release_successor();
    const WideItem item = wide_item(work, work.key_heads);
    const BlocksOfQueries blocks = blocks_of_queries(work.band, item.number, WIDE_ROWS, WIDE_ROWS);
    if (threadIdx.x / WARPGROUP == 0) {
        setmaxnreg_dec<WIDE_PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            wide_keys_produce<C>(work, item, blocks, &map_query, &map_key, &map_value, &map_grad, s);
    } else {
        setmaxnreg_inc<WIDE_REGISTERS>();
        if (threadIdx.x < 2 * WARPGROUP)
            wide_keys_consume<C, 0>(work, item, blocks, &map_grad_value, s);
        else
            wide_keys_consume<C, 1>(work, item, blocks, &map_grad_key, s);
    }
#endif
}

#endif
