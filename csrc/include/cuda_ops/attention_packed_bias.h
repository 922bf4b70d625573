/* attention_packed_bias: the gradient of the bias of the layer that makes queries, keys and values of attention without
 * dropout, in which every query sees a key, and which a layer with a bias follows: output = linear(attention).
 *
 *   grad_qkv             rows x 3 x features, dense: the gradient of queries, keys and values
 *   grad_next_bias       outputs: the sums over rows of the gradient of the layer that follows
 *   next_weight          outputs x features
 *   grad_bias            3 x features
 *   workspace            as many bytes as the function says, aligned to 16
 *
 * Queries: the sums over rows. Keys: zeros, since what is added to all keys of a sequence changes no weight. Values:
 * grad_next_bias * next_weight, since the weights of a query add up to one, so that the sums over rows of the values'
 * gradient are those of attention's output.
 *
 * grad_bias and grad_next_bias are float32 for fp16 and bf16, else of `dtype`, as the others are.
 */
#ifndef CUDA_OPS_ATTENTION_PACKED_BIAS_H
#define CUDA_OPS_ATTENTION_PACKED_BIAS_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

int64_t cuda_ops_attention_packed_bias_workspace_cuda(int64_t rows, int64_t features, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_attention_packed_bias_cuda(void *grad_bias, const void *grad_qkv, const void *grad_next_bias,
                                                    const void *next_weight, void *workspace, int64_t rows,
                                                    int64_t features, int64_t outputs, cuda_ops_dtype dtype,
                                                    cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
