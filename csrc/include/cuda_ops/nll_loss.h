/* nll_loss: loss of a column = -weight[target] * input[target], then none, their sum, or the sum / sum of the weights.
 *
 *   layout, reductions and bad class indices: see loss.h
 *   input, grad_input: [outer, classes, inner] of dtype      target: [outer, inner], int64
 *   weight: [classes] of dtype, or NULL for ones
 *   losses, grad_output: [outer, inner] without a reduction, else one element; of dtype
 *   total_weight: one element, of dtype, but float for the halves; the sum of the weights of the columns that count
 *   a column whose target is ignore_index has the loss, weight and gradient zero
 */
#ifndef CUDA_OPS_NLL_LOSS_H
#define CUDA_OPS_NLL_LOSS_H

#include "cuda_ops/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Columns [begin, end). Exactly one of `losses` (the array of all columns) and `partial` (the two sums of this range,
 * in double; see cuda_ops_loss_reduce_cpu) is not NULL. Of halves are input and grad_input alone: beside them weight,
 * losses, grad_output and total_weight are float32. */
cuda_ops_status cuda_ops_nll_loss_forward_cpu(void *losses, double *partial, const void *input, const int64_t *target,
                                              const void *weight, int64_t classes, int64_t inner, int64_t begin,
                                              int64_t end, int64_t ignore_index, cuda_ops_dtype dtype);
/* total_weight is read for the mean alone. */
cuda_ops_status cuda_ops_nll_loss_backward_cpu(void *grad_input, const void *grad_output, const int64_t *target,
                                               const void *weight, const void *total_weight, int64_t classes,
                                               int64_t inner, int64_t begin, int64_t end, int64_t ignore_index,
                                               cuda_ops_reduction reduction, cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 8, that forward needs for a mean or a sum. */
size_t cuda_ops_nll_loss_workspace_cuda(int64_t outer, int64_t inner);
/* total_weight and workspace are not touched without a reduction; error may be NULL. */
cuda_ops_status cuda_ops_nll_loss_forward_cuda(void *losses, void *total_weight, void *workspace,
                                               cuda_ops_index_error *error, const void *input, const int64_t *target,
                                               const void *weight, int64_t outer, int64_t classes, int64_t inner,
                                               int64_t ignore_index, cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                               cuda_ops_stream stream);
cuda_ops_status cuda_ops_nll_loss_backward_cuda(void *grad_input, const void *grad_output, const int64_t *target,
                                                const void *weight, const void *total_weight, int64_t outer,
                                                int64_t classes, int64_t inner, int64_t ignore_index,
                                                cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
