// 16-bit tiles of the sm90 path of 192 rows, 64 for each of three consumer warpgroups. They fill a last wave that tiles
// of 128 rows leave half empty: 4096 x 560 is 132 tiles of 192 x 96, one for each SM of an H100. Otherwise they are as
// those of gemm/sm90/kernel.cuh, without gelu, and with results that leave 32 columns at a time.
#ifndef CUDA_OPS_GEMM_SM90_TRIPLE_CUH
#define CUDA_OPS_GEMM_SM90_TRIPLE_CUH

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90/triple.h"

template <typename T, int N, int STAGES_, bool a_mn_major, bool b_mn_major>
struct TripleTile : Tile<T, 192, N, 2, 1, false, 2, a_mn_major, b_mn_major> {
    typedef Tile<T, 192, N, 2, 1, false, 2, a_mn_major, b_mn_major> Whole;
    static constexpr int GROUPS = 3, THREADS = (1 + GROUPS) * WARPGROUP;
    static constexpr int STAGES = STAGES_, GROUP_M = Whole::M / GROUPS, BLOCKS = 1, BUFFERS = 2;
    static constexpr bool IN_LINES = false;
    static constexpr int CHUNK = 32, CHUNK_ROW = CHUNK * (int)sizeof(T), BUFFER_BYTES = GROUP_M * CHUNK_ROW;
    static constexpr int RING_BYTES = STAGES * Whole::STAGE_BYTES, OUT_BYTES = GROUPS * BUFFERS * BUFFER_BYTES;
    static constexpr int BUFFERS_FROM = RING_BYTES, BARRIERS_FROM = RING_BYTES + OUT_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS_FROM + (2 * STAGES + 2) * 8 + SWIZZLE_ATOM;
    static_assert(sizeof(T) == 2 && GROUP_M == 64 && N % CHUNK == 0, "16 bits, and whole chunks");
    static_assert(SHARED_BYTES + 1024 <= 233472, "an SM's shared memory");
};

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    gemm_sm90_triple_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                            const __grid_constant__ CUtensorMap map_d, const __grid_constant__ OddGemmWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::BUFFERS_FROM;
    const uint32_t full = stages + C::BARRIERS_FROM, empty = full + 8 * C::STAGES;
    const int rank_m = (int)cluster_ctarank();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, C::GROUPS * C::CLUSTER);
        }
        fence_mbarrier_init();
    }
    cluster_arrive_relaxed_aligned();
    if (work.ahead > 0 && threadIdx.x == C::PRODUCER * WARPGROUP)
        prefetch_first<C>(work, &map_a, &map_b, rank_m, 0);
    cluster_wait_aligned();
    wait_for_predecessor();
    release_successor();
    // 512 threads of 128 registers: 40 for the producer's, 152 for the consumers'.
    if (threadIdx.x / WARPGROUP == C::PRODUCER) {
        setmaxnreg_dec<40>();
        if (threadIdx.x % WARPGROUP == 0)
            produce<C>(work, &map_a, &map_b, stages, full, empty, rank_m, 0);
    } else {
        setmaxnreg_inc<152>();
        consume<C>(work, &map_d, stages, full, empty, shared + (buffers - shared_address(shared)), rank_m, 0);
    }
#endif
}

#if defined(CUDA_OPS_SM90A)
template <typename C>
static cuda_ops_status launch_triple_tile(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b, map_d;
    bool mapped = C::A_MN_MAJOR
                      ? make_map(&map_a, call.a, p.dtype, false, p.m, p.k, p.batch, p.lda, p.stride_a, C::ROW, C::K)
                      : make_map(&map_a, call.a, p.dtype, false, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M);
    mapped = mapped && (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, false, p.n, p.k, p.batch, p.ldb, p.stride_b,
                                                 C::ROW, C::K / C::CLUSTER_M)
                                      : make_map(&map_b, call.b, p.dtype, false, p.k, p.n, p.batch, p.ldb, p.stride_b,
                                                 C::ROW, C::N / C::CLUSTER_M));
    OddGemmWork work = {{work_of(call), 0}, 0};
    const int64_t wanted = plan.splits > 1 ? plan.splits : 1, chunk = ceil_div(ceil_div(p.k, wanted), C::K) * C::K;
    const int64_t splits = ceil_div(p.k, chunk); // none is empty
    work.splits = (int)splits, work.chunk = (int)chunk;
    set_clusters<C>(work);
    work.group = plan.group;
    map_d = map_a;
    if (splits > 1) {
        work.d = call.workspace;
        work.bias = nullptr;
        work.ldd = p.n;
        work.stride_d = p.m * p.n;
        work.alpha = 1;
        work.activation = CUDA_OPS_GEMM_NONE;
        work.output_is_float = 1;
    } else if (can_copy_out(call)) {
        work.copies_out = 1;
        mapped = mapped &&
                 make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK, C::GROUP_M);
    }
    const int64_t total = ((int64_t)work.clusters_m * work.clusters_n + work.lone) * p.batch * splits;
    if (!mapped || total > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.total = (int)total;
    const auto kernel = gemm_sm90_triple_kernel<C>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    const int64_t room = device.multiprocessors / C::CLUSTER, clusters = total < room ? total : room;
    work.ahead = stages_ahead(splits);
    start_clusters(kernel, clusters * C::CLUSTER, C::THREADS, C::CLUSTER, C::SHARED_BYTES, device.capability,
                   call.stream, map_a, map_b, map_d, work);
    const cuda_ops_status status = launch_status();
    return status != CUDA_OPS_SUCCESS || splits == 1 ? status : gemm_add_splits(call, splits);
}

// The tiles, as gemm/times.h numbers them.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_triples(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (plan.tile) {
    //                                              N  stages
    case 13:
        return launch_triple_tile<TripleTile<T, 192, 4, a_mn_major, b_mn_major>>(call, device, plan);
    case 15:
        return launch_triple_tile<TripleTile<T, 96, 5, a_mn_major, b_mn_major>>(call, device, plan);
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}
#endif

template <typename T>
static cuda_ops_status launch_triples_of(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a)
        return p.transpose_b ? launch_triples<T, true, false>(call, device, plan)
                             : launch_triples<T, true, true>(call, device, plan);
    return p.transpose_b ? launch_triples<T, false, false>(call, device, plan)
                         : launch_triples<T, false, true>(call, device, plan);
#else
    (void)call, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
