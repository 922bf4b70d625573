/* attention of float32 with AVX-512, queries in the lanes of vector registers (attention_lanes.c). It takes the parts
 * of cuda_ops_attention_forward_cpu and cuda_ops_attention_backward_cpu, and the same arguments. */
#ifndef CUDA_OPS_CPU_ATTENTION_LANES_H
#define CUDA_OPS_CPU_ATTENTION_LANES_H

#include <stdbool.h>

#include "cuda_ops/attention.h"

enum { LANES_QUERIES = 64 /* of a forward part */ };

/* Whether it takes a sequence of so many keys of the call: without mask, softcap, ALiBi, dropout and pages, with a scale
 * above 0; backward of keys whose scores with 32 queries stay in the second-level cache, and without grad_mask. */
bool cuda_ops_attention_lanes_takes(const cuda_ops_attention *call, int64_t keys, bool backward, bool with_grad_mask);

int64_t cuda_ops_attention_lanes_workspace(const cuda_ops_attention *call, bool backward);
void cuda_ops_attention_lanes_forward(float *output, float *logsumexp, const float *query, const float *key,
                                      const float *value, void *workspace, const cuda_ops_attention *call,
                                      int64_t begin, int64_t end);
void cuda_ops_attention_lanes_backward(float *grad_query, float *grad_key, float *grad_value, const float *grad_output,
                                       const float *grad_logsumexp, const float *query, const float *key,
                                       const float *value, const float *logsumexp, void *workspace,
                                       const cuda_ops_attention *call, int64_t begin, int64_t end);

#endif
