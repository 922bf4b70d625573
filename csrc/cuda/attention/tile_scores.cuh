// What the tiled kernels on the CUDA cores make of a tile's products: which keys are seen, dropout, weights and their
// gradients.
#ifndef CUDA_OPS_ATTENTION_TILE_SCORES_CUH
#define CUDA_OPS_ATTENTION_TILE_SCORES_CUH

#include "attention/scores.cuh"

template <typename T>
__device__ __forceinline__ const T *rows_of(const void *tensor, const cuda_ops_attention_strides &strides,
                                            int64_t batch, int64_t head)
{
    return (const T *)tensor + batch * strides.batch + head * strides.head;
}
template <typename T>
__device__ __forceinline__ T *rows_of(void *tensor, const cuda_ops_attention_strides &strides, int64_t batch,
                                      int64_t head)
{
    return (T *)tensor + batch * strides.batch + head * strides.head;
}

// The factors of query i and keys j to j + 1, j even.
template <typename A>
__device__ __forceinline__ void dropout_factors(A (&factors)[2], const cuda_ops_attention &p, int64_t head_index,
                                                int64_t i, int64_t j, uint64_t seed, uint64_t offset)
{
    uint32_t words[4];
    const uint64_t row = cuda_ops_attention_dropout_row(head_index, p.queries, i) + (uint64_t)(j % 8 / 2);
    cuda_ops_attention_dropout_words(words, row, (uint32_t)(j / 16), seed, offset);
    const uint32_t near = i & 8 ? words[1] : words[0], far = i & 8 ? words[3] : words[2], word = j & 8 ? far : near;
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(p.dropout);
    const A kept = A(cuda_ops_attention_dropout_scale(p.dropout));
    factors[0] = (word & 0xffff) >= dropped ? kept : A(0);
    factors[1] = word >> 16 >= dropped ? kept : A(0);
}

// Whether `queries` queries from i on are there and see `keys` keys from j on.
__device__ __forceinline__ bool sees_whole_tile(const cuda_ops_attention_sequence &s, int64_t i, int queries, int64_t j,
                                                int keys)
{
    return i + queries <= s.queries && cuda_ops_attention_sequence_first_key(&s, i + queries - 1) <= j &&
           j + keys <= cuda_ops_attention_sequence_last_key(&s, i);
}

// Of `keys` keys from j on those that windows let query i see, of which there may be none.
struct SeenKeys {
    int begin, end;
    __device__ __forceinline__ SeenKeys(const cuda_ops_attention_sequence &s, int64_t i, int64_t j, int keys,
                                        bool whole)
        : begin(0), end(whole ? keys : 0)
    {
        if (!whole && i < s.queries) {
            begin = (int)cuda_ops_attention_clamp(cuda_ops_attention_sequence_first_key(&s, i) - j, 0, keys);
            end = (int)cuda_ops_attention_clamp(cuda_ops_attention_sequence_last_key(&s, i) - j, 0, keys);
        }
    }
    __device__ __forceinline__ bool has(int key) const
    {
        return begin <= key && key < end;
    }
};

// Whether scores are scaled products of the keys seen: those are made in registers, all others one after the other, so
// that what makes them stands once in a kernel.
__device__ __forceinline__ bool has_plain_scores(const cuda_ops_attention &p)
{
    return !(p.softcap > 0) && !p.alibi_slopes && p.mask_kind == CUDA_OPS_ATTENTION_MASK_NONE;
}

// What backward knows of a query: P = exp((score - logsumexp) - remainder), dS = P (dP - delta).
template <typename A>
struct RowOfWeights {
    A logsumexp, remainder, delta;
};

// Sums over keys, by which these are mended: of P, of dS and of P |dP|.
template <typename A>
struct RowSums {
    A weights, gradients, sizes;
    __device__ __forceinline__ void add(A weight, A gradient, A gradient_of_weight)
    {
        weights += weight, gradients += gradient, sizes += weight * fabs(gradient_of_weight);
    }
};

// From scores and the products of grad_output and value: tile becomes D P, gradient dS times the cap's derivative.
// grad_mask: where dS goes, or NULL. i, j: of one element. sums: of the query, or NULL.
template <typename T>
__device__ __forceinline__ void gradient_of_score(accumulate_type<T> &weight, accumulate_type<T> &gradient,
                                                  const AttentionScores<accumulate_type<T>> &scores, int64_t i,
                                                  int64_t j, const RowOfWeights<accumulate_type<T>> &row,
                                                  accumulate_type<T> dropout, T *grad_mask,
                                                  RowSums<accumulate_type<T>> *sums)
{
    typedef accumulate_type<T> A;
    A cap;
    const A score = scores.score(weight * A(scores.p.scale), i, j, cap);
    // What is not seen adds nothing, whatever its value is.
    const bool seen = score != -A(CUDART_INF);
    const A weight_of_key = seen ? exp(score - row.logsumexp - row.remainder) : A(0);
    const A gradient_of_key = seen ? weight_of_key * (gradient * dropout - row.delta) : A(0);
    if (grad_mask && i < scores.s.queries && j < scores.s.keys)
        grad_mask[((int64_t)scores.row + i) * scores.p.keys + j] = store_from_accumulate<T>(gradient_of_key);
    if (sums && seen)
        sums->add(weight_of_key, gradient_of_key, gradient * dropout);
    weight = weight_of_key * dropout;
    gradient = gradient_of_key * cap;
}

// The same of a key that is seen or not, of plain scores without dropout.
template <typename A>
__device__ __forceinline__ void plain_gradient(A &weight, A &gradient, bool seen, A scale, const RowOfWeights<A> &row,
                                               RowSums<A> *sums)
{
    const A score = weight * scale;
    seen = seen && score != -A(CUDART_INF);
    weight = seen ? exp(score - row.logsumexp - row.remainder) : A(0);
    const A gradient_of_weight = gradient;
    gradient = seen ? weight * (gradient - row.delta) : A(0);
    if (sums && seen)
        sums->add(weight, gradient, gradient_of_weight);
}

#endif
