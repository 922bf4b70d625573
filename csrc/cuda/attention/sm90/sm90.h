// attention's sm90 path, as the table in attention.cu sees it, and its instances, one a dtype and pass.
#ifndef CUDA_OPS_ATTENTION_SM90_SM90_H
#define CUDA_OPS_ATTENTION_SM90_SM90_H

#include "attention/paths.h"

// fp16 and bf16 on Hopper, rows of up to 256 elements; of packed sequences, with dropout and with masks of up to 128. No
// softcap or slopes.
Answer attention_sm90_supports(const AttentionCall &call, const Device &device);
Answer attention_sm90_is_fast(const AttentionCall &call, const Device &device);
int64_t attention_sm90_workspace(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90(const AttentionCall &call, const Device &device);

cuda_ops_status attention_sm90_forward_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_forward_float16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_float16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_forward_dropout_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_forward_dropout_float16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_dropout_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_dropout_float16(const AttentionCall &call, const Device &device);
// With a boolean mask, and with dropout or without.
cuda_ops_status attention_sm90_forward_masked_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_forward_masked_float16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_masked_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_masked_float16(const AttentionCall &call, const Device &device);
// With a mask that is added, likewise.
cuda_ops_status attention_sm90_forward_added_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_forward_added_float16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_added_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_added_float16(const AttentionCall &call, const Device &device);
// Of rows of more than 128 elements.
cuda_ops_status attention_sm90_backward_wide_bfloat16(const AttentionCall &call);
cuda_ops_status attention_sm90_backward_wide_float16(const AttentionCall &call);
// Of packed sequences.
cuda_ops_status attention_sm90_forward_packed_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_forward_packed_float16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_packed_bfloat16(const AttentionCall &call, const Device &device);
cuda_ops_status attention_sm90_backward_packed_float16(const AttentionCall &call, const Device &device);

// Rows of up to 64 elements take the tiles for 64, longer ones those for 128 or more; the rest is zeros.
static inline bool attention_sm90_is_narrow(const cuda_ops_attention &problem)
{
    return problem.head_dim <= 64 && problem.value_dim <= 64;
}
static inline bool attention_sm90_is_wide(const cuda_ops_attention &problem)
{
    return problem.head_dim > 128 || problem.value_dim > 128;
}

// Queries of backward's blocks.
static constexpr int attention_sm90_queries(bool narrow)
{
    return narrow ? 128 : 64;
}

// Those blocks of all heads.
int64_t attention_sm90_query_blocks(const cuda_ops_attention &problem);
// What backward's kernels have of each of them: logsumexp and delta; of rows of up to 128 elements sums of gradients
// too, whose turn it is, and a counter. Rounded up to 16 bytes.
int64_t attention_sm90_backward_bytes(const cuda_ops_attention &problem);

#endif
