/* concat_batch_norm_act: output = f(batch_norm(the sources one behind the other along the channels)), f an activation,
 * without the concatenation being written anywhere: what a layer of a DenseNet does with the features before it.
 *
 *   output, grad_output: dense [rows, channels], channels the sum of the sources', which lie in it in their order
 *   epilogue: as in batch_norm.h, without a residual
 *   mean, variance: [channels]; of `statistics_dtype`
 *
 * In training the statistics of a source are those of its batch, in double. They are the same for every op that
 * normalises it, and so are taken once, by cuda_ops_batch_norm_forward_training_cuda of that source alone.
 *
 * On CUDA alone: the CPU's ops are concat and batch_norm. Results repeat bitwise.
 */
#ifndef CUDA_OPS_CONCAT_BATCH_NORM_ACT_H
#define CUDA_OPS_CONCAT_BATCH_NORM_ACT_H

#include "cuda_ops/batch_norm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_NORM_SOURCES = 64 }; /* at most */

typedef struct cuda_ops_norm_source {
    const void *input; /* dense [rows, channels] */
    int64_t channels;
    const void *mean, *variance; /* forward: [channels], of `statistics_dtype` */
    /* backward: what other ops add to its gradient, rows `grad_pitch` elements apart, or NULL; and the sum of both,
     * dense [rows, channels], or NULL where it is not wanted */
    const void *grad;
    int64_t grad_pitch;
    void *grad_input;
} cuda_ops_norm_source;

/* Whether the launchers take such tensors: there are no more than CUDA_OPS_NORM_SOURCES, and all that is in memory by
 * rows of channels can be moved by vectors of 16 bytes. Others are concatenated, and then normalised. */
int cuda_ops_concat_batch_norm_act_supports_cuda(const cuda_ops_norm_source *sources, int64_t count, int64_t rows,
                                                 cuda_ops_dtype dtype);

/* mean and variance, [channels] of float64: the sources' statistics one behind the other, for backward; or NULL.
 * running: NULL, or statistics of all channels that are to be updated, where the sources' are the batch's. */
cuda_ops_status cuda_ops_concat_batch_norm_act_forward_cuda(
    void *output, double *mean, double *variance, const cuda_ops_norm_source *sources, int64_t count,
    const cuda_ops_running_statistics *running, const void *weight, const void *bias,
    const cuda_ops_batch_norm_epilogue *epilogue, int64_t rows, double eps, cuda_ops_dtype dtype,
    cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

int64_t cuda_ops_concat_batch_norm_act_workspace_cuda(int64_t rows, int64_t channels, cuda_ops_dtype dtype);

/* grad_weight and grad_bias: both or neither NULL. mean and variance: float64 in training. */
cuda_ops_status cuda_ops_concat_batch_norm_act_backward_cuda(
    void *grad_weight, void *grad_bias, void *workspace, const void *grad_output, const cuda_ops_norm_source *sources,
    int64_t count, const void *weight, const void *bias, const void *mean, const void *variance,
    const cuda_ops_batch_norm_epilogue *epilogue, int64_t rows, double eps, int training, cuda_ops_dtype dtype,
    cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
