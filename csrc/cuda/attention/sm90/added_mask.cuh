// A mask that is added to scores, and its gradient, as attention's kernels on Hopper have them: read where a product's
// registers lie, from global memory, two neighbours of a row at once.
//
// Scores are then in natural units, sums of a rounded product and the mask as on every other path, not in those of log2:
// times log2(e) the lowest float would be -inf. What of logsumexp a float does not hold (attention.h) is found by the mma
// path's kernel, which says of every 64 queries whether there is any.
#ifndef CUDA_OPS_ATTENTION_SM90_ADDED_MASK_CUH
#define CUDA_OPS_ATTENTION_SM90_ADDED_MASK_CUH

#include "attention/sm90/added_mask.h"
#include "attention/sm90/fragments.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async_bulk_prefetch.cuh"
#include "ptx/movmatrix.cuh"

#if defined(CUDA_OPS_HOPPER_CODE)

template <typename T>
__device__ __forceinline__ float2 mask_pair(const T *from)
{
    return unpack_pair<T>(__ldg(reinterpret_cast<const uint32_t *>(from)));
}
template <>
__device__ __forceinline__ float2 mask_pair<float>(const float *from)
{
    return __ldg(reinterpret_cast<const float2 *>(from));
}

// As `score` of attention/scores.cuh has it: not as one operation.
__device__ __forceinline__ float masked_score(float product, float scale, float mask)
{
    return __fadd_rn(__fmul_rn(product, scale), mask);
}

// Where a batch and head's mask begins.
template <typename M>
__device__ __forceinline__ const M *mask_of_head(const AddedMask &mask, int batch, int head)
{
    return (const M *)mask.values + batch * mask.batch + head * mask.head;
}

template <typename T>
__device__ __forceinline__ void fetch_mask(const AddedMask &mask, int batch, int head)
{
    if (mask.ahead > 0)
        bulk_prefetch_l2(mask.is_float ? (const void *)mask_of_head<float>(mask, batch, head)
                                       : (const void *)mask_of_head<T>(mask, batch, head),
                         mask.ahead);
}

template <int N, typename M>
__device__ __forceinline__ void add_mask_pairs(float (&s)[N / 2], const M *near, const M *far, int column, int last,
                                               float scale)
{
#pragma unroll
    for (int c = 0; c < N / 8; c++) {
        const int at = min(column + 8 * c, last);
        const float2 n = mask_pair(near + at), f = mask_pair(far + at);
        s[4 * c] = masked_score(s[4 * c], scale, n.x), s[4 * c + 1] = masked_score(s[4 * c + 1], scale, n.y);
        s[4 * c + 2] = masked_score(s[4 * c + 2], scale, f.x), s[4 * c + 3] = masked_score(s[4 * c + 3], scale, f.y);
    }
}
template <typename T, int N>
__device__ __forceinline__ void add_mask_to_rows(float (&s)[N / 2], const AddedMask &mask, int batch, int head, int row,
                                                 int last_row, int column, int last_column)
{
    const int64_t near = (int64_t)min(max(row, 0), last_row) * mask.row;
    const int64_t far = (int64_t)min(max(row + 8, 0), last_row) * mask.row;
    if (mask.is_float) {
        const float *const from = mask_of_head<float>(mask, batch, head);
        add_mask_pairs<N>(s, from + near, from + far, column, last_column, mask.scale);
    } else {
        const T *const from = mask_of_head<T>(mask, batch, head);
        add_mask_pairs<N>(s, from + near, from + far, column, last_column, mask.scale);
    }
}

// Of halves a lane reads pairs of keys of a query, as they lie in memory, and the warp transposes them.
template <typename T, int M>
__device__ __forceinline__ void add_mask_to_columns(float (&p)[M / 2], const AddedMask &mask, int batch, int head,
                                                    int first_query, int last_query, int key, int last_key)
{
    const int lane = threadIdx.x % WARP_SIZE, quad = lane % 4;
    if (mask.is_float) {
        const float *const from = mask_of_head<float>(mask, batch, head);
        const int near = min(key, last_key), far = min(key + 8, last_key);
#pragma unroll
        for (int c = 0; c < M / 8; c++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *const row = from + (int64_t)min(first_query + 8 * c + 2 * quad + e, last_query) * mask.row;
                p[4 * c + e] = masked_score(p[4 * c + e], mask.scale, __ldg(row + near));
                p[4 * c + 2 + e] = masked_score(p[4 * c + 2 + e], mask.scale, __ldg(row + far));
            }
    } else {
        const T *const from = mask_of_head<T>(mask, batch, head);
        const int pair = key - lane / 4 + 2 * quad, last_pair = last_key - 1;
        const int near = min(pair, last_pair), far = min(pair + 8, last_pair);
#pragma unroll
        for (int c = 0; c < M / 8; c++) {
            const T *const row = from + (int64_t)min(first_query + 8 * c + lane / 4, last_query) * mask.row;
            const uint32_t n = __ldg(reinterpret_cast<const uint32_t *>(row + near));
            const uint32_t f = __ldg(reinterpret_cast<const uint32_t *>(row + far));
            const float2 a = unpack_pair<T>(movmatrix_trans(n)), b = unpack_pair<T>(movmatrix_trans(f));
            p[4 * c] = masked_score(p[4 * c], mask.scale, a.x);
            p[4 * c + 1] = masked_score(p[4 * c + 1], mask.scale, a.y);
            p[4 * c + 2] = masked_score(p[4 * c + 2], mask.scale, b.x);
            p[4 * c + 3] = masked_score(p[4 * c + 3], mask.scale, b.y);
        }
    }
}

template <int M>
__device__ __forceinline__ bool has_remainder(const AddedMask &mask, int all_head, int queries, int first_query)
{
    const int tiles = ceil_div(queries, REMAINDER_ROWS), tile = first_query / REMAINDER_ROWS;
    const int *const of_head = mask.large + (int64_t)all_head * tiles;
    int large = 0;
#pragma unroll
    for (int i = 0; i < M / REMAINDER_ROWS; i++)
        large |= tile + i < tiles ? of_head[tile + i] : 0;
    return large != 0;
}
template <int M>
__device__ __forceinline__ void take_off_remainders(float (&p)[M / 2], const AddedMask &mask, int all_head, int queries,
                                                    int first_query)
{
    const float *const of_head = mask.remainder + (int64_t)all_head * queries;
#pragma unroll
    for (int c = 0; c < M / 8; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = first_query + 8 * c + (int)threadIdx.x % 4 * 2 + e;
            const float factor = ex2_approx_ftz(-1.4426950408889634f * of_head[min(query, queries - 1)]);
            p[4 * c + e] *= factor;
            p[4 * c + 2 + e] *= factor;
        }
}

// The warp transposes words of two queries to pairs of keys.
template <typename T, int M>
__device__ __forceinline__ void store_grad_mask(const AddedMask &mask, const uint32_t (&packed)[M / 16][4],
                                                int all_head, int queries, int keys, int first_query, int key)
{
    const int lane = threadIdx.x % WARP_SIZE, pair = key - lane / 4 + 2 * (lane % 4);
    T *const of_head = (T *)mask.gradient + (int64_t)all_head * queries * keys;
#pragma unroll
    for (int c = 0; c < M / 8; c++) {
        const int query = first_query + 8 * c + lane / 4;
        T *const row = of_head + (int64_t)query * keys;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t two = movmatrix_trans(packed[c / 2][c % 2 * 2 + half]);
            if (query < queries && pair + 8 * half < keys)
                *reinterpret_cast<uint32_t *>(row + pair + 8 * half) = two;
        }
    }
}

#endif // CUDA_OPS_HOPPER_CODE

#endif
