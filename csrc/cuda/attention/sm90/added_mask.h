// A mask that is added to scores, as attention's kernels on Hopper are told of it; what they do with it is in
// added_mask.cuh, which the files of their instances include.
#ifndef CUDA_OPS_ATTENTION_SM90_ADDED_MASK_H
#define CUDA_OPS_ATTENTION_SM90_ADDED_MASK_H

#include "attention/paths.h"
#include "common/common.cuh"

struct AddedMask {
    const void *values;
    int64_t batch, head; // elements from one to the next; 0 where all have the same
    int row;
    bool is_float; // else of the call's dtype
    float scale;   // of the products
    int ahead;     // bytes of a head that the producer has come to the L2, where that has room for every block's; or 0
    // Backward alone.
    void *gradient;         // [batch][heads][queries][keys]; NULL: not wanted
    const float *remainder; // of logsumexp, [batch][heads][queries]
    const int *large;       // of each 64 queries of a head: whether one has a remainder
};

static constexpr int REMAINDER_ROWS = 64;
static constexpr int64_t MOST_AHEAD = 128 << 10;

static inline int64_t added_mask_flags(const cuda_ops_attention &p)
{
    return p.batch * p.heads * ceil_div(p.queries, REMAINDER_ROWS);
}
// Of backward's workspace.
static inline int64_t added_mask_bytes(const cuda_ops_attention &p)
{
    return p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE ? (attention_rows(p) + added_mask_flags(p)) * 4 : 0;
}

static inline AddedMask added_mask_of(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    AddedMask mask = {};
    mask.values = p.mask, mask.is_float = p.mask_dtype == CUDA_OPS_FLOAT32;
    mask.batch = p.mask_batch, mask.head = p.mask_head, mask.row = (int)p.mask_row;
    mask.scale = (float)p.scale;
    const int64_t size = mask.is_float ? 4 : 2, bytes = p.queries * p.keys * size;
    const bool is_whole = p.mask_batch != 0 && p.mask_row == p.keys && bytes % 16 == 0 &&
                          p.mask_batch * size % 16 == 0 && p.mask_head * size % 16 == 0 && (uintptr_t)p.mask % 16 == 0;
    mask.ahead = is_whole && bytes <= MOST_AHEAD ? (int)bytes : 0;
    return mask;
}

#if defined(__CUDACC__)

// By one thread, ahead of those that read it.
template <typename T>
__device__ __forceinline__ void fetch_mask(const AddedMask &mask, int batch, int head);
// Forward's scores of a thread's two rows, `row` and row + 8. column: the key of s[0]; last_column: the last pair of keys,
// which those beyond read.
template <typename T, int N>
__device__ __forceinline__ void add_mask_to_rows(float (&s)[N / 2], const AddedMask &mask, int batch, int head, int row,
                                                 int last_row, int column, int last_column);
// Backward's scores, whose rows are keys, this thread's `key` and key + 8, and columns M queries from first_query on.
template <typename T, int M>
__device__ __forceinline__ void add_mask_to_columns(float (&p)[M / 2], const AddedMask &mask, int batch, int head,
                                                    int first_query, int last_query, int key, int last_key);
// Whether one of M queries from first_query on has a remainder. all_head: of all batches.
template <int M>
__device__ __forceinline__ bool has_remainder(const AddedMask &mask, int all_head, int queries, int first_query);
// p *= exp(-remainder).
template <int M>
__device__ __forceinline__ void take_off_remainders(float (&p)[M / 2], const AddedMask &mask, int all_head, int queries,
                                                    int first_query);
// dS, whose rows are keys, as words of two queries.
template <typename T, int M>
__device__ __forceinline__ void store_grad_mask(const AddedMask &mask, const uint32_t (&packed)[M / 16][4],
                                                int all_head, int queries, int keys, int first_query, int key);

#endif

#endif
