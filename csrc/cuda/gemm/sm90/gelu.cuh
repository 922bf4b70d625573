// The sm90 path's products with gelu behind them, forward and backward, for a D of many tiles:
//     D = gelu(op(A) op(B) + bias), and the preactivation beside it
//     D = (op(A) op(B)) * gelu'(preactivation), and the sums of D's columns for each tile's rows
// The kernel is gemm/sm90/kernel.cuh's in ping-pong with epilogues of their own, in registers and unrolled, which one
// consumer warpgroup runs behind the other's products: store.cuh's is short code for products of few tiles. With 768 of
// k forward takes 1.2 times as long as the plain product, and backward 1.5 times. Backward's preactivation comes by TMA
// into the buffers that D then leaves by, loaded by two of the producer's warps as soon as a buffer is free, a tile
// ahead; ldmatrix gives each thread the elements that its sums belong to. The sums of D's columns are a product too.
#ifndef CUDA_OPS_GEMM_SM90_GELU_CUH
#define CUDA_OPS_GEMM_SM90_GELU_CUH

#include "common/activation.cuh"
#include "gemm/sm90/gelu.h"
#include "gemm/sm90/kernel.cuh"

template <bool TANH>
struct GeluForwardWork : GemmWork {
    static constexpr bool LOADS_PREACTIVATION = false;
    CUtensorMap map_preactivation;
};

template <bool TANH>
struct GeluBackwardWork : GemmWork {
    static constexpr bool LOADS_PREACTIVATION = true;
    CUtensorMap map_preactivation;
    float *column_sums; // [tile along m][n], or null
};

// Of 192 columns; backward of 128 where k is short, so that its epilogue takes longer than the products: with a third of
// the sums fewer in registers, twice as many elements are under way in it.
constexpr int64_t SHORT_K = 512;
template <typename T, bool B_MN_MAJOR, int N>
using GeluTile = Tile<T, 128, N, 2, 1, true, N == 192 ? 4 : 5, false, B_MN_MAJOR>;

#if defined(CUDA_OPS_HOPPER_CODE)

template <bool TANH>
__device__ __forceinline__ float gelu_quickly_of(float x)
{
    return TANH ? gelu_tanh_quickly(x) : gelu_quickly(x);
}
template <bool TANH>
__device__ __forceinline__ float gelu_slope_quickly_of(float x)
{
    if (!TANH)
        return gelu_slope_quickly(x);
    // gelu_tanh_slope_quickly in three instructions fewer. With share = 1 / (1 + 2^(x p)), p = -2 log2(e) u / x, the
    // slope is share + x share (1 - share) 2 du/dx, and 2 du/dx = -3 ln 2 * p - 4 sqrt(2 / pi).
    const float p = fmaf(-0.1029432396f, x * x, -2.3022081991f);
    const float share = rcp_approx_ftz(1.0f + ex2_approx_ftz(x * p)), y = x * share;
    return fmaf(fmaf(-y, share, y), fmaf(-2.0794415417f, p, -3.1915382432f), share);
}

// The address of a warp's 16 x 16 elements in a buffer of CHUNK columns, as this lane gives it to ldmatrix and stmatrix:
// lanes 0-15 the rows, lanes 16-31 the same rows 8 columns on.
template <typename C>
__device__ __forceinline__ uint32_t matrix_address(uint32_t buffer, int block, int columns16, int thread)
{
    const int lane = thread % 32, warp = thread / 32;
    return buffer + swizzled_offset<C>(64 * block + 16 * warp + lane % 16, 2 * columns16 + lane / 16);
}

// CHUNK columns from registers to a buffer, and by TMA to memory.
template <typename C>
__device__ __forceinline__ void store_chunk(const uint32_t (&packed)[C::BLOCKS][C::CHUNK / 16][4],
                                            const CUtensorMap *map, uint32_t to, int column, int first_row, int matrix,
                                            int group, int thread)
{
    if (thread == 0)
        bulk_wait_group_read<1>(); // all but the other buffer's have been read
    bar_sync(1 + group, WARPGROUP);
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int i = 0; i < C::CHUNK / 16; i++) {
            const uint32_t(&p)[4] = packed[block][i];
            stmatrix_x4(matrix_address<C>(to, block, i, thread), p[0], p[1], p[2], p[3]);
        }
    fence_proxy_async();
    bar_sync(1 + group, WARPGROUP);
    if (thread == 0) {
        tma_store_3d(map, to, column, first_row, matrix);
        bulk_commit_group();
    }
}

// Forward: CHUNK columns at a time, the preactivation by the first buffer and D by the second.
template <typename C, bool TANH>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias,
                                           const GeluForwardWork<TANH> &work, const CUtensorMap *map_d, char *buffers,
                                           int &, int64_t matrix, int first_row, int first_column, int group,
                                           int thread)
{
    typedef typename C::T T;
    const uint32_t first = shared_address(buffers);
    finish<C>(sum, bias, work, first_row, thread);
#pragma unroll
    for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++) {
        const int column = first_column + C::CHUNK * chunk;
        uint32_t packed[C::BLOCKS][C::CHUNK / 16][4];
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::CHUNK / 16; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i + 2 * e;
                    packed[block][i][e] = pack<T>(s[0], s[1]);
                }
        store_chunk<C>(packed, &work.map_preactivation, first, column, first_row, (int)matrix, group, thread);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::CHUNK / 16; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float x, y;
                    unpack<T>(packed[block][i][e], x, y); // gelu is of what is stored
                    packed[block][i][e] = pack<T>(gelu_quickly_of<TANH>(x), gelu_quickly_of<TANH>(y));
                }
        store_chunk<C>(packed, map_d, first + C::BUFFER_BYTES, column, first_row, (int)matrix, group, thread);
    }
}

// The barriers of a warpgroup's two buffers, behind those of the pipeline: `loaded` counts the preactivation's bytes, and
// `freed` is for the loader, when D has been read from the buffer.
template <typename C>
__device__ __forceinline__ uint32_t loaded_barriers(uint32_t first_buffer, int group)
{
    return first_buffer + 2 * C::BUFFERS * C::BUFFER_BYTES + (2 * C::STAGES + 2) * 8 + group * 32;
}
static constexpr int FREED = 16; // from `loaded`
// Groups of 16 x 16 elements of the preactivation, from shared memory: as many as there are registers for.
template <typename C>
static constexpr int GROUPS_AHEAD = C::N == 192 ? 1 : 2;
static constexpr int FINISHED_BEHIND = 1; // which of a chunk's groups what the chunk before has begun is waited for

// The thread that loads the preactivation of a consumer warpgroup's tiles, CHUNK columns at a time.
template <typename C, typename Work>
__device__ __forceinline__ void load_preactivation(const Work &work, uint32_t first_buffer, int rank_m, int group)
{
    const uint32_t loaded = loaded_barriers<C>(first_buffer, group);
    const uint32_t buffers = first_buffer + group * C::BUFFERS * C::BUFFER_BYTES;
    const int clusters = gridDim.x / C::CLUSTER;
    int phases = 0;
    for (int index = blockIdx.x / C::CLUSTER + group * clusters; index < work.total; index += 2 * clusters) {
        const TileCoordinates tile = tile_coordinates<C>(work, index, rank_m, 0);
        for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++) {
            const int to = chunk % 2;
            mbarrier_wait(loaded + FREED + 8 * to, (phases >> to & 1) ^ 1);
            phases ^= 1 << to;
            mbarrier_arrive_expect_tx(loaded + 8 * to, C::BUFFER_BYTES);
            tma_load_3d(buffers + to * C::BUFFER_BYTES, &work.map_preactivation, loaded + 8 * to,
                        tile.n + C::CHUNK * chunk, tile.m, tile.batch);
        }
    }
}

// The sums of a chunk's columns over its rows, as stored, by the tensor cores, which the epilogue's arithmetic leaves
// idle: ones times the buffer, whose rows are k. All rows of the result are the sums; each warp stores those of some
// columns. Made whether or not they are wanted: under a condition the compiler would wait for each product.
template <typename T, int ROWS>
__device__ __forceinline__ void start_column_sums(float (&columns)[32], uint32_t buffer)
{
    const uint32_t one = pack<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
    const uint64_t rows = wgmma_descriptor(buffer, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, 0);
    wgmma_forget(columns);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        wgmma<T, 64, 1>(columns, ones, wgmma_advance(rows, k * 2 * SWIZZLE_ATOM), k > 0);
    wgmma_commit_group();
}

__device__ __forceinline__ void store_column_sums(const float (&columns)[32], float *line, int left, int thread)
{
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = 8 * i + 2 * lane;
        if (i / 2 == warp && lane < 4 && column < left) // columns are even in number
            *(float2 *)(line + column) = make_float2(columns[4 * i], columns[4 * i + 1]);
    }
}

// Backward. Bit b of `phases` is the phase of buffer b's barrier.
template <typename C, bool TANH>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &,
                                           const GeluBackwardWork<TANH> &work, const CUtensorMap *map_d, char *buffers,
                                           int &phases, int64_t matrix, int first_row, int first_column, int group,
                                           int thread)
{
    typedef typename C::T T;
    constexpr int CHUNKS = C::N / C::CHUNK, AHEAD = GROUPS_AHEAD<C>;
    static_assert(C::CHUNK == 64 && C::PINGPONG && CHUNKS >= 2, "the columns' sums, and which buffer is free when");
    const uint32_t first = shared_address(buffers);
    const uint32_t loaded = loaded_barriers<C>(first - group * C::BUFFERS * C::BUFFER_BYTES, group);
    constexpr int GROUPS = C::BLOCKS * C::CHUNK / 16; // of 16 x 16 elements a warp
    float columns[C::CHUNK / 2];
    // What follows a chunk's store, once that is no longer waited for.
    const auto finish_chunk = [&](int chunk) {
        wgmma_wait_group<0>();
        wgmma_pin(columns);
        if (work.column_sums) {
            const int column = first_column + C::CHUNK * chunk;
            store_column_sums(columns, work.column_sums + (int64_t)(first_row / C::M) * work.n + column,
                              work.n - column, thread);
        }
        if (thread == 0) {
            bulk_wait_group_read<0>();
            mbarrier_arrive(loaded + FREED + 8 * (chunk % 2));
        }
    };
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int which = chunk % 2;
        const uint32_t at = first + which * C::BUFFER_BYTES;
        mbarrier_wait(loaded + 8 * which, phases >> which & 1);
        phases ^= 1 << which;
        // Loaded AHEAD groups before they are worked on: a group's store waits for its arithmetic, and the loads behind
        // it for that, so that otherwise no two groups would be under way. Column by column: as long as few sums are
        // done with, few columns' sums take registers.
        uint32_t pairs[AHEAD + 1][4];
#pragma unroll
        for (int g = 0; g < AHEAD; g++)
            ldmatrix_x4(pairs[g], matrix_address<C>(at, g % C::BLOCKS, g / C::BLOCKS, thread));
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int block = g % C::BLOCKS, i = g / C::BLOCKS, later = g + AHEAD;
            if (later < GROUPS)
                ldmatrix_x4(pairs[later % (AHEAD + 1)],
                            matrix_address<C>(at, later % C::BLOCKS, later / C::BLOCKS, thread));
            float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i;
            uint32_t(&pair)[4] = pairs[g % (AHEAD + 1)];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float x, y;
                unpack<T>(pair[e], x, y);
                pair[e] =
                    pack<T>(s[2 * e] * gelu_slope_quickly_of<TANH>(x), s[2 * e + 1] * gelu_slope_quickly_of<TANH>(y));
            }
            stmatrix_x4(matrix_address<C>(at, block, i, thread), pair[0], pair[1], pair[2], pair[3]);
            if (chunk > 0 && g == FINISHED_BEHIND)
                finish_chunk(chunk - 1);
        }
        fence_proxy_async();
        bar_sync(1 + group, WARPGROUP);
        if (thread == 0) {
            tma_store_3d(map_d, at, first_column + C::CHUNK * chunk, first_row, (int)matrix);
            bulk_commit_group();
        }
        start_column_sums<T, C::M>(columns, at);
    }
    finish_chunk(CHUNKS - 1);
}
#endif // CUDA_OPS_HOPPER_CODE

// For two warpgroups' two buffers, `loaded` and `freed`.
static constexpr int GELU_BARRIERS = 8;

// gemm_sm90_kernel for another kind of work.
template <typename C, typename Work>
__global__ void __launch_bounds__(C::THREADS, 1)
    gemm_sm90_gelu_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ CUtensorMap map_d, const __grid_constant__ Work work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::BARRIERS_FROM, empty = full + 8 * C::STAGES, order = empty + 8 * C::STAGES;
    const int rank = (int)cluster_ctarank();
    static_assert(C::PINGPONG && C::CLUSTER_N == 1 && C::CLUSTER_M == 2 && !C::IN_REGISTERS, "the barriers' arrivals");
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        prefetch_tensormap(&work.map_preactivation);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, C::CLUSTER_M);
        }
        for (int group = 0; group < 2; group++)
            mbarrier_init(order + 8 * group, ORDER_ARRIVALS);
        for (int i = 0; i < GELU_BARRIERS; i++)
            mbarrier_init(order + 16 + 8 * i, 1);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x / WARPGROUP == C::PRODUCER) {
        setmaxnreg_dec<40>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == 0)
            produce<C>(work, &map_a, &map_b, stages, full, empty, rank, 0);
        else if (Work::LOADS_PREACTIVATION && (warp == 1 || warp == 2) && threadIdx.x % 32 == 0)
            load_preactivation<C>(work, stages + C::BUFFERS_FROM, rank, warp - 1);
    } else {
        setmaxnreg_inc<232>();
        consume<C>(work, &map_d, stages, full, empty, shared + (stages + C::BUFFERS_FROM - shared_address(shared)),
                   rank, 0);
    }
#endif
}

#if defined(CUDA_OPS_SM90A)
template <typename C, typename Work>
static cuda_ops_status launch_gelu(Work work, const GemmCall &call, GemmDevice device, const void *preactivation)
{
    constexpr int BAND = C::N == 192 ? 6 : 8; // rows of cluster tiles, as gemm.cu has it for tiles of so many columns
    const cuda_ops_gemm_problem &p = call.problem;
    CUtensorMap map_a, map_b, map_d;
    const bool mapped =
        make_map(&map_a, call.a, p.dtype, false, p.k, p.m, p.batch, p.lda, p.stride_a, C::ROW, C::M) &&
        (C::B_MN_MAJOR ? make_map(&map_b, call.b, p.dtype, false, p.n, p.k, p.batch, p.ldb, p.stride_b, C::ROW,
                                  C::K / C::CLUSTER_M)
                       : make_map(&map_b, call.b, p.dtype, false, p.k, p.n, p.batch, p.ldb, p.stride_b, C::ROW,
                                  C::N / C::CLUSTER_M)) &&
        make_map(&map_d, call.d, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK, C::GROUP_M) &&
        make_map(&work.map_preactivation, preactivation, p.dtype, false, p.n, p.m, p.batch, p.ldd, p.stride_d, C::CHUNK,
                 C::GROUP_M);
    work.clusters_m = (int)ceil_div(p.m, C::M * C::CLUSTER_M);
    work.clusters_n = (int)ceil_div(p.n, C::N * C::CLUSTER_N);
    work.group = BAND;
    work.activation = CUDA_OPS_GEMM_NONE; // finish() does without
    work.preactivation = nullptr;
    const int64_t total = (int64_t)work.clusters_m * work.clusters_n * p.batch;
    if (!mapped || total > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.total = (int)total;
    static_assert(C::M == GELU_SUM_ROWS && C::CLUSTER_M == 2, "what gelu.h says of the column sums");
    const auto kernel = gemm_sm90_gelu_kernel<C, Work>;
    constexpr int BYTES = C::SHARED_BYTES + GELU_BARRIERS * 8;
    allow_shared_memory(kernel, BYTES);
    const int64_t room = device.multiprocessors / C::CLUSTER, clusters = total < room ? total : room;
    start_clusters(kernel, clusters * C::CLUSTER, C::THREADS, C::CLUSTER, BYTES, device.capability, call.stream, map_a,
                   map_b, map_d, work);
    return launch_status();
}

template <typename T, bool TANH>
static cuda_ops_status launch_gelu_forward(const GemmCall &call, GemmDevice device)
{
    GeluForwardWork<TANH> work;
    (GemmWork &)work = work_of(call);
    return launch_gelu<GeluTile<T, false, 192>>(work, call, device, call.problem.preactivation);
}

template <typename T, bool TANH>
static cuda_ops_status launch_gelu_backward(const GemmCall &call, GemmDevice device, const void *preactivation)
{
    GeluBackwardWork<TANH> work;
    (GemmWork &)work = work_of(call);
    work.column_sums = (float *)call.workspace;
    if constexpr (TANH) // the other has not been timed
        if (call.problem.k <= SHORT_K)
            return launch_gelu<GeluTile<T, true, 128>>(work, call, device, preactivation);
    return launch_gelu<GeluTile<T, true, 192>>(work, call, device, preactivation);
}
#endif

template <typename T>
static cuda_ops_status launch_gelu_forward_of(const GemmCall &call, GemmDevice device)
{
#if defined(CUDA_OPS_SM90A)
    return call.problem.activation == CUDA_OPS_GEMM_GELU_TANH ? launch_gelu_forward<T, true>(call, device)
                                                              : launch_gelu_forward<T, false>(call, device);
#else
    (void)call, (void)device;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

template <typename T>
static cuda_ops_status launch_gelu_backward_of(const GemmCall &call, GemmDevice device, const void *preactivation)
{
#if defined(CUDA_OPS_SM90A)
    return call.problem.activation == CUDA_OPS_GEMM_GELU_TANH
               ? launch_gelu_backward<T, true>(call, device, preactivation)
               : launch_gelu_backward<T, false>(call, device, preactivation);
#else
    (void)call, (void)device, (void)preactivation;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
