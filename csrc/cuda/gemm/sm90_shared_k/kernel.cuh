// The sm90_shared_k path's kernel and its launcher, to be instantiated one dtype a file;
// gemm/sm90_shared_k/sm90_shared_k.cu says what they do.
#ifndef CUDA_OPS_GEMM_SM90_SHARED_K_KERNEL_CUH
#define CUDA_OPS_GEMM_SM90_SHARED_K_KERNEL_CUH

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "gemm/sm90/ahead.cuh"
#include "gemm/sm90/tile.cuh"
#include "gemm/sm90_shared_k/sm90_shared_k.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// MN-major is what the kernel calls A stored k x m and B stored k x n. A warpgroup loads, two multiply 64 rows each.
template <typename T_, int N_, bool A_MN_MAJOR_, bool B_MN_MAJOR_>
struct SharedTile {
    typedef T_ T;
    static constexpr int M = 128, N = N_, STAGES = N == 64 ? 9 : 6, GROUP_M = 64, THREADS = 3 * WARPGROUP;
    static constexpr bool A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr int CLUSTER_M = 1, CLUSTER_N = 1; // what the blocks of a cluster share is no operand
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T), K = ROW;
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW, A_COLUMNS = M / ROW, B_COLUMNS = N / ROW;
    static constexpr int A_BYTES = M * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + N * SWIZZLE_ROW;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES,
                         SHARED_BYTES = SWIZZLE_ATOM + RING_BYTES + (2 * STAGES + 1) * 8;
    // Sums change hands by units of 8 columns, four sums a thread.
    static constexpr int UNITS = N / 8, UNIT_BYTES = 2 * WARPGROUP * 16, SENT_TOGETHER = UNITS / 4;
    static_assert(sizeof(T) == 2 && SHARED_BYTES <= 232448 && UNITS <= 16, "16 bits, and an SM's shared memory");
    static_assert(RING_BYTES >= (UNITS + MOST_SHARED_K) * UNIT_BYTES, "room for all blocks' sums");
};

// The divisions by the number of shares are made on the host: in the kernel they would be a third of its instructions.
struct SharedWork : AheadGemmWork {
    int shares;                   // the blocks of a cluster
    int first[MOST_SHARED_K + 1]; // of a tile's units, of those that each block finishes
    uint32_t place[16];           // where each unit goes: the bytes before it, and, in the lowest bits, the block
};

#if defined(CUDA_OPS_HOPPER_CODE)

// Sends a thread's sums of a quarter of the units to the blocks that finish them. There the units lie one after the
// other, each from all blocks in their order.
template <typename C, int QUARTER>
__device__ __forceinline__ void send_units(const float (&sum)[C::N / 2], const SharedWork &work, uint32_t mine,
                                           uint32_t arrived, uint32_t rank)
{
#pragma unroll
    for (int i = 0; i < C::SENT_TOGETHER; i++) {
        constexpr uint32_t BLOCK = MOST_SHARED_K - 1;
        const int unit = QUARTER * C::SENT_TOGETHER + i;
        const uint32_t owner = work.place[unit] & BLOCK, to = mine + (work.place[unit] & ~BLOCK);
        const float *const s = sum + 4 * unit;
        const float4 four = make_float4(s[0], s[1], s[2], s[3]);
        if (owner == rank)
            st_shared_v4_f32(to, four);
        else
            st_async(mapa(to, owner), four, mapa(arrived, owner));
    }
}

// Two neighbours of a row of D.
template <typename T>
__device__ __forceinline__ void store_two(const GemmWork &work, int64_t at, int left, float x, float y)
{
    const bool both = left > 1 && at % 2 == 0;
    if (work.output_is_float) {
        float *const to = (float *)work.d + at;
        if (both)
            *(float2 *)to = make_float2(x, y);
        else
            to[0] = x;
        if (!both && left > 1)
            to[1] = y;
    } else {
        T *const to = (T *)work.d + at;
        if (both)
            *(uint32_t *)to = pack<T>(x, y);
        else
            to[0] = store_from_accumulate<T>(x);
        if (!both && left > 1)
            to[1] = store_from_accumulate<T>(y);
    }
}

template <typename T>
__device__ __forceinline__ float bias_of(const GemmWork &work, int column)
{
    if (!work.bias || column >= work.n)
        return 0;
    return work.bias_is_float ? ((const float *)work.bias)[column] : load_as_accumulate(((const T *)work.bias)[column]);
}

// The units of this block, of all blocks' sums, in the order of their shares of k, to D.
template <typename C>
__device__ __forceinline__ void finish_units(const SharedWork &work, uint32_t sums, int64_t matrix, int first_row,
                                             int first_column, int first, int last)
{
    typedef typename C::T T;
    const int row = first_row + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int unit = first; unit < last; unit++, sums += work.shares * C::UNIT_BYTES) {
        const int column = first_column + 8 * unit + 2 * (threadIdx.x % 4), left = work.n - column;
        if (left <= 0)
            continue;
        const float bias[2] = {bias_of<T>(work, column), bias_of<T>(work, column + 1)};
        float4 sum = ld_shared_v4_f32(sums);
#pragma unroll 1
        for (int share = 1; share < work.shares; share++) {
            const float4 part = ld_shared_v4_f32(sums + share * C::UNIT_BYTES);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = fmaf(x[e], work.alpha, bias[e % 2]);
            x[e] = work.activation == CUDA_OPS_GEMM_RELU && x[e] < 0 ? 0 : x[e]; // NaN stays
        }
        const int64_t at = matrix * work.stride_d + row * work.ldd + column;
        if (row < work.m)
            store_two<T>(work, at, left, x[0], x[1]);
        if (row + 8 < work.m)
            store_two<T>(work, at + 8 * work.ldd, left, x[2], x[3]);
    }
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    gemm_sm90_shared_k_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                              const __grid_constant__ SharedWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef typename C::T T;
    extern __shared__ char shared[];
    // The addresses must be the same in all blocks, as that of dynamic shared memory is.
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::RING_BYTES, empty = full + 8 * C::STAGES, arrived = empty + 8 * C::STAGES;
    const int rank = (int)cluster_ctarank(), shares = work.shares, cluster = blockIdx.x / shares;
    const int first = work.first[rank], last = work.first[rank + 1];
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 2);
        }
        mbarrier_init(arrived, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(arrived, (last - first) * (shares - 1) * C::UNIT_BYTES);
    }
    // Along the side with fewer tiles first: concurrent clusters then share the long side's operand.
    const int tiles = work.clusters_m * work.clusters_n, outer = cluster / tiles, index = cluster - outer * tiles;
    const bool m_first = work.clusters_m <= work.clusters_n;
    const int side = m_first ? work.clusters_m : work.clusters_n, across = index / side, along = index - across * side;
    const int first_m = (m_first ? along : across) * C::M, first_n = (m_first ? across : along) * C::N;
    const int split = outer / work.batch, batch = outer - split * work.batch;
    const int batch_a = work.a_shared ? 0 : batch, batch_b = work.b_shared ? 0 : batch;
    // All parts of k have work.chunk steps, the last ones perhaps fewer or none.
    const int all_steps = (work.k + C::K - 1) / C::K, first_step = (split * shares + rank) * work.chunk;
    const int steps = max(0, min(work.chunk, all_steps - first_step));
    __syncthreads();
    if (work.ahead > 0 && threadIdx.x == 0)
        prefetch_ahead<C>({min(work.ahead, steps), first_step * C::K, first_m, first_n, batch_a, batch_b, 0, 0, false,
                           work.clusters_n, work.clusters_m, first_n / C::N, first_m / C::M},
                          &map_a, &map_b);
    wait_for_predecessor();
    release_successor();

    int stage = 0, phase = 0;
    const int group = threadIdx.x / WARPGROUP - 1;
    if (group < 0) {
        if (threadIdx.x == 0)
            for (int step = 0, k = first_step * C::K; step < steps; step++, k += C::K) {
                mbarrier_wait(empty + 8 * stage, phase ^ 1);
                const uint32_t here = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
                mbarrier_arrive_expect_tx(here, C::STAGE_BYTES);
                if constexpr (C::A_MN_MAJOR) {
#pragma unroll
                    for (int column = 0; column < C::A_COLUMNS; column++)
                        tma_load_3d(a + column * C::COLUMN_BYTES, &map_a, here, first_m + column * C::ROW, k, batch_a);
                } else {
                    tma_load_3d(a, &map_a, here, k, first_m, batch_a);
                }
                if constexpr (C::B_MN_MAJOR) {
#pragma unroll
                    for (int column = 0; column < C::B_COLUMNS; column++)
                        tma_load_3d(b + column * C::COLUMN_BYTES, &map_b, here, first_n + column * C::ROW, k, batch_b);
                } else {
                    tma_load_3d(b, &map_b, here, k, first_n, batch_b);
                }
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        // All blocks' warpgroups have read what they loaded (below), and their barriers are initialised.
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        const uint32_t a_first = stages + group * (C::A_MN_MAJOR ? C::COLUMN_BYTES : C::GROUP_M * SWIZZLE_ROW);
        const uint64_t a_tile = wgmma_descriptor(a_first, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        // 32 bytes on along k: within the row, or 16 rows further.
        constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        float sum[C::N / 2];
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            sum[i] = 0;
        int before = -1;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(full + 8 * stage, phase);
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum, wgmma_advance(a, i * A_STEP),
                                                             wgmma_advance(b, i * B_STEP), 1);
            wgmma_commit_group();
            // This stage's products are in flight; the previous stage's are done.
            wgmma_wait_group<1>();
            if (before >= 0 && threadIdx.x % WARPGROUP == 0)
                mbarrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait_group<0>();
        // The stages' memory is what the others send their sums to, once all have read theirs.
        cluster_arrive_relaxed();
        cluster_wait();
        const uint32_t mine = stages + (threadIdx.x - WARPGROUP) * 16, sent = mine + rank * C::UNIT_BYTES;
        // The blocks begin with different units, so that they do not all send to the same block at once.
#pragma unroll 1
        for (int i = 0, quarter = rank * 4 / shares; i < 4; i++, quarter++)
            switch (quarter % 4) {
            case 0:
                send_units<C, 0>(sum, work, sent, arrived, rank);
                break;
            case 1:
                send_units<C, 1>(sum, work, sent, arrived, rank);
                break;
            case 2:
                send_units<C, 2>(sum, work, sent, arrived, rank);
                break;
            default:
                send_units<C, 3>(sum, work, sent, arrived, rank);
            }
        mbarrier_wait_cluster(arrived, 0);
        finish_units<C>(work, mine, (int64_t)split * work.batch + batch, first_m + group * C::GROUP_M, first_n, first,
                        last);
    }
#endif
}

template <typename C>
static cuda_ops_status launch(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b;
    const bool mapped =
        (C::A_MN_MAJOR
             ? make_map(&map_a, call.a, p.dtype, false, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW, C::K)
             : make_map(&map_a, call.a, p.dtype, false, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M)) &&
        (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, false, p.n, p.k, p.batch, p.ldb, p.stride_b, C::ROW, C::K)
                       : make_map(&map_b, call.b, p.dtype, false, p.k, p.n, p.batch, p.ldb, p.stride_b, C::ROW, C::N));
    SharedWork work = {};
    (GemmWork &)work = work_of(call);
    work.clusters_m = (int)ceil_div(p.m, C::M), work.clusters_n = (int)ceil_div(p.n, C::N);
    work.shares = shares_of(plan.tile), work.splits = plan.splits;
    work.chunk = (int)ceil_div(ceil_div(p.k, C::K), (int64_t)plan.splits * work.shares);
    for (int rank = 0; rank <= work.shares; rank++)
        work.first[rank] = (rank * C::UNITS + work.shares - 1) / work.shares;
    for (int unit = 0; unit < C::UNITS; unit++) {
        const int owner = unit * work.shares / C::UNITS;
        work.place[unit] = (uint32_t)((unit - work.first[owner]) * work.shares * C::UNIT_BYTES + owner);
    }
    work.ahead = stages_ahead(plan.splits);
    if (plan.splits > 1) {
        if (!call.workspace)
            return CUDA_OPS_INVALID_ARGUMENT;
        work.d = call.workspace;
        work.bias = nullptr;
        work.ldd = p.n, work.stride_d = p.m * p.n;
        work.alpha = 1;
        work.activation = CUDA_OPS_GEMM_NONE;
        work.output_is_float = 1;
    }
    const int64_t blocks = (int64_t)work.clusters_m * work.clusters_n * p.batch * plan.splits * work.shares;
    if (!mapped || blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = gemm_sm90_shared_k_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    start_clusters(kernel, blocks, C::THREADS, work.shares, C::SHARED_BYTES, device.capability, call.stream, map_a,
                   map_b, work);
    const cuda_ops_status status = launch_status();
    return status != CUDA_OPS_SUCCESS || plan.splits == 1 ? status : gemm_add_splits(call, plan.splits);
}

template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_tile(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    return is_narrow_shared_tile(plan.tile) ? launch<SharedTile<T, 64, a_mn_major, b_mn_major>>(call, device, plan)
                                            : launch<SharedTile<T, 128, a_mn_major, b_mn_major>>(call, device, plan);
}

template <typename T>
static cuda_ops_status launch_orders(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    if (call.problem.transpose_a)
        return call.problem.transpose_b ? launch_tile<T, true, false>(call, device, plan)
                                        : launch_tile<T, true, true>(call, device, plan);
    return call.problem.transpose_b ? launch_tile<T, false, false>(call, device, plan)
                                    : launch_tile<T, false, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
