// The kernel of gemm's path sm90_3xtf32 and its launcher, to be instantiated for one storage order of A a file;
// gemm/sm90_3xtf32/sm90_3xtf32.cu says what they do.
#ifndef CUDA_OPS_GEMM_SM90_3XTF32_KERNEL_CUH
#define CUDA_OPS_GEMM_SM90_3XTF32_KERNEL_CUH

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90_3xtf32/split.cuh"
#include "gemm/sm90_3xtf32/tile.h"

// A tile of 128 x N, of which a consumer warpgroup has 64 rows, by clusters of two that share B.
static constexpr int SPLIT_STEPS = SPLIT_GROUP / 8; // of wgmma in a stage

template <int N_, int STAGES_, bool A_MN_MAJOR_>
struct SplitTile : Tile<float, 128, N_, 2, 1, false, 2, A_MN_MAJOR_, false, true, true> {
    typedef Tile<float, 128, N_, 2, 1, false, 2, A_MN_MAJOR_, false, true, true> Base;
    static constexpr int STAGES = STAGES_;
    static constexpr bool IN_REGISTERS = true, ACTIVATES_QUICKLY = false;
    static constexpr int PART_BYTES = Base::B_BYTES; // of the upper or the lower parts of B
    static constexpr int STAGE_BYTES = Base::A_BYTES + 2 * PART_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int BUFFERS_FROM = RING_BYTES, BARRIERS_FROM = RING_BYTES + Base::OUT_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS_FROM + 2 * STAGES * 8 + SWIZZLE_ATOM;
    static_assert(Base::BLOCKS == 1 && Base::K == SPLIT_GROUP, "what load_parts is written for");
    static_assert(SHARED_BYTES + 1024 <= 233472, "an SM's shared memory");
    static_assert(PART_BYTES / 2 % SWIZZLE_ATOM == 0, "each block loads half of B");
};

// The operands as they are stored, in elements from one row of A, column of B or k to the next.
struct SplitGemmWork : OddGemmWork {
    const float *a, *b;
    int64_t a_row, a_k, b_column, b_k, stride_a, stride_b;
};

#if defined(CUDA_OPS_HOPPER_CODE)

template <typename C>
__device__ __forceinline__ void split_produce(const OddGemmWork &work, const CUtensorMap *map_a,
                                              const CUtensorMap *map_b, uint32_t stages, uint32_t full, uint32_t empty,
                                              int rank)
{
    constexpr uint16_t ALONE = 1, BOTH = 3;
    int stage = 0, phase = 0;
    for (int index = blockIdx.x / C::CLUSTER; index < work.total; index += gridDim.x / C::CLUSTER) {
        const TileCoordinates tile = tile_coordinates<C>(work, index, rank, 0);
        const int batch_a = work.a_shared ? 0 : tile.batch, batch_b = 2 * (work.b_shared ? 0 : tile.batch);
        int k = tile.k_begin;
        for (int step = 0; step < tile.steps; step++, k += C::K) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            if constexpr (C::A_MN_MAJOR) {
#pragma unroll
                for (int column = 0; column < C::A_COLUMNS; column++)
                    load_column<1, C::K>(a + column * C::COLUMN_BYTES, map_a, arrived, tile.m + column * C::ROW, k,
                                         batch_a, 0, ALONE, true);
            } else {
                load_column<1, C::M>(a, map_a, arrived, k, tile.m, batch_a, 0, ALONE, true);
            }
#pragma unroll
            for (int part = 0; part < 2; part++)
                load_column<2, C::N / 2>(b + part * C::PART_BYTES, map_b, arrived, k, tile.n, batch_b + part, rank,
                                         BOTH, tile.lone);
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    // As in the sm90 path: the other block of the cluster arrives at this one's barriers.
    for (int i = 0; i < C::STAGES; i++) {
        mbarrier_wait(empty + 8 * stage, phase ^ 1);
        if (++stage == C::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
}

// A thread's fragments of A in one stage, for each of the steps.
struct LeftParts {
    uint32_t upper[SPLIT_STEPS][4], lower[SPLIT_STEPS][4];
};

// Loads and splits them. The rows are those of the sm90 path's tiles with A in registers (row_of).
template <typename C>
__device__ __forceinline__ void load_parts(LeftParts &left, uint32_t a, int group, int thread)
{
    const int warp = thread / 32, quad = thread % 32 / 4, lane = thread % 4;
    uint32_t x[SPLIT_STEPS][4];
    if constexpr (C::A_MN_MAJOR) {
        const uint32_t column = a + (2 * group + warp / 2) * C::COLUMN_BYTES + quad % 2 * 8;
        const int vector = warp % 2 * 2 + quad / 4 + quad / 2 % 2 * 4;
#pragma unroll
        for (int i = 0; i < SPLIT_STEPS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int in = lane + 4 * half;
                const uint32_t from = column + (8 * i + in) * SWIZZLE_ROW + (vector ^ in) * 16;
                ld_shared_v2(x[i][2 * half], x[i][2 * half + 1], from);
            }
    } else {
        const int row = C::GROUP_M * group + row_of<C>(thread, 0, 0);
#pragma unroll
        for (int pair = 0; pair < SPLIT_STEPS / 2; pair++)
#pragma unroll
            for (int second = 0; second < 2; second++) { // of the thread's two rows
                const int vector = split_vector(pair, lane) ^ ((row + second) % 8);
                uint32_t v[4];
                ld_shared_v4(v[0], v[1], v[2], v[3], a + (row + second) * SWIZZLE_ROW + vector * 16);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[2 * pair + e / 2][e % 2 * 2 + second] = v[e];
            }
    }
#pragma unroll
    for (int i = 0; i < SPLIT_STEPS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const Parts parts = split(__uint_as_float(x[i][e]));
            left.upper[i][e] = parts.upper, left.lower[i][e] = parts.lower;
        }
}

// The products of a stage, the small ones first: what the tensor cores cut off is then in proportion to them.
template <typename C>
__device__ __forceinline__ void multiply_parts(float (&sum)[C::N / 2], const LeftParts &left, uint64_t b)
{
    const uint64_t b_lower = wgmma_advance(b, C::PART_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < SPLIT_STEPS; i++) {
        wgmma<float, C::N, 0>(sum, left.lower[i], wgmma_advance(b, 32 * i), i > 0);
        wgmma<float, C::N, 0>(sum, left.upper[i], wgmma_advance(b_lower, 32 * i), 1);
    }
#pragma unroll
    for (int i = 0; i < SPLIT_STEPS; i++)
        wgmma<float, C::N, 0>(sum, left.upper[i], wgmma_advance(b, 32 * i), 1);
    wgmma_commit_group();
}

// Sums that are not finite are made anew, of multiply-adds: a product that overflows, or one by an infinity or NaN, is no
// sum of the parts' products, whose signs differ.
template <typename C>
__device__ __forceinline__ void mend_sums(float (&total)[C::N / 2], const SplitGemmWork &work,
                                          const TileCoordinates &tile, int first_row, int thread)
{
    float zero = 0; // or NaN
#pragma unroll
    for (int i = 0; i < C::N / 2; i++)
        zero = fmaf(total[i], 0.0f, zero);
    if (zero == 0.0f)
        return;
    const float *const a = work.a + tile.batch * work.stride_a + tile.k_begin * work.a_k;
    const float *const b = work.b + tile.batch * work.stride_b + tile.k_begin * work.b_k;
    const int depth = min(work.chunk, work.k - tile.k_begin);
#pragma unroll 1
    for (int j = 0; j < C::N / 2; j++) {
        float value = 0;
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            value = i == j ? total[i] : value;
        const int row = first_row + row_of<C>(thread, 0, j / 2 % 2);
        const int column = tile.n + 8 * (j / 4) + 2 * (thread % 4) + j % 2;
        if (isfinite(value) || row >= work.m || column >= work.n)
            continue;
        value = 0;
        for (int k = 0; k < depth && !isnan(value); k++)
            value = fmaf(a[row * work.a_row + k * work.a_k], b[column * work.b_column + k * work.b_k], value);
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            total[i] = i == j ? value : total[i];
    }
}

template <typename C>
__device__ __forceinline__ void split_consume(const SplitGemmWork &work, const CUtensorMap *map_d, uint32_t stages,
                                              uint32_t full, uint32_t empty, char *buffers, int rank)
{
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, my_row = group * C::GROUP_M;
    buffers += group * C::BUFFERS * C::BUFFER_BYTES;
    int buffer = 0;
    const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    int stage = 0, phase = 0;
    for (int index = blockIdx.x / C::CLUSTER; index < work.total; index += gridDim.x / C::CLUSTER) {
        const TileCoordinates tile = tile_coordinates<C>(work, index, rank, 0);
        const auto bias = load_bias<C>(work, tile.n, thread);
        float total[1][C::N / 2];
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            total[0][i] = 0;
        LeftParts left, next;
        mbarrier_wait(full + 8 * stage, phase);
        load_parts<C>(left, stages + stage * C::STAGE_BYTES, group, thread);
        for (int step = 0; step < tile.steps; step++) {
            float sum[C::N / 2];
            wgmma_forget(sum);
            multiply_parts<C>(sum, left, wgmma_advance(b_tile, stage * C::STAGE_BYTES));
            const int now = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
            if (step + 1 < tile.steps) { // during these products
                mbarrier_wait(full + 8 * stage, phase);
                load_parts<C>(next, stages + stage * C::STAGE_BYTES, group, thread);
            }
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            release_stage<C>(empty, now, thread, rank, 0);
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                total[0][i] += sum[i];
            left = next;
        }
        mend_sums<C>(total[0], work, tile, tile.m + my_row, thread);
        store_tile<C>(total, bias, work, map_d, buffers, buffer, (int64_t)tile.split * work.batch + tile.batch,
                      tile.m + my_row, tile.n, group, thread);
    }
    if (thread == 0)
        bulk_wait_group_read<0>();
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    gemm_sm90_3xtf32_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                            const __grid_constant__ CUtensorMap map_d, const __grid_constant__ SplitGemmWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    // The addresses must be the same in both blocks of a cluster, as that of dynamic shared memory is.
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::BUFFERS_FROM;
    const uint32_t full = stages + C::BARRIERS_FROM, empty = full + 8 * C::STAGES;
    const int rank = (int)cluster_ctarank();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 2 * 4 * C::CLUSTER); // each consumer warp of both blocks
        }
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            split_produce<C>(work, &map_a, &map_b, stages, full, empty, rank);
    } else {
        setmaxnreg_inc<232>();
        split_consume<C>(work, &map_d, stages, full, empty, shared + (buffers - shared_address(shared)), rank);
    }
#endif
}

template <typename C>
static cuda_ops_status launch_split(const GemmCall &call, const SplitOperand &b, GemmDevice device,
                                    const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t pitch = split_pitch(p.k);
    CUtensorMap map_a, map_b, map_d;
    bool mapped = C::A_MN_MAJOR
                      ? make_map(&map_a, call.a, p.dtype, false, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW, C::K)
                      : make_map(&map_a, call.a, p.dtype, false, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M);
    mapped = mapped && make_map(&map_b, b.to, p.dtype, false, pitch, p.n, 2 * b.matrices, pitch, p.n * pitch, C::ROW,
                                C::N / C::CLUSTER);
    SplitGemmWork work = {};
    (GemmWork &)work = work_of(call);
    work.a = (const float *)call.a, work.b = (const float *)call.b;
    work.a_row = p.transpose_a ? 1 : p.lda, work.a_k = p.transpose_a ? p.lda : 1;
    work.b_column = p.transpose_b ? p.ldb : 1, work.b_k = p.transpose_b ? 1 : p.ldb;
    work.stride_a = p.stride_a, work.stride_b = p.stride_b;
    const int64_t wanted = plan.splits > 1 ? plan.splits : 1, chunk = ceil_div(ceil_div(p.k, wanted), C::K) * C::K;
    const int64_t splits = ceil_div(p.k, chunk); // none is empty
    work.splits = (int)splits, work.chunk = (int)chunk;
    set_clusters<C>(work);
    work.group = plan.group;
    work.swapped = plan.swapped;
    map_d = map_a;
    if (splits > 1) {
        work.d = call.workspace;
        work.bias = nullptr;
        work.ldd = plan.swapped ? p.m : p.n;
        work.stride_d = p.m * p.n;
        work.alpha = 1;
        work.activation = CUDA_OPS_GEMM_NONE;
        work.preactivation = nullptr;
    } else if (!plan.swapped && can_copy_out(call)) {
        work.copies_out = 1;
        mapped = mapped &&
                 make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK, C::GROUP_M);
    }
    const int64_t total = ((int64_t)work.clusters_m * work.clusters_n + work.lone) * p.batch * splits;
    if (!mapped || total > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.total = (int)total;
    const cuda_ops_status copied = split_operand(b, call.stream);
    if (copied != CUDA_OPS_SUCCESS)
        return copied;
    const auto kernel = gemm_sm90_3xtf32_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    const int64_t room = device.multiprocessors / C::CLUSTER, clusters = total < room ? total : room;
    start_clusters(kernel, clusters * C::CLUSTER, C::THREADS, C::CLUSTER, C::SHARED_BYTES, device.capability,
                   call.stream, map_a, map_b, map_d, work);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || splits == 1)
        return status;
    GemmCall whole = call;
    if (plan.swapped) {
        whole.problem.m = p.n;
        whole.problem.n = p.m;
    }
    return gemm_add_splits(whole, splits);
}

// The tiles, as gemm/times.h numbers them.
template <bool a_mn_major>
static cuda_ops_status launch_split_tiles(const GemmCall &call, const SplitOperand &b, GemmDevice device,
                                          const GemmPlan &plan)
{
    switch (plan.tile) {
    //                                      N  stages
    case 0:
        return launch_split<SplitTile<128, 4, a_mn_major>>(call, b, device, plan);
    case 1:
        return launch_split<SplitTile<96, 4, a_mn_major>>(call, b, device, plan);
    case 2:
        return launch_split<SplitTile<64, 6, a_mn_major>>(call, b, device, plan);
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
