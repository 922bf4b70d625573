// The sm90_skinny path's kernel and its launcher, to be instantiated one dtype a file; gemm/sm90_skinny/sm90_skinny.cu
// says what they do.
#ifndef CUDA_OPS_GEMM_SM90_SKINNY_KERNEL_CUH
#define CUDA_OPS_GEMM_SM90_SKINNY_KERNEL_CUH

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/tensor_map.h"
#include "gemm/paths.h"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// M x N: the tile as the kernel sees it; A and B may be exchanged. M is what a warpgroup multiplies. Two blocks share
// an SM. MN-major is what the kernel calls A stored k x m and B stored k x n.
template <typename T_, int N_, bool A_MN_MAJOR_, bool B_MN_MAJOR_>
struct SkinnyTile {
    typedef T_ T;
    static constexpr int M = 64, N = N_, BLOCKS = 2;
    static constexpr bool A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr int THREADS = WARPGROUP + WARP_SIZE;             // consumers and a producer warp
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T), K = ROW; // elements of a row, and k of a stage
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW;              // an MN-major tile: one column of 64
    static constexpr int A_BYTES = M * SWIZZLE_ROW, B_BYTES = B_MN_MAJOR ? COLUMN_BYTES : N * SWIZZLE_ROW;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES, MOST_STAGES = 16;
    static constexpr int SUM_BYTES = M * N * 4;              // that a block of a cluster sends
    static constexpr int LINE_BYTES = (M + 8) * (N + 8) * 4; // the tile in float32, in either order
    static_assert(N <= 64, "one column of an MN-major tile");
    static_assert(sizeof(T) == 2 || (!A_MN_MAJOR && !B_MN_MAJOR), "TF32 is K-major");
    static_assert(STAGE_BYTES % SWIZZLE_ATOM == 0 && A_BYTES % SWIZZLE_ATOM == 0, "tiles are aligned to the swizzle");

    // Of an SM's 228 KB each block has 1 KB reserved, and loses up to one to alignment. In clusters of `splits` the
    // first block has room for the sums that the others send.
    static int stages(int splits, int blocks)
    {
        const int room = (228 << 10) / blocks - (2 << 10) - 512;
        const int fit = (room - (splits - 1) * SUM_BYTES) / STAGE_BYTES;
        return fit < MOST_STAGES ? fit : MOST_STAGES;
    }
    static size_t shared_bytes(int splits, int stages)
    {
        return SWIZZLE_ATOM + stages * (STAGE_BYTES + 16) + 16 + (splits - 1) * SUM_BYTES;
    }
    // From so many pipelines of k on it pays that a block alone on its SM takes all of its shared memory and keeps more
    // bytes in flight, though the next kernel then cannot start beside it.
    static constexpr int LONG = N == 64 ? 2 : 5;
};

struct SkinnyWork {
    void *d;
    const void *bias;
    int64_t ldd, stride_d;
    int m, n, k; // of the product as the kernel sees it
    int tiles_m, tiles_n;
    int stages, splits;     // of k, among the blocks of a cluster
    int a_shared, b_shared; // one matrix for all products of the batch
    float alpha;
    int bias_is_float, activation, output_is_float;
    int swapped;         // the kernel makes D^T
    int whole;           // 16 bytes of a row of D and of the preactivation may be written at once
    void *preactivation; // or null: where the input of the activation is stored, laid out like D
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The epilogue from shared memory, where the sums are rows of D, `pitch` apart, to D, 16 bytes a thread at a time. One
// rolled loop for all variants: a kernel of few microseconds waits for its instructions as it does for its operands.
template <typename T, typename Output>
__device__ __forceinline__ void store_lines(const SkinnyWork &work, float *tile, int lines, int columns, int pitch,
                                            int64_t matrix, int first_line, int first_column)
{
    constexpr int MANY = 16 / sizeof(Output);
    const int all_lines = work.swapped ? work.n : work.m, all_columns = work.swapped ? work.m : work.n;
    const int vectors = columns / MANY;
#pragma unroll 1
    for (int i = threadIdx.x; i < lines * vectors; i += WARPGROUP) {
        const int in_line = i / vectors, in_column = i % vectors * MANY;
        const int line = first_line + in_line, column = first_column + in_column;
        if (line >= all_lines || column >= all_columns)
            continue;
        const float *const from = tile + in_line * pitch + in_column;
        float x[MANY];
#pragma unroll
        for (int e = 0; e < MANY; e += 4)
            *(float4 *)(x + e) = *(const float4 *)(from + e);
#pragma unroll
        for (int e = 0; e < MANY; e++)
            x[e] *= work.alpha;
        if (work.bias)
#pragma unroll
            for (int e = 0; e < MANY; e++) {
                const int at = min(column + e, all_columns - 1);
                x[e] += work.bias_is_float ? ((const float *)work.bias)[at]
                                           : load_as_accumulate(((const T *)work.bias)[at]);
            }
        const int64_t to = matrix * work.stride_d + line * work.ldd + column;
        const int left = all_columns - column;
        const bool whole = work.whole && left >= MANY;
        if (opaque(work.preactivation != nullptr))
            store_some<Output>(work.preactivation, to, x, false, whole, left);
        activate_quickly(x, opaque(work.activation));
        store_some<Output>(work.d, to, x, false, whole, left);
    }
}

// The accumulators to D through shared memory, where the stages were.
template <typename C>
__device__ __forceinline__ void store_sums(const SkinnyWork &work, const float (&sum)[C::N / 2], char *shared,
                                           int64_t matrix, int first_m, int first_n)
{
    typedef typename C::T T;
    float *const tile = (float *)shared;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    // The pitches that let a warp's stores meet all banks.
    const int pitch = work.swapped ? C::M + 4 : C::N + 8;
    bar_sync(1, WARPGROUP); // all have multiplied the last stage
#pragma unroll
    for (int i = 0; i < C::N / 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 8 * half, c = column + 8 * i;
            const float x = sum[4 * i + 2 * half], y = sum[4 * i + 2 * half + 1];
            if (work.swapped) {
                tile[c * pitch + r] = x;
                tile[(c + 1) * pitch + r] = y;
            } else {
                *(float2 *)(tile + r * pitch + c) = make_float2(x, y);
            }
        }
    bar_sync(1, WARPGROUP);
    const int lines = work.swapped ? C::N : C::M, columns = work.swapped ? C::M : C::N;
    const int first_line = work.swapped ? first_n : first_m, first_column = work.swapped ? first_m : first_n;
    if (work.output_is_float)
        store_lines<T, float>(work, tile, lines, columns, pitch, matrix, first_line, first_column);
    else
        store_lines<T, T>(work, tile, lines, columns, pitch, matrix, first_line, first_column);
}

// Adds the sums of a cluster's blocks, each of a split of k, in the first block: the others send theirs into its shared
// memory, and it adds them in rank order. True in the first block.
template <typename C>
__device__ __forceinline__ bool add_cluster(const SkinnyWork &work, float (&sum)[C::N / 2], uint32_t sums,
                                            uint32_t arrived, uint32_t rank)
{
    if (work.splits == 1)
        return true;
    cluster_wait(); // the first block's barrier is initialised
    if (rank > 0) {
        const uint32_t barrier = mapa(arrived, 0);
        const uint32_t to = mapa(sums + (rank - 1) * C::SUM_BYTES, 0) + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < C::N / 8; i++)
            st_async(to + i * WARPGROUP * 16, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]),
                     barrier);
        return false;
    }
    mbarrier_wait_cluster(arrived, 0);
#pragma unroll 1
    for (int other = 1; other < work.splits; other++) {
        const uint32_t from = sums + (other - 1) * C::SUM_BYTES + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < C::N / 8; i++) {
            const float4 part = ld_shared_v4_f32(from + i * WARPGROUP * 16);
            sum[4 * i] += part.x, sum[4 * i + 1] += part.y, sum[4 * i + 2] += part.z, sum[4 * i + 3] += part.w;
        }
    }
    return true;
}
#endif

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    gemm_sm90_skinny_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                            const __grid_constant__ SkinnyWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef typename C::T T;
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t sums = stages + work.stages * C::STAGE_BYTES;
    const uint32_t full = sums + (work.splits - 1) * C::SUM_BYTES, empty = full + 8 * work.stages;
    const uint32_t arrived_sums = empty + 8 * work.stages;
    const int tile = blockIdx.x / work.splits;
    const uint32_t rank = blockIdx.x % work.splits; // in the cluster
    // Along the side with fewer tiles first: concurrent blocks then share the long side's operand.
    const bool m_first = work.tiles_m <= work.tiles_n;
    const int side = m_first ? work.tiles_m : work.tiles_n, other_side = m_first ? work.tiles_n : work.tiles_m;
    const int along = tile % side, across = tile / side % other_side, batch = tile / side / other_side;
    const int first_m = (m_first ? along : across) * C::M, first_n = (m_first ? across : along) * C::N;
    const int all_steps = (work.k + C::K - 1) / C::K;
    const int first_step = (int)((int64_t)all_steps * rank / work.splits);
    const int steps = (int)((int64_t)all_steps * (rank + 1) / work.splits) - first_step;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        for (int stage = 0; stage < work.stages; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 1);
        }
        mbarrier_init(arrived_sums, 1);
        fence_mbarrier_init();
        if (work.splits > 1 && rank == 0)
            mbarrier_arrive_expect_tx(arrived_sums, (work.splits - 1) * C::SUM_BYTES);
    }
    __syncthreads();
    if (work.splits > 1)
        cluster_arrive_relaxed();
    wait_for_predecessor();
    release_successor();

    int stage = 0, phase = 0;
    if (threadIdx.x >= WARPGROUP) {
        if (threadIdx.x == WARPGROUP) {
            const int batch_a = work.a_shared ? 0 : batch, batch_b = work.b_shared ? 0 : batch;
            for (int step = 0; step < steps; step++) {
                mbarrier_wait(empty + 8 * stage, phase ^ 1);
                const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
                const int k = (first_step + step) * C::K;
                mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
                if constexpr (C::A_MN_MAJOR)
                    tma_load_3d(a, &map_a, arrived, first_m, k, batch_a);
                else
                    tma_load_3d(a, &map_a, arrived, k, first_m, batch_a);
                if constexpr (C::B_MN_MAJOR)
                    tma_load_3d(b, &map_b, arrived, first_n, k, batch_b);
                else
                    tma_load_3d(b, &map_b, arrived, k, first_n, batch_b);
                if (++stage == work.stages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        }
        if (work.splits > 1)
            cluster_wait(); // completes the arrival above
    } else {
        const uint64_t a_tile = wgmma_descriptor(stages, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        // 32 bytes on along k: within the row, or 16 rows further.
        constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        float sum[C::N / 2];
        int before = 0;
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(full + 8 * stage, phase);
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum, wgmma_advance(a, i * A_STEP),
                                                             wgmma_advance(b, i * B_STEP), step > 0 || i > 0);
            wgmma_commit_group();
            // This stage's products are in flight; the previous stage's are done.
            wgmma_wait_group<1>();
            if (step > 0 && threadIdx.x == 0)
                mbarrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == work.stages) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait_group<0>();
        if (add_cluster<C>(work, sum, sums, arrived_sums, rank))
            store_sums<C>(work, sum, shared + (stages - shared_address(shared)), batch, first_m, first_n);
    }
#endif
}

template <typename C>
static cuda_ops_status launch(const GemmCall &original, GemmDevice device, const GemmPlan &plan)
{
    const GemmCall call = plan.swapped ? exchanged(original) : original; // as the kernel sees it
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b;
    const bool tf32 = sizeof(typename C::T) == 4;
    const bool mapped =
        (C::A_MN_MAJOR ? make_map(&map_a, call.a, p.dtype, tf32, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW, C::K)
                       : make_map(&map_a, call.a, p.dtype, tf32, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M)) &&
        (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, tf32, p.n, p.k, p.batch, p.ldb, p.stride_b, C::ROW, C::K)
                       : make_map(&map_b, call.b, p.dtype, tf32, p.k, p.n, p.batch, p.ldb, p.stride_b, C::ROW, C::N));
    SkinnyWork work = {};
    work.d = call.d;
    work.bias = call.bias;
    work.ldd = p.ldd;
    work.stride_d = p.stride_d;
    work.m = (int)p.m, work.n = (int)p.n, work.k = (int)p.k;
    work.tiles_m = (int)ceil_div(p.m, C::M);
    work.tiles_n = (int)ceil_div(p.n, C::N);
    work.a_shared = p.stride_a == 0, work.b_shared = p.stride_b == 0;
    work.alpha = (float)p.alpha;
    work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.activation = p.activation;
    work.output_is_float = p.output_dtype == CUDA_OPS_FLOAT32;
    work.swapped = plan.swapped;
    const int64_t output_size = work.output_is_float ? 4 : sizeof(typename C::T);
    work.preactivation = p.preactivation;
    work.whole = is_aligned_16(call.d) && is_aligned_16(p.preactivation) && p.ldd * output_size % 16 == 0 &&
                 (p.batch == 1 || p.stride_d * output_size % 16 == 0);
    work.splits = 1; // none of the splits is empty
    while (2 * work.splits <= plan.splits && 2 * work.splits <= ceil_div(p.k, C::K))
        work.splits *= 2;
    const int64_t blocks = (int64_t)work.tiles_m * work.tiles_n * p.batch * work.splits;
    work.stages = C::stages(work.splits, C::BLOCKS);
    // Not for clusters of four: fewer of them are resident than the SMs would hold, and too few with one block an SM.
    if (work.splits <= 2 && blocks <= device.multiprocessors &&
        ceil_div(p.k, C::K * work.splits) >= C::LONG * work.stages)
        work.stages = C::stages(work.splits, 1);
    if (!mapped || blocks > INT32_MAX || work.stages * C::STAGE_BYTES < C::LINE_BYTES)
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = gemm_sm90_skinny_kernel<C>;
    const int bytes = C::shared_bytes(work.splits, work.stages);
    allow_shared_memory(kernel, bytes);
    start_clusters(kernel, blocks, C::THREADS, work.splits, bytes, device.capability, call.stream, map_a, map_b, work);
    return launch_status();
}

// The tiles, as gemm/times.h numbers them.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_tile(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (plan.tile) {
    case 0:
        return launch<SkinnyTile<T, 16, a_mn_major, b_mn_major>>(call, device, plan);
    case 1:
        return launch<SkinnyTile<T, 32, a_mn_major, b_mn_major>>(call, device, plan);
    case 2:
        return launch<SkinnyTile<T, 64, a_mn_major, b_mn_major>>(call, device, plan);
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_halves(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    const bool a_mn_major = plan.swapped ? !p.transpose_b : p.transpose_a;
    const bool b_mn_major = plan.swapped ? p.transpose_a : !p.transpose_b;
    if (a_mn_major)
        return b_mn_major ? launch_tile<T, true, true>(call, device, plan)
                          : launch_tile<T, true, false>(call, device, plan);
    return b_mn_major ? launch_tile<T, false, true>(call, device, plan)
                      : launch_tile<T, false, false>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
