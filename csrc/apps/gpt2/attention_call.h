/* What both devices tell attention of a span: queries, keys and values of a row lie beside each other in one tensor. */
#ifndef GPT2_ATTENTION_CALL_H
#define GPT2_ATTENTION_CALL_H

#include <math.h>

#include "cuda_ops/attention.h"
#include "gpt2/layers.h"

static inline cuda_ops_attention attention_call(int64_t heads, int64_t features, const gpt2_span *s)
{
    const int64_t queries = s->end - s->begin, head = features / heads;
    const cuda_ops_attention_strides packed = {s->end * 3 * features, head, 3 * features};
    const cuda_ops_attention_strides mixed = {queries * features, head, features};
    return (cuda_ops_attention){.batch = s->batch,
                                .heads = heads,
                                .key_heads = heads,
                                .queries = queries,
                                .keys = s->end,
                                .head_dim = head,
                                .value_dim = head,
                                .query = packed,
                                .key = packed,
                                .value = packed,
                                .output = mixed,
                                .grad_output = mixed,
                                .grad_query = packed,
                                .grad_key = packed,
                                .grad_value = packed,
                                .scale = 1.0 / sqrt((double)head),
                                .diagonal = s->begin,
                                .window_left = CUDA_OPS_ATTENTION_UNBOUNDED};
}

#endif
