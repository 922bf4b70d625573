/* attention of float16 and bfloat16 on the CPU without copies of float32: by the products of AMX's tile registers,
 * or bfloat16 by those of AVX512-BF16, which keep their sums in float32. attention.h is the contract; these take the calls of which
 * cuda_ops_attention_takes_halves_cpu says so, and all others go by its CPU functions in float32.
 *
 * Taken are halves of a processor with AMX, or bfloat16 with AVX512-BF16, without mask, softcap, ALiBi, dropout and pages, with a scale above 0;
 * causal and windowed calls, grouped heads and packed sequences among them. Backward: bfloat16 alone.
 */
#ifndef CUDA_OPS_ATTENTION_HALVES_CPU_H
#define CUDA_OPS_ATTENTION_HALVES_CPU_H

#include "cuda_ops/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* with_grad_mask: whether backward is to have one. */
int cuda_ops_attention_takes_halves_cpu(const cuda_ops_attention *call, int backward, int with_grad_mask,
                                        cuda_ops_dtype dtype);

/* Parts and workspaces as of attention.h's. not_finite: set to 1 (by any thread, and else left alone) where an operand
 * of float16 is an infinity or NaN, which sums of two bfloat16 do not have: the outputs are then not valid. */
int64_t cuda_ops_attention_halves_forward_parts_cpu(const cuda_ops_attention *call);
int64_t cuda_ops_attention_halves_forward_workspace_cpu(const cuda_ops_attention *call, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_attention_halves_forward_cpu(void *output, void *logsumexp, const void *query, const void *key,
                                                      const void *value, void *workspace, int *not_finite,
                                                      const cuda_ops_attention *call, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);

/* Parts: of cuda_ops_attention_backward_parts_cpu. The workspace grows with the keys. grad_logsumexp may be NULL. */
int64_t cuda_ops_attention_halves_backward_workspace_cpu(const cuda_ops_attention *call);
cuda_ops_status cuda_ops_attention_halves_backward_cpu(void *grad_query, void *grad_key, void *grad_value,
                                                       const void *grad_output, const void *grad_logsumexp,
                                                       const void *query, const void *key, const void *value,
                                                       const void *output, const void *logsumexp, void *workspace,
                                                       const cuda_ops_attention *call, int64_t begin, int64_t end,
                                                       cuda_ops_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
