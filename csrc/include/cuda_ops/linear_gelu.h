/* linear_gelu: output = gelu(preactivation), preactivation = input * weight^T + bias, and the gradient of gelu, from
 * which linear.h makes those of input, weight and bias:
 *
 *   CUDA_OPS_GELU_EXACT   gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))
 *   CUDA_OPS_GELU_TANH    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
 *
 *   input                                        rows x in_features
 *   weight                                       out_features x in_features
 *   output, preactivation, and their gradients   rows x out_features
 *   bias, grad_bias                              out_features; bias may be NULL
 *
 * All are row-major and dense. in_features = 0 makes the preactivation the bias (or zero), rows = 0 makes grad_bias
 * zero. Results repeat bit by bit.
 */
#ifndef CUDA_OPS_LINEAR_GELU_H
#define CUDA_OPS_LINEAR_GELU_H

#include "cuda_ops/linear.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_gelu { CUDA_OPS_GELU_EXACT = 0, CUDA_OPS_GELU_TANH = 1 } cuda_ops_gelu;

/* preactivation: NULL where no gradient is to be computed. workspace: cuda_ops_linear_workspace_cpu() bytes, aligned to
 * 64, for this call alone. */
cuda_ops_status cuda_ops_linear_gelu_forward_cpu(void *output, void *preactivation, const void *input,
                                                 const void *weight, const void *bias, void *workspace, int64_t rows,
                                                 int64_t in_features, int64_t out_features, cuda_ops_linear_block block,
                                                 cuda_ops_gelu gelu, cuda_ops_dtype dtype);
/* Elements [begin, end) of grad_preactivation, which may be grad_output. */
cuda_ops_status cuda_ops_linear_gelu_backward_cpu(void *grad_preactivation, const void *grad_output,
                                                  const void *preactivation, int64_t begin, int64_t end,
                                                  cuda_ops_gelu gelu, cuda_ops_dtype dtype);

/* On CUDA the product is that of gemm.h, with bias and activation in its epilogue, and the preactivation beside the
 * output where it is kept for the gradient (NULL: it is not). Where no kernel can leave both, the preactivation is what
 * the product leaves, and a second kernel makes output of it. path: the GEMM's, or CUDA_OPS_GEMM_FASTEST; where it
 * cannot make the product, CUDA_OPS_INVALID_ARGUMENT. workspace: of as many bytes as the query for the same sizes says,
 * aligned to 256; zero: may be NULL. */
int64_t cuda_ops_linear_gelu_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                    int with_preactivation, cuda_ops_gelu gelu, int allow_tf32,
                                                    int path, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_linear_gelu_forward_cuda(void *output, void *preactivation, const void *input,
                                                  const void *weight, const void *bias, void *workspace, int64_t rows,
                                                  int64_t in_features, int64_t out_features, cuda_ops_gelu gelu,
                                                  int allow_tf32, int path, cuda_ops_dtype dtype,
                                                  cuda_ops_stream stream);
/* The table of the forward pass (paths.h): fills in at most `room` reports, and returns how many rows there are.
 * device: NULL for the current one. */
int cuda_ops_linear_gelu_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows, int64_t in_features,
                                    int64_t out_features, int with_preactivation, int allow_tf32, cuda_ops_dtype dtype,
                                    const cuda_ops_device_facts *device);
/* grad_preactivation, which may be grad_output, and in the same pass grad_bias (NULL: not computed), the sum of its
 * rows, of bias_dtype: dtype, or CUDA_OPS_FLOAT32, which the sums of halves are made in. workspace: bytes from the first
 * function (zero: may be NULL), aligned to 16. */
int64_t cuda_ops_linear_gelu_backward_workspace_cuda(int64_t rows, int64_t out_features, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_linear_gelu_backward_cuda(void *grad_preactivation, void *grad_bias, const void *grad_output,
                                                   const void *preactivation, void *workspace, int64_t rows,
                                                   int64_t out_features, cuda_ops_gelu gelu, cuda_ops_dtype dtype,
                                                   cuda_ops_dtype bias_dtype, cuda_ops_stream stream);

/* The gradient through a linear layer that follows gelu, and through gelu: grad_preactivation = (grad_output * weight)
 * times gelu's slope at the preactivation, and grad_bias as above.
 *
 *   grad_output                          rows x out_features, of that layer
 *   weight                               out_features x features
 *   preactivation, grad_preactivation    rows x features; grad_preactivation overlaps nothing
 *   grad_bias                            features, or NULL
 *
 * One kernel on 9.0 for large products in fp16 and bf16, else the product and the pass above. path and
 * CUDA_OPS_INVALID_ARGUMENT as of the forward pass; workspace aligned to 256. */
int64_t cuda_ops_gelu_linear_backward_workspace_cuda(int64_t rows, int64_t features, int64_t out_features,
                                                     int allow_tf32, int path, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_gelu_linear_backward_cuda(void *grad_preactivation, void *grad_bias, const void *grad_output,
                                                   const void *weight, const void *preactivation, void *workspace,
                                                   int64_t rows, int64_t features, int64_t out_features,
                                                   cuda_ops_gelu gelu, int allow_tf32, int path, cuda_ops_dtype dtype,
                                                   cuda_ops_dtype bias_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
