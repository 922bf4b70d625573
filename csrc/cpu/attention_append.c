/* attention's cache on the CPU: cache[b, length of b + t] = new[b, t], of keys and values. Bound by memory. */
#include <string.h>

#include "common/common.h"
#include "cuda_ops/attention.h"

static void copy_heads(char *cache, const char *from, cuda_ops_attention_strides to, cuda_ops_attention_strides of,
                       int64_t page, int64_t row, int64_t batch, int64_t t, int64_t heads, int64_t elements,
                       int64_t size)
{
    for (int64_t h = 0; h < heads; h++)
        memcpy(cache + (page * to.batch + h * to.head + row * to.row) * size,
               from + (batch * of.batch + h * of.head + t * of.row) * size, (size_t)(elements * size));
}

cuda_ops_status cuda_ops_attention_append_cpu(void *key_cache, void *value_cache, const void *key, const void *value,
                                              cuda_ops_attention_strides new_key, cuda_ops_attention_strides new_value,
                                              const cuda_ops_attention *call, int64_t begin, int64_t end,
                                              cuda_ops_dtype dtype)
{
    const cuda_ops_attention_sequences *const q = &call->sequences;
    if (!q->key_lengths || q->new_keys < 0 || (q->block_table && (q->page_size <= 0 || q->table_row < 0)))
        return CUDA_OPS_INVALID_ARGUMENT;
    int64_t size;
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        size = 8;
        break;
    case CUDA_OPS_FLOAT32:
        size = 4;
        break;
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        size = 2;
        break;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
    for (int64_t b = begin; b < end; b++)
        for (int64_t t = 0; t < q->new_keys; t++) {
            int64_t page = b, row = q->key_lengths[b] + t;
            if (q->key_lengths[b] < 0 || row >= call->keys)
                continue;
            if (q->block_table) {
                page = q->block_table[b * q->table_row + row / q->page_size];
                row %= q->page_size;
                if (page < 0 || page >= q->pages)
                    continue;
            }
            copy_heads(key_cache, key, call->key, new_key, page, row, b, t, call->key_heads, call->head_dim, size);
            copy_heads(value_cache, value, call->value, new_value, page, row, b, t, call->key_heads, call->value_dim,
                       size);
        }
    return CUDA_OPS_SUCCESS;
}
