// What layer_norm's kernels share: sums over the threads that have a row between them, and the row's parameters.
#ifndef CUDA_OPS_LAYER_NORM_ROWS_CUH
#define CUDA_OPS_LAYER_NORM_ROWS_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

static constexpr int MOST_WARPS = 32; // of a block
static constexpr int MOST_CLUSTER = 8;

// What the sums of a row go through. Two of each, used alternately: nobody writes one again before a barrier that all
// come to after they have read it.
template <typename A, int VALUES>
struct RowScratch {
    A warp[2][VALUES][MOST_WARPS];
    A blocks[2][MOST_CLUSTER][VALUES]; // the sums of the cluster's blocks, which send them here
    uint64_t arrived[2];               // mbarriers: all of them have
};

// Once, before the sums of clusters.
template <bool CLUSTER, typename A, int VALUES>
__device__ __forceinline__ void prepare_row_sums(RowScratch<A, VALUES> &scratch)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
        if (threadIdx.x == 0) {
            mbarrier_init(shared_address(&scratch.arrived[0]), 1);
            mbarrier_init(shared_address(&scratch.arrived[1]), 1);
            fence_mbarrier_init();
        }
        cluster_sync_relaxed();
    }
#endif
}

// Sums over the `threads` neighbouring threads that have a row, and over the blocks of the cluster; all get them.
// threads: a power of two up to 32, or a multiple of 32. `turn` is 0 at first. `apart`: the rows that a block has side by
// side do not wait for each other.
// Blocks of a cluster send each other their sums by st.async, and wait for those of the others alone: a barrier of the
// cluster, which would have to release them, also waits until the row before has been written to memory.
template <bool CLUSTER, typename A, int COUNT, int VALUES>
__device__ __forceinline__ void row_sums(A (&values)[COUNT], int threads, int cluster, RowScratch<A, VALUES> &scratch,
                                         int &turn, bool apart = false)
{
    static_assert(COUNT <= VALUES, "the scratch has room");
    const int lane = threadIdx.x % WARP_SIZE, buffer = turn & 1;
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
        if (offset < threads)
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                values[k] += __shfl_xor_sync(FULL_WARP, values[k], offset);
    if (threads <= WARP_SIZE && !CLUSTER)
        return;
    const int warps = threads / WARP_SIZE, first = threadIdx.x / threads * warps; // those of the row
    if (lane == 0)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            scratch.warp[buffer][k][threadIdx.x / WARP_SIZE] = values[k];
    if (apart)
        bar_sync(1 + threadIdx.x / threads, threads);
    else
        __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = warp_sum(lane < warps ? scratch.warp[buffer][k][first + lane] : A(0));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
        const uint32_t arrived = shared_address(&scratch.arrived[buffer]);
        if (threadIdx.x < WARP_SIZE) {
            if (lane == 0)
                mbarrier_arrive_expect_tx(arrived, cluster * COUNT * sizeof(A));
            if (lane < cluster)
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    st_async(mapa(shared_address(&scratch.blocks[buffer][cluster_ctarank()][k]), lane), values[k],
                             mapa(arrived, lane));
        }
        mbarrier_wait_cluster(arrived, turn >> 1);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            values[k] = warp_sum(lane < cluster ? scratch.blocks[buffer][lane][k] : A(0));
    }
#endif
    turn = (turn + 1) & 3; // the buffer, and the parity of its mbarrier
}

// The variance, of the mean squared difference from a mean that is off by `rest`. Where the square overflows, so may the
// correction, and their difference would be NaN. NaN stays.
template <typename A>
__device__ __forceinline__ A variance_of(A mean_square, A rest)
{
    const A variance = isinf(mean_square) ? mean_square : mean_square - rest * rest;
    return variance < A(0) ? A(0) : variance;
}

template <typename A>
__device__ __forceinline__ A rstd_of(A mean_square, A rest, A eps)
{
    return rsqrt(variance_of(mean_square, rest) + eps);
}

// A parameter, which is `full` (in the accumulation type) or of the dtype T.
template <typename T>
__device__ __forceinline__ accumulate_type<T> parameter_at(const void *parameters, bool full, int64_t at)
{
    return sizeof(T) < sizeof(accumulate_type<T>) && full ? ((const accumulate_type<T> *)parameters)[at]
                                                          : load_as_accumulate(((const T *)parameters)[at]);
}

// COUNT values of weight or bias from column `at` on, which are `full` (in the accumulation type) or of the dtype T.
// Aligned to 16 bytes unless COUNT is 1.
template <typename T, int COUNT>
__device__ __forceinline__ void load_parameters(accumulate_type<T> (&values)[COUNT], const void *parameters, bool full,
                                                int64_t at)
{
    typedef accumulate_type<T> A;
    if (sizeof(T) < sizeof(A) && full) {
        constexpr int PART = COUNT < 16 / (int)sizeof(A) ? COUNT : 16 / (int)sizeof(A);
        typedef aligned_vector<A, PART> V;
#pragma unroll
        for (int part = 0; part < COUNT / PART; part++) {
            const V v = reinterpret_cast<const V *>((const A *)parameters + at)[part];
#pragma unroll
            for (int e = 0; e < PART; e++)
                values[part * PART + e] = v.element[e];
        }
    } else {
        typedef aligned_vector<T, COUNT> V;
        const V v = *reinterpret_cast<const V *>((const T *)parameters + at);
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            values[e] = element_of(v, e);
    }
}

// The power of two from `count` on, or the multiple of a warp.
static inline int round_threads(int64_t count)
{
    int threads = 1;
    while (threads < WARP_SIZE && threads < count)
        threads *= 2;
    return threads < count ? (int)(ceil_div(count, WARP_SIZE) * WARP_SIZE) : threads;
}

// Rows that a block of up to `most` threads has at once: whole warps, and no more than fill the device's
// multiprocessors.
static inline int choose_slots(int threads, int most, int64_t rows, int multiprocessors)
{
    const int64_t least = threads < WARP_SIZE ? WARP_SIZE / threads : 1;
    const int64_t wanted = ceil_div(rows, multiprocessors > 0 ? multiprocessors : 1);
    const int64_t slots = wanted < most / threads ? wanted : most / threads;
    return (int)(slots > least ? slots / least * least : least);
}

#endif
