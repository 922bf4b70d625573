// attention, tiles of tensor cores' products: which of a thread's 32 scores of 16 rows and 64 columns windows let see and
// dropout keeps, and what a mask adds. A thread has rows g and g + 8, and of every eight columns 2 t and 2 t + 1, where its
// lane is 4 g + t; scores[n][f] is row f / 2, column f % 2 of the n-th eight.
#ifndef CUDA_OPS_ATTENTION_FRAGMENTS_CUH
#define CUDA_OPS_ATTENTION_FRAGMENTS_CUH

#include "attention/dropout.cuh"
#include "attention/scores.cuh"

static constexpr int FRAGMENT_COLUMNS = 64;

// Whether windows and lengths let all of queries [i, i + rows) that exist see all of keys [j, j + FRAGMENT_COLUMNS).
__device__ __forceinline__ bool sees_all(const cuda_ops_attention_sequence &s, int64_t i, int rows, int64_t j)
{
    const int64_t last = (i + rows < s.queries ? i + rows : s.queries) - 1;
    return cuda_ops_attention_sequence_first_key(&s, last) <= j &&
           j + FRAGMENT_COLUMNS <= cuda_ops_attention_sequence_last_key(&s, i);
}

// Columns of a tile's row that count: those from `first` on, as many as `count`.
struct SeenColumns {
    int first = 0;
    unsigned int count = FRAGMENT_COLUMNS;
    __device__ bool has(int column) const
    {
        return (unsigned int)(column - first) < count;
    }
};
// Of [begin, end), in a tile that starts at `start`.
__device__ __forceinline__ SeenColumns seen_columns(int64_t begin, int64_t end, int64_t start)
{
    const int64_t stop = start + FRAGMENT_COLUMNS;
    const int64_t first = begin > start ? (begin < stop ? begin - start : FRAGMENT_COLUMNS) : 0;
    const int64_t last = end < stop ? end - start : FRAGMENT_COLUMNS;
    SeenColumns seen;
    seen.first = (int)first;
    seen.count = last > first ? (unsigned int)(last - first) : 0;
    return seen;
}

__device__ __forceinline__ float mask_value(float value)
{
    return value;
}
__device__ __forceinline__ float mask_value(__half value)
{
    return __half2float(value);
}
__device__ __forceinline__ float mask_value(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

// Whether a mask is all that scores have but for scale and windows, of a type that add_mask takes.
static inline bool scores_are_masked(const cuda_ops_attention &p)
{
    return !(p.softcap > 0) && !p.alibi_slopes && p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE &&
           (p.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN || p.mask_dtype != CUDA_OPS_FLOAT64);
}

// Adds the mask, -inf where it is boolean and false. i, j: the tile's first query and key; beyond the last ones any of it
// is taken.
template <typename M, bool KEYS_ARE_ROWS>
__device__ __forceinline__ void add_mask(float (&scores)[8][4], const M *mask, const AttentionScores<float> &of,
                                         int64_t i, int64_t j)
{
    const cuda_ops_attention &p = of.p;
    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int64_t row = (KEYS_ARE_ROWS ? j : i) + g, rows = KEYS_ARE_ROWS ? of.s.keys : of.s.queries;
    const int64_t column = (KEYS_ARE_ROWS ? i : j) + 2 * t, columns = KEYS_ARE_ROWS ? of.s.queries : of.s.keys;
    const int64_t row_stride = KEYS_ARE_ROWS ? p.mask_column : p.mask_row;
    const int64_t stride = KEYS_ARE_ROWS ? p.mask_row : p.mask_column;
    const M *const near = mask + of.mask_offset + (row < rows ? row : rows - 1) * row_stride;
    const M *const far = mask + of.mask_offset + (row + 8 < rows ? row + 8 : rows - 1) * row_stride;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int64_t at = (column + 8 * n + e < columns ? column + 8 * n + e : columns - 1) * stride;
            if constexpr (sizeof(M) == 1) {
                scores[n][e] = near[at] ? scores[n][e] : -CUDART_INF_F;
                scores[n][2 + e] = far[at] ? scores[n][2 + e] : -CUDART_INF_F;
            } else {
                scores[n][e] = __fadd_rn(scores[n][e], mask_value(near[at]));
                scores[n][2 + e] = __fadd_rn(scores[n][2 + e], mask_value(far[at]));
            }
        }
}
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ void add_mask(float (&scores)[8][4], const AttentionScores<float> &of, int64_t i, int64_t j)
{ // of scores_are_masked
    const cuda_ops_attention &p = of.p;
    if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN)
        add_mask<uint8_t, KEYS_ARE_ROWS>(scores, (const uint8_t *)p.mask, of, i, j);
    else if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE && p.mask_dtype == CUDA_OPS_FLOAT32)
        add_mask<float, KEYS_ARE_ROWS>(scores, (const float *)p.mask, of, i, j);
    else if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE && p.mask_dtype == CUDA_OPS_BFLOAT16)
        add_mask<__nv_bfloat16, KEYS_ARE_ROWS>(scores, (const __nv_bfloat16 *)p.mask, of, i, j);
    else if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE && p.mask_dtype == CUDA_OPS_FLOAT16)
        add_mask<__half, KEYS_ARE_ROWS>(scores, (const __half *)p.mask, of, i, j);
}

// Which are dropped: bit 4 * n + f. i, j: the first query and key, multiples of 16.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ uint32_t dropped_weights(const DropoutWork &work, const DropoutSeed &seed,
                                                    int64_t head_index, int64_t queries, int64_t i, int64_t j)
{
    const uint64_t row = cuda_ops_attention_dropout_row(head_index, queries, i);
    uint32_t dropped = 0;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t words[4];
        if (KEYS_ARE_ROWS)
            dropout_words_of_keys(words, seed, row + 32 * (n / 2), (uint32_t)(j / 16));
        else
            dropout_words(words, seed, row, (uint32_t)(j / 16 + n / 2));
#pragma unroll
        for (int f = 0; f < 8; f++) {
            const int right = f / 4, down = f / 2 % 2, word = KEYS_ARE_ROWS ? right + 2 * down : down + 2 * right;
            dropped |= dropout_keeps(words[word], f % 2, work.threshold) ? 0 : 1u << (4 * n + f);
        }
    }
    return dropped;
}
// Multiplies by dropout's factors.
__device__ __forceinline__ void drop_weights(float (&weights)[8][4], uint32_t dropped, float scale)
{
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int f = 0; f < 4; f++)
            weights[n][f] = dropped >> (4 * n + f) & 1 ? 0.0f : weights[n][f] * scale;
}

#endif
