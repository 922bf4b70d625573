// attention's decode path: what its kernels and their launcher share.
#ifndef CUDA_OPS_ATTENTION_DECODE_H
#define CUDA_OPS_ATTENTION_DECODE_H

#include "attention/paths.h"
#include "common/fast_division.cuh"

// Queries of the heads that share a key head are its rows: row r is query r % queries of head r / queries of its group.
//
// The keys of a batch and key head, as many as its queries see, are a number of tiles, the last of which may be short;
// a tile is what a block takes at once. There is at least one. Tiles are shared out among blocks in one of two ways:
//
//     groups    a batch and key head has a cluster of blocks, each of which takes a part of its tiles
//     shares    the tiles of all of them, one after the other, are cut into `shares` of as many tiles each, wherever
//               one batch and key head ends and another begins: a block has all of some, and parts of two at most
//
// Rows beyond those that a block takes are of other chunks, which have blocks of their own for the same keys.
struct DecodeAttention {
    cuda_ops_attention p;
    const void *query, *key, *value;
    void *output, *logsumexp; // of the call
    // Of parts of a batch and key head's keys that are of different shares: normalised results, [shares, chunks, 2,
    // rows_at_once, value_dim], and of each row the largest score and the sum of exponentials of what is less than it,
    // without value_dim. Their logsumexp is one number, which for low scores is the largest alone, however many there
    // are. The second of the 2 is the part at a share's end, if it is not the first that the share has.
    void *partial, *partial_maximum, *partial_total;
    int heads_of_group; // of a key head
    int rows;           // of a key head
    int rows_at_once;   // of those, the most that a block takes
    int chunks;
    int cluster;  // blocks of a batch and key head's tiles; 1 with shares
    int shares;   // 0: groups
    int tiles;    // of each batch and key head, if no lengths are read in memory
    bool general; // scores are more than products within windows times a positive scale
    bool vectors; // rows are whole 16-byte vectors that are aligned
    Divider by_chunks, by_key_heads, by_queries, by_page_size;
};

// Tensor cores (mma_<dtype>.cu) and CUDA cores (simt.cu): rows that a block takes, keys of a tile, and the launch.
// head: 64, 128 or 256.
static constexpr int DECODE_SIMT_ROWS = 4;
// Blocks of a cluster that every device of clusters has room for.
static constexpr int DECODE_PORTABLE_CLUSTER = 8;
static constexpr int decode_mma_rows(int head)
{
    return head == 256 ? 32 : 64;
}
static constexpr int decode_mma_keys(int head)
{
    return 8192 / head;
}
static constexpr int decode_simt_keys(int head, int64_t element_size)
{
    const int lanes = head * element_size / 16 < 32 ? (int)(head * element_size / 16) : 32;
    const int chunks = (int)(head * element_size / 16) / lanes;
    return 128 / lanes * (chunks == 1 ? 4 : chunks == 2 ? 2 : 1);
}
// Blocks of the current device's multiprocessors at once.
int decode_mma_bfloat16_blocks(int head);
int decode_mma_float16_blocks(int head);
int decode_simt_blocks(int head, cuda_ops_dtype dtype);
cuda_ops_status decode_mma_bfloat16(int head, const DecodeAttention &work, int64_t blocks, cudaStream_t stream);
cuda_ops_status decode_mma_float16(int head, const DecodeAttention &work, int64_t blocks, cudaStream_t stream);
cuda_ops_status decode_simt(int head, cuda_ops_dtype dtype, const DecodeAttention &work, int64_t blocks,
                            cudaStream_t stream);

#endif
