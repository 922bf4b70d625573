// The sm90 path's kernel and its launcher, to be instantiated one dtype a file; gemm/sm90/sm90.cu says what they do.
#ifndef CUDA_OPS_GEMM_SM90_KERNEL_CUH
#define CUDA_OPS_GEMM_SM90_KERNEL_CUH

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

#if defined(CUDA_OPS_HOPPER_CODE)

struct TileCoordinates {
    int m, n, batch, split; // the first row and column of this block's tile
    int k_begin, steps;
    bool lone; // of a last line of tiles, whose blocks send each other nothing (OddGemmWork)
};

template <typename C>
__device__ __forceinline__ void set_split(TileCoordinates &tile, const GemmWork &work, int outer)
{
    tile.split = outer / work.batch;
    tile.batch = outer - tile.split * work.batch;
    tile.k_begin = tile.split * work.chunk;
    tile.steps = (min(work.chunk, work.k - tile.k_begin) + C::K - 1) / C::K;
}

// Tiles are walked in bands of `group` rows of cluster tiles, column by column: concurrent tiles make up about a
// square, so that what they read of A and B stays in the L2. index: of the product's cluster tiles.
template <typename C>
__device__ __forceinline__ TileCoordinates tile_in_band(const GemmWork &work, int index, int rank_m, int rank_n)
{
    const int band_tiles = work.group * work.clusters_n, band = index / band_tiles;
    index -= band * band_tiles;
    const int first = band * work.group, rows = min(work.group, work.clusters_m - first);
    const int column = index / rows, row = first + index - column * rows;
    TileCoordinates tile;
    tile.m = (row * C::CLUSTER_M + rank_m) * C::M;
    tile.n = (column * C::CLUSTER_N + rank_n) * C::N;
    tile.lone = false;
    return tile;
}

template <typename C>
__device__ __forceinline__ TileCoordinates tile_coordinates(const GemmWork &work, int index, int rank_m, int rank_n)
{
    const int tiles = work.clusters_m * work.clusters_n, outer = index / tiles;
    TileCoordinates tile = tile_in_band<C>(work, index - outer * tiles, rank_m, rank_n);
    set_split<C>(tile, work, outer);
    return tile;
}

// With a last line of tiles two by two, after the bands.
template <typename C>
__device__ __forceinline__ TileCoordinates tile_coordinates(const OddGemmWork &work, int index, int rank_m, int rank_n)
{
    if constexpr (C::CLUSTER != 2)
        return tile_coordinates<C>((const GemmWork &)work, index, rank_m, rank_n);
    const int whole = work.clusters_m * work.clusters_n, tiles = whole + work.lone, outer = index / tiles;
    index -= outer * tiles;
    TileCoordinates tile;
    if (index < whole) {
        tile = tile_in_band<C>(work, index, rank_m, rank_n);
    } else {
        const int along = 2 * (index - whole) + rank_m + rank_n;
        tile.m = (C::CLUSTER_M == 2 ? 2 * work.clusters_m : along) * C::M;
        tile.n = (C::CLUSTER_M == 2 ? along : 2 * work.clusters_n) * C::N;
        tile.lone = true;
    }
    set_split<C>(tile, work, outer);
    return tile;
}

// Loads a column of a stage, which is PARTS boxes of LINES lines from `line` on: this block's box, for all blocks of
// the cluster, or, if `lone`, all boxes for itself.
template <int PARTS, int LINES>
__device__ __forceinline__ void load_column(uint32_t to, const CUtensorMap *map, uint32_t arrived, int inner, int line,
                                            int batch, int rank, uint16_t blocks, bool lone)
{
    if (PARTS > 1 && !lone) {
        tma_load_3d_multicast(to + rank * LINES * SWIZZLE_ROW, map, arrived, inner, line + rank * LINES, batch, blocks);
        return;
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        tma_load_3d(to + part * LINES * SWIZZLE_ROW, map, arrived, inner, line + part * LINES, batch);
}

// Of the block's first tile.
template <typename C>
__device__ __forceinline__ void prefetch_first(const OddGemmWork &work, const CUtensorMap *map_a,
                                               const CUtensorMap *map_b, int rank_m, int rank_n)
{
    const TileCoordinates tile = tile_coordinates<C>(work, blockIdx.x / C::CLUSTER, rank_m, rank_n);
    const int columns = max(1, work.clusters_n), rows = max(1, work.clusters_m);
    const Ahead ahead = {min(work.ahead, tile.steps),
                         tile.k_begin,
                         tile.m,
                         tile.n,
                         work.a_shared ? 0 : tile.batch,
                         work.b_shared ? 0 : tile.batch,
                         rank_m,
                         rank_n,
                         tile.lone,
                         columns,
                         rows,
                         tile.n / (C::N * C::CLUSTER_N) % columns,
                         tile.m / (C::M * C::CLUSTER_M) % rows};
    prefetch_ahead<C>(ahead, map_a, map_b);
}

// The producer thread: fills the pipeline, tile after tile.
template <typename C, typename Work>
__device__ __forceinline__ void produce(const Work &work, const CUtensorMap *map_a, const CUtensorMap *map_b,
                                        uint32_t stages, uint32_t full, uint32_t empty, int rank_m, int rank_n)
{
    // The blocks of a cluster with the same rank_m share A's tile, those with the same rank_n B's; each multicasts its
    // part.
    uint16_t blocks_a = 0, blocks_b = 0;
    for (int i = 0; i < C::CLUSTER_N; i++)
        blocks_a |= 1 << (rank_m + i * C::CLUSTER_M);
    for (int i = 0; i < C::CLUSTER_M; i++)
        blocks_b |= 1 << (i + rank_n * C::CLUSTER_M);
    int stage = 0, phase = 0;
    for (int index = blockIdx.x / C::CLUSTER; index < work.total; index += gridDim.x / C::CLUSTER) {
        const TileCoordinates tile = tile_coordinates<C>(work, index, rank_m, rank_n);
        const int batch_a = work.a_shared ? 0 : tile.batch, batch_b = work.b_shared ? 0 : tile.batch;
        int k = tile.k_begin;
        for (int step = 0; step < tile.steps; step++, k += C::K) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            if constexpr (C::A_MN_MAJOR) {
#pragma unroll
                for (int column = 0; column < C::A_COLUMNS; column++)
                    load_column<C::CLUSTER_N, C::K / C::CLUSTER_N>(a + column * C::COLUMN_BYTES, map_a, arrived,
                                                                   tile.m + column * C::ROW, k, batch_a, rank_n,
                                                                   blocks_a, tile.lone);
            } else {
                load_column<C::CLUSTER_N, C::M / C::CLUSTER_N>(a, map_a, arrived, k, tile.m, batch_a, rank_n, blocks_a,
                                                               tile.lone);
            }
            if constexpr (C::B_MN_MAJOR) {
#pragma unroll
                for (int column = 0; column < C::B_COLUMNS; column++)
                    load_column<C::CLUSTER_M, C::K / C::CLUSTER_M>(b + column * C::COLUMN_BYTES, map_b, arrived,
                                                                   tile.n + column * C::ROW, k, batch_b, rank_m,
                                                                   blocks_b, tile.lone);
            } else {
                load_column<C::CLUSTER_M, C::N / C::CLUSTER_M>(b, map_b, arrived, k, tile.n, batch_b, rank_m, blocks_b,
                                                               tile.lone);
            }
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    // The other blocks of the cluster arrive at this one's barriers when they have read a stage, so that this one must
    // not exit before the last of them has. What the others send, the consumers wait for.
    if constexpr (C::CLUSTER > 1)
        for (int i = 0; i < C::STAGES; i++) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
}

// Tells every block that multicasts into this block's stage that this warpgroup has read it. One thread arrives for the
// warpgroup, since wgmma is waited for by all of it; ordinary loads are not, so there each warp arrives.
template <typename C>
__device__ __forceinline__ void release_stage(uint32_t empty, int stage, int thread, int rank_m, int rank_n)
{
    if (C::IN_REGISTERS) {
        __syncwarp();
        thread %= 32;
    }
    if constexpr (C::CLUSTER == 1) {
        if (thread == 0)
            mbarrier_arrive(empty + 8 * stage);
    } else {
        const int other_m = thread % C::CLUSTER_M, other_n = thread / C::CLUSTER_M;
        if (thread < C::CLUSTER && (other_m == rank_m || other_n == rank_n))
            mbarrier_arrive_cluster(mapa(empty + 8 * stage, thread));
    }
}

// A thread's fragments of A in one stage: for each 32 bytes of k, four registers for each block of 64 rows.
template <typename C>
struct Left {
    uint32_t part[4][C::BLOCKS][4];
};

// Loads them from an MN-major TF32 stage: columns of K rows of 128 bytes (32 elements along m). With two blocks of 64
// rows, a warp's 32 rows of A are one such column, and a thread loads 16 bytes, four rows of A, for each of its k; with
// one block two warps share a column, and a thread loads 8 bytes. The rows are chosen so that concurrent lanes meet all
// banks; to wgmma they are rows g and g + 8 of the first block, then of the second.
template <typename C>
__device__ __forceinline__ void load_left(Left<C> &left, uint32_t a, int group, int thread)
{
    const int warp = thread / 32, quad = thread % 32 / 4, lane_k = thread % 4;
    if constexpr (C::BLOCKS == 2) {
        const uint32_t column = a + ((C::PINGPONG ? 0 : 4 * group) + warp) * C::COLUMN_BYTES;
        const int vector = quad / 2 + quad % 2 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int in = lane_k + 4 * half; // of 8 along k
                const uint32_t from = column + (8 * i + in) * SWIZZLE_ROW + (vector ^ in) * 16;
                ld_shared_v4(left.part[i][0][2 * half], left.part[i][0][2 * half + 1], left.part[i][1][2 * half],
                             left.part[i][1][2 * half + 1], from);
            }
    } else {
        const uint32_t column = a + ((C::PINGPONG ? 0 : 2 * group) + warp / 2) * C::COLUMN_BYTES + quad % 2 * 8;
        const int vector = warp % 2 * 2 + quad / 4 + quad / 2 % 2 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int in = lane_k + 4 * half;
                const uint32_t from = column + (8 * i + in) * SWIZZLE_ROW + (vector ^ in) * 16;
                ld_shared_v2(left.part[i][0][2 * half], left.part[i][0][2 * half + 1], from);
            }
    }
}

// Transposes a stage's MN-major B in TF32 (columns of 32 rows of 128 bytes, 32 elements along n) into K-major rows of
// n, which is what wgmma reads: by both warpgroups, 8 rows of n a warp, one k a lane.
template <typename C>
__device__ __forceinline__ void transpose_right(uint32_t to, uint32_t b, int group, int thread)
{
    const int warp = 4 * group + thread / 32, k = thread % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int vector = warp % 4 * 2 + i; // of a row of 128 bytes
        const uint32_t from = b + warp / 4 * C::COLUMN_BYTES + k * SWIZZLE_ROW + (vector ^ (k % 8)) * 16;
        uint32_t x[4];
        ld_shared_v4(x[0], x[1], x[2], x[3], from);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int n = 8 * warp + 4 * i + e; // a warp writes a whole row of 128 bytes
            st_shared(to + n * SWIZZLE_ROW + ((k / 4) ^ (n % 8)) * 16 + k % 4 * 4, x[e]);
        }
    }
}

// A consumer warpgroup. Work is GemmWork, or a struct derived from it with its own load_bias and store_tile
// (conv2d/sm90/kernel.cuh). One function for the three main loops: in functions of their own their machine code
// differs.
template <typename C, typename Work>
__device__ __forceinline__ void consume(const Work &work, const CUtensorMap *map_d, uint32_t stages, uint32_t full,
                                        uint32_t empty, char *buffers, int rank_m, int rank_n)
{
    typedef typename C::T T;
    const int group = threadIdx.x / WARPGROUP - C::CONSUMERS, thread = threadIdx.x % WARPGROUP;
    buffers += group * C::BUFFERS * C::BUFFER_BYTES;
    [[maybe_unused]] int buffer = 0;
    const int my_row = C::PINGPONG ? 0 : group * C::GROUP_M;
    float sum[C::BLOCKS][C::N / 2];

    // Descriptors of stage 0's tiles.
    const uint32_t a_first = stages + (C::A_MN_MAJOR ? my_row / C::ROW * C::COLUMN_BYTES : my_row * SWIZZLE_ROW);
    const uint64_t a_tile = wgmma_descriptor(a_first, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
    const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
    constexpr int A_BLOCK = C::A_MN_MAJOR ? C::COLUMN_BYTES : 64 * SWIZZLE_ROW;
    constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;

    const uint32_t order = empty + 8 * C::STAGES;
    int stage = 0, phase = 0, parity = 0, mine = 0;
    [[maybe_unused]] int transposed = 0; // which of the two tiles for B is next
    for (int index = blockIdx.x / C::CLUSTER; index < work.total; index += gridDim.x / C::CLUSTER, parity ^= 1) {
        const TileCoordinates tile = tile_coordinates<C>(work, index, rank_m, rank_n);
        if (C::PINGPONG && parity != group) {
            // The other warpgroup's tile: skip its stages.
            stage += tile.steps;
            phase ^= (stage / C::STAGES) & 1;
            stage %= C::STAGES;
            continue;
        }
        const auto bias = load_bias<C>(work, tile.n, thread);
        // Zeroed, instead of a first wgmma that overwrites: that would keep the last tile's sums in their registers for
        // as long as their epilogue takes.
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] = 0;
        // Not before the other warpgroup has seen its last stage full: a wait tells the current phase of a barrier from
        // the previous one only, so it must not be two fills ahead.
        if (C::PINGPONG)
            mbarrier_wait(order + 8 * group, (mine & 1) ^ (group == 0));
        mine++;
        if constexpr (C::B_TRANSPOSED) {
            // A through registers, and B transposed. The previous stage's products are waited for first: until then
            // their registers belong to wgmma. A warpgroup that transposes a stage knows by the last bar_sync that both
            // have finished the products of the tile it overwrites.
            for (int step = 0; step < tile.steps; step++) {
                const uint32_t from = stages + stage * C::STAGE_BYTES;
                const uint32_t to = stages + C::STAGES * C::STAGE_BYTES + transposed * (C::TRANSPOSED_BYTES / 2);
                mbarrier_wait(full + 8 * stage, phase);
                wgmma_wait_group<0>();
                Left<C> left;
                load_left<C>(left, from, group, thread);
                transpose_right<C>(to, from + C::A_BYTES, group, thread);
                fence_proxy_async();
                release_stage<C>(empty, stage, thread, rank_m, rank_n);
                bar_sync(3, 2 * WARPGROUP);
                transposed ^= 1;
                const uint64_t b = wgmma_descriptor(to, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int block = 0; block < C::BLOCKS; block++)
                        wgmma<float, C::N, 0>(sum[block], left.part[i][block], wgmma_advance(b, i * 32), 1);
                wgmma_commit_group();
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            wgmma_wait_group<0>();
        } else if constexpr (C::IN_REGISTERS) {
            // A through registers: the next stage's fragments are loaded during this one's products.
            Left<C> left = {}, next = {};
            mbarrier_wait(full + 8 * stage, phase);
            if (C::PINGPONG && tile.steps == 1)
                order_arrive(order, group, thread);
            load_left<C>(left, stages + stage * C::STAGE_BYTES, group, thread);
            for (int step = 0; step < tile.steps; step++) {
                const uint64_t b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int block = 0; block < C::BLOCKS; block++)
                        wgmma<float, C::N, 0>(sum[block], left.part[i][block], wgmma_advance(b, i * B_STEP), 1);
                wgmma_commit_group();
                const int now = stage;
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
                if (step + 1 < tile.steps) {
                    mbarrier_wait(full + 8 * stage, phase);
                    if (C::PINGPONG && step + 2 == tile.steps)
                        order_arrive(order, group, thread);
                    load_left<C>(next, stages + stage * C::STAGE_BYTES, group, thread);
                }
                wgmma_wait_group<0>();
                release_stage<C>(empty, now, thread, rank_m, rank_n);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            left.part[i][block][e] = next.part[i][block][e];
            }
        } else {
            int before = stage;
            for (int step = 0; step < tile.steps; step++) {
                mbarrier_wait(full + 8 * stage, phase);
                if (C::PINGPONG && step + 1 == tile.steps)
                    order_arrive(order, group, thread);
                const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                               b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int block = 0; block < C::BLOCKS; block++)
                        wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum[block],
                                                                     wgmma_advance(a, i * A_STEP + block * A_BLOCK),
                                                                     wgmma_advance(b, i * B_STEP), 1);
                wgmma_commit_group();
                // This stage's products are in flight; the previous stage's are done.
                wgmma_wait_group<1>();
                if (step > 0)
                    release_stage<C>(empty, before, thread, rank_m, rank_n);
                before = stage;
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            wgmma_wait_group<0>();
            release_stage<C>(empty, before, thread, rank_m, rank_n);
        }
        if constexpr (C::ONE_TILE) // both warpgroups have read the last stage, and the epilogue may overwrite them
            bar_sync(3, 2 * WARPGROUP);
        store_tile<C>(sum, bias, work, map_d, buffers, buffer, (int64_t)tile.split * work.batch + tile.batch,
                      tile.m + my_row, tile.n, group, thread);
    }
    if (C::BUFFERS > 0 && thread == 0)
        bulk_wait_group_read<0>();
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::SHARING)
    gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                     const __grid_constant__ CUtensorMap map_d, const __grid_constant__ OddGemmWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    // The addresses must be the same in all blocks of a cluster, as that of dynamic shared memory is.
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::BUFFERS_FROM;
    const uint32_t full = stages + C::BARRIERS_FROM, empty = full + 8 * C::STAGES;
    const uint32_t rank = C::CLUSTER > 1 ? cluster_ctarank() : 0;
    const int rank_m = rank % C::CLUSTER_M, rank_n = rank / C::CLUSTER_M;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        constexpr int arrivals = (C::PINGPONG ? 1 : 2) * (C::IN_REGISTERS ? 4 : 1) * (C::CLUSTER_M + C::CLUSTER_N - 1);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, arrivals);
        }
        for (int group = 0; group < 2; group++)
            mbarrier_init(empty + 8 * (C::STAGES + group), ORDER_ARRIVALS);
        fence_mbarrier_init();
    }
    if constexpr (C::CLUSTER > 1)
        cluster_arrive_relaxed_aligned();
    if (work.ahead > 0 && threadIdx.x == C::PRODUCER * WARPGROUP)
        prefetch_first<C>(work, &map_a, &map_b, rank_m, rank_n);
    if constexpr (C::CLUSTER > 1)
        cluster_wait_aligned();
    else
        __syncthreads();
    wait_for_predecessor();
    // All blocks are resident by now; the next kernel's take over the SMs as they become free.
    release_successor();
    if (threadIdx.x / WARPGROUP == C::PRODUCER) {
        if constexpr (C::SHARING == 1)
            setmaxnreg_dec<40>();
        if (threadIdx.x % WARPGROUP == 0)
            produce<C>(work, &map_a, &map_b, stages, full, empty, rank_m, rank_n);
    } else {
        if constexpr (C::SHARING == 1)
            setmaxnreg_inc<232>();
        consume<C>(work, &map_d, stages, full, empty, shared + (buffers - shared_address(shared)), rank_m, rank_n);
    }
#endif
}

template <typename C>
static cuda_ops_status launch(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const bool swapped = plan.swapped;
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b, map_d;
    const bool tf32 = sizeof(typename C::T) == 4;
    // The box of a K-major operand holds the rows that one block of the cluster loads; of an MN-major one, that block's
    // part of k.
    bool mapped = C::A_MN_MAJOR ? make_map(&map_a, call.a, p.dtype, tf32, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW,
                                           C::K / C::CLUSTER_N)
                                : make_map(&map_a, call.a, p.dtype, tf32, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW,
                                           C::M / C::CLUSTER_N);
    mapped = mapped && (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, tf32, p.n, p.k, p.batch, p.ldb, p.stride_b,
                                                 C::ROW, C::K / C::CLUSTER_M)
                                      : make_map(&map_b, call.b, p.dtype, tf32, p.k, p.n, p.batch, p.ldb, p.stride_b,
                                                 C::ROW, C::N / C::CLUSTER_M));
    OddGemmWork work = {{work_of(call), 0}, 0};
    const int64_t wanted = plan.splits > 1 ? plan.splits : 1, chunk = ceil_div(ceil_div(p.k, wanted), C::K) * C::K;
    const int64_t splits = ceil_div(p.k, chunk); // none is empty
    work.splits = (int)splits, work.chunk = (int)chunk;
    set_clusters<C>(work);
    work.group = plan.group;
    work.swapped = swapped;
    map_d = map_a;
    if (C::MAKES_EITHER && swapped && splits > 1) // sums of splits leave in the kernel's order
        return CUDA_OPS_INVALID_ARGUMENT;
    if (splits > 1) {
        work.d = call.workspace;
        work.bias = nullptr;
        work.ldd = swapped ? p.m : p.n;
        work.stride_d = p.m * p.n;
        work.alpha = 1;
        work.activation = CUDA_OPS_GEMM_NONE;
        work.preactivation = nullptr;
        work.output_is_float = 1;
    } else if (C::IN_LINES) {
        work.copies_out = is_aligned_16(call.d) && p.ldd % 8 == 0 && (p.batch == 1 || p.stride_d % 8 == 0);
    } else if (C::MAKES_EITHER && swapped) {
        if (!can_copy_out(exchanged(call)))
            return CUDA_OPS_INVALID_ARGUMENT;
        work.copies_out = 1;
        mapped =
            mapped && make_map(&map_d, call.d, p.dtype, false, p.m, p.n, p.batch, p.ldd, p.stride_d, C::ROW, C::CHUNK);
    } else if (C::BUFFERS > 0 && !swapped && can_copy_out(call)) {
        work.copies_out = 1;
        mapped = mapped &&
                 make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK, C::GROUP_M);
    }
    const int64_t total = ((int64_t)work.clusters_m * work.clusters_n + work.lone) * p.batch * splits;
    if (!mapped || total > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.total = (int)total;

    const auto kernel = gemm_sm90_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    const int64_t room = clusters_at_once(device.multiprocessors * C::SHARING, C::CLUSTER);
    work.ahead = stages_ahead(splits);
    const int64_t clusters = C::ONE_TILE || total < room ? total : room;
    start_clusters(kernel, clusters * C::CLUSTER, C::THREADS, C::CLUSTER, C::SHARED_BYTES, device.capability,
                   call.stream, map_a, map_b, map_d, work);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || work.splits == 1)
        return status;
    GemmCall whole = call;
    if (swapped) {
        whole.problem.m = p.n;
        whole.problem.n = p.m;
    }
    return gemm_add_splits(whole, work.splits);
}

// The tiles of 16-bit operands, as HALVES_TIMES (gemm/times.h) numbers them.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_halves(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                                 M    N   cluster ping-pong stages
    case 0: return launch<EitherTile<Tile<T, 128, 256, 2, 1, false, 4, a_mn_major, b_mn_major, false, true>>>(call, device, plan);
    case 1: return launch<Tile<T, 128, 128, 2, 1, true, 5, a_mn_major, b_mn_major, false, true>>(call, device, plan);
    case 2: return launch<EitherTile<Tile<T, 128, 192, 2, 1, true, 4, a_mn_major, b_mn_major, false, true>>>(call, device, plan);
    case 3: return launch<EitherTile<Tile<T, 128, 64, 1, 2, false, 7, a_mn_major, b_mn_major, false, true>>>(call, device, plan);
    case 4: return launch<Tile<T, 128, 80, 2, 1, false, b_mn_major ? 7 : 8, a_mn_major, b_mn_major, false, true, 1, true>>(call, device, plan);
    case 5:
        if constexpr (!a_mn_major)
            return launch<Tile<T, 128, 128, 2, 1, false, 5, false, b_mn_major, false, true>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

// Tiles for batches of small matrices: two blocks an SM, of which one loads while the other stores.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_small(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                      M   N   cluster ping-pong stages                 TMA    gelu   blocks an SM
    case 6: return launch<Tile<T, 128, 64, 1, 1, false, 3, a_mn_major, b_mn_major, false, false, 2>>(call, device, plan);
    case 7: return launch<Tile<T, 64, 128, 1, 1, true, 3, a_mn_major, b_mn_major, false, false, 2>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_small_halves(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a)
        return p.transpose_b ? launch_small<T, true, false>(call, device, plan)
                             : launch_small<T, true, true>(call, device, plan);
    return p.transpose_b ? launch_small<T, false, false>(call, device, plan)
                         : launch_small<T, false, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

// One storage order of A: the other one is in a file of its own, which compiles in parallel.
template <typename T, bool a_mn_major>
static cuda_ops_status launch_either_b(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    return call.problem.transpose_b ? launch_halves<T, a_mn_major, false>(call, device, plan)
                                    : launch_halves<T, a_mn_major, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
