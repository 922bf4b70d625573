// What rungs 1 to 3 share: tiles in shared memory, in float32 whatever the tensors hold, and their products on the CUDA
// cores. A block has 64 queries, and goes over keys in tiles of 64 (head_dim 64) or 32 (128). Its 256 threads stand in a
// square: thread (x, y) makes rows 4 y to 4 y + 3, and of the scores' columns x, x + 16, ...
#ifndef CUDA_OPS_ATTENTION_LADDER_TILE_CUH
#define CUDA_OPS_ATTENTION_LADDER_TILE_CUH

#include <math_constants.h>

#include "attention/ladder/rungs.h"
#include "common/common.cuh"

static constexpr int THREADS = 256, ACROSS = 16, ROWS = 4;
static constexpr int QUERIES = THREADS / ACROSS * ROWS;
template <int D>
static constexpr int KEYS = 4096 / D;
template <int D>
static constexpr int COLUMNS = KEYS<D> / ACROSS; // of a thread's scores
template <int D>
static constexpr int OUTPUTS = D / ACROSS; // of a thread's columns of the output, in fours

// A row of a tile, in floats: four more than it has elements, so that the rows that eight threads read by 16 bytes each
// lie in different banks.
static constexpr int pitch(int columns)
{
    return columns + 4;
}
template <int D>
struct Tiles {
    float query[QUERIES][pitch(D)], other[KEYS<D>][pitch(D)], weights[QUERIES][pitch(KEYS<D>)];
};

__device__ __forceinline__ int thread_x()
{
    return threadIdx.x % ACROSS;
}
__device__ __forceinline__ int first_row_of_thread()
{
    return threadIdx.x / ACROSS * ROWS;
}

// The rows from `first` on, of `count` that there are; zeros beyond.
template <typename T, int D, int N>
__device__ __forceinline__ void load_tile(float (&tile)[N][pitch(D)], const T *rows, int first, int count)
{
    for (int i = threadIdx.x; i < N * D; i += THREADS) {
        const int row = i / D, column = i % D;
        tile[row][column] = first + row < count ? load_as_accumulate(rows[(int64_t)(first + row) * D + column]) : 0.0f;
    }
}

__device__ __forceinline__ void multiply_add(float &sum, float4 a, float4 b)
{
    sum = fmaf(a.x, b.x, sum), sum = fmaf(a.y, b.y, sum), sum = fmaf(a.z, b.z, sum), sum = fmaf(a.w, b.w, sum);
}
__device__ __forceinline__ float4 four_at(const float *from)
{
    return *reinterpret_cast<const float4 *>(from);
}

// scale * query key^T of the tiles; -inf where there is no key, or the query does not see it.
template <int D>
__device__ __forceinline__ void scores_of_tiles(float (&scores)[ROWS][COLUMNS<D>], const Tiles<D> &tiles,
                                                const AttentionLadder &a, int first_query, int first_key)
{
    const int x = thread_x(), row = first_row_of_thread();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS<D>; c++)
            scores[r][c] = 0;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float4 query[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            query[r] = four_at(&tiles.query[row + r][d]);
#pragma unroll
        for (int c = 0; c < COLUMNS<D>; c++) {
            const float4 key = four_at(&tiles.other[x + ACROSS * c][d]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                multiply_add(scores[r][c], query[r], key);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS<D>; c++) {
            const int query = first_query + row + r, key = first_key + x + ACROSS * c;
            const bool seen = key < a.keys && (!a.causal || key <= query);
            scores[r][c] = seen ? scores[r][c] * a.scale : -CUDART_INF_F;
        }
}

template <int D>
__device__ __forceinline__ void put_weights(Tiles<D> &tiles, const float (&weights)[ROWS][COLUMNS<D>])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS<D>; c++)
            tiles.weights[first_row_of_thread() + r][thread_x() + ACROSS * c] = weights[r][c];
}

// output += weights times values, of the tiles. Thread (x, y) has of its rows the columns 64 j + 4 x to 64 j + 4 x + 3.
template <int D>
__device__ __forceinline__ void add_values(float (&output)[ROWS][OUTPUTS<D>], const Tiles<D> &tiles)
{
#pragma unroll 2
    for (int key = 0; key < KEYS<D>; key += 4) {
        float4 weight[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            weight[r] = four_at(&tiles.weights[first_row_of_thread() + r][key]);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < OUTPUTS<D>; j += 4) {
                const float4 value = four_at(&tiles.other[key + k][16 * j + 4 * thread_x()]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float w = k == 0 ? weight[r].x : k == 1 ? weight[r].y : k == 2 ? weight[r].z : weight[r].w;
                    output[r][j] = fmaf(w, value.x, output[r][j]);
                    output[r][j + 1] = fmaf(w, value.y, output[r][j + 1]);
                    output[r][j + 2] = fmaf(w, value.z, output[r][j + 2]);
                    output[r][j + 3] = fmaf(w, value.w, output[r][j + 3]);
                }
            }
    }
}

// Row r times factors[r], to memory.
template <typename T, int D>
__device__ __forceinline__ void store_output(T *rows, const float (&output)[ROWS][OUTPUTS<D>],
                                             const float (&factors)[ROWS], int first_query, int queries)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int query = first_query + first_row_of_thread() + r;
#pragma unroll
        for (int j = 0; j < OUTPUTS<D>; j++)
            if (query < queries)
                rows[(int64_t)query * D + 16 * (j / 4 * 4) + 4 * thread_x() + j % 4] =
                    store_from_accumulate<T>(output[r][j] * factors[r]);
    }
}

// Over the 16 threads that share rows.
__device__ __forceinline__ float sum_of_row(float value)
{
#pragma unroll
    for (int apart = ACROSS / 2; apart > 0; apart /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, apart);
    return value;
}
__device__ __forceinline__ float maximum_of_row(float value)
{
#pragma unroll
    for (int apart = ACROSS / 2; apart > 0; apart /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, apart));
    return value;
}

// The keys that a block's queries see: none beyond its last query, where causal.
__device__ __forceinline__ int keys_of_block(const AttentionLadder &a, int first_query)
{
    return a.causal ? min(a.keys, first_query + QUERIES) : a.keys;
}

// Runs the statement with T and D for the call's; without keys the output is zeros.
#define DISPATCH_ATTENTION(call, a, T, D, ...)                                                                         \
    if ((a).heads == 0 || (a).queries == 0)                                                                            \
        return CUDA_OPS_SUCCESS;                                                                                       \
    if ((a).keys == 0) {                                                                                               \
        cudaMemsetAsync((a).output, 0, (call).outputs[0].count *element_bytes((call).outputs[0]), (call).stream);      \
        return launch_status();                                                                                        \
    }                                                                                                                  \
    if ((call).inputs[0].dtype == CUDA_OPS_FLOAT32) {                                                                  \
        typedef float T;                                                                                               \
        DISPATCH_HEAD_DIM(a, D, __VA_ARGS__)                                                                           \
    } else {                                                                                                           \
        typedef __nv_bfloat16 T;                                                                                       \
        DISPATCH_HEAD_DIM(a, D, __VA_ARGS__)                                                                           \
    }
#define DISPATCH_HEAD_DIM(a, D, ...)                                                                                   \
    if ((a).head_dim == 64) {                                                                                          \
        constexpr int D = 64;                                                                                          \
        __VA_ARGS__;                                                                                                   \
    } else {                                                                                                           \
        constexpr int D = 128;                                                                                         \
        __VA_ARGS__;                                                                                                   \
    }

#endif
