// gemm, narrow path, a long D: each warp streams runs of 32 rows of A through shared memory, multiplies them by B,
// which the block holds there, and writes the run of D, by way of shared memory too, as one stretch of memory.
//
// 16 bits: mma.sync. Which k of the instruction an element stands for is free, as long as A and B agree; so a lane's
// four of a step are neighbours in memory, and one load where rows are multiples of 8 bytes. The columns of two tiles
// of 8 are dealt out likewise, so that a lane has four neighbours of D. float32: a lane has four rows and four columns
// of each 16, on the CUDA cores.
#ifndef CUDA_OPS_GEMM_NARROW_ROWS_CUH
#define CUDA_OPS_GEMM_NARROW_ROWS_CUH

#include <string.h>

#include "common/activation.cuh"
#include "gemm/narrow/stream.cuh"

// ALIGNED: elements that one load may take, since rows of A have a multiple of them.
template <int ALIGNED>
__device__ __forceinline__ void load_row(uint32_t &low, uint32_t &high, const char *row, int k, int left)
{
    const unsigned short *const from = (const unsigned short *)row + k;
    low = high = 0;
    if constexpr (ALIGNED == 4) {
        if (left > 0) {
            const uint2 both = *(const uint2 *)from;
            low = both.x, high = both.y;
        }
    } else if constexpr (ALIGNED == 2) {
        if (left > 0)
            low = *(const uint32_t *)from;
        if (left > 2)
            high = *(const uint32_t *)(from + 2);
    } else {
        const uint32_t x = left > 0 ? from[0] : 0, y = left > 1 ? from[1] : 0, z = left > 2 ? from[2] : 0;
        low = x | y << 16;
        high = z | (left > 3 ? (uint32_t)from[3] : 0) << 16;
    }
}

// B as the lanes want it: 16 bits, for each 16 of k and 16 columns the four words of each lane; float32, its rows of
// whole 16 columns.
template <typename T>
__device__ __forceinline__ void keep_b(char *to, const NarrowRows &work)
{
    const int groups = work.groups;
    const T *const b = (const T *)work.b;
    if constexpr (sizeof(T) == 2) {
        const unsigned short *const bits = (const unsigned short *)b;
        const int count = (work.k + 15) / 16 * groups * 4 * WARP_SIZE;
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const int part = i % 4, lane = i / 4 % WARP_SIZE, rest = i / (4 * WARP_SIZE);
            const int step = rest / groups, group = rest - step * groups, g = lane / 4;
            const int k = 16 * step + 4 * (lane % 4) + 2 * (part % 2);
            const int n = 16 * group + 4 * (g / 2) + g % 2 + 2 * (part / 2);
            const int at = k * work.b_k + n * work.b_n;
            const uint32_t low = n < work.n && k < work.k ? bits[at] : 0;
            const uint32_t high = n < work.n && k + 1 < work.k ? bits[at + work.b_k] : 0;
            ((uint32_t *)to)[i] = low | high << 16;
        }
    } else {
        const int columns = 16 * groups, count = (work.k + 3) / 4 * 4 * columns;
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const int k = i / columns, n = i - k * columns;
            ((float *)to)[i] = n < work.n && k < work.k ? b[k * work.b_k + n * work.b_n] : 0.0f;
        }
    }
}

// The sums of a lane: rows `row(i)` and the columns 16 * group + 4 * (lane % 4) + {0, 1, 2, 3}, for the groups from
// `group` on.
static constexpr int LANE_ROWS = 4;
template <typename T>
__device__ __forceinline__ int lane_row(int i, int lane)
{
    return lane / 4 + 8 * i;
}

template <typename T, int ALIGNED, int GROUP>
__device__ __forceinline__ void multiply_run(float (&sum)[GROUP][LANE_ROWS][4], const char *run, const char *kept_b,
                                             const NarrowRows &work, int group, int lane)
{
    const int groups = work.groups, g = lane / 4, t = lane % 4, row_bytes = work.k * (int)sizeof(T);
    if constexpr (sizeof(T) == 2) {
        const uint4 *b = (const uint4 *)kept_b + group * WARP_SIZE + lane;
        for (int k = 4 * t; k < work.k + 4 * t; k += 16, b += groups * WARP_SIZE) {
            uint32_t a[2][4];
#pragma unroll
            for (int half = 0; half < 4; half++)
                load_row<ALIGNED>(a[half / 2][half % 2], a[half / 2][2 + half % 2], run + (g + 8 * half) * row_bytes, k,
                                  work.k - k);
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                const uint4 of_b = b[j * WARP_SIZE];
#pragma unroll
                for (int block = 0; block < 2; block++) {
                    float(&low)[4] = sum[j][2 * block], (&high)[4] = sum[j][2 * block + 1];
                    mma_sync<T>(low[0], low[1], high[0], high[1], a[block], of_b.x, of_b.y);
                    mma_sync<T>(low[2], low[3], high[2], high[3], a[block], of_b.z, of_b.w);
                }
            }
        }
    } else {
        const float4 *b = (const float4 *)kept_b + group * 4 + t;
        const float *const rows = (const float *)run;
        for (int k = 0; k < work.k; k += 4) {
            float a[LANE_ROWS][4];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) {
                const float *const from = rows + lane_row<T>(i, lane) * work.k + k;
                if constexpr (ALIGNED == 4)
                    *(float4 *)a[i] = *(const float4 *)from;
                else
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        a[i][e] = k + e < work.k ? from[e] : 0.0f;
            }
#pragma unroll
            for (int e = 0; e < 4; e++, b += groups * 4)
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    const float4 of_b = b[j * 4];
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; i++) {
                        sum[j][i][0] = fmaf(a[i][e], of_b.x, sum[j][i][0]);
                        sum[j][i][1] = fmaf(a[i][e], of_b.y, sum[j][i][1]);
                        sum[j][i][2] = fmaf(a[i][e], of_b.z, sum[j][i][2]);
                        sum[j][i][3] = fmaf(a[i][e], of_b.w, sum[j][i][3]);
                    }
                }
        }
    }
}

template <typename T>
__device__ __forceinline__ float narrow_bias(const NarrowRows &work, int column)
{
    if (!work.bias || column >= work.n)
        return 0;
    return work.bias_is_float ? ((const float *)work.bias)[column] : load_as_accumulate(((const T *)work.bias)[column]);
}

// Four neighbours of a row of D to shared memory, of which `left` are within it.
template <typename T>
__device__ __forceinline__ void store_four(T *to, const float (&value)[4], int left, bool aligned)
{
    aligned_vector<T, 4> four;
#pragma unroll
    for (int e = 0; e < 4; e++)
        four.element[e] = store_from_accumulate<T>(value[e]);
    if (aligned) {
        if (left > 0)
            *(aligned_vector<T, 4> *)to = four;
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (e < left)
                to[e] = four.element[e];
    }
}

// GROUP: the groups of 16 columns whose sums a warp has at once.
template <typename T, int ALIGNED, int GROUP>
__global__ void __launch_bounds__(THREADS, 2) gemm_narrow_rows_kernel(const __grid_constant__ NarrowRows work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, t = lane % 4;
    const int row_bytes = work.k * (int)sizeof(T), run_bytes = RUN * row_bytes, groups = work.groups;
    char *const runs = shared + work.b_bytes + warp * work.warp_bytes;
    T *const results = (T *)(runs + work.stages * run_bytes);
    const int64_t count = ceil_div(work.rows, RUN), apart = (int64_t)gridDim.x * WARPS;
    const int64_t first = (int64_t)warp * gridDim.x + blockIdx.x;
    wait_for_predecessor();
    release_successor();
    for (int s = 0; s < work.stages - 1; s++) {
        if (first + s * apart < count)
            copy_run(runs + s * run_bytes, (const char *)work.a, first + s * apart, row_bytes, work.rows, lane);
        cp_async_commit_group();
    }
    keep_b<T>(shared, work);
    __syncthreads();
    const bool fours = work.n % 4 == 0;
    int stage = 0;
    for (int64_t run = first; run < count; run += apart) {
        const int64_t next = run + (work.stages - 1) * apart;
        const int to = stage == 0 ? work.stages - 1 : stage - 1;
        if (next < count)
            copy_run(runs + to * run_bytes, (const char *)work.a, next, row_bytes, work.rows, lane);
        cp_async_commit_group();
        wait_for_run(work.stages);
        for (int group = 0; group < groups; group += GROUP) {
            float sum[GROUP][LANE_ROWS][4] = {};
            multiply_run<T, ALIGNED, GROUP>(sum, runs + stage * run_bytes, shared, work, group, lane);
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                const int column = 16 * (group + j) + 4 * t;
                if (column < work.n) {
                    float bias[4];
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        bias[e] = narrow_bias<T>(work, column + e);
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; i++) {
                        float value[4];
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            value[e] = fmaf(sum[j][i][e], work.alpha, bias[e]);
                            value[e] = work.relu && value[e] < 0 ? 0 : value[e]; // NaN stays
                        }
                        store_four(results + lane_row<T>(i, lane) * work.n + column, value, work.n - column, fours);
                    }
                }
            }
        }
        __syncwarp();
        const int64_t begin = run * RUN * work.n * (int64_t)sizeof(T);
        const int64_t left = work.rows * work.n * (int64_t)sizeof(T) - begin;
        const int whole = RUN * work.n * (int)sizeof(T), bytes = left < whole ? (int)left : whole;
        char *const d = (char *)work.d + begin;
        for (int at = 16 * lane; at < bytes; at += 16 * WARP_SIZE)
            if (at + 16 <= bytes)
                *(uint4 *)(d + at) = *(const uint4 *)((const char *)results + at);
            else
                for (int e = at; e < bytes; e += (int)sizeof(T))
                    *(T *)(d + e) = results[e / (int)sizeof(T)];
        __syncwarp(); // before the next run overwrites the results, and the copy after it this one
        stage = stage + 1 == work.stages ? 0 : stage + 1;
    }
#endif
}

template <typename T, int ALIGNED, int GROUP>
static cuda_ops_status launch_rows_of(const NarrowRows &work, GemmDevice device, cudaStream_t stream)
{
    const int bytes = work.b_bytes + WARPS * work.warp_bytes;
    const auto kernel = gemm_narrow_rows_kernel<T, ALIGNED, GROUP>;
    if (const cudaError_t error = allow_shared_memory(kernel, (size_t)bytes); error != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)error;
    const int64_t runs = ceil_div(work.rows, RUN);
    const int64_t room = (int64_t)device.multiprocessors * active_blocks(kernel, THREADS, (size_t)bytes);
    launch_dependent(kernel, dim3((unsigned int)(runs < room ? runs : room)), THREADS, (size_t)bytes, stream, work);
    return launch_status();
}

template <typename T, int ALIGNED>
static cuda_ops_status launch_rows_aligned(const NarrowRows &work, GemmDevice device, cudaStream_t stream)
{
    return work.groups == 1   ? launch_rows_of<T, ALIGNED, 1>(work, device, stream)
           : work.groups == 2 ? launch_rows_of<T, ALIGNED, 2>(work, device, stream)
                              : launch_rows_of<T, ALIGNED, 4>(work, device, stream);
}

template <typename T>
static cuda_ops_status launch_rows(const NarrowRows &work, GemmDevice device, cudaStream_t stream)
{
    if (work.k % 4 == 0)
        return launch_rows_aligned<T, 4>(work, device, stream);
    if constexpr (sizeof(T) == 2)
        if (work.k % 2 == 0)
            return launch_rows_aligned<T, 2>(work, device, stream);
    return launch_rows_aligned<T, 1>(work, device, stream);
}

#endif
