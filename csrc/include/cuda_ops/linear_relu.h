/* linear_relu: output = relu(input * weight^T + bias), and its gradients, which are those of linear (linear.h) for
 *
 *   masked = output <= 0 ? 0 : grad_output        (a NaN in output lets the gradient pass, as in relu)
 *
 *   input, grad_input    rows x in_features
 *   weight, grad_weight  out_features x in_features
 *   output, grad_output  rows x out_features
 *   bias, grad_bias      out_features; bias may be NULL
 *
 * All are row-major and dense. in_features = 0 makes the output relu(bias) (or zero), rows = 0 makes the gradients of
 * weight and bias zero. Results repeat bit by bit.
 * On CUDA, weight, bias and their gradients may be float32 (parameter_dtype) beside input, output and their gradients
 * in a half (dtype); they are converted where they are loaded.
 */
#ifndef CUDA_OPS_LINEAR_RELU_H
#define CUDA_OPS_LINEAR_RELU_H

#include "cuda_ops/linear.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* workspace: cuda_ops_linear_workspace_cpu() bytes, aligned to 64, for this call alone. */
cuda_ops_status cuda_ops_linear_relu_forward_cpu(void *output, const void *input, const void *weight, const void *bias,
                                                 void *workspace, int64_t rows, int64_t in_features,
                                                 int64_t out_features, cuda_ops_linear_block block,
                                                 cuda_ops_dtype dtype);
/* Elements [begin, end) of masked, from which linear.h makes the three gradients. masked may be grad_output. */
cuda_ops_status cuda_ops_linear_relu_mask_cpu(void *masked, const void *grad_output, const void *output, int64_t begin,
                                              int64_t end, cuda_ops_dtype dtype);

/* On CUDA by one of the paths of csrc/cuda/linear_relu/linear_relu.cu: sm90, gemm or skinny.
 * allow_tf32: float32 operands (and what grad_bias sums) may be rounded to TF32; otherwise they are multiplied as they
 * are. workspace: of as many bytes as the query for the same sizes says, on the current device, aligned to 256, for
 * the call alone; zero: may be NULL. */
int64_t cuda_ops_linear_relu_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                    int allow_tf32, cuda_ops_dtype dtype,
                                                    cuda_ops_dtype parameter_dtype);
int64_t cuda_ops_linear_relu_backward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                     int allow_tf32, cuda_ops_dtype dtype,
                                                     cuda_ops_dtype parameter_dtype);
cuda_ops_status cuda_ops_linear_relu_forward_cuda(void *output, const void *input, const void *weight, const void *bias,
                                                  void *workspace, int64_t rows, int64_t in_features,
                                                  int64_t out_features, int allow_tf32, cuda_ops_dtype dtype,
                                                  cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
/* Each of the three gradients may be NULL: it is then not computed. grad_bias alone costs nearly what grad_weight
 * does. */
cuda_ops_status cuda_ops_linear_relu_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                   const void *grad_output, const void *output, const void *input,
                                                   const void *weight, void *workspace, int64_t rows,
                                                   int64_t in_features, int64_t out_features, int allow_tf32,
                                                   cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                   cuda_ops_stream stream);

/* Its table for a call of such sizes, whose tensors are aligned (paths.h): fills in at most `room` reports, and returns
 * how many rows there are. device: NULL for the current one. */
int cuda_ops_linear_relu_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t rows,
                                    int64_t in_features, int64_t out_features, int allow_tf32, cuda_ops_dtype dtype,
                                    cuda_ops_dtype parameter_dtype, const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
