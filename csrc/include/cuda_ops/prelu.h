/* prelu: output = input where it is above 0, else weight times it. Arrays are dense [outer, channels, inner], of `dtype`;
 * weight and grad_weight have `channels` elements. One weight for all is channels = 1.
 *
 *   forward:   output[o, c, i] = input[o, c, i] > 0 ? input[o, c, i] : weight[c] * input[o, c, i]
 *   backward:  grad_input = input > 0 ? grad_output : weight[c] * grad_output
 *              grad_weight[c] = the sum over o and i of input * grad_output where input is not above 0
 *
 *   workspace: of cuda_ops_prelu_workspace_* bytes, aligned to 16
 *
 * output may be input, and grad_input may be grad_output. A NaN is not above 0. Sums are cut by sizes (on CUDA also by
 * whether the arrays are aligned to 16 bytes) and added in a fixed order: results repeat bit by bit, on the CPU for any
 * number of threads.
 */
#ifndef CUDA_OPS_PRELU_H
#define CUDA_OPS_PRELU_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end). */
cuda_ops_status cuda_ops_prelu_forward_cpu(void *output, const void *input, const void *weight, int64_t channels,
                                           int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype);
/* The CPU takes backward in two steps, each of which may be spread over threads: units [begin, end), which leave the
 * weight's sums in the workspace, then channels. */
int64_t cuda_ops_prelu_units_cpu(int64_t outer, int64_t channels, int64_t inner);
int64_t cuda_ops_prelu_workspace_cpu(int64_t outer, int64_t channels, int64_t inner);
cuda_ops_status cuda_ops_prelu_backward_cpu(void *grad_input, void *workspace, const void *grad_output,
                                            const void *input, const void *weight, int64_t outer, int64_t channels,
                                            int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_prelu_backward_weight_cpu(void *grad_weight, const void *workspace, int64_t outer,
                                                   int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                   cuda_ops_dtype dtype);

int64_t cuda_ops_prelu_workspace_cuda(int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_prelu_forward_cuda(void *output, const void *input, const void *weight, int64_t outer,
                                            int64_t channels, int64_t inner, cuda_ops_dtype dtype,
                                            cuda_ops_stream stream);
cuda_ops_status cuda_ops_prelu_backward_cuda(void *grad_input, void *grad_weight, void *workspace,
                                             const void *grad_output, const void *input, const void *weight,
                                             int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype,
                                             cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
