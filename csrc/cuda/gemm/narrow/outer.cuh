// gemm, narrow path, a short k: D's rows are long, and its bytes are nearly all that is moved. A thread keeps B's four
// columns in registers and goes down the rows; A's come through shared memory, for the whole block at once. On the CUDA
// cores, in float32, one k after the other.
#ifndef CUDA_OPS_GEMM_NARROW_OUTER_CUH
#define CUDA_OPS_GEMM_NARROW_OUTER_CUH

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "gemm/narrow/narrow.h"

static constexpr int OUTER_THREADS = 256, OUTER_ROWS = 32, OUTER_COLUMNS = 4; // of a block, at most, and of a thread
static_assert(OUTER_THREADS * OUTER_COLUMNS == OUTER_BLOCK_COLUMNS, "what a block has of a row");

// K: k, rounded up; beyond k are zeros.
template <typename T, int K>
__global__ void __launch_bounds__(OUTER_THREADS, 2) gemm_narrow_outer_kernel(const __grid_constant__ NarrowOuter work)
{
    __shared__ __align__(16) float rows[OUTER_ROWS][K];
    const int across = blockIdx.x % work.across, at_once = OUTER_THREADS / work.lanes;
    const int64_t column = ((int64_t)across * work.lanes + threadIdx.x % work.lanes) * OUTER_COLUMNS;
    const int first = threadIdx.x / work.lanes;
    wait_for_predecessor();
    release_successor();
    float b[K][OUTER_COLUMNS], bias[OUTER_COLUMNS];
    if (work.fours_b) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            aligned_vector<T, OUTER_COLUMNS> four = {};
            if (column < work.n && k < work.k)
                four = *(const aligned_vector<T, OUTER_COLUMNS> *)((const T *)work.b + k * work.b_k + column);
#pragma unroll
            for (int e = 0; e < OUTER_COLUMNS; e++)
                b[k][e] = load_as_accumulate(four.element[e]);
        }
    } else if (K % 4 == 0 && work.fours_b_k) {
#pragma unroll
        for (int e = 0; e < OUTER_COLUMNS; e++)
#pragma unroll
            for (int k = 0; k + 4 <= K; k += 4) {
                aligned_vector<T, 4> four = {};
                if (column + e < work.n && k < work.k)
                    four = *(const aligned_vector<T, 4> *)((const T *)work.b + (column + e) * work.b_n + k);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[k + i][e] = load_as_accumulate(four.element[i]);
            }
    } else {
#pragma unroll
        for (int e = 0; e < OUTER_COLUMNS; e++)
#pragma unroll
            for (int k = 0; k < K; k++)
                b[k][e] = column + e < work.n && k < work.k
                              ? load_as_accumulate(((const T *)work.b)[k * work.b_k + (column + e) * work.b_n])
                              : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < OUTER_COLUMNS; e++) {
        const bool inside = column + e < work.n;
        bias[e] = !work.bias || !inside ? 0.0f
                  : work.bias_is_float  ? ((const float *)work.bias)[column + e]
                                        : load_as_accumulate(((const T *)work.bias)[column + e]);
    }
    const int64_t apart = (int64_t)(gridDim.x / work.across) * work.rows;
    for (int64_t row = (int64_t)(blockIdx.x / work.across) * work.rows; row < work.m; row += apart) {
        const int count = work.m - row < work.rows ? (int)(work.m - row) : work.rows;
        __syncthreads(); // the rows before have been read
        // Neighbouring threads load what lies side by side, along m or along k.
        for (int i = threadIdx.x; i < OUTER_ROWS * K; i += OUTER_THREADS) {
            const int r = work.a_m == 1 ? i % OUTER_ROWS : i / K, k = work.a_m == 1 ? i / OUTER_ROWS : i % K;
            if (r < count)
                rows[r][k] =
                    k < work.k ? load_as_accumulate(((const T *)work.a)[(row + r) * work.a_m + k * work.a_k]) : 0.0f;
        }
        __syncthreads();
        if (column >= work.n)
            continue;
#pragma unroll 2
        for (int r = first; r < count; r += at_once) {
            float sum[OUTER_COLUMNS] = {};
#pragma unroll
            for (int k = 0; k < K; k++)
#pragma unroll
                for (int e = 0; e < OUTER_COLUMNS; e++)
                    sum[e] = fmaf(rows[r][k], b[k][e], sum[e]);
            aligned_vector<T, OUTER_COLUMNS> four;
#pragma unroll
            for (int e = 0; e < OUTER_COLUMNS; e++) {
                const float value = fmaf(sum[e], work.alpha, bias[e]);
                four.element[e] = store_from_accumulate<T>(work.relu && value < 0 ? 0.0f : value); // NaN stays
            }
            T *const d = (T *)work.d + (row + r) * work.ldd + column;
            if (work.fours) {
                *(aligned_vector<T, OUTER_COLUMNS> *)d = four;
            } else {
#pragma unroll
                for (int e = 0; e < OUTER_COLUMNS; e++)
                    if (column + e < work.n)
                        d[e] = four.element[e];
            }
        }
    }
}

template <typename T, int K>
static cuda_ops_status launch_outer_of(NarrowOuter work, GemmDevice device, cudaStream_t stream)
{
    // All threads along a row, even where that leaves most of them without columns: fewer were slower at all sizes.
    work.lanes = OUTER_THREADS;
    work.across = (int)ceil_div(ceil_div(work.n, OUTER_COLUMNS), work.lanes);
    const auto kernel = gemm_narrow_outer_kernel<T, K>;
    const int64_t room =
        ceil_div((int64_t)device.multiprocessors * active_blocks(kernel, OUTER_THREADS, 0), work.across);
    // A short D has fewer rows a block, so that there is one for each place on the GPU.
    const int64_t at_once = OUTER_THREADS / work.lanes, fair = ceil_div(ceil_div(work.m, room), at_once) * at_once;
    work.rows = (int)(fair < OUTER_ROWS ? fair : OUTER_ROWS);
    const int64_t groups = ceil_div(work.m, work.rows), down = groups < room ? groups : room;
    launch_dependent(kernel, dim3((unsigned int)(down * work.across)), OUTER_THREADS, 0, stream, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_outer(const NarrowOuter &work, GemmDevice device, cudaStream_t stream)
{
    if (work.k <= 2)
        return launch_outer_of<T, 2>(work, device, stream);
    if (work.k <= 4)
        return launch_outer_of<T, 4>(work, device, stream);
    if constexpr (sizeof(T) == 4)
        return work.k <= 8 ? launch_outer_of<T, 8>(work, device, stream) : launch_outer_of<T, 16>(work, device, stream);
    return CUDA_OPS_INVALID_ARGUMENT;
}

#endif
