// Rung 14's kernel and its launcher, to be instantiated a dtype a file; 14_skinny.cu tells what they are.
#ifndef CUDA_OPS_GEMM_SKINNY_CUH
#define CUDA_OPS_GEMM_SKINNY_CUH

#include "common.cuh"
#include "gemm/activation.cuh"
#include "gemm/hopper.cuh"
#include "gemm/rungs.h"

// M and N: what a block makes of the product as the kernel sees it, in which A and B may have changed places. A
// warpgroup multiplies 64 of M; where M is 32 it does so too, and what comes of the rows that follow A's in shared
// memory is thrown away: twice the blocks read a long operand. Two blocks share an SM. MN-major is what the kernel
// calls A stored k x m and B stored k x n.
template <typename T_, int M_, int N_, bool A_MN_MAJOR_, bool B_MN_MAJOR_>
struct SkinnyTile {
    typedef T_ T;
    static constexpr int M = M_, N = N_, BLOCKS = 2;
    static constexpr bool A_MN_MAJOR = A_MN_MAJOR_, B_MN_MAJOR = B_MN_MAJOR_;
    static constexpr int THREADS = WARPGROUP + WARP_SIZE;             // who multiply, and who copy
    static constexpr int ROW = SWIZZLE_ROW / (int)sizeof(T), K = ROW; // elements of a row, and depth of a stage
    static constexpr int COLUMN_BYTES = K * SWIZZLE_ROW;
    static constexpr int A_COLUMNS = (M + ROW - 1) / ROW, B_COLUMNS = (N + ROW - 1) / ROW; // of MN-major tiles
    static constexpr int A_BYTES = M * SWIZZLE_ROW, B_BYTES = B_MN_MAJOR ? B_COLUMNS * COLUMN_BYTES : N * SWIZZLE_ROW;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    // Of an SM's 228 KB each block has 1 KB for the system, and loses up to one to alignment.
    static constexpr int PAST = (64 - M) * SWIZZLE_ROW; // what is read past the last stage's A
    static constexpr int ROOM = (228 << 10) / BLOCKS - (2 << 10) - 512 - PAST;
    static constexpr int STAGES = ROOM / STAGE_BYTES < 16 ? ROOM / STAGE_BYTES : 16;
    static constexpr int SHARED_BYTES = SWIZZLE_ATOM + STAGES * STAGE_BYTES + 2 * STAGES * 8 + PAST;
    static_assert(M == 64 || (M == 32 && !A_MN_MAJOR), "a warpgroup's rows, or half of them");
    static_assert(sizeof(T) == 2 || (!A_MN_MAJOR && !B_MN_MAJOR), "TF32 is K-major");
    static_assert(STAGE_BYTES % SWIZZLE_ATOM == 0 && A_BYTES % SWIZZLE_ATOM == 0, "tiles are aligned to the swizzle");
};

struct SkinnyWork {
    void *d;
    const void *bias;
    int64_t ldd, stride_d;
    int m, n, k; // of the product as the kernel sees it
    int tiles_m, tiles_n;
    int a_shared, b_shared; // one matrix for all products of the batch
    float alpha;
    int bias_is_float, activation, output_is_float;
    int swapped; // what the kernel makes is D transposed
    int pairs;   // two neighbours of a line of D may be written at once
};

#if defined(CUDA_OPS_HOPPER_CODE)

template <typename T>
struct __align__(2 * sizeof(T)) NeighbourPair {
    T element[2];
};

// The accumulators straight to D: tiles are small, and this is the shortest way.
template <typename C>
__device__ __forceinline__ void store_sums(const SkinnyWork &work, const float (&sum)[C::N / 2], int batch, int first_m,
                                           int first_n)
{
    typedef typename C::T T;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = first_n + threadIdx.x % 4 * 2;
    if (row >= C::M)
        return;
    const int64_t first = batch * work.stride_d;
#pragma unroll
    for (int i = 0; i < C::N / 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int m = first_m + row + 8 * half, n = column + 8 * i;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                x[e] = sum[4 * i + 2 * half + e] * work.alpha;
                const int d_column = work.swapped ? m : n + e;
                if (work.bias && m < work.m && n + e < work.n)
                    x[e] += work.bias_is_float ? ((const float *)work.bias)[d_column]
                                               : load_as_accumulate(((const T *)work.bias)[d_column]);
            }
            if (work.activation != CUDA_OPS_GEMM_NONE)
#pragma unroll 1
                for (int e = 0; e < 2; e++) { // not unrolled, since gelu is long; the two change places
                    const float y = activate(x[0], work.activation);
                    x[0] = x[1], x[1] = y;
                }
            if (m >= work.m || n >= work.n)
                continue;
            if (work.swapped) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int64_t to = first + (int64_t)(n + e) * work.ldd + m;
                    if (n + e >= work.n)
                        break;
                    if (work.output_is_float)
                        ((float *)work.d)[to] = x[e];
                    else
                        ((T *)work.d)[to] = store_from_accumulate<T>(x[e]);
                }
                continue;
            }
            const int64_t to = first + (int64_t)m * work.ldd + n;
            if (work.output_is_float) {
                float *const d = (float *)work.d + to;
                if (work.pairs && n + 1 < work.n)
                    *(float2 *)d = make_float2(x[0], x[1]);
                else
                    for (int e = 0; e < 2 && n + e < work.n; e++)
                        d[e] = e == 0 ? x[0] : x[1];
            } else {
                const NeighbourPair<T> pair = {{store_from_accumulate<T>(x[0]), store_from_accumulate<T>(x[1])}};
                T *const d = (T *)work.d + to;
                if (work.pairs && n + 1 < work.n)
                    *(NeighbourPair<T> *)d = pair;
                else
                    for (int e = 0; e < 2 && n + e < work.n; e++)
                        d[e] = e == 0 ? pair.element[0] : pair.element[1];
            }
        }
}
#endif

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    gemm_skinny_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                       const __grid_constant__ SkinnyWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef typename C::T T;
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::STAGES * C::STAGE_BYTES, empty = full + 8 * C::STAGES;
    const int first_m = blockIdx.x % work.tiles_m * C::M, outer = blockIdx.x / work.tiles_m;
    const int first_n = outer % work.tiles_n * C::N, batch = outer / work.tiles_n;
    const int steps = (work.k + C::K - 1) / C::K;
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        for (int stage = 0; stage < C::STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, 1);
        }
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();

    int stage = 0, phase = 0;
    if (threadIdx.x >= WARPGROUP) {
        if (threadIdx.x != WARPGROUP)
            return;
        const int batch_a = work.a_shared ? 0 : batch, batch_b = work.b_shared ? 0 : batch;
        for (int step = 0; step < steps; step++) {
            barrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            const int k = step * C::K;
            barrier_expect(arrived, C::STAGE_BYTES);
            if constexpr (C::A_MN_MAJOR)
                copy_in(a, &map_a, arrived, first_m, k, batch_a);
            else
                copy_in(a, &map_a, arrived, k, first_m, batch_a);
            if constexpr (C::B_MN_MAJOR)
                copy_in(b, &map_b, arrived, first_n, k, batch_b);
            else
                copy_in(b, &map_b, arrived, k, first_n, batch_b);
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    } else {
        const uint64_t a_tile = describe(stages, C::COLUMN_BYTES, SWIZZLE_ATOM);
        const uint64_t b_tile = describe(stages + C::A_BYTES, C::COLUMN_BYTES, SWIZZLE_ATOM);
        // 32 bytes on along k: within the row, or 16 rows further.
        constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        float sum[C::N / 2];
        int before = 0;
        for (int step = 0; step < steps; step++) {
            barrier_wait(full + 8 * stage, phase);
            const uint64_t a = advance(a_tile, stage * C::STAGE_BYTES), b = advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum, advance(a, i * A_STEP), advance(b, i * B_STEP),
                                                             step > 0 || i > 0);
            wgmma_commit();
            // This stage's products are under way; those of the stage before are done.
            wgmma_wait<1>();
            if (step > 0 && threadIdx.x == 0)
                barrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait<0>();
        store_sums<C>(work, sum, batch, first_m, first_n);
    }
#endif
}

#if defined(CUDA_OPS_SM90A)
template <typename C>
static cuda_ops_status launch(const GemmCall &call, bool swapped)
{
    const cuda_ops_gemm_problem &p = call.problem;
    // As the kernel sees it.
    const void *const a = swapped ? call.b : call.a, *const b = swapped ? call.a : call.b;
    const int64_t m = swapped ? p.n : p.m, n = swapped ? p.m : p.n;
    const int64_t lda = swapped ? p.ldb : p.lda, ldb = swapped ? p.lda : p.ldb;
    const int64_t stride_a = swapped ? p.stride_b : p.stride_a, stride_b = swapped ? p.stride_a : p.stride_b;
    CUtensorMap map_a, map_b;
    const bool tf32 = sizeof(typename C::T) == 4;
    const bool mapped =
        (C::A_MN_MAJOR ? make_map(&map_a, a, p.dtype, tf32, m, p.k, p.batch, lda, stride_a, C::ROW, C::K)
                       : make_map(&map_a, a, p.dtype, tf32, p.k, m, p.batch, lda, stride_a, C::ROW, C::M)) &&
        (C::B_MN_MAJOR ? make_map(&map_b, b, p.dtype, tf32, n, p.k, p.batch, ldb, stride_b, C::ROW, C::K)
                       : make_map(&map_b, b, p.dtype, tf32, p.k, n, p.batch, ldb, stride_b, C::ROW, C::N));
    SkinnyWork work = {};
    work.d = call.d;
    work.bias = call.bias;
    work.ldd = p.ldd;
    work.stride_d = p.stride_d;
    work.m = (int)m, work.n = (int)n, work.k = (int)p.k;
    work.tiles_m = (int)ceil_div(m, C::M);
    work.tiles_n = (int)ceil_div(n, C::N);
    work.a_shared = stride_a == 0, work.b_shared = stride_b == 0;
    work.alpha = (float)p.alpha;
    work.bias_is_float = p.bias_dtype == CUDA_OPS_FLOAT32;
    work.activation = p.activation;
    work.output_is_float = p.output_dtype == CUDA_OPS_FLOAT32;
    work.swapped = swapped;
    work.pairs = (uintptr_t)call.d % 8 == 0 && p.ldd % 2 == 0 && p.stride_d % 2 == 0;
    const int64_t blocks = (int64_t)work.tiles_m * work.tiles_n * p.batch;
    if (!mapped || blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = gemm_skinny_kernel<C>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED_BYTES);
    launch_dependent(kernel, dim3((unsigned int)blocks), C::THREADS, C::SHARED_BYTES, call.stream, map_a, map_b, work);
    return launch_status();
}

// The tiles, as gemm/times.h numbers them. Of an A that is stored k x m there are no 32 rows in swizzled columns of 64.
template <typename T, bool a_mn_major, bool b_mn_major>
static cuda_ops_status launch_tile(const GemmCall &call, const GemmPlan &plan)
{
    switch (plan.tile) {
    case 0:
        return launch<SkinnyTile<T, 64, 16, a_mn_major, b_mn_major>>(call, plan.swapped);
    case 1:
        if constexpr (!a_mn_major)
            return launch<SkinnyTile<T, 32, 16, a_mn_major, b_mn_major>>(call, plan.swapped);
        break;
    }
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
static cuda_ops_status launch_halves(const GemmCall &call, const GemmPlan &plan)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const bool a_mn_major = plan.swapped ? !p.transpose_b : p.transpose_a;
    const bool b_mn_major = plan.swapped ? p.transpose_a : !p.transpose_b;
    if (a_mn_major)
        return b_mn_major ? launch_tile<T, true, true>(call, plan) : launch_tile<T, true, false>(call, plan);
    return b_mn_major ? launch_tile<T, false, true>(call, plan) : launch_tile<T, false, false>(call, plan);
}
#endif

#endif
