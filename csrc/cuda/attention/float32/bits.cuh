// attention, float32 path: which of a thread's 8 x 4 elements of a tile a boolean mask shows, and which dropout keeps;
// bit 4 row + column. Forward has queries as rows, backward keys.
#ifndef CUDA_OPS_ATTENTION_FLOAT32_BITS_CUH
#define CUDA_OPS_ATTENTION_FLOAT32_BITS_CUH

#include "attention/scores.cuh"

// Whether scores are scaled products of the keys seen: those are made in registers, all others one after the other, so
// that what makes them stands once in a kernel.
__device__ __forceinline__ bool has_simple_scores(const cuda_ops_attention &p)
{
    return !(p.softcap > 0) && !p.alibi_slopes && p.mask_kind != CUDA_OPS_ATTENTION_MASK_ADDITIVE;
}

// Of queries from i and keys from j on; beyond the last ones anything.
template <bool ROWS_ARE_KEYS>
__device__ __forceinline__ uint32_t shown_by_mask(const AttentionScores<float> &scores, int64_t i, int64_t j)
{
    constexpr int QUERIES = ROWS_ARE_KEYS ? 4 : 8, KEYS = 12 - QUERIES;
    const cuda_ops_attention &p = scores.p;
    const uint8_t *of_query[QUERIES];
#pragma unroll
    for (int q = 0; q < QUERIES; q++)
        of_query[q] = (const uint8_t *)p.mask + scores.mask_offset +
                      (i + q < scores.s.queries ? i + q : scores.s.queries - 1) * p.mask_row;
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        const int64_t at = (j + k < scores.s.keys ? j + k : scores.s.keys - 1) * p.mask_column;
#pragma unroll
        for (int q = 0; q < QUERIES; q++)
            bits |= (of_query[q][at] ? 1u : 0u) << (ROWS_ARE_KEYS ? 4 * k + q : 4 * q + k);
    }
    return bits;
}

// A Philox block has a word for each of the four threads whose elements differ from this one's in the bits of 8 of i and
// j (attention.h). They are lanes of one warp, which differ in these bits of their numbers: each makes a quarter of the
// sixteen blocks that all of them need, and words are swapped as a matrix of four by four is transposed.
template <bool ROWS_ARE_KEYS, int QUERY_LANE_BIT, int KEY_LANE_BIT>
__device__ __forceinline__ uint32_t kept_by_dropout(const cuda_ops_attention &p, int64_t head_index, int64_t i,
                                                    int64_t j, uint64_t seed, uint64_t offset)
{
    constexpr int PAIRS = ROWS_ARE_KEYS ? 4 : 2; // of keys, of a query
    const int lane = (int)threadIdx.x % WARP_SIZE;
    const bool far_query = lane >> QUERY_LANE_BIT & 1, far_key = lane >> KEY_LANE_BIT & 1;
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(p.dropout);
    uint32_t bits = 0;
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
        const int own = first + far_query + 2 * far_key;
        uint32_t words[4];
        const uint64_t row = cuda_ops_attention_dropout_row(head_index, p.queries, i + own / PAIRS) +
                             (uint64_t)(j % 8 / 2 + own % PAIRS);
        cuda_ops_attention_dropout_words(words, row, (uint32_t)(j / 16), seed, offset);
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            const uint32_t other = __shfl_xor_sync(FULL_WARP, far_query ? words[w] : words[w + 1], 1 << QUERY_LANE_BIT);
            words[w] = far_query ? other : words[w];
            words[w + 1] = far_query ? words[w + 1] : other;
        }
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const uint32_t other = __shfl_xor_sync(FULL_WARP, far_key ? words[w] : words[w + 2], 1 << KEY_LANE_BIT);
            words[w] = far_key ? other : words[w];
            words[w + 2] = far_key ? words[w + 2] : other;
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int query = (first + w) / PAIRS, key = (first + w) % PAIRS * 2;
            const int near = ROWS_ARE_KEYS ? 4 * key + query : 4 * query + key, next = near + (ROWS_ARE_KEYS ? 4 : 1);
            bits |= ((words[w] & 0xffff) >= dropped ? 1u : 0u) << near;
            bits |= (words[w] >> 16 >= dropped ? 1u : 0u) << next;
        }
    }
    return bits;
}

#endif
