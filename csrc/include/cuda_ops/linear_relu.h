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

/* Neither needs a workspace. allow_tf32: float32 operands (and what grad_bias sums) may be rounded to TF32; otherwise
 * they are multiplied as they are. */
cuda_ops_status cuda_ops_linear_relu_forward_cuda(void *output, const void *input, const void *weight, const void *bias,
                                                  int64_t rows, int64_t in_features, int64_t out_features,
                                                  int allow_tf32, cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                  cuda_ops_stream stream);
/* Each of the three gradients may be NULL: it is then not computed. All are made by one launch; grad_bias alone costs
 * nearly what grad_weight does. */
cuda_ops_status cuda_ops_linear_relu_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                   const void *grad_output, const void *output, const void *input,
                                                   const void *weight, int64_t rows, int64_t in_features,
                                                   int64_t out_features, int allow_tf32, cuda_ops_dtype dtype,
                                                   cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);

/* masked, and grad_bias unless that is NULL, for those who make the products themselves. All of dtype (float32 or a
 * half) but grad_bias, of parameter_dtype; aligned to 16 bytes, out_features a multiple of as many elements, rows above
 * 0. workspace: of as many bytes as the function says. */
int64_t cuda_ops_linear_relu_mask_workspace_cuda(int64_t rows, int64_t out_features);
cuda_ops_status cuda_ops_linear_relu_mask_cuda(void *masked, void *grad_bias, void *workspace, const void *grad_output,
                                               const void *output, int64_t rows, int64_t out_features,
                                               cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                               cuda_ops_stream stream);

/* Half precision on Hopper; both feature counts multiples of 8, all aligned to 16 bytes. Whether it takes the sizes on
 * this device, and whether a pass of them is quicker than by others, as where they leave a GEMM of one product after
 * the other most of the GPU idle: 0 or 1. */
int cuda_ops_linear_relu_sm90_takes_cuda(int64_t rows, int64_t in_features, int64_t out_features, cuda_ops_dtype dtype,
                                         cuda_ops_dtype parameter_dtype);
int cuda_ops_linear_relu_sm90_pays_forward_cuda(int64_t rows, int64_t in_features, int64_t out_features);
int cuda_ops_linear_relu_sm90_pays_backward_cuda(int64_t rows, int64_t in_features, int64_t out_features);
/* Bytes of the workspace of either pass, which is aligned to 256. */
int64_t cuda_ops_linear_relu_sm90_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features);
cuda_ops_status cuda_ops_linear_relu_sm90_forward_cuda(void *output, void *workspace, const void *input,
                                                       const void *weight, const void *bias, int64_t rows,
                                                       int64_t in_features, int64_t out_features, cuda_ops_dtype dtype,
                                                       cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
/* Each of the three gradients may be NULL. */
cuda_ops_status cuda_ops_linear_relu_sm90_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                        void *workspace, const void *grad_output, const void *output,
                                                        const void *input, const void *weight, int64_t rows,
                                                        int64_t in_features, int64_t out_features, cuda_ops_dtype dtype,
                                                        cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
/* What its passes begin with, in one launch, for dtype a half; each part may be left out. masked, and with it partials,
 * the sums of its columns over *parts sets of rows (*parts x out_features, in float32, of as many bytes as
 * cuda_ops_linear_relu_mask_workspace_cuda says); copy: weight, which is float32, rounded to dtype. */
cuda_ops_status cuda_ops_linear_relu_prepare_cuda(void *masked, void *partials, int64_t *parts, void *copy,
                                                  const void *grad_output, const void *output, const void *weight,
                                                  int64_t rows, int64_t in_features, int64_t out_features,
                                                  cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
