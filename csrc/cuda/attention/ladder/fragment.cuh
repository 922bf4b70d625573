// What rungs 4 to 6 share: the scores of tensor cores, and softmax on them without shared memory. mma.sync and wgmma leave
// a product in registers alike: with g = lane / 4 and t = lane % 4, a thread has of its warp's 16 rows
//     x[i]: row g + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 t + i % 2
// so that four lanes share a row, and two shuffles reduce it. Packed by pairs to bf16, scores over 16 columns are as they
// stand the left operand of the next product, whose sum goes over these columns: weights stay in registers too.
#ifndef CUDA_OPS_ATTENTION_LADDER_FRAGMENT_CUH
#define CUDA_OPS_ATTENTION_LADDER_FRAGMENT_CUH

#include <math_constants.h>

#include "attention/ladder/rungs.h"
#include "common/common.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"

typedef __nv_bfloat16 bf16;

static constexpr float LOG2_E = 1.44269504088896341f;

// Of a thread's two rows: the largest score so far, unscaled, and the sum of this thread's exponentials.
struct SoftmaxRows {
    float maximum[2], sum[2];
};
__device__ __forceinline__ SoftmaxRows rows_without_scores()
{
    return {{-CUDART_INF_F, -CUDART_INF_F}, {0, 0}};
}

// -inf where the thread's rows, `query` and query + 8, do not see a key. key: that of x[0].
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&x)[COUNT], const AttentionLadder &a, int query, int key)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int seen = (a.causal ? min(a.keys, query + 8 * r + 1) : a.keys) - key;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i / 2 % 2 == r && 8 * (i / 4) + i % 2 >= seen)
                x[i] = -CUDART_INF_F;
    }
}

// Scores become exponentials; `factor` is what earlier sums, and the output, are to be multiplied by. scale: that of the
// scores times log2(e), since the hardware's exponential is 2^x: exp(scale * (s - maximum)) is one multiply-add and that.
template <int COUNT>
__device__ __forceinline__ void softmax_scores(float (&x)[COUNT], SoftmaxRows &rows, float (&factor)[2], float scale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = rows.maximum[r];
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i / 2 % 2 == r)
                largest = fmaxf(largest, x[i]);
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        factor[r] = ex2_approx_ftz((rows.maximum[r] - largest) * scale);
        rows.maximum[r] = largest;
        float sum[2] = {0, 0}; // two, so that additions do not wait for each other
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i / 2 % 2 == r) {
                x[i] = ex2_approx_ftz(fmaf(x[i], scale, -largest * scale));
                sum[i % 2] += x[i];
            }
        rows.sum[r] = rows.sum[r] * factor[r] + (sum[0] + sum[1]);
    }
}

template <int COUNT>
__device__ __forceinline__ void rescale(float (&x)[COUNT], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] *= factor[i / 2 % 2];
}

template <int COUNT>
__device__ __forceinline__ void pack_scores(uint32_t (&weights)[COUNT / 8][4], const float (&x)[COUNT])
{
#pragma unroll
    for (int k = 0; k < COUNT / 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            weights[k][i] = cvt_rn_bf16x2_f32(x[8 * k + 2 * i + 1], x[8 * k + 2 * i]);
}

// The quotients of the thread's rows, `query` and query + 8, to memory by pairs: four lanes write 16 bytes.
template <int D>
__device__ __forceinline__ void store_rows(const AttentionLadder &a, int head, const float (&output)[D / 2],
                                           const SoftmaxRows &rows, int query)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        const float inverse = 1 / sum;
        const int row = query + 8 * r, first = threadIdx.x % 4 * 2;
        bf16 *const to = static_cast<bf16 *>(a.output) + ((int64_t)head * a.queries + row) * D + first;
#pragma unroll
        for (int i = 2 * r; i < D / 2; i += 4)
            if (row < a.queries)
                *reinterpret_cast<uint32_t *>(to + 2 * i - 4 * r) =
                    cvt_rn_bf16x2_f32(output[i + 1] * inverse, output[i] * inverse);
    }
}

#endif
