// What makes a product of query and key a score: cap, slope, mask and windows; and dropout's factors.
#ifndef CUDA_OPS_ATTENTION_SCORES_CUH
#define CUDA_OPS_ATTENTION_SCORES_CUH

#include <math_constants.h>

#include "common/common.cuh"
#include "cuda_ops/attention.h"
#include "cuda_ops/dropout.h"

// Where logsumexp and delta of a batch and head begin.
__device__ __forceinline__ int64_t first_row_of(const cuda_ops_attention &p, const cuda_ops_attention_sequence &s,
                                                int64_t batch, int64_t head)
{
    return p.sequences.query_starts ? head * p.sequences.query_rows + s.first_query
                                    : (batch * p.heads + head) * p.queries;
}

// What the scores of one batch and head have in common.
template <typename A>
struct AttentionScores {
    const cuda_ops_attention &p;
    cuda_ops_attention_sequence s;
    int64_t mask_offset;
    A slope;
    uint64_t row;      // queries of the batches and heads before
    int64_t first_row; // of logsumexp and delta

    __device__ AttentionScores(const cuda_ops_attention &problem, int64_t batch, int64_t head)
        : p(problem), s(cuda_ops_attention_sequence_of(&problem, batch)),
          mask_offset(batch * problem.mask_batch + head * problem.mask_head),
          slope(problem.alibi_slopes ? A(problem.alibi_slopes[batch * problem.alibi_batch + head]) : A(0)),
          row((uint64_t)((batch * problem.heads + head) * problem.queries)),
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

    // Dropout's words of query i and keys 4 * quad to 4 * quad + 3.
    __device__ void words(uint32_t (&counter)[4], int64_t i, int64_t quad, uint64_t seed, uint64_t offset) const
    {
        const uint64_t high = (row + (uint64_t)i) * (uint64_t)((p.keys + 3) / 4) + (uint64_t)quad;
        counter[0] = (uint32_t)(offset / 4), counter[1] = (uint32_t)(offset / 4 >> 32);
        counter[2] = (uint32_t)high, counter[3] = (uint32_t)(high >> 32);
        cuda_ops_philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
    }
};

#endif
