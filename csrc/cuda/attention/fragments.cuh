// attention, tiles of tensor cores' products: which of a thread's 32 scores of 16 rows and 64 columns dropout keeps, a
// mask shows and windows let see. A thread has rows g and g + 8, and of every eight columns 2 t and 2 t + 1, where its
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

// Which a boolean mask shows: bit 4 * n + f. i, j: the tile's first query and key; beyond the last ones anything.
template <bool KEYS_ARE_ROWS>
__device__ __forceinline__ uint32_t shown_weights(const AttentionScores<float> &scores, int64_t i, int64_t j)
{
    const cuda_ops_attention &p = scores.p;
    const int lane = (int)threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const uint8_t *const mask = (const uint8_t *)p.mask + scores.mask_offset;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const int row = g + f / 2 * 8, column = 8 * n + 2 * t + f % 2;
            const int64_t query = i + (KEYS_ARE_ROWS ? column : row), key = j + (KEYS_ARE_ROWS ? row : column);
            const int64_t at = (query < scores.s.queries ? query : scores.s.queries - 1) * p.mask_row +
                               (key < scores.s.keys ? key : scores.s.keys - 1) * p.mask_column;
            bits |= (mask[at] ? 1u : 0u) << (4 * n + f);
        }
    return bits;
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
