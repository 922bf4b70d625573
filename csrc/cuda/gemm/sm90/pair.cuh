// The sm90 path's tiles that a cluster of two blocks makes: each block multiplies half of k for the whole tile, and
// then they exchange half of their sums. For few tiles and a long k: smaller tiles would reread their operands from
// shared memory too often to feed the tensor cores. The exchange costs a trip between SMs at some 16 bytes a cycle: a
// microsecond for 32 KB. One tile a cluster; not persistent. Of a D that is so few tiles that pairs leave half of the
// GPU idle, three or four blocks make a tile: each has its share of k, receives the others' sums of its share of the
// columns, and adds all in the order of k.
#ifndef CUDA_OPS_GEMM_SM90_PAIR_CUH
#define CUDA_OPS_GEMM_SM90_PAIR_CUH

#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "gemm/sm90/ahead.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/sm90/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// MN-major is what the kernel calls A stored k x m and B stored k x n. 64 rows for each consumer warpgroup.
template <typename T_, int TILE_M_, int TILE_N_, int STAGES_, bool A_MN_MAJOR_, bool B_MN_MAJOR_, int BLOCKS_OF_K_ = 2>
struct PairTile : Tile<T_, TILE_M_, TILE_N_, 1, 1, false, 2, A_MN_MAJOR_, B_MN_MAJOR_> {
    typedef Tile<T_, TILE_M_, TILE_N_, 1, 1, false, 2, A_MN_MAJOR_, B_MN_MAJOR_> Whole;
    static constexpr int BLOCKS_OF_K = BLOCKS_OF_K_; // of the cluster, which make the tile
    // The columns that a block finishes, whole multiples of 16: neighbours finish some of them both, bit by bit the
    // same, where that does not come out even.
    static constexpr int COLUMNS = (TILE_N_ / BLOCKS_OF_K + 15) / 16 * 16;
    typedef Tile<T_, 128, COLUMNS, 1, 1, false, 2, false, false, false, true> Half; // what a block stores
    static constexpr int STAGES = STAGES_, GROUP_M = 64, GROUPS = TILE_M_ / GROUP_M, THREADS = (1 + GROUPS) * WARPGROUP;
    static constexpr int PRODUCER_REGISTERS = 40, REGISTERS = GROUPS == 2 ? 232 : 152; // of 65536 / THREADS
    static constexpr int COUNT = COLUMNS / 2;                                          // sums that a thread finishes
    static constexpr int PART_BYTES = WARPGROUP * COUNT * 4;         // that a warpgroup receives of a block
    static constexpr int SUM_BYTES = (BLOCKS_OF_K - 1) * PART_BYTES; // and of all
    static constexpr int SHARED_BYTES =
        STAGES * Whole::STAGE_BYTES + GROUPS * SUM_BYTES + (2 * STAGES + GROUPS) * 8 + SWIZZLE_ATOM;
    static_assert(sizeof(T_) == 2 && Half::GROUP_M == GROUP_M, "of 16 bits, 64 rows a warpgroup");
    static_assert(BLOCKS_OF_K == 2 || Half::IN_LINES, "columns that begin at any multiple of 8");
    static_assert(SHARED_BYTES <= 232448, "an SM's shared memory");
    static_assert(STAGES * Whole::STAGE_BYTES >= GROUPS * Half::BUFFERS * Half::BUFFER_BYTES, "the epilogue's buffers");
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The first of the columns of the tile that a block finishes.
template <typename C>
__device__ __forceinline__ constexpr int first_finished(int rank)
{
    return C::BLOCKS_OF_K == 2 ? rank * C::COLUMNS : rank * (C::N - C::COLUMNS) / (C::BLOCKS_OF_K - 1) / 8 * 8;
}

// The first row and column of a cluster's tile, and this block's steps along k.
struct PairCoordinates {
    int m, n, batch, first_step, steps;
};

template <typename C>
__device__ __forceinline__ PairCoordinates pair_coordinates(const GemmWork &work, int rank)
{
    // Along the side with fewer tiles first: concurrent clusters then share the long side's operand.
    const int tiles = work.clusters_m * work.clusters_n, cluster = blockIdx.x / C::BLOCKS_OF_K, index = cluster % tiles;
    const bool m_first = work.clusters_m <= work.clusters_n;
    const int side = m_first ? work.clusters_m : work.clusters_n, along = index % side, across = index / side;
    const int steps = (work.k + C::K - 1) / C::K, least = steps / C::BLOCKS_OF_K, more = steps % C::BLOCKS_OF_K;
    PairCoordinates tile;
    tile.m = (m_first ? along : across) * C::M;
    tile.n = (m_first ? across : along) * C::N;
    tile.batch = cluster / tiles;
    tile.first_step = rank * least + min(rank, more);
    tile.steps = least + (rank < more);
    return tile;
}

// The producer thread: fills the pipeline.
template <typename C>
__device__ __forceinline__ void pair_produce(const GemmWork &work, const PairCoordinates &tile,
                                             const CUtensorMap *map_a, const CUtensorMap *map_b, uint32_t stages,
                                             uint32_t full, uint32_t empty)
{
    const int batch_a = work.a_shared ? 0 : tile.batch, batch_b = work.b_shared ? 0 : tile.batch;
    int stage = 0, phase = 0, k = tile.first_step * C::K;
    for (int step = 0; step < tile.steps; step++, k += C::K) {
        mbarrier_wait(empty + 8 * stage, phase ^ 1);
        const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
        mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
        if constexpr (C::A_MN_MAJOR) {
#pragma unroll
            for (int column = 0; column < C::A_COLUMNS; column++)
                tma_load_3d(a + column * C::COLUMN_BYTES, map_a, arrived, tile.m + column * C::ROW, k, batch_a);
        } else {
            tma_load_3d(a, map_a, arrived, k, tile.m, batch_a);
        }
        if constexpr (C::B_MN_MAJOR) {
#pragma unroll
            for (int column = 0; column < C::B_COLUMNS; column++)
                tma_load_3d(b + column * C::COLUMN_BYTES, map_b, arrived, tile.n + column * C::ROW, k, batch_b);
        } else {
            tma_load_3d(b, map_b, arrived, k, tile.n, batch_b);
        }
        if (++stage == C::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
}

// Sends each other block of more than two what it finishes, and adds to what this one finishes what the others have of
// it, from the first block's to the last one's. `mine`: where this thread's arrive, `arrived`: their barrier.
template <typename C>
__device__ __forceinline__ void exchange_parts(float (&kept)[C::COUNT], const float (&sum)[C::N / 2], uint32_t mine,
                                               uint32_t arrived, int rank)
{
    constexpr int BLOCKS = C::BLOCKS_OF_K;
    // To the next block first, so that no block receives from all others at once.
#pragma unroll
    for (int before = 0; before < 2; before++)
#pragma unroll
        for (int other = 0; other < BLOCKS; other++)
            if (before ? other < rank : other > rank) {
                const int part = rank - (rank > other);
                const uint32_t to = mapa(mine + part * C::PART_BYTES, other), barrier = mapa(arrived, other);
#pragma unroll
                for (int i = 0; i < C::COUNT; i += 4) {
                    const float *const from = sum + first_finished<C>(other) / 2 + i;
                    st_async(to + i * WARPGROUP * 4, make_float4(from[0], from[1], from[2], from[3]), barrier);
                }
            }
    // Selected value by value: a branch would need the sums in as many sets of registers.
#pragma unroll
    for (int i = 0; i < C::COUNT; i++) {
        kept[i] = sum[i];
#pragma unroll
        for (int block = 1; block < BLOCKS; block++)
            kept[i] = rank == block ? sum[first_finished<C>(block) / 2 + i] : kept[i];
    }
    mbarrier_wait_cluster(arrived, 0);
#pragma unroll
    for (int i = 0; i < C::COUNT; i += 4) {
        float total[4] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            // Of the part that is this block's own any other is loaded.
            const int part = min(block - (block > rank), BLOCKS - 2);
            const float4 four = ld_shared_v4_f32(mine + part * C::PART_BYTES + i * WARPGROUP * 4);
            const float loaded[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                total[e] += block == rank ? kept[i + e] : loaded[e];
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            kept[i + e] = total[e];
    }
}

// A consumer warpgroup: its products, the exchange, and the epilogue.
template <typename C>
__device__ __forceinline__ void pair_consume(const GemmWork &work, const PairCoordinates &tile,
                                             const CUtensorMap *map_d, uint32_t stages, uint32_t sums, uint32_t full,
                                             uint32_t empty, int rank, char *shared)
{
    typedef typename C::Half Half;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, my_row = group * C::GROUP_M;
    constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
    const uint64_t a_tile =
        wgmma_descriptor(stages + (C::A_MN_MAJOR ? my_row / C::ROW * C::COLUMN_BYTES : my_row * SWIZZLE_ROW),
                         WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
    const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
    const int first_column = tile.n + first_finished<C>(rank);
    const auto bias = load_bias<Half>(work, first_column, thread);
    float sum[C::N / 2];
#pragma unroll
    for (int i = 0; i < C::N / 2; i++)
        sum[i] = 0;
    int stage = 0, phase = 0, before = 0;
    for (int step = 0; step < tile.steps; step++) {
        mbarrier_wait(full + 8 * stage, phase);
        const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                       b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma<typename C::T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum, wgmma_advance(a, i * A_STEP),
                                                                     wgmma_advance(b, i * B_STEP), 1);
        wgmma_commit_group();
        // This stage's products are in flight; the previous stage's are done.
        wgmma_wait_group<1>();
        if (step > 0 && thread == 0)
            mbarrier_arrive(empty + 8 * before);
        before = stage;
        if (++stage == C::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    wgmma_wait_group<0>();
    cluster_wait(); // the other blocks' barriers are initialised
    const uint32_t arrived = empty + 8 * C::STAGES + 8 * group, mine = sums + group * C::SUM_BYTES + thread * 16;
    float kept[1][C::COUNT];
    if constexpr (C::BLOCKS_OF_K == 2) {
        const uint32_t to = mapa(mine, rank ^ 1), barrier = mapa(arrived, rank ^ 1);
        // Selected value by value: a branch would need the sums in two sets of registers.
#pragma unroll
        for (int i = 0; i < C::COUNT; i += 4) {
            const float *const first = sum + i, *const second = sum + C::COUNT + i;
            st_async(to + i * WARPGROUP * 4,
                     make_float4(rank ? first[0] : second[0], rank ? first[1] : second[1], rank ? first[2] : second[2],
                                 rank ? first[3] : second[3]),
                     barrier);
#pragma unroll
            for (int j = 0; j < 4; j++)
                kept[0][i + j] = rank ? second[j] : first[j];
        }
        mbarrier_wait_cluster(arrived, 0);
#pragma unroll
        for (int i = 0; i < C::COUNT; i += 4) {
            const float4 part = ld_shared_v4_f32(mine + i * WARPGROUP * 4);
            kept[0][i] += part.x, kept[0][i + 1] += part.y, kept[0][i + 2] += part.z, kept[0][i + 3] += part.w;
        }
    } else {
        exchange_parts<C>(kept[0], sum, mine, arrived, rank);
    }
    // The epilogue's buffers are where the other blocks' sums arrived. Gelu's need more room: the pipeline's, which
    // all warpgroups have read to the end.
    uint32_t buffers = sums + group * C::SUM_BYTES;
    if (work.preactivation || is_gelu(work.activation)) {
        bar_sync(1 + C::GROUPS, C::GROUPS * WARPGROUP);
        buffers = stages + group * Half::BUFFERS * Half::BUFFER_BYTES;
    }
    int buffer = 0;
    store_tile<Half>(kept, bias, work, map_d, shared + (buffers - shared_address(shared)), buffer, tile.batch,
                     tile.m + my_row, first_column, group, thread);
    if (thread == 0)
        bulk_wait_group_read<0>();
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    gemm_sm90_pair_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ CUtensorMap map_d, const __grid_constant__ AheadGemmWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    // The addresses must be the same in both blocks, as that of dynamic shared memory is.
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t sums = stages + C::STAGES * C::STAGE_BYTES, full = sums + C::GROUPS * C::SUM_BYTES;
    const uint32_t empty = full + 8 * C::STAGES, arrived = empty + 8 * C::STAGES;
    const int rank = (int)cluster_ctarank(); // which share of k it multiplies, and which of the columns it finishes
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, C::GROUPS);
        }
        for (int group = 0; group < C::GROUPS; group++)
            mbarrier_init(arrived + 8 * group, 1);
        fence_mbarrier_init();
        for (int group = 0; group < C::GROUPS; group++)
            mbarrier_arrive_expect_tx(arrived + 8 * group, C::SUM_BYTES);
    }
    __syncthreads();
    // Waited for before another block is written to. No block waits for the others at its end: one that has received
    // all it waits for is written to no more.
    cluster_arrive_relaxed();
    const PairCoordinates tile = pair_coordinates<C>(work, rank);
    if (work.ahead > 0 && threadIdx.x == 0)
        prefetch_ahead<C>({min(work.ahead, tile.steps), tile.first_step * C::K, tile.m, tile.n,
                           work.a_shared ? 0 : tile.batch, work.b_shared ? 0 : tile.batch, 0, 0, false, work.clusters_n,
                           work.clusters_m, tile.n / C::N, tile.m / C::M},
                          &map_a, &map_b);
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            pair_produce<C>(work, tile, &map_a, &map_b, stages, full, empty);
        cluster_wait(); // completes the arrival above
    } else {
        setmaxnreg_inc<C::REGISTERS>();
        pair_consume<C>(work, tile, &map_d, stages, sums, full, empty, rank, shared);
    }
#endif
}

template <typename C>
static cuda_ops_status launch_pair(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    typedef typename C::Half Half;
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b, map_d;
    bool mapped =
        (C::A_MN_MAJOR
             ? make_map(&map_a, call.a, p.dtype, false, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW, C::K)
             : make_map(&map_a, call.a, p.dtype, false, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M)) &&
        (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, false, p.n, p.k, p.batch, p.ldb, p.stride_b, C::ROW, C::K)
                       : make_map(&map_b, call.b, p.dtype, false, p.k, p.n, p.batch, p.ldb, p.stride_b, C::ROW, C::N));
    AheadGemmWork work = {work_of(call), 0};
    work.clusters_m = (int)ceil_div(p.m, C::M);
    work.clusters_n = (int)ceil_div(p.n, C::N);
    work.swapped = plan.swapped;
    map_d = map_a;
    if (Half::IN_LINES) {
        work.copies_out = is_aligned_16(call.d) && p.ldd % 8 == 0 && (p.batch == 1 || p.stride_d % 8 == 0);
    } else if (can_copy_out(call)) {
        work.copies_out = 1;
        mapped = mapped && make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, Half::CHUNK,
                                    Half::GROUP_M);
    }
    const int64_t total = (int64_t)work.clusters_m * work.clusters_n * p.batch;
    if (!mapped || total > INT32_MAX / C::BLOCKS_OF_K)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.ahead = stages_ahead(1);
    const auto kernel = gemm_sm90_pair_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    start_clusters(kernel, total * C::BLOCKS_OF_K, C::THREADS, C::BLOCKS_OF_K, C::SHARED_BYTES, device.capability,
                   call.stream, map_a, map_b, map_d, work);
    return launch_status();
}

// The tiles, as gemm/times.h numbers them. An MN-major B was slower with 96 and 160 columns, which are no multiple of a
// 64-column box, than with 128. The last is for a D such as 3072 x 768, which is 64 tiles of it.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_pairs(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (plan.tile) {
    //                                    M    N  stages
    case 16:
        return launch_pair<PairTile<T, 128, 64, 8, a_mn_major, b_mn_major>>(call, device, plan);
    case 17:
        if constexpr (!b_mn_major)
            return launch_pair<PairTile<T, 128, 96, 7, a_mn_major, false>>(call, device, plan);
        break;
    case 18:
        return launch_pair<PairTile<T, 128, 128, 6, a_mn_major, b_mn_major>>(call, device, plan);
    case 19:
        if constexpr (!b_mn_major)
            return launch_pair<PairTile<T, 128, 160, 5, a_mn_major, false>>(call, device, plan);
        break;
    case 21:
        return launch_pair<PairTile<T, 192, 192, 3, a_mn_major, b_mn_major>>(call, device, plan);
    case 25:
        if constexpr (a_mn_major && b_mn_major)
            return launch_pair<PairTile<T, 128, 128, 5, a_mn_major, b_mn_major, 3>>(call, device, plan);
        break;
    case 26:
        if constexpr (a_mn_major && b_mn_major)
            return launch_pair<PairTile<T, 128, 128, 5, a_mn_major, b_mn_major, 4>>(call, device, plan);
        break;
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_pairs_of(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    if (call.problem.transpose_a)
        return call.problem.transpose_b ? launch_pairs<T, true, false>(call, device, plan)
                                        : launch_pairs<T, true, true>(call, device, plan);
    return call.problem.transpose_b ? launch_pairs<T, false, false>(call, device, plan)
                                    : launch_pairs<T, false, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
