// attention, mma_3xtf32 path: products of float32 tiles by mma.sync in TF32, three for one (Ootomo and Yokota,
// "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance",
// 2022). A number is high + low, each a TF32 number, and a product high high' + (low high' + high low'); what is left
// out is 2^-22 of it. The tensor cores cut their sums off where float32 rounds them: scores and sums of 64 weights are
// theirs, gradients of weights, which cancel, for sixteen elements at a time, and all else is added up by ordinary additions;
// the small products have sums of their own.
//
// By lane = 4 g + t an instruction's left operand has rows g and g + 8 and elements t and t + 4, its right one columns g
// and elements t and t + 4, and the result columns 2 t and 2 t + 1. Which elements of a row these are is free, as long as
// both operands agree, and so are columns of the right operand: both are chosen so that a lane reads 16 bytes at once.
#ifndef CUDA_OPS_ATTENTION_MMA_3XTF32_TILES_CUH
#define CUDA_OPS_ATTENTION_MMA_3XTF32_TILES_CUH

#include <math_constants.h>

#include "common/common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt_tf32.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
static constexpr int TILE = 64; // queries or keys of a tile

// A tile has 64 rows as in device memory, whose vectors of 16 bytes are permuted within 128 bytes by the row's number:
// what eight lanes read at once, four vectors of two neighbouring rows or two vectors, two apart, of four rows, two
// apart, is in banks of its own.
__device__ __forceinline__ int permuted(int row, int four)
{
    return four ^ ((row >> 1 & 1) | ((row >> 2 ^ row) & 1) << 2);
}
// Only the row's number within eight counts: rows that are multiples of eight further are at constants.
template <int D>
__device__ __forceinline__ const float *four_of(const float *tile, int row, int four)
{
    return tile + row * D + 4 * permuted(row, four);
}
__device__ __forceinline__ float4 four_at(const float *at)
{
    return *reinterpret_cast<const float4 *>(at);
}

// Asks for 64 rows, of which `rows` exist, and of their D elements `elements`, a multiple of four; the rest are zeros.
template <int D>
__device__ __forceinline__ void copy_tile(float *to, const float *from, int64_t stride, int64_t rows, int64_t elements)
{
    constexpr int FOURS = D / 4, STEP = THREADS / FOURS;
    const int four = (int)threadIdx.x % FOURS, first = (int)threadIdx.x / FOURS;
    const int64_t there = 4 * four < elements ? rows : 0;
#pragma unroll
    for (int i = 0; i < TILE; i += STEP) {
        const int row = first + i;
        const bool exists = row < there;
        cp_async<16>(shared_address(to + row * D + 4 * permuted(row, four)),
                     exists ? from + row * stride + 4 * four : from, exists ? 16 : 0);
    }
}

struct SplitFour {
    uint32_t high[4], low[4];
};
// The tensor cores read the upper 19 bits: of what is left below high, at most 13 bits, all but the last.
__device__ __forceinline__ SplitFour split(float x, float y, float z, float w)
{
    const float values[4] = {x, y, z, w};
    SplitFour result;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        result.high[i] = cvt_rn_tf32(values[i]);
        result.low[i] = __float_as_uint(values[i] - __uint_as_float(result.high[i]));
    }
    return result;
}
__device__ __forceinline__ SplitFour split(float4 v)
{
    return split(v.x, v.y, v.z, v.w);
}

// Infinities leave no numbers below them: then the products of the upper parts are right by themselves.
__device__ __forceinline__ float with_small(float sum, float small)
{
    const float both = sum + small;
    return both == both ? both : sum;
}

// sum and small += left . right, right's elements being i and i + 1 of a split four. EXCHANGED: the sum is the same, bit
// by bit, that it is where left is right and right left.
template <bool EXCHANGED>
__device__ __forceinline__ void multiply_split(float (&sum)[4], float (&small)[4], const SplitFour &left,
                                               uint32_t high0, uint32_t high1, uint32_t low0, uint32_t low1)
{
    if (!EXCHANGED)
        mma_sync<float>(small, left.low, high0, high1);
    mma_sync<float>(small, left.high, low0, low1);
    if (EXCHANGED)
        mma_sync<float>(small, left.low, high0, high1);
    mma_sync<float>(sum, left.high, high0, high1);
}

// sum[n] = left rows . right rows, over `elements` elements: 16 rows by 64. EXACT: sixteen elements' products are the tensor
// cores' sum, and these are added up by ordinary additions.
template <int D, bool EXCHANGED, bool EXACT>
__device__ __forceinline__ void multiply_rows(float (&sum)[8][4], const float *left, const float *right, int elements)
{
    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    float small[8][4] = {};
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[n][e] = 0;
#pragma unroll 1
    for (int four = 0; 4 * four < elements; four += 4) {
        const float *const own = four_of<D>(left, g, four + t), *const other = four_of<D>(right, g, four + t);
        const float4 near = four_at(own), far = four_at(own + 8 * D);
        const SplitFour first = split(near.x, far.x, near.y, far.y), second = split(near.z, far.z, near.w, far.w);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const SplitFour of_right = split(four_at(other + 8 * n * D));
            float own_sum[4] = {};
            float(&to)[4] = EXACT ? own_sum : sum[n];
            multiply_split<EXCHANGED>(to, small[n], first, of_right.high[0], of_right.high[1], of_right.low[0],
                                      of_right.low[1]);
            multiply_split<EXCHANGED>(to, small[n], second, of_right.high[2], of_right.high[3], of_right.low[2],
                                      of_right.low[3]);
            if (EXACT)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[n][e] += own_sum[e];
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[n][e] = with_small(sum[n][e], small[n][e]);
}

// A lane's part of 16 rows of D columns: of every 32 columns, eight of each of two rows. sum[h][r][j] are the four from
// column_of(h, j) on of row r, which is g + 8 r where the left operand's rows are as multiply_rows leaves them.
template <int D>
struct RowSums16 {
    float4 of[D / 32][2][2];
};
__device__ __forceinline__ int column_of(int h, int j)
{
    return 64 * (h / 2) + 4 * (h % 2) + 8 * j + 16 * ((int)threadIdx.x % 4);
}

// sum = factors * sum + weights rows: 16 x 64 weights as multiply_rows leaves them by 64 rows of D columns.
template <int D>
__device__ __forceinline__ void multiply_weights(RowSums16<D> &sum, const float (&weights)[8][4], const float *rows,
                                                 const float (&factors)[2])
{
    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < D / 32; h++) {
        const int four = 16 * (h / 2) + h % 2 + 2 * g;
        const float *const even = four_of<D>(rows, 2 * t, four), *const odd = four_of<D>(rows, 2 * t + 1, four);
        float added[4][4] = {}, small[4][4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const SplitFour left = split(weights[k][0], weights[k][2], weights[k][1], weights[k][3]);
            const SplitFour near = split(four_at(even + 8 * k * D)), far = split(four_at(odd + 8 * k * D));
#pragma unroll
            for (int y = 0; y < 4; y++)
                multiply_split<false>(added[y], small[y], left, near.high[y], far.high[y], near.low[y], far.low[y]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float4 &to = sum.of[h][r][j];
                const int e = 2 * r + j;
                to.x = fmaf(to.x, factors[r], with_small(added[0][e], small[0][e]));
                to.y = fmaf(to.y, factors[r], with_small(added[1][e], small[1][e]));
                to.z = fmaf(to.z, factors[r], with_small(added[2][e], small[2][e]));
                to.w = fmaf(to.w, factors[r], with_small(added[3][e], small[3][e]));
            }
    }
}

// Stores rows row and row + 8 of a lane, or row and row + 1 (NEIGHBOURS), of which those below `rows` exist.
template <int D>
__device__ __forceinline__ void store_rows(float *to, int64_t stride, int row, int64_t rows, int64_t elements,
                                           const RowSums16<D> &sum, const float (&factors)[2])
{
#pragma unroll
    for (int h = 0; h < D / 32; h++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float4 &v = sum.of[h][r][j];
                if (row + 8 * r < rows && column_of(h, j) < elements)
                    *reinterpret_cast<float4 *>(to + (row + 8 * r) * stride + column_of(h, j)) =
                        make_float4(v.x * factors[r], v.y * factors[r], v.z * factors[r], v.w * factors[r]);
            }
}

#endif
