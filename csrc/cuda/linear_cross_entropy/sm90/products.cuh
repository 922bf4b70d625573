// The kernels behind products.h: gemm's sm90 kernel in ping-pong with epilogues of their own, each of which the other
// consumer warpgroup hides behind its products. To be instantiated one dtype a file.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_SM90_PRODUCTS_CUH
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_SM90_PRODUCTS_CUH

#include <math_constants.h>

#include "gemm/sm90/kernel.cuh"
#include "linear_cross_entropy/sm90/products.h"

// Capped logits are another kernel: their arithmetic would cost the other one registers.
template <bool CAPPED>
struct HeadLogitsWork : GemmWork {
    HeadPartial *partials;
    float *logit_sums, *target_logits;
    const float *references;
    const int64_t *target;
    float softcap;
    int stores;
};

struct HeadWeightWork : GemmWork {
    float *sums;
    int accumulate, rounds;
};

#if defined(CUDA_OPS_HOPPER_CODE)

static constexpr float LOG2_E = 1.4426950408889634f;

// Over the four lanes that share a row of the accumulators.
__device__ __forceinline__ float quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, 1));
    return fmaxf(value, __shfl_xor_sync(FULL_WARP, value, 2));
}
__device__ __forceinline__ float quad_sum(float value)
{
    value += __shfl_xor_sync(FULL_WARP, value, 1);
    return value + __shfl_xor_sync(FULL_WARP, value, 2);
}

// The epilogue of the logits: they are replaced by their exponentials where they are. NaN is dropped by fmaxf, but
// comes back with its exponential.
template <typename C, bool CAPPED>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias,
                                           const HeadLogitsWork<CAPPED> &work, const CUtensorMap *map_d, char *buffers,
                                           int &buffer, int64_t matrix, int first_row, int first_column, int group,
                                           int thread)
{
    const int own_column = 2 * (thread % 4), columns = work.n - first_column;
    // All rows' at once: one after the other, their latencies are as long as the other warpgroup's products.
    float given[C::BLOCKS][2];
    int targets[C::BLOCKS][2]; // among the tile's columns, or -1
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = min(first_row + row_of<C>(thread, block, half), work.m - 1);
            given[block][half] = work.references ? work.references[row] : -CUDART_INF_F;
            const int64_t target = work.target[row] - first_column;
            targets[block][half] = 0 <= target && target < C::N && target < columns ? (int)target : -1;
        }
    finish<C>(sum, bias, work, first_row, thread);
    if constexpr (CAPPED) {
        // tanh(x) = 1 - 2 / (exp(2 x) + 1), whose limits come out right.
        const float scale = 2.0f * LOG2_E / work.softcap;
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] =
                    work.softcap * (1.0f - 2.0f * rcp_approx_ftz(ex2_approx_ftz(scale * sum[block][i]) + 1.0f));
    }
    if (columns < C::N)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                if (own_column + 8 * (i / 4) + i % 2 >= columns)
                    sum[block][i] = -CUDART_INF_F;
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + row_of<C>(thread, block, half);
            const int target = targets[block][half];
            if (target < 0 || row >= work.m)
                continue;
#pragma unroll
            for (int i = 0; i < C::N / 8; i++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (target == own_column + 8 * i + e)
                        work.target_logits[row] = sum[block][4 * i + 2 * half + e];
        }
    const int tile = first_column / C::N, tiles = work.clusters_n * C::CLUSTER_N;
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + row_of<C>(thread, block, half);
            const bool is_row = row < work.m;
            const int64_t partial = (int64_t)row * tiles + tile;
            if (work.logit_sums) {
                float total = 0;
#pragma unroll
                for (int i = 0; i < C::N / 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        total += own_column + 8 * i + e < columns ? sum[block][4 * i + 2 * half + e] : 0.0f;
                total = quad_sum(total);
                if (is_row && thread % 4 == 0)
                    work.logit_sums[partial] = total;
            }
            float largest = -CUDART_INF_F;
#pragma unroll
            for (int i = 0; i < C::N / 8; i++)
                largest = fmaxf(largest, fmaxf(sum[block][4 * i + 2 * half], sum[block][4 * i + 2 * half + 1]));
            largest = quad_max(largest);
            const float reference = largest - given[block][half] > LARGEST_EXPONENT ? largest : given[block][half];
            const float shift = reference == -CUDART_INF_F ? 0.0f : reference * LOG2_E;
            float total = 0;
            if constexpr (CAPPED) {
                const float per_cap = 1.0f / work.softcap;
#pragma unroll
                for (int i = 0; i < C::N / 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &value = sum[block][4 * i + 2 * half + e];
                        const float exponential = ex2_approx_ftz(value * LOG2_E - shift), capped = value * per_cap;
                        total += exponential;
                        value = exponential * (1.0f - capped * capped); // NaN past the last class, which nothing reads
                    }
            } else {
#pragma unroll
                for (int i = 0; i < C::N / 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &value = sum[block][4 * i + 2 * half + e];
                        value = ex2_approx_ftz(value * LOG2_E - shift);
                        total += value;
                    }
            }
            total = quad_sum(total);
            if (is_row && thread % 4 == 0)
                work.partials[partial] = {reference, total};
        }
    if (work.stores)
        store_halves<C>(sum, work, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
}

// The epilogue of the gradient of weight. Every element has one thread, so that its sum over chunks has one order.
template <typename C>
__device__ __forceinline__ void
store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &, const HeadWeightWork &work, const CUtensorMap *map_d,
           char *buffers, int &buffer, int64_t matrix, int first_row, int first_column, int group, int thread)
{
    constexpr int TOGETHER = 8;
    static_assert(C::N / 8 % TOGETHER == 0, "whole groups of loads");
    const int column = first_column + 2 * (thread % 4);
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + row_of<C>(thread, block, half);
            if (row >= work.m)
                continue;
            float *const line = work.sums + row * work.ldd;
#pragma unroll
            for (int first = 0; first < C::N / 8; first += TOGETHER) {
                float2 before[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    const int c = column + 8 * (first + i); // whole pairs: in_features is a multiple of 8
                    before[i] = work.accumulate && c < work.n ? *(const float2 *)(line + c) : make_float2(0, 0);
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    const int c = column + 8 * (first + i);
                    float *const s = sum[block] + 4 * (first + i) + 2 * half;
                    s[0] += before[i].x;
                    s[1] += before[i].y;
                    if (!work.rounds && c < work.n)
                        *(float2 *)(line + c) = make_float2(s[0], s[1]);
                }
            }
        }
    if (work.rounds)
        store_halves<C>(sum, work, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
}
#endif // CUDA_OPS_HOPPER_CODE

// gemm_sm90_kernel for another kind of work.
template <typename C, typename Work>
__global__ void __launch_bounds__(C::THREADS, 1)
    linear_cross_entropy_sm90_kernel(const __grid_constant__ CUtensorMap map_a,
                                     const __grid_constant__ CUtensorMap map_b,
                                     const __grid_constant__ CUtensorMap map_d, const __grid_constant__ Work work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::BARRIERS_FROM, empty = full + 8 * C::STAGES;
    const int rank = (int)cluster_ctarank();
    static_assert(C::PINGPONG && C::CLUSTER_N == 1 && C::CLUSTER_M == 2 && !C::IN_REGISTERS, "the barriers' arrivals");
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, C::CLUSTER_M);
        }
        for (int group = 0; group < 2; group++)
            mbarrier_init(empty + 8 * (C::STAGES + group), ORDER_ARRIVALS);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x / WARPGROUP == C::PRODUCER) {
        setmaxnreg_dec<40>();
        if (threadIdx.x % WARPGROUP == 0)
            produce<C>(work, &map_a, &map_b, stages, full, empty, rank, 0);
    } else {
        setmaxnreg_inc<232>();
        consume<C>(work, &map_d, stages, full, empty, shared + (stages + C::BUFFERS_FROM - shared_address(shared)),
                   rank, 0);
    }
#endif
}

#if defined(CUDA_OPS_SM90A)
// Fills in what is the same for both: m x n of k in tiles of C.
template <typename C, typename Work>
static cuda_ops_status launch_head(Work work, const CUtensorMap &map_a, const CUtensorMap &map_b,
                                   const CUtensorMap &map_d, int64_t m, int64_t n, int64_t k, cudaStream_t stream)
{
    const Device device = current_device();
    work.m = (int)m, work.n = (int)n, work.k = work.chunk = (int)k;
    work.batch = work.splits = 1;
    work.alpha = 1;
    work.clusters_m = (int)ceil_div(m, C::M * C::CLUSTER_M);
    work.clusters_n = (int)ceil_div(n, C::N);
    work.group = 6; // as gemm has it for tiles of 192 columns
    const int64_t total = (int64_t)work.clusters_m * work.clusters_n, room = device.multiprocessors / C::CLUSTER;
    if (total > INT32_MAX / 2)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.total = (int)total;
    const auto kernel = linear_cross_entropy_sm90_kernel<C, Work>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    start_clusters(kernel, (total < room ? total : room) * C::CLUSTER, C::THREADS, C::CLUSTER, C::SHARED_BYTES,
                   device.capability, stream, map_a, map_b, map_d, work);
    return launch_status();
}
#endif

template <typename T, bool CAPPED>
static cuda_ops_status head_logits_of(const HeadLogits &call)
{
#if defined(CUDA_OPS_SM90A)
    typedef Tile<T, 128, HEAD_TILE_CLASSES, 2, 1, true, 4, false, false> C;
    const int64_t k = call.in_features;
    CUtensorMap map_a, map_b, map_d;
    bool mapped =
        make_map(&map_a, call.input, call.dtype, false, k, call.rows, 1, k, 0, C::ROW, C::M) &&
        make_map(&map_b, call.weight, call.dtype, false, k, call.classes, 1, k, 0, C::ROW, C::N / C::CLUSTER_M);
    map_d = map_a;
    HeadLogitsWork<CAPPED> work = {};
    if (call.exponentials) {
        work.stores = work.copies_out = 1;
        mapped = mapped && make_map(&map_d, call.exponentials, call.dtype, false, call.pitch, call.rows, 1, call.pitch,
                                    0, C::CHUNK, C::GROUP_M);
    }
    if (!mapped)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.bias = call.bias;
    work.bias_is_float = call.bias_dtype == CUDA_OPS_FLOAT32;
    work.partials = call.partials, work.logit_sums = call.logit_sums, work.target_logits = call.target_logits;
    work.references = call.references, work.target = call.target, work.softcap = call.softcap;
    return launch_head<C>(work, map_a, map_b, map_d, call.rows, call.classes, k, call.stream);
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

template <typename T>
static cuda_ops_status head_logits(const HeadLogits &call)
{
    return call.softcap > 0 ? head_logits_of<T, true>(call) : head_logits_of<T, false>(call);
}

template <typename T>
static cuda_ops_status head_weight_gradient(const HeadWeightGradient &call)
{
#if defined(CUDA_OPS_SM90A)
    typedef Tile<T, 128, 192, 2, 1, true, 4, true, true> C;
    const int64_t n = call.in_features;
    CUtensorMap map_a, map_b, map_d;
    if (!make_map(&map_a, call.exponentials, call.dtype, false, call.classes, call.rows, 1, call.pitch, 0, C::ROW,
                  C::K) ||
        !make_map(&map_b, call.input, call.dtype, false, n, call.rows, 1, n, 0, C::ROW, C::K / C::CLUSTER_M))
        return CUDA_OPS_INVALID_ARGUMENT;
    HeadWeightWork work = {};
    work.sums = call.sums, work.d = call.rounded, work.ldd = n;
    work.accumulate = call.accumulate, work.rounds = call.rounded != nullptr;
    work.copies_out = is_aligned_16(call.rounded);
    map_d = map_a;
    if (work.rounds && work.copies_out &&
        !make_map(&map_d, call.rounded, call.dtype, false, n, call.classes, 1, n, 0, C::CHUNK, C::GROUP_M))
        return CUDA_OPS_INVALID_ARGUMENT;
    return launch_head<C>(work, map_a, map_b, map_d, call.classes, n, call.rows, call.stream);
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
