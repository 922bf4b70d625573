/* layer_scale_add: the end of a residual block whose branch has a factor for each channel (LayerScale), and may be
 * dropped with a whole row of the batch (stochastic depth).
 *
 *     sum = residual + weight * row_scale * input
 *
 *   sum, copy, input, residual and their gradients: [rows, cols], dense
 *   weight: weight[col] where channels is 0, channels being innermost; else weight[row % channels]. NULL: 1
 *   row_scale: row_scale[row / image_rows]; NULL: 1
 *   copy: sum rounded to the dtype of input; NULL: not wanted
 *   backward, with grad = grad_sum + grad_copy, either of which may be NULL:
 *       grad_input = grad * weight * row_scale,  grad_residual = grad
 *       grad_weight[col] = sum over rows of grad * row_scale * input, where channels is 0
 *       Each of them may be NULL, not wanted.
 *   On CUDA sum and weight are of `sum_dtype`, input of `input_dtype`, residual of `residual_dtype`: all the same; or
 *       float32 sums of an input in float16 or bfloat16 and a residual in either. row_scale is double for double, else
 *       float. grad_copy and grad_input are as input, grad_sum and grad_weight as sum, grad_residual as residual.
 *
 * Results repeat bitwise.
 */
#ifndef CUDA_OPS_LAYER_SCALE_ADD_H
#define CUDA_OPS_LAYER_SCALE_ADD_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end), so that the caller spreads ranges over threads; all of one dtype, but in bfloat16 weight and
 * row_scale of float32. */
cuda_ops_status cuda_ops_layer_scale_add_forward_cpu(void *sum, const void *input, const void *residual,
                                                     const void *weight, const void *row_scale, int64_t cols,
                                                     int64_t channels, int64_t image_rows, int64_t begin, int64_t end,
                                                     cuda_ops_dtype dtype);
/* grad_input alone. */
cuda_ops_status cuda_ops_layer_scale_add_backward_cpu(void *grad_input, const void *grad_sum, const void *weight,
                                                      const void *row_scale, int64_t cols, int64_t channels,
                                                      int64_t image_rows, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_layer_scale_add_forward_cuda(void *sum, void *copy, const void *input, const void *residual,
                                                      const void *weight, const void *row_scale, int64_t rows,
                                                      int64_t cols, int64_t channels, int64_t image_rows,
                                                      cuda_ops_dtype sum_dtype, cuda_ops_dtype input_dtype,
                                                      cuda_ops_dtype residual_dtype, cuda_ops_stream stream);
/* Bytes that backward needs where grad_weight is wanted, aligned to 16. */
int64_t cuda_ops_layer_scale_add_workspace_cuda(int64_t rows, int64_t cols, cuda_ops_dtype sum_dtype);
/* input: NULL unless grad_weight is wanted. */
cuda_ops_status cuda_ops_layer_scale_add_backward_cuda(void *grad_input, void *grad_residual, void *grad_weight,
                                                       void *workspace, const void *grad_sum, const void *grad_copy,
                                                       const void *input, const void *weight, const void *row_scale,
                                                       int64_t rows, int64_t cols, int64_t channels, int64_t image_rows,
                                                       cuda_ops_dtype sum_dtype, cuda_ops_dtype input_dtype,
                                                       cuda_ops_dtype residual_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
