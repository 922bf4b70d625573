// attention's table of paths: what a call is, and the paths' functions. The table is in attention.cu.
#ifndef CUDA_OPS_ATTENTION_PATHS_H
#define CUDA_OPS_ATTENTION_PATHS_H

#include "common/paths.h"
#include "cuda_ops/attention.h"

// One pass as a launcher gets it; attention.cu has checked that the sizes fit and that there is something to do.
struct AttentionCall {
    bool backward;
    // forward; logsumexp and output are backward's inputs
    void *output, *logsumexp;
    int64_t *state; // NULL without dropout
    // backward
    void *grad_query, *grad_key, *grad_value;
    void *grad_mask;     // NULL: not wanted
    bool with_grad_mask; // the same where only sizes are asked about
    const void *grad_output;
    const void *grad_logsumexp; // NULL: 0
    // both
    const void *query, *key, *value;
    void *workspace;
    cuda_ops_attention problem;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

// Whether all rows, of head_dim or value_dim elements, are whole 16-byte vectors that are aligned, which takes the
// strides and the pointers of this pass.
bool attention_rows_are_aligned(const AttentionCall &call);

// Rows of logsumexp and delta.
static inline int64_t attention_rows(const cuda_ops_attention &p)
{
    return p.sequences.query_starts ? p.heads * p.sequences.query_rows : p.batch * p.heads * p.queries;
}

// Zeros into rows of results that no packed sequence has, and into all of the gradients of keys and values (packed.cu).
cuda_ops_status attention_clear_unpacked(const AttentionCall &call);
cuda_ops_status attention_clear_keys(const AttentionCall &call);

// Whether backward finds remainders of logsumexp (attention.h), [b][h][i] as delta.
static inline bool attention_has_remainder(const cuda_ops_attention &p)
{
    return p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE;
}

// delta[b][h][i] = grad_output[i] . output[i] - grad_logsumexp[i], dense, in float or double: backward's first kernel
// (simt/simt.cu). What reads it waits for its predecessor.
cuda_ops_status attention_delta(void *delta, const AttentionCall &call);

// Few queries: every dtype, rows of up to 256 elements, forward alone (decode/decode.cu).
Answer attention_decode_supports(const AttentionCall &call, const Device &device);
Answer attention_decode_is_fast(const AttentionCall &call, const Device &device);
int64_t attention_decode_workspace(const AttentionCall &call, const Device &device);
cuda_ops_status attention_decode(const AttentionCall &call, const Device &device);
// Tensor cores of sm_80: float16 and bfloat16 (mma.cu).
Answer attention_mma_supports(const AttentionCall &call, const Device &device);
int64_t attention_mma_workspace(const AttentionCall &call, const Device &device);
cuda_ops_status attention_mma(const AttentionCall &call, const Device &device);
// CUDA cores: every dtype, size and option (simt/simt.cu).
int64_t attention_simt_workspace(const AttentionCall &call, const Device &device);
cuda_ops_status attention_simt(const AttentionCall &call, const Device &device);

#endif
