/* linear_cross_entropy: the cross-entropy (cross_entropy.h, class indices without weights) of logits
 * input * weight^T + bias, which are never stored as a whole, and the gradients in the same go.
 * softcap > 0: of softcap * tanh(logits / softcap). z_loss > 0: each row's loss has z_loss * logsumexp(logits)^2 more.
 *
 *   input, grad_input          rows x in_features
 *   weight, grad_weight        classes x in_features
 *   bias, grad_bias            classes; bias may be NULL
 *   target                     rows, int64; bad class indices: see loss.h
 *   losses                     rows without a reduction, else one element
 *   row_scale                  rows, what the gradients of each row's loss are multiplied by, or NULL for ones
 *   total_weight               one element: how many targets are not ignore_index; not touched without a reduction
 *
 * The gradients are those of the sum over rows of row_scale * loss, also where the reduction is a mean: what they are
 * to be multiplied by (grad_output / total_weight) is known later, and fp16 would lose them to underflow if they were
 * divided here. cuda_ops_linear_cross_entropy_scale_cuda finishes them.
 *
 * dtype is that of input and grad_input; parameter_dtype (dtype, or on CUDA float32 beside a half) that of weight,
 * bias, losses and row_scale. grad_weight, grad_bias and total_weight are of float64 for float64 and else of float32, but
 * grad_weight of bfloat16 where weight is: it is rounded from float32 sums.
 */
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_H
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_H

#include <stdbool.h>

#include "cuda_ops/linear.h"
#include "cuda_ops/loss.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* On the CPU the caller goes through the rows in chunks: logits by cuda_ops_linear_forward_cpu, then this, then the
 * gradients by cuda_ops_linear_backward_input_cpu and the function below. */

/* Rows [begin, end) of a chunk whose logits are [chunk rows, classes]: losses (NULL: none) and partial (NULL: none; two
 * sums, see cuda_ops_loss_reduce_cpu) are written; with_gradient: the gradient overwrites the logits.
 * losses, target and row_scale begin with the chunk's first row. */
cuda_ops_status cuda_ops_linear_cross_entropy_rows_cpu(void *logits, void *losses, double *partial,
                                                       const int64_t *target, const void *row_scale, int64_t classes,
                                                       int64_t begin, int64_t end, int64_t ignore_index,
                                                       double label_smoothing, double z_loss, double softcap,
                                                       bool with_gradient, cuda_ops_dtype dtype);
/* grad_weight and grad_bias (each may be NULL) of rows (row_begin to row_end) and columns of grad_weight in `block`,
 * from a chunk of `rows`; accumulate: += instead of =. grad_bias: by the blocks with column_begin = 0. workspace:
 * cuda_ops_linear_workspace_cpu() bytes, aligned to 64. */
cuda_ops_status cuda_ops_linear_cross_entropy_weight_cpu(void *grad_weight, void *grad_bias, const void *grad_logits,
                                                         const void *input, void *workspace, int64_t rows,
                                                         int64_t in_features, int64_t classes,
                                                         cuda_ops_linear_block block, bool accumulate,
                                                         cuda_ops_dtype dtype);

/* Elements [begin, end) of output = input * grad_output, divided by total_weight for a mean; a zero stays zero. */
cuda_ops_status cuda_ops_linear_cross_entropy_scale_cpu(void *output, const void *input, const void *grad_output,
                                                        const void *total_weight, int64_t begin, int64_t end,
                                                        cuda_ops_reduction reduction, cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 256. with_gradient: for a call that computes any of the three. */
size_t cuda_ops_linear_cross_entropy_workspace_cuda(int64_t rows, int64_t in_features, int64_t classes,
                                                    double label_smoothing, double z_loss, double softcap,
                                                    bool with_gradient, cuda_ops_dtype dtype,
                                                    cuda_ops_dtype parameter_dtype);
/* Each of the three gradients may be NULL: it is then not computed. error may be NULL. */
cuda_ops_status cuda_ops_linear_cross_entropy_cuda(void *losses, void *total_weight, void *grad_input,
                                                   void *grad_weight, void *grad_bias, void *workspace,
                                                   cuda_ops_index_error *error, const void *input, const void *weight,
                                                   const void *bias, const int64_t *target, const void *row_scale,
                                                   int64_t rows, int64_t in_features, int64_t classes,
                                                   int64_t ignore_index, double label_smoothing, double z_loss,
                                                   double softcap, cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                   cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
/* output[i] = input[i] * grad_output, divided by total_weight for a mean, for the three gradients (an output of NULL is
 * left out); a zero stays zero. The outputs for weight and bias are of parameter_dtype. grad_output: one element of
 * parameter_dtype. An output may be its input where they are of one type, here and on the CPU. */
cuda_ops_status cuda_ops_linear_cross_entropy_scale_cuda(void *output_input, void *output_weight, void *output_bias,
                                                         const void *grad_input, const void *grad_weight,
                                                         const void *grad_bias, const void *grad_output,
                                                         const void *total_weight, int64_t input_count,
                                                         int64_t weight_count, int64_t bias_count,
                                                         cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                         cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);

/* The table (paths.h): fills in at most `room` reports, and returns how many rows there are. device: NULL for the
 * current one. */
int cuda_ops_linear_cross_entropy_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows, int64_t in_features,
                                             int64_t classes, double label_smoothing, double z_loss, double softcap,
                                             cuda_ops_dtype dtype, const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
