// attention's decode path: the keys that a block has, and where they lie in a cache.
#ifndef CUDA_OPS_ATTENTION_DECODE_WALK_CUH
#define CUDA_OPS_ATTENTION_DECODE_WALK_CUH

#include "attention/decode/decode.h"
#include "attention/scores.cuh"
#include "common/loss.cuh"

// Tiles in `count` shares, of which the first few have one more than the others.
struct DecodeShares {
    int even, longer; // tiles of a share, and how many have one more

    __device__ DecodeShares(int tiles, int count)
        : even((int)((uint32_t)tiles / (uint32_t)count)), longer(tiles - even * count)
    {
    }
    __device__ int begin(int share) const
    {
        return share * even + (share < longer ? share : longer);
    }
    // The share that has this tile.
    __device__ int of(int tile) const
    {
        const int of_longer = longer * (even + 1);
        return tile < of_longer ? tile / (even + 1) : longer + (tile - of_longer) / even;
    }
};

// Of a batch; packed ones are of other paths.
__device__ __forceinline__ cuda_ops_attention_sequence decode_sequence_of(const cuda_ops_attention &p, int64_t batch)
{
    cuda_ops_attention_sequence s = cuda_ops_attention_only_sequence(&p);
    if (p.sequences.key_lengths)
        s.keys = cuda_ops_attention_clamp(p.sequences.key_lengths[batch] + p.sequences.new_keys, 0, p.keys);
    if (p.sequences.bottom_right)
        s.diagonal += s.keys - s.queries;
    return s;
}

// A batch and key head, and its keys.
struct DecodeGroup {
    const DecodeAttention &work;
    int keys_of_tile;
    int batch, key_head;
    int first_key, last_key; // of those that its queries see, and one more
    int tiles;

    // The first of all.
    __device__ DecodeGroup(const DecodeAttention &work, int keys_of_tile)
        : work(work), keys_of_tile(keys_of_tile), key_head(0)
    {
        enter(0);
    }
    __device__ void enter(int to_batch)
    {
        batch = to_batch;
        const cuda_ops_attention_sequence s = decode_sequence_of(work.p, batch);
        first_key = (int)cuda_ops_attention_sequence_first_key(&s, 0);
        last_key = (int)cuda_ops_attention_sequence_last_key(&s, work.p.queries - 1);
        const int seen = last_key - first_key;
        tiles = seen > keys_of_tile ? (int)((uint32_t)(seen + keys_of_tile - 1) / (uint32_t)keys_of_tile) : 1;
    }
    __device__ void next()
    {
        if (++key_head == (int)work.p.key_heads)
            key_head = 0, enter(batch + 1);
    }
    // The tiles of all batches and key heads. By whole warps, as the next.
    __device__ int all_tiles() const
    {
        if (!work.p.sequences.key_lengths)
            return tiles * (int)(work.p.batch * work.p.key_heads);
        int sum = 0;
        for (int b = threadIdx.x % WARP_SIZE; b < (int)work.p.batch; b += WARP_SIZE)
            sum += tiles_of(b);
        return warp_sum(sum);
    }
    // Goes where tile `at` of all of them is; returns the number that it has there.
    __device__ int find(int at)
    {
        const int lane = threadIdx.x % WARP_SIZE;
        int found = 0;
        if (work.p.sequences.key_lengths)
            for (;; found += WARP_SIZE) {
                const int mine = found + lane < (int)work.p.batch ? tiles_of(found + lane) : 0;
                int sum = mine; // over the lanes up to this one
#pragma unroll
                for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
                    const int before = __shfl_up_sync(FULL_WARP, sum, offset);
                    sum += lane >= offset ? before : 0;
                }
                const unsigned int beyond = __ballot_sync(FULL_WARP, at < sum);
                if (beyond) {
                    const int there = __ffs((int)beyond) - 1;
                    found += there;
                    at -= __shfl_sync(FULL_WARP, sum - mine, there);
                    break;
                }
                at -= __shfl_sync(FULL_WARP, sum, WARP_SIZE - 1);
            }
        else
            found = (int)((uint32_t)at / (uint32_t)(tiles * (int)work.p.key_heads)),
            at -= found * tiles * (int)work.p.key_heads;
        enter(found);
        key_head = (int)((uint32_t)at / (uint32_t)tiles);
        return at - key_head * tiles;
    }

  private:
    // Of all key heads of batch b.
    __device__ int tiles_of(int b) const
    {
        DecodeGroup other = *this;
        other.enter(b);
        return other.tiles * (int)work.p.key_heads;
    }
};

// The tiles of a block, one batch and key head after the other. Blocks of the same keys are neighbours, so that all but
// one read them from the second-level cache.
struct DecodeWalk {
    DecodeGroup group;
    int from, to; // the keys of the group that the block has; none: from >= to
    int left;     // tiles of these; at least 1, which may have no keys
    int rest;     // tiles of the groups behind
    int chunk;    // of rows
    int share;
    bool is_first; // of the block's groups
    bool is_whole; // all keys of the group are the block's, or its cluster's

    __device__ DecodeWalk(const DecodeAttention &work, int keys_of_tile)
        : group(work, keys_of_tile), rest(0), share(0), is_first(true), is_whole(true)
    {
        const uint32_t cluster = (uint32_t)work.cluster, block = blockIdx.x / cluster;
        const int index = (int)work.by_chunks.of(block);
        chunk = (int)block - index * work.chunks;
        if (work.shares == 0) {
            const int batch = (int)work.by_key_heads.of((uint32_t)index);
            group.enter(batch);
            group.key_head = index - batch * (int)work.p.key_heads;
            const int rank = (int)(blockIdx.x - block * cluster);
            const DecodeShares parts(group.tiles, work.cluster);
            take(parts.begin(rank), parts.begin(rank + 1));
            left = left > 0 ? left : 1;
            return;
        }
        share = index;
        const DecodeShares shares(group.all_tiles(), work.shares);
        rest = shares.begin(share + 1) - shares.begin(share);
        left = 0;
        if (rest > 0)
            take_up_to_rest(group.find(shares.begin(share)));
    }
    // Whether there is another group.
    __device__ bool next()
    {
        if (rest == 0)
            return false;
        group.next();
        is_first = false;
        take_up_to_rest(0);
        return true;
    }

  private:
    __device__ void take(int first, int end)
    {
        left = end - first;
        from = group.first_key + first * group.keys_of_tile;
        to = group.first_key + end * group.keys_of_tile;
        to = to < group.last_key ? to : group.last_key;
    }
    __device__ void take_up_to_rest(int first)
    {
        const int end = group.tiles - first < rest ? group.tiles : first + rest;
        take(first, end);
        rest -= left;
        is_whole = left == group.tiles;
    }
};

// Rows of a block: from first_row on, `count` of them.
struct DecodeRows {
    int first_row, count;

    __device__ DecodeRows(const DecodeAttention &work, int chunk) : first_row(chunk * work.rows_at_once)
    {
        const int more = work.rows - first_row;
        count = more < work.rows_at_once ? more : work.rows_at_once;
    }
};

// Of a batch whose length is not one; by one thread of all.
__device__ __forceinline__ void check_length(const DecodeWalk &walk)
{
    const cuda_ops_attention &p = walk.group.work.p;
    const cuda_ops_attention_sequences &q = p.sequences;
    if (!q.key_lengths || threadIdx.x != 0 || walk.chunk != 0 || walk.group.key_head != 0 ||
        walk.from != walk.group.first_key)
        return;
    const int64_t length = q.key_lengths[walk.group.batch];
    if (!is_class(length, p.keys - q.new_keys + 1))
        record_bad_index(q.bad_length, walk.group.batch, length, p.keys - q.new_keys + 1);
}

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
    __device__ __forceinline__ int32_t page_of(int j, bool is_there, int &row) const
    {
        const uint32_t column = work.by_page_size.of((uint32_t)j);
        row = (int)((uint32_t)j - column * (uint32_t)work.p.sequences.page_size);
        return is_there ? table[column] : -1;
    }
    __device__ __forceinline__ bool has(int32_t page) const
    {
        return page >= 0 && page < work.p.sequences.pages;
    }
};

#endif
