/* Where a call's sequences, heads and rows are: what attention's kernels have in common. */
#ifndef CUDA_OPS_CPU_ATTENTION_SEQUENCES_H
#define CUDA_OPS_CPU_ATTENTION_SEQUENCES_H

#include "common/common.h"
#include "cuda_ops/attention.h"

static inline int64_t head_of_keys(const cuda_ops_attention *call, int64_t head)
{
    return head / (call->heads / call->key_heads);
}

/* The call with the lengths of one of its sequences. Packed tensors have no batch, whatever its strides say. */
static inline cuda_ops_attention call_of_sequence(const cuda_ops_attention *call, const cuda_ops_attention_sequence *s)
{
    cuda_ops_attention one = *call;
    one.queries = s->queries, one.keys = s->keys, one.diagonal = s->diagonal;
    if (call->sequences.query_starts) {
        one.query.batch = one.key.batch = one.value.batch = one.output.batch = 0;
        one.grad_output.batch = one.grad_query.batch = one.grad_key.batch = one.grad_value.batch = 0;
    }
    return one;
}

/* The row of logsumexp of a sequence's first query. */
static inline int64_t first_row_of(const cuda_ops_attention *call, const cuda_ops_attention_sequence *s, int64_t batch,
                                   int64_t head)
{
    return call->sequences.query_starts ? head * call->sequences.query_rows + s->first_query
                                        : (batch * call->heads + head) * call->queries;
}

/* Sizes that fit each other, and none so large that an index could overflow. */
static inline bool attention_is_sound(const cuda_ops_attention *call, bool backward)
{
    const int64_t limit = CUDA_OPS_ATTENTION_UNBOUNDED;
    const bool sizes = call->batch >= 0 && call->heads >= 0 && call->key_heads >= 0 && call->queries >= 0 &&
                       call->keys >= 0 && call->head_dim >= 0 && call->value_dim >= 0 && call->queries < limit &&
                       call->keys < limit && -limit < call->diagonal && call->diagonal < limit;
    const bool options = 0 <= call->window_left && call->window_left <= CUDA_OPS_ATTENTION_UNBOUNDED &&
                         0 <= call->window_right && call->window_right <= CUDA_OPS_ATTENTION_UNBOUNDED &&
                         call->softcap >= 0 && call->dropout >= 0 && call->dropout <= 1;
    const bool heads = call->heads == 0 || (call->key_heads > 0 && call->heads % call->key_heads == 0);
    const cuda_ops_attention_sequences *const q = &call->sequences;
    const bool packed = q->query_starts != NULL, cache = q->key_lengths || q->block_table;
    const bool sequences =
        packed == (q->key_starts != NULL) && q->new_keys >= 0 &&
        (!packed || (q->query_rows >= 0 && q->key_rows >= 0 && !cache && call->dropout == 0 &&
                     call->mask_kind == CUDA_OPS_ATTENTION_MASK_NONE)) &&
        (!cache || (!backward && call->dropout == 0)) &&
        (!q->block_table || (q->page_size > 0 && q->table_row >= 0 && (q->pages > 0 || call->keys == 0)));
    return sizes && options && heads && sequences;
}

/* Part `number` of `count` in the order first, last, second, ...: where a mask is causal, neighbours cost about the
 * same together. */
static inline int64_t in_turn(int64_t number, int64_t count)
{
    return number % 2 ? count - 1 - number / 2 : number / 2;
}

#endif
