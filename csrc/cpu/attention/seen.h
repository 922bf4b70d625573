/* Which queries see a key, as lanes of a vector register, or all of them. */
#ifndef CUDA_OPS_CPU_ATTENTION_SEEN_H
#define CUDA_OPS_CPU_ATTENTION_SEEN_H

#include "common/common.h"
#include "cuda_ops/attention.h"

/* Which of queries [i, i + 16) see key j, a bit each. */
CUDA_OPS_INLINE uint16_t queries_that_see(const cuda_ops_attention *call, int64_t i, int64_t j)
{
    const int64_t apart = j - call->diagonal - i; /* lanes from apart - window_right to apart + window_left */
    const int64_t from = min_i64(max_i64(apart - call->window_right, 0), 16);
    const int64_t to = min_i64(max_i64(apart + call->window_left + 1, 0), 16);
    const unsigned below_to = (1u << to) - 1, below_from = (1u << from) - 1;
    return j < call->keys ? (uint16_t)(below_to & ~below_from) : 0;
}

/* Whether queries [i, i + rows) all see keys [j, j + count). */
static inline bool all_seen(const cuda_ops_attention *call, int64_t i, int64_t rows, int64_t j, int64_t count)
{
    return cuda_ops_attention_first_key(call, i + rows - 1) <= j && j + count <= cuda_ops_attention_last_key(call, i);
}

#endif
