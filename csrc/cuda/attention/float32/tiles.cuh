// attention, float32 path: tiles in shared memory, and the products of a thread's 8 x 4 or 8 x 8 sums.
//
// A tile has rows as in device memory, and after every eight of them 16 bytes of nothing. A thread's eight rows are
// neighbours: those that the lanes of a warp read at once are eight apart, and so in banks of their own, and all places
// within eight rows are constants. Four elements are read at once.
#ifndef CUDA_OPS_ATTENTION_FLOAT32_TILES_CUH
#define CUDA_OPS_ATTENTION_FLOAT32_TILES_CUH

#include <math_constants.h>

#include "common/common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int ROWS = 8; // of a thread

// Elements of eight rows of D, of so many rows, and before a row.
template <int D>
static constexpr int EIGHT_ROWS = 8 * D + 4;
template <int D>
__host__ __device__ constexpr int tile_elements(int rows)
{
    return rows / 8 * EIGHT_ROWS<D>;
}
template <int D>
__device__ __forceinline__ int row_at(int row)
{
    return row / 8 * EIGHT_ROWS<D> + row % 8 * D;
}

__device__ __forceinline__ float4 four_at(const float *at)
{
    return *reinterpret_cast<const float4 *>(at);
}

// Asks for TILE rows, of which `rows` exist, and of their D elements `elements`, a multiple of four; the rest are zeros.
template <int D, int TILE, int THREADS>
__device__ __forceinline__ void copy_tile(float *to, const float *from, int64_t stride, int64_t rows, int64_t elements)
{
    constexpr int FOURS = D / 4, STEP = THREADS / FOURS;
    static_assert(STEP == 4 || STEP % 8 == 0, "whole eights of rows, or halves");
    const int column = (int)threadIdx.x % FOURS * 4, first = (int)threadIdx.x / FOURS;
    const uint32_t target = shared_address(to + row_at<D>(first) + column);
    const int64_t there = column < elements ? rows : 0;
    from += first * stride + column;
#pragma unroll
    for (int i = 0; i < TILE / STEP; i++) {
        const int place = STEP == 4 ? i / 2 * EIGHT_ROWS<D> + i % 2 * 4 * D : i * (STEP / 8) * EIGHT_ROWS<D>;
        cp_async<16>(target + place * 4, from, first + i * STEP < there ? 16 : 0);
        from += STEP * stride;
    }
}

// sum[r][c] += left row r . right row c, over `elements` elements. left, right: this thread's first rows.
template <int D>
__device__ __forceinline__ void multiply_rows(float (&sum)[ROWS][4], const float *left, const float *right,
                                              int elements)
{
#pragma unroll 1
    for (int first = 0; first < elements; first += 16, left += 16, right += 16)
#pragma unroll
        for (int d = 0; d < 16; d += 4) {
            float4 column[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                column[c] = four_at(right + c * D + d);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 row = four_at(left + r * D + d);
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[r][c] += row.x * column[c].x;
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[r][c] += row.y * column[c].y;
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[r][c] += row.z * column[c].z;
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[r][c] += row.w * column[c].w;
            }
        }
}

// sum[r][four][c] += sum over x < 64 of weights[r][x] * rows[x][64 * four + c]. weights: this thread's first row of a
// tile of 64 columns; rows: its first column.
template <int D>
__device__ __forceinline__ void multiply_weights(float (&sum)[ROWS][D / 64][4], const float *weights, const float *rows)
{
    constexpr int FOURS = D / 64;
#pragma unroll 1
    for (int first = 0; first < 64; first += 8, weights += 8, rows += EIGHT_ROWS<D>)
#pragma unroll
        for (int x = 0; x < 8; x += 4) {
            float4 row[4][FOURS];
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int f = 0; f < FOURS; f++)
                    row[e][f] = four_at(rows + (x + e) * D + 64 * f);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 weight = four_at(weights + r * 64 + x);
                const float of_row[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int f = 0; f < FOURS; f++) {
                        sum[r][f][0] += of_row[e] * row[e][f].x;
                        sum[r][f][1] += of_row[e] * row[e][f].y;
                        sum[r][f][2] += of_row[e] * row[e][f].z;
                        sum[r][f][3] += of_row[e] * row[e][f].w;
                    }
            }
        }
}

// sum[4 * half + r][c] += sum over k < KEYS of weights[k][32 * half + r] * rows[k][c]. weights: this thread's first
// column of a tile of 64; rows: its first column.
template <int D, int KEYS>
__device__ __forceinline__ void multiply_transposed(float (&sum)[ROWS][4], const float *weights, const float *rows)
{
#pragma unroll 1
    for (int first = 0; first < KEYS; first += 8, weights += EIGHT_ROWS<64>, rows += EIGHT_ROWS<D>)
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float4 near = four_at(weights + k * 64), far = four_at(weights + k * 64 + 32);
            const float4 row = four_at(rows + k * D);
            const float weight[ROWS] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                sum[r][0] += weight[r] * row.x;
                sum[r][1] += weight[r] * row.y;
                sum[r][2] += weight[r] * row.z;
                sum[r][3] += weight[r] * row.w;
            }
        }
}

#endif
