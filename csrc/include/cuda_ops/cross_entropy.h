/* cross_entropy: loss of a column = sum over classes of q * (logsumexp(input) - input), without ever storing
 * log_softmax(input), where q is how much each class counts:
 *
 *   class indices:        q = weight * ((class == target) * (1 - label_smoothing) + label_smoothing / classes)
 *   class probabilities:  q = weight * (probability * (1 - label_smoothing) + label_smoothing / classes)
 *
 * then none, their sum, or the mean: the sum divided by the sum of weight[target], or, for probabilities, by the number
 * of columns.
 *
 *   layout, reductions and bad class indices: see loss.h
 *   input, grad_input: [outer, classes, inner] of dtype
 *   exactly one of target: [outer, inner], int64, and probabilities: as input, is not NULL
 *   weight: [classes] of dtype, or NULL for ones
 *   losses, grad_output: [outer, inner] without a reduction, else one element; of dtype
 *   statistics: [3, outer * inner], of dtype, but float for the halves: what backward needs to know of each column
 *     [0] the largest input
 *     [1] the logarithm of the sum of exp(input - largest). The sum of the two is the logsumexp; they are kept apart
 *         because one number would lose the second to rounding where the first is large.
 *     [2] the sum of q over the classes
 *   total_weight: one element, of the dtype of statistics: what a mean divides by
 *   a column whose target is ignore_index has the loss, weight and gradient zero
 */
#ifndef CUDA_OPS_CROSS_ENTROPY_H
#define CUDA_OPS_CROSS_ENTROPY_H

#include "cuda_ops/loss.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Columns [begin, end) of all `columns` = outer * inner. Exactly one of `losses` (the array of all columns) and
 * `partial` (the two sums of this range, in double; see cuda_ops_loss_reduce_cpu) is not NULL. */
cuda_ops_status cuda_ops_cross_entropy_forward_cpu(void *losses, double *partial, void *statistics, const void *input,
                                                   const int64_t *target, const void *probabilities, const void *weight,
                                                   int64_t columns, int64_t classes, int64_t inner, int64_t begin,
                                                   int64_t end, int64_t ignore_index, double label_smoothing,
                                                   cuda_ops_dtype dtype);
/* total_weight is read for the mean alone. */
cuda_ops_status cuda_ops_cross_entropy_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                                    const int64_t *target, const void *probabilities,
                                                    const void *weight, const void *statistics,
                                                    const void *total_weight, int64_t columns, int64_t classes,
                                                    int64_t inner, int64_t begin, int64_t end, int64_t ignore_index,
                                                    double label_smoothing, cuda_ops_reduction reduction,
                                                    cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 8, that forward needs for a mean or a sum. */
size_t cuda_ops_cross_entropy_workspace_cuda(int64_t outer, int64_t classes, int64_t inner);
/* total_weight and workspace are not touched without a reduction; error may be NULL. */
cuda_ops_status cuda_ops_cross_entropy_forward_cuda(void *losses, void *statistics, void *total_weight, void *workspace,
                                                    cuda_ops_index_error *error, const void *input,
                                                    const int64_t *target, const void *probabilities,
                                                    const void *weight, int64_t outer, int64_t classes, int64_t inner,
                                                    int64_t ignore_index, double label_smoothing,
                                                    cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                    cuda_ops_stream stream);
/* Without probabilities, grad_input may be input. */
cuda_ops_status cuda_ops_cross_entropy_backward_cuda(void *grad_input, const void *grad_output, const void *input,
                                                     const int64_t *target, const void *probabilities,
                                                     const void *weight, const void *statistics,
                                                     const void *total_weight, int64_t outer, int64_t classes,
                                                     int64_t inner, int64_t ignore_index, double label_smoothing,
                                                     cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                     cuda_ops_stream stream);

/* The table of the forward pass (paths.h): fills in at most `room` reports, and returns how many rows there are.
 * device: NULL for the current one. */
int cuda_ops_cross_entropy_paths_cuda(cuda_ops_path_report *reports, int room, int64_t outer, int64_t classes,
                                      int64_t inner, cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                      const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
