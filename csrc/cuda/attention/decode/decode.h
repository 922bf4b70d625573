// attention's decode path: what its two kernels and their launcher share.
#ifndef CUDA_OPS_ATTENTION_DECODE_H
#define CUDA_OPS_ATTENTION_DECODE_H

#include "attention/paths.h"
#include "common/fast_division.cuh"

// Queries of the heads that share a key head are its rows: row r is query r % queries of head r / queries of its group.
struct DecodeAttention {
    cuda_ops_attention p;
    const void *query, *key, *value;
    void *output, *logsumexp; // of the call
    // Where splits > 1, of each part: results, [splits, all rows, value_dim], and the largest score and the sum of
    // exponentials of what is less than it, [splits, all rows]. Their logsumexp is one number, which for low scores is
    // the largest alone, however many there are.
    void *partial, *partial_maximum, *partial_total;
    int64_t rows;     // of a key head
    int64_t all_rows; // of the call
    int chunks;       // of rows, a block each
    int splits;       // of keys, a block each
    bool general;     // scores are more than products within windows times a positive scale
    bool vectors;     // rows are whole 16-byte vectors that are aligned
    Divider page_size;
};

// Tensor cores (mma_<dtype>.cu) and CUDA cores (simt.cu): rows that a block takes, keys that a block takes at once, and
// the launch. head: 64, 128 or 256.
static constexpr int DECODE_MMA_ROWS = 64, DECODE_SIMT_ROWS = 4;
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
