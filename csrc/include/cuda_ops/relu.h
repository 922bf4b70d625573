/* relu: output[i] = max(input[i], 0), and grad_input[i] = output[i] > 0 ? grad_output[i] : 0.
 *
 *   input, output, grad_output, grad_input: `count` elements, dense, of the same dtype
 *   output may be input, and grad_input may be grad_output or output (elementwise in place)
 *   NaN stays NaN forward, and lets the gradient through backward, as in PyTorch
 *   no workspace
 */
#ifndef CUDA_OPS_RELU_H
#define CUDA_OPS_RELU_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end) of the arrays, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_relu_forward_cpu(void *output, const void *input, int64_t begin, int64_t end,
                                          cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_relu_backward_cpu(void *grad_input, const void *grad_output, const void *output, int64_t begin,
                                           int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_relu_forward_cuda(void *output, const void *input, int64_t count, cuda_ops_dtype dtype,
                                           cuda_ops_stream stream);
cuda_ops_status cuda_ops_relu_backward_cuda(void *grad_input, const void *grad_output, const void *output,
                                            int64_t count, cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
