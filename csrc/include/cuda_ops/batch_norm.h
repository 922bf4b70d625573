/* batch_norm: output = (input - mean) / sqrt(variance + eps) * weight + bias, by channel.
 *
 *   input, output, grad_output, grad_input: dense [outer, channels, inner], of the same dtype. A contiguous tensor
 *       (N, C, ...) is outer = N, inner = the rest; a channels_last one is outer = N * the rest, inner = 1.
 *   mean, variance: [channels]. In training those of the batch, over outer and inner, the variance biased: outputs of
 *       the forward pass, in double whatever the dtype, since a mean that is rounded to float shifts every normalised
 *       value of a channel whose mean is far larger than its deviation. Else the running statistics.
 *   weight, bias: [channels] or NULL, which stands for 1 and 0
 *   workspace: of cuda_ops_batch_norm_workspace_* bytes, aligned to 8; of no value between calls of different passes
 *   outer, channels and inner are at least 1, or nothing is done
 *
 * A channel's reduction is split as the sizes alone say, and the splits are merged in a fixed order: results repeat
 * bitwise, on the CPU for any number of threads.
 */
#ifndef CUDA_OPS_BATCH_NORM_H
#define CUDA_OPS_BATCH_NORM_H

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The CPU backend takes each pass in steps. Those with [begin, end) may be spread over threads, and the others belong
 * between them:
 *     training: moments over blocks, prepare_training, normalize over rows
 *     else:     prepare_inference, normalize over rows
 *     backward: sums over blocks (where they are asked for), prepare_backward, grad_input over rows
 * Rows are the outer * channels runs of `inner` elements, or for inner = 1 the `outer` runs of `channels` elements.
 * weight, bias and their gradients have the dtype of input; running statistics too. */
int64_t cuda_ops_batch_norm_blocks_cpu(int64_t outer, int64_t channels, int64_t inner);
int64_t cuda_ops_batch_norm_rows_cpu(int64_t outer, int64_t channels, int64_t inner);
int64_t cuda_ops_batch_norm_workspace_cpu(int64_t outer, int64_t channels, int64_t inner);

cuda_ops_status cuda_ops_batch_norm_moments_cpu(void *workspace, const void *input, int64_t outer, int64_t channels,
                                                int64_t inner, int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_prepare_training_cpu(double *mean, double *variance, void *workspace,
                                                         const void *weight, const void *bias, int64_t outer,
                                                         int64_t channels, int64_t inner, double eps,
                                                         cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_prepare_inference_cpu(void *workspace, const void *weight, const void *bias,
                                                          const void *running_mean, const void *running_var,
                                                          int64_t outer, int64_t channels, int64_t inner, double eps,
                                                          cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_normalize_cpu(void *output, const void *workspace, const void *input, int64_t outer,
                                                  int64_t channels, int64_t inner, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype);

/* mean and variance: double in training, else of the dtype of input.
 * grad_weight and grad_bias: both or neither NULL. The sums are needed in training, or when these are not NULL. */
cuda_ops_status cuda_ops_batch_norm_sums_cpu(void *workspace, const void *grad_output, const void *input,
                                             const void *mean, int64_t outer, int64_t channels, int64_t inner,
                                             int training, int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_prepare_backward_cpu(void *grad_weight, void *grad_bias, void *workspace,
                                                         const void *weight, const void *mean, const void *variance,
                                                         int64_t outer, int64_t channels, int64_t inner, double eps,
                                                         int training, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_batch_norm_grad_input_cpu(void *grad_input, const void *workspace, const void *grad_output,
                                                   const void *input, int64_t outer, int64_t channels, int64_t inner,
                                                   int training, int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* running = (1 - momentum) * running + momentum * (mean, variance of `count` values made unbiased). In place; nothing
 * for count = 0. running_mean and running_var are of `statistics_dtype`. */
cuda_ops_status cuda_ops_batch_norm_update_cpu(void *running_mean, void *running_var, const double *mean,
                                               const double *variance, int64_t channels, int64_t count, double momentum,
                                               cuda_ops_dtype statistics_dtype);
cuda_ops_status cuda_ops_batch_norm_update_cuda(void *running_mean, void *running_var, const double *mean,
                                                const double *variance, int64_t channels, int64_t count,
                                                double momentum, cuda_ops_dtype statistics_dtype,
                                                cuda_ops_stream stream);

typedef enum cuda_ops_batch_norm_pass {
    CUDA_OPS_BATCH_NORM_TRAINING = 0,  /* forward */
    CUDA_OPS_BATCH_NORM_INFERENCE = 1, /* forward with running statistics */
    CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD = 2,
    CUDA_OPS_BATCH_NORM_INFERENCE_BACKWARD = 3
} cuda_ops_batch_norm_pass;

/* On CUDA by one of the paths of csrc/cuda/batch_norm/batch_norm.cu: resident or split. The table for a call that wants
 * output or grad_input (paths.h): fills in at most `room` reports, and returns how many rows there are. device: NULL
 * for the current one. */
int cuda_ops_batch_norm_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_batch_norm_pass pass,
                                   int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype,
                                   const cuda_ops_device_facts *device);

/* weight, bias and their gradients are of `parameter_dtype`, running statistics of `statistics_dtype` (in the backward
 * pass of training: float64, which mean and variance are). channels < 2^31. */
int64_t cuda_ops_batch_norm_workspace_cuda(int64_t outer, int64_t channels, int64_t inner);

/* output may be NULL: mean and variance alone are wanted. */
cuda_ops_status cuda_ops_batch_norm_forward_training_cuda(void *output, double *mean, double *variance, void *workspace,
                                                          const void *input, const void *weight, const void *bias,
                                                          int64_t outer, int64_t channels, int64_t inner, double eps,
                                                          cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                          cuda_ops_stream stream);
cuda_ops_status cuda_ops_batch_norm_forward_inference_cuda(void *output, void *workspace, const void *input,
                                                           const void *weight, const void *bias,
                                                           const void *running_mean, const void *running_var,
                                                           int64_t outer, int64_t channels, int64_t inner, double eps,
                                                           cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                           cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

/* grad_input may be NULL; grad_weight and grad_bias, both or neither, too. */
cuda_ops_status cuda_ops_batch_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias, void *workspace,
                                                  const void *grad_output, const void *input, const void *weight,
                                                  const void *mean, const void *variance, int64_t outer,
                                                  int64_t channels, int64_t inner, double eps, int training,
                                                  cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                  cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
