// attention's decode path: what a block works on, and where keys lie in a cache.
#ifndef CUDA_OPS_ATTENTION_DECODE_POSITION_CUH
#define CUDA_OPS_ATTENTION_DECODE_POSITION_CUH

#include "attention/decode/decode.h"
#include "attention/scores.cuh"
#include "common/loss.cuh"

// Blocks of the same keys are neighbours, so that all but one read them from the second-level cache.
struct DecodePosition {
    int64_t batch, key_head, first_row; // the row: of the key head
    int count, split;
    cuda_ops_attention_sequence s; // its keys end where the block's do
    int64_t from;                  // the first of the block's keys
    int64_t first_query, last_query;

    // rows, keys: as many as a block takes, in all and at once.
    __device__ DecodePosition(const DecodeAttention &work, int rows, int keys)
    {
        const cuda_ops_attention &p = work.p;
        int64_t rest = blockIdx.x;
        first_row = rest % work.chunks * rows;
        rest /= work.chunks;
        split = (int)(rest % work.splits);
        rest /= work.splits;
        batch = rest / p.key_heads, key_head = rest % p.key_heads;
        count = (int)(work.rows - first_row < rows ? work.rows - first_row : rows);
        s = cuda_ops_attention_sequence_of(&p, batch);
        const cuda_ops_attention_sequences &q = p.sequences;
        if (q.key_lengths && rest == batch * p.key_heads && split == 0 && first_row == 0 && threadIdx.x == 0 &&
            !is_class(q.key_lengths[batch], p.keys - q.new_keys + 1))
            record_bad_index(q.bad_length, batch, q.key_lengths[batch], p.keys - q.new_keys + 1);
        const int64_t last_row = first_row + count - 1;
        const bool one_head = first_row / p.queries == last_row / p.queries;
        first_query = one_head ? first_row % p.queries : 0;
        last_query = one_head ? last_row % p.queries : p.queries - 1;
        const int64_t begin = cuda_ops_attention_sequence_first_key(&s, first_query);
        const int64_t end = cuda_ops_attention_sequence_last_key(&s, last_query);
        const int64_t tiles = begin < end ? ceil_div(end - begin, keys) : 0;
        from = begin + tiles * split / work.splits * keys;
        const int64_t to = begin + tiles * (split + 1) / work.splits * keys;
        s.keys = to < end ? to : end;
    }
};

// Of key j of a sequence. A call, since it is as good as never made.
[[maybe_unused]] static __device__ __noinline__ void record_bad_page(const DecodeAttention &work, int64_t batch,
                                                                     int64_t j, int32_t page)
{
    const cuda_ops_attention_sequences &q = work.p.sequences;
    record_bad_index(q.bad_page, batch * q.table_row + j / q.page_size, page, q.pages);
}

// Where keys lie in a cache.
struct CachedRows {
    const int32_t *table; // of the sequence; NULL: not paged
    const DecodeAttention &work;

    __device__ CachedRows(const DecodeAttention &w, int64_t batch)
        : table(w.p.sequences.block_table ? w.p.sequences.block_table + batch * w.p.sequences.table_row : nullptr),
          work(w)
    {
    }
    // The page of key j, if it is there, and its row in it. The page may be none.
    __device__ __forceinline__ int32_t page_of(int64_t j, bool is_there, int &row) const
    {
        const uint32_t column = work.page_size.of((uint32_t)j);
        row = (int)((uint32_t)j - column * (uint32_t)work.p.sequences.page_size);
        return is_there ? table[column] : -1;
    }
    __device__ __forceinline__ bool has(int32_t page) const
    {
        return page >= 0 && page < work.p.sequences.pages;
    }
};

#endif
