/* attention: exact attention, without the matrix of scores in memory. Of each batch, head and query i, with
 * k = key head h / (heads / key_heads):
 *
 *     score[i][j]  = cap(scale * query[i] . key[j]) - slope * |i + diagonal - j| + mask[i][j]      of the keys seen
 *     logsumexp[i] = log(sum over j of exp(score[i][j]))
 *     output[i]    = sum over j of dropout(exp(score[i][j] - logsumexp[i])) * value[j]
 *
 * where cap(x) = softcap * tanh(x / softcap), or x without one. Key j is seen by query i if
 *     i + diagonal - window_left <= j <= i + diagonal + window_right
 * and a boolean mask is true there. A query that sees no key, or whose scores are all -inf, has output 0, logsumexp -inf
 * and gradients 0. Where they are all equal its keys weigh alike, however low they are: a mask of the lowest float hides
 * a key beside others, but no row.
 *
 *   query [batch, heads, queries, head_dim], key [batch, key_heads, keys, head_dim], value [batch, key_heads, keys,
 *       value_dim], output [batch, heads, queries, value_dim], and their gradients: of the dtype, of any strides but
 *       that elements of a row are neighbours
 *   logsumexp, grad_logsumexp: [batch, heads, queries], dense; double for double, else float
 *   grad_mask: [batch, heads, queries, keys], dense, of the dtype: the gradient of the scores before a mask is summed
 *       over what it was broadcast to; 0 at keys that are not seen
 *   workspace: of as many bytes as the function beside the launcher says, aligned to 16; on the CPU to 64
 *
 * backward, with P the exponentials above and D = dropout's factors, 0 or 1 / (1 - p):
 *     grad_value[j] = sum over i of D P[i][j] grad_output[i]
 *     dP[i][j]      = D grad_output[i] . value[j],   delta[i] = grad_output[i] . output[i] - grad_logsumexp[i]
 *     dS[i][j]      = P[i][j] (dP[i][j] - delta[i])           (grad_mask), then times cap's derivative
 *     grad_query[i] = scale * sum over j of dS[i][j] key[j],  grad_key[j] = scale * sum over i of dS[i][j] query[i]
 * and over the heads of a key head for grad_key and grad_value; without queries those are 0. Results repeat bit by bit,
 * on the CPU for any number of threads.
 * output and logsumexp are forward's of the same call. They are rounded, which leaves sums over j of P that are not 1,
 * and of dS that are not grad_logsumexp[i]: most of the error of grad_query, where dS all but cancels. In float and
 * double, the CPU's kernels of up to 512 keys and the simt path on CUDA mend P and delta by these sums (the float32 path,
 * for more than 64 queries, does not).
 *
 * Sources: online softmax by Milakov and Gimelshein (arXiv 1805.02867), tiles and recomputation by Dao et al.
 * (FlashAttention, arXiv 2205.14135 and 2307.08691).
 */
#ifndef CUDA_OPS_ATTENTION_H
#define CUDA_OPS_ATTENTION_H

#include "cuda_ops/core.h"
#include "cuda_ops/loss.h"
#include "cuda_ops/paths.h"
#include "cuda_ops/philox.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In elements; those of a row are neighbours. */
typedef struct cuda_ops_attention_strides {
    int64_t batch, head, row;
} cuda_ops_attention_strides;

typedef enum cuda_ops_attention_mask_kind {
    CUDA_OPS_ATTENTION_MASK_NONE = 0,
    CUDA_OPS_ATTENTION_MASK_BOOLEAN = 1, /* one byte each, 0 or 1: whether the key is seen */
    CUDA_OPS_ATTENTION_MASK_ADDITIVE = 2 /* of mask_dtype */
} cuda_ops_attention_mask_kind;

/* A window without a bound, and the largest there is: sums with indices do not overflow, also where a compiler computes
 * both sides of a choice. */
#define CUDA_OPS_ATTENTION_UNBOUNDED (INT64_MAX / 4)

/* A logsumexp of this size or more, positive or negative, is rounded by so much that weights made of it would not add
 * up to 1: of scores that are the lowest float, as a mask may have it, it is that itself, whatever the number of keys.
 * Where a mask is added, backward adds up exp(score - logsumexp) of such rows too; the log of that is the remainder of
 * logsumexp, and P = exp((score - logsumexp) - remainder). */
#define CUDA_OPS_ATTENTION_LARGE_LOGSUMEXP 256

/* Where the sequences of a batch have lengths of their own; all zero: they have not. `queries` and `keys` of the call
 * are then the most that one may have. Numbers in memory are clamped to what there is, so that nothing beyond the
 * tensors is read or written whatever they are.
 *
 * Packed: query, key, value, output and their gradients are [rows, heads, dim], whose strides of the batch are not
 * looked at, and sequence b has rows [starts[b], starts[b + 1]). logsumexp and its gradient are [heads, query_rows].
 * Rows of no sequence are 0, of logsumexp -inf (on the CPU by the caller). No mask, no dropout.
 *
 * Cache: key and value are [batch, keys, key_heads, dim], of which sequence b has the first key_lengths[b] + new_keys;
 * or, with a block table, [pages, page_size, key_heads, dim], where the batch's stride is that of pages: key j of
 * sequence b is row j % page_size of page block_table[b * table_row + j / page_size], and `keys` is page_size times the
 * table's columns. Forward alone, without dropout. */
typedef struct cuda_ops_attention_sequences {
    const int32_t *query_starts, *key_starts; /* batch + 1 each */
    int64_t query_rows, key_rows;             /* of the packed tensors */
    const int32_t *key_lengths;               /* batch; on CUDA may be NULL: all `keys` - new_keys */
    int64_t new_keys;
    const int32_t *block_table; /* NULL: the cache is not paged */
    int64_t table_row, pages, page_size;
    int bottom_right; /* `diagonal` counts from keys - queries of each sequence */
    /* CUDA alone: records of a length or a page that was clamped; NULL: nobody asks. */
    cuda_ops_index_error *bad_length, *bad_page;
} cuda_ops_attention_sequences;

/* What a call computes. */
typedef struct cuda_ops_attention {
    int64_t batch, heads, key_heads, queries, keys, head_dim, value_dim;
    cuda_ops_attention_strides query, key, value, output;
    cuda_ops_attention_strides grad_output, grad_query, grad_key, grad_value; /* backward alone */
    double scale;
    /* The key that lies at query 0's diagonal: 0 as in PyTorch, keys - queries where the last query is to see the last
     * key. Windows are from 0 to CUDA_OPS_ATTENTION_UNBOUNDED, no bound. Causal: window_right = 0. */
    int64_t diagonal, window_left, window_right;
    double softcap; /* 0: none */
    /* Strides of 0 broadcast. */
    cuda_ops_attention_mask_kind mask_kind;
    cuda_ops_dtype mask_dtype;
    const void *mask;
    int64_t mask_batch, mask_head, mask_row, mask_column;
    /* Slopes, float32, that of a batch and head at batch * alibi_batch + head; NULL: none. */
    const float *alibi_slopes;
    int64_t alibi_batch;
    /* The probability that a weight is dropped, rounded to a multiple of 2^-16 (cuda_ops_attention_dropped_of_65536
     * says which weights are); 0: none. On the CPU the values in `philox` count; on CUDA backward's point to the state
     * that forward has left. */
    double dropout;
    cuda_ops_philox_state philox;
    cuda_ops_attention_sequences sequences;
    /* The CPU with dtype float32: the half that query, key, value and grad_output were widened from, or float32.
     * Operands of the products are rounded to it (of float16 to sixteen digits) where the processor has AMX, or for bfloat16 AVX512-BF16. */
    cuda_ops_dtype products;
} cuda_ops_attention;

/* Parts [begin, end) of as many as the function says, so that the caller spreads them over threads: blocks of queries
 * forward, and backward whole key heads. Each thread has a workspace of its own. No gradient may be NULL but
 * grad_mask; grad_logsumexp may. */
int64_t cuda_ops_attention_forward_parts_cpu(const cuda_ops_attention *call);
int64_t cuda_ops_attention_forward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_attention_forward_cpu(void *output, void *logsumexp, const void *query, const void *key,
                                               const void *value, void *workspace, const cuda_ops_attention *call,
                                               int64_t begin, int64_t end, cuda_ops_dtype dtype);
int64_t cuda_ops_attention_backward_parts_cpu(const cuda_ops_attention *call);
int64_t cuda_ops_attention_backward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_attention_backward_cpu(void *grad_query, void *grad_key, void *grad_value, void *grad_mask,
                                                const void *grad_output, const void *grad_logsumexp, const void *query,
                                                const void *key, const void *value, const void *output,
                                                const void *logsumexp, void *workspace, const cuda_ops_attention *call,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* Writes key [batch, new_keys, key_heads, head_dim] and value [.., value_dim] of `new_strides` into the caches behind the
 * first key_lengths[b] keys, by parts [begin, end) of the batch; those that have no place there are left out. */
cuda_ops_status cuda_ops_attention_append_cpu(void *key_cache, void *value_cache, const void *key, const void *value,
                                              cuda_ops_attention_strides new_key, cuda_ops_attention_strides new_value,
                                              const cuda_ops_attention *call, int64_t begin, int64_t end,
                                              cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_attention_append_cuda(void *key_cache, void *value_cache, const void *key, const void *value,
                                               cuda_ops_attention_strides new_key, cuda_ops_attention_strides new_value,
                                               const cuda_ops_attention *call, cuda_ops_dtype dtype,
                                               cuda_ops_stream stream);

/* state: NULL without dropout; else 2 elements, set to the seed and the offset that were used. */
int64_t cuda_ops_attention_forward_workspace_cuda(const cuda_ops_attention *call, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_attention_forward_cuda(void *output, void *logsumexp, int64_t *state, const void *query,
                                                const void *key, const void *value, void *workspace,
                                                const cuda_ops_attention *call, cuda_ops_dtype dtype,
                                                cuda_ops_stream stream);
/* with_grad_mask: whether the call will have a grad_mask. */
int64_t cuda_ops_attention_backward_workspace_cuda(const cuda_ops_attention *call, int with_grad_mask,
                                                   cuda_ops_dtype dtype);
/* No gradient may be NULL but grad_mask; grad_logsumexp may. */
cuda_ops_status cuda_ops_attention_backward_cuda(void *grad_query, void *grad_key, void *grad_value, void *grad_mask,
                                                 const void *grad_output, const void *grad_logsumexp, const void *query,
                                                 const void *key, const void *value, const void *output,
                                                 const void *logsumexp, void *workspace, const cuda_ops_attention *call,
                                                 cuda_ops_dtype dtype, cuda_ops_stream stream);

/* Dropout's factors, 0 or 1 / (1 - p): [batch, heads, queries, keys], dense. Of the call only these sizes count, dropout
 * and philox. CPU: of rows [begin, end), of which there are batch * heads * queries. */
cuda_ops_status cuda_ops_attention_dropout_factors_cpu(void *factors, const cuda_ops_attention *call, int64_t begin,
                                                       int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_attention_dropout_factors_cuda(void *factors, const cuda_ops_attention *call,
                                                        cuda_ops_dtype dtype, cuda_ops_stream stream);

/* The table for a call whose tensors are aligned (paths.h): fills in at most `room` reports, and returns how many rows
 * there are. device: NULL for the current one. */
int cuda_ops_attention_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int with_grad_mask,
                                  const cuda_ops_attention *call, cuda_ops_dtype dtype,
                                  const cuda_ops_device_facts *device);

/* One sequence of a call: its lengths, its windows, and its first rows in packed tensors. */
typedef struct cuda_ops_attention_sequence {
    int64_t queries, keys, diagonal, window_left, window_right, first_query, first_key;
} cuda_ops_attention_sequence;

CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}
/* Sequence b. */
CUDA_OPS_HOST_DEVICE cuda_ops_attention_sequence cuda_ops_attention_sequence_of(const cuda_ops_attention *call,
                                                                                int64_t b)
{
    const cuda_ops_attention_sequences *const all = &call->sequences;
    cuda_ops_attention_sequence s;
    s.queries = call->queries, s.keys = call->keys, s.diagonal = call->diagonal;
    s.window_left = call->window_left, s.window_right = call->window_right;
    s.first_query = 0, s.first_key = 0;
    if (all->query_starts) {
        s.first_query = cuda_ops_attention_clamp(all->query_starts[b], 0, all->query_rows);
        s.first_key = cuda_ops_attention_clamp(all->key_starts[b], 0, all->key_rows);
        const int64_t queries = cuda_ops_attention_clamp(all->query_starts[b + 1], s.first_query, all->query_rows);
        const int64_t keys = cuda_ops_attention_clamp(all->key_starts[b + 1], s.first_key, all->key_rows);
        s.queries = cuda_ops_attention_clamp(queries - s.first_query, 0, call->queries);
        s.keys = cuda_ops_attention_clamp(keys - s.first_key, 0, call->keys);
    }
    if (all->key_lengths)
        s.keys = cuda_ops_attention_clamp(all->key_lengths[b] + all->new_keys, 0, call->keys);
    if (all->bottom_right)
        s.diagonal += s.keys - s.queries;
    return s;
}

/* The first key that windows let query i see, and one more than the last; equal where there is none. */
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_sequence_first_key(const cuda_ops_attention_sequence *s, int64_t i)
{
    const int64_t at = i + s->diagonal;
    const int64_t first = s->window_left < at ? at - s->window_left : 0;
    return first < s->keys ? first : s->keys;
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_sequence_last_key(const cuda_ops_attention_sequence *s, int64_t i)
{
    const int64_t at = i + s->diagonal, first = cuda_ops_attention_sequence_first_key(s, i);
    const int64_t last = s->window_right < s->keys - at ? at + s->window_right + 1 : s->keys;
    return last > first ? last : first;
}
/* Likewise the queries that see key j. */
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_sequence_first_query(const cuda_ops_attention_sequence *s, int64_t j)
{
    const int64_t at = j - s->diagonal;
    const int64_t first = s->window_right < at ? at - s->window_right : 0;
    return first < s->queries ? first : s->queries;
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_sequence_last_query(const cuda_ops_attention_sequence *s, int64_t j)
{
    const int64_t at = j - s->diagonal, first = cuda_ops_attention_sequence_first_query(s, j);
    const int64_t last = s->window_left < s->queries - at ? at + s->window_left + 1 : s->queries;
    return last > first ? last : first;
}

/* The same of a call whose sequences have the same lengths. */
CUDA_OPS_HOST_DEVICE cuda_ops_attention_sequence cuda_ops_attention_only_sequence(const cuda_ops_attention *call)
{
    cuda_ops_attention_sequence s;
    s.queries = call->queries, s.keys = call->keys, s.diagonal = call->diagonal;
    s.window_left = call->window_left, s.window_right = call->window_right;
    s.first_query = 0, s.first_key = 0;
    return s;
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_first_key(const cuda_ops_attention *call, int64_t i)
{
    const cuda_ops_attention_sequence s = cuda_ops_attention_only_sequence(call);
    return cuda_ops_attention_sequence_first_key(&s, i);
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_last_key(const cuda_ops_attention *call, int64_t i)
{
    const cuda_ops_attention_sequence s = cuda_ops_attention_only_sequence(call);
    return cuda_ops_attention_sequence_last_key(&s, i);
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_first_query(const cuda_ops_attention *call, int64_t j)
{
    const cuda_ops_attention_sequence s = cuda_ops_attention_only_sequence(call);
    return cuda_ops_attention_sequence_first_query(&s, j);
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_attention_last_query(const cuda_ops_attention *call, int64_t j)
{
    const cuda_ops_attention_sequence s = cuda_ops_attention_only_sequence(call);
    return cuda_ops_attention_sequence_last_query(&s, j);
}

/* Dropout. A weight is dropped if its number, of 16 bits, is below p * 2^16; those that are kept are divided by 1 - p for
 * the p that has been rounded so, which leaves the mean as it is.
 *
 * A Philox block of four words has the numbers of eight weights: where i and j are a multiple of 16 plus q and k, those
 * that differ in the bits of 8 of q and k, and in k's lowest bit. That is what a thread has of a 16 x 16 tile of a
 * product of queries and keys on tensor cores; where keys are the rows, it has half of two such blocks, and swaps with
 * the neighbour that has the other halves. With
 *     row = 32 * ((b * heads + h) * ceil(queries / 16) + i / 16) + 4 * (q % 8) + k % 8 / 2
 * the halves of the block's counter are offset / 4 + 2^32 * (row / 2^32) and row % 2^32 + 2^32 * (j / 16), and its key is
 * the seed; the weight's word is q / 8 + k / 8 * 2, its lower half where k is even. Seven rounds are the fewest with
 * which Philox passed all of TestU01 (Salmon et al.). */
#define CUDA_OPS_ATTENTION_DROPOUT_ROUNDS 7

CUDA_OPS_HOST_DEVICE uint32_t cuda_ops_attention_dropped_of_65536(double p)
{
    return (uint32_t)(p * 65536.0 + 0.5);
}
CUDA_OPS_HOST_DEVICE double cuda_ops_attention_dropout_scale(double p)
{
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(p);
    return dropped < 65536 ? 65536.0 / (65536 - dropped) : 0.0;
}

/* `row` above, of key 0 and query i of head_index = b * heads + h. */
CUDA_OPS_HOST_DEVICE uint64_t cuda_ops_attention_dropout_row(int64_t head_index, int64_t queries, int64_t i)
{
    return ((uint64_t)head_index * (uint64_t)((queries + 15) / 16) + (uint64_t)(i / 16)) * 32 + (uint64_t)(i % 8 * 4);
}
/* row: that of the block. column: j / 16. */
CUDA_OPS_HOST_DEVICE void cuda_ops_attention_dropout_words(uint32_t words[4], uint64_t row, uint32_t column,
                                                           uint64_t seed, uint64_t offset)
{
    words[0] = (uint32_t)(offset / 4);
    words[1] = (uint32_t)(offset / 4 >> 32) + (uint32_t)(row >> 32);
    words[2] = (uint32_t)row;
    words[3] = column;
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < CUDA_OPS_ATTENTION_DROPOUT_ROUNDS; round++) {
        cuda_ops_philox_round(&words[0], &words[1], &words[2], &words[3], key0, key1);
        key0 += CUDA_OPS_PHILOX_WEYL_0;
        key1 += CUDA_OPS_PHILOX_WEYL_1;
    }
}

#ifdef __cplusplus
}
#endif

#endif
