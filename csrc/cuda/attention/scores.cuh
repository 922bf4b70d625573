// What makes a product of query and key a score: cap, slope, mask and windows.
#ifndef CUDA_OPS_ATTENTION_SCORES_CUH
#define CUDA_OPS_ATTENTION_SCORES_CUH

#include <math_constants.h>

#include "common/common.cuh"
#include "cuda_ops/attention.h"

// Where logsumexp and delta of a batch and head begin.
__device__ __forceinline__ int64_t first_row_of(const cuda_ops_attention &p, const cuda_ops_attention_sequence &s,
                                                int64_t batch, int64_t head)
{
    return p.sequences.query_starts ? head * p.sequences.query_rows + s.first_query
                                    : (batch * p.heads + head) * p.queries;
}

// Whether it has a remainder that counts (attention.h).
template <typename A>
__device__ __forceinline__ bool is_large_logsumexp(A logsumexp)
{
    return fabs(logsumexp) >= A(CUDA_OPS_ATTENTION_LARGE_LOGSUMEXP) && fabs(logsumexp) < A(CUDART_INF);
}

// What the scores of one batch and head have in common.
template <typename A>
struct AttentionScores {
    const cuda_ops_attention &p;
    cuda_ops_attention_sequence s;
    int64_t mask_offset;
    A slope;
    int64_t head_index;
    uint64_t row;      // queries of the batches and heads before
    int64_t first_row; // of logsumexp and delta

    __device__ AttentionScores(const cuda_ops_attention &problem, int64_t batch, int64_t head)
        : p(problem), s(cuda_ops_attention_sequence_of(&problem, batch)),
          mask_offset(batch * problem.mask_batch + head * problem.mask_head),
          slope(problem.alibi_slopes ? A(problem.alibi_slopes[batch * problem.alibi_batch + head]) : A(0)),
          head_index(batch * problem.heads + head), row((uint64_t)(head_index * problem.queries)),
          first_row(first_row_of(problem, s, batch, head))
    {
    }

    __device__ A additive_mask(int64_t at) const
    {
        switch (p.mask_dtype) {
        case CUDA_OPS_FLOAT64:
            return A(((const double *)p.mask)[at]);
        case CUDA_OPS_FLOAT16:
            return A(__half2float(((const __half *)p.mask)[at]));
        case CUDA_OPS_BFLOAT16:
            return A(__bfloat162float(((const __nv_bfloat16 *)p.mask)[at]));
        default:
            return A(((const float *)p.mask)[at]);
        }
    }

    // Whether the windows let query i, of which there is one, see key j, of which there is one.
    __device__ bool in_window(int64_t i, int64_t j) const
    {
        return cuda_ops_attention_sequence_first_key(&s, i) <= j && j < cuda_ops_attention_sequence_last_key(&s, i);
    }

    // The score of query i and key j from their scaled product; -inf where the key is not seen. cap: the cap's
    // derivative.
    __device__ A score(A x, int64_t i, int64_t j, A &cap) const
    {
        cap = A(1);
        if (i >= s.queries || j >= s.keys || !in_window(i, j))
            return -A(CUDART_INF);
        if (p.softcap > 0) {
            const A t = tanh(x / A(p.softcap));
            cap = A(1) - t * t;
            x = A(p.softcap) * t;
        }
        if (p.alibi_slopes) {
            const A distance = A(i + s.diagonal - j);
            x -= slope * (distance < A(0) ? -distance : distance);
        }
        const int64_t at = mask_offset + i * p.mask_row + j * p.mask_column;
        if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE)
            x += additive_mask(at);
        else if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN && !((const uint8_t *)p.mask)[at])
            x = -A(CUDART_INF);
        return x;
    }
};

#endif
