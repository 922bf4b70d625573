// attention's path in float32: what its files share.
#ifndef CUDA_OPS_ATTENTION_FLOAT32_FLOAT32_H
#define CUDA_OPS_ATTENTION_FLOAT32_FLOAT32_H

#include "attention/paths.h"

// float32 on the CUDA cores of sm_80: aligned rows of up to 128 elements (float32.cu).
Answer attention_float32_supports(const AttentionCall &call, const Device &device);
Answer attention_float32_is_fast(const AttentionCall &call, const Device &device);
int64_t attention_float32_workspace(const AttentionCall &call, const Device &device);
cuda_ops_status attention_float32(const AttentionCall &call, const Device &device);

struct Float32Work {
    cuda_ops_attention p;
    const float *query, *key, *value, *output, *grad_output, *logsumexp, *grad_logsumexp;
    float *result, *logsumexp_result; // forward
    int64_t *state;                   // forward, with dropout
    float *grad_query, *grad_key, *grad_value, *delta;
    float *remainder; // of logsumexp, or NULL
    // Of each head's tile of queries: one more than the last block of keys that has been added to its gradients.
    uint32_t *turns;
    uint32_t *handed_out; // blocks of keys
    int64_t tiles;        // of queries, of a head
    int64_t blocks;       // of keys, of a head; forward: as `tiles`
    int64_t rows;         // of delta
};

static constexpr int FLOAT32_QUERIES = 64;       // of a tile
static constexpr int FLOAT32_MOST_COLUMNS = 128; // of a row
static inline int float32_keys(bool is_wide)     // of a block, backward
{
    return is_wide ? 128 : 64;
}

// Rows of more than 64 elements.
static inline bool attention_float32_is_wide(const cuda_ops_attention &p)
{
    return (p.head_dim > p.value_dim ? p.head_dim : p.value_dim) > 64;
}

// What the call's kernels are told; the same for the mma_3xtf32 path, whose workspace is laid out alike.
Float32Work attention_float32_work(const AttentionCall &call);
// Before backward's kernel: delta, remainders of logsumexp, gradients of queries of 0, and no turn taken.
cuda_ops_status attention_float32_prepare(const Float32Work &work, cudaStream_t stream);

// Shared memory of a block, and the launches; is_wide: rows of more than 64 elements.
int attention_float32_forward_bytes(bool is_wide);
int attention_float32_backward_bytes(bool is_wide);
cuda_ops_status attention_float32_forward(const Float32Work &work, bool is_wide, cudaStream_t stream);
cuda_ops_status attention_float32_backward(const Float32Work &work, bool is_wide, cudaStream_t stream);

#endif
