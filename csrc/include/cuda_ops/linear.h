/* linear: output = input * weight^T + bias, and its three gradients.
 *
 *   input, grad_input    rows x in_features
 *   weight, grad_weight  out_features x in_features
 *   output, grad_output  rows x out_features
 *   bias, grad_bias      out_features; bias may be NULL
 *
 * All are row-major and dense. in_features = 0 makes the output the bias (or zero), rows = 0 makes the gradients of
 * weight and bias zero.
 * workspace: bytes from the *_workspace_* functions (zero: may be NULL), aligned to 64 (on CUDA 256), for this call
 * alone. On CUDA the products are those of gemm.h, without TF32.
 * Every element is summed in an order that depends on the sizes alone, so that results repeat bit by bit; on the CPU
 * the cut into blocks makes no difference to it either.
 */
#ifndef CUDA_OPS_LINEAR_H
#define CUDA_OPS_LINEAR_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows and columns [begin, end) of a result, so that the caller spreads blocks over threads. */
typedef struct cuda_ops_linear_block {
    int64_t row_begin, row_end, column_begin, column_end;
} cuda_ops_linear_block;

/* For each of the three products, and each call. */
int64_t cuda_ops_linear_workspace_cpu(void);

cuda_ops_status cuda_ops_linear_forward_cpu(void *output, const void *input, const void *weight, const void *bias,
                                            void *workspace, int64_t rows, int64_t in_features, int64_t out_features,
                                            cuda_ops_linear_block block, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_linear_backward_input_cpu(void *grad_input, const void *grad_output, const void *weight,
                                                   void *workspace, int64_t rows, int64_t in_features,
                                                   int64_t out_features, cuda_ops_linear_block block,
                                                   cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_linear_backward_weight_cpu(void *grad_weight, const void *grad_output, const void *input,
                                                    void *workspace, int64_t rows, int64_t in_features,
                                                    int64_t out_features, cuda_ops_linear_block block,
                                                    cuda_ops_dtype dtype);
/* Columns [begin, end). */
cuda_ops_status cuda_ops_linear_backward_bias_cpu(void *grad_bias, const void *grad_output, int64_t rows,
                                                  int64_t out_features, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype);

int64_t cuda_ops_linear_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                               cuda_ops_dtype dtype);
int64_t cuda_ops_linear_backward_input_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                      cuda_ops_dtype dtype);
int64_t cuda_ops_linear_backward_weight_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                       cuda_ops_dtype dtype);
int64_t cuda_ops_linear_backward_bias_workspace_cuda(int64_t rows, int64_t out_features, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_linear_forward_cuda(void *output, const void *input, const void *weight, const void *bias,
                                             void *workspace, int64_t rows, int64_t in_features, int64_t out_features,
                                             cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_linear_backward_input_cuda(void *grad_input, const void *grad_output, const void *weight,
                                                    void *workspace, int64_t rows, int64_t in_features,
                                                    int64_t out_features, cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_linear_backward_weight_cuda(void *grad_weight, const void *grad_output, const void *input,
                                                     void *workspace, int64_t rows, int64_t in_features,
                                                     int64_t out_features, cuda_ops_dtype dtype,
                                                     cuda_ops_stream stream);
/* bias_dtype: of grad_bias, dtype or CUDA_OPS_FLOAT32, which the sums of halves are made in. */
cuda_ops_status cuda_ops_linear_backward_bias_cuda(void *grad_bias, const void *grad_output, void *workspace,
                                                   int64_t rows, int64_t out_features, cuda_ops_dtype dtype,
                                                   cuda_ops_dtype bias_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
