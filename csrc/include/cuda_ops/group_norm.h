/* group_norm, and instance_norm, which is group_norm with one channel a group. Of the values of an image's group of
 * channels, n of them:
 *
 *     output = (input - mean) * rstd * weight + bias,   rstd = 1 / sqrt(variance + eps), variance biased
 *
 *   input, output, grad_output, grad_input: of the same dtype, dense, and as `sizes` says
 *       contiguous:     [images, channels, inner]
 *       channels_last:  [images, inner, channels]
 *   mean, variance: [images, groups], in double whatever the dtype, since a mean that is rounded to float shifts every
 *       normalised value of a group whose mean is far larger than its deviation
 *   weight, bias: [channels] or NULL, which stands for 1 and 0
 *   backward: with xhat = (input - mean) * rstd and h = grad_output * weight:
 *           grad_bias = sum over images and inner of grad_output,  grad_weight = that of grad_output * xhat
 *           grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)),  means over the group
 *       grad_input, grad_weight and grad_bias may each be NULL.
 *   workspace: of cuda_ops_group_norm_workspace_* bytes, aligned to 16
 *
 * channels is a multiple of groups. Results repeat bitwise, on the CPU for any number of threads.
 */
#ifndef CUDA_OPS_GROUP_NORM_H
#define CUDA_OPS_GROUP_NORM_H

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_group_norm_sizes {
    int64_t images, channels, inner, groups;
    int channels_last;
} cuda_ops_group_norm_sizes;

/* Units [begin, end) of cuda_ops_group_norm_units_cpu, so that the caller spreads ranges over threads: a group of an
 * image each, or in channels_last several neighbouring groups, which share lines of the cache. weight, bias and their
 * gradients are of the dtype of input. */
int64_t cuda_ops_group_norm_units_cpu(cuda_ops_group_norm_sizes sizes);
cuda_ops_status cuda_ops_group_norm_forward_cpu(void *output, double *mean, double *variance, const void *input,
                                                const void *weight, const void *bias, cuda_ops_group_norm_sizes sizes,
                                                double eps, int64_t begin, int64_t end, cuda_ops_dtype dtype);
/* Backward in steps: backward over the units; then, where grad_weight or grad_bias is wanted, their sums over channels
 * [begin, end). */
int64_t cuda_ops_group_norm_workspace_cpu(cuda_ops_group_norm_sizes sizes);
cuda_ops_status cuda_ops_group_norm_backward_cpu(void *grad_input, void *workspace, const void *grad_output,
                                                 const void *input, const void *weight, const double *mean,
                                                 const double *variance, cuda_ops_group_norm_sizes sizes, double eps,
                                                 int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_group_norm_backward_sums_cpu(void *grad_weight, void *grad_bias, const void *workspace,
                                                      cuda_ops_group_norm_sizes sizes, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);

/* Of instance_norm: running = (1 - momentum) * running + momentum * (means over the images of mean, and of variance made
 * unbiased, which is of `count` values). mean and variance: [images, channels]. In place; nothing without images. */
cuda_ops_status cuda_ops_instance_norm_update_cpu(void *running_mean, void *running_var, const double *mean,
                                                  const double *variance, int64_t images, int64_t channels,
                                                  int64_t count, double momentum, cuda_ops_dtype statistics_dtype);
cuda_ops_status cuda_ops_instance_norm_update_cuda(void *running_mean, void *running_var, const double *mean,
                                                   const double *variance, int64_t images, int64_t channels,
                                                   int64_t count, double momentum, cuda_ops_dtype statistics_dtype,
                                                   cuda_ops_stream stream);

/* weight, bias and their gradients are of `parameter_dtype`: that of input, or float32 beside float16 and bfloat16.
 * channels < 2^31. */
int64_t cuda_ops_group_norm_workspace_cuda(cuda_ops_group_norm_sizes sizes, int backward, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_group_norm_forward_cuda(void *output, double *mean, double *variance, void *workspace,
                                                 const void *input, const void *weight, const void *bias,
                                                 cuda_ops_group_norm_sizes sizes, double eps, cuda_ops_dtype dtype,
                                                 cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_group_norm_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias, void *workspace,
                                                  const void *grad_output, const void *input, const void *weight,
                                                  const double *mean, const double *variance,
                                                  cuda_ops_group_norm_sizes sizes, double eps, cuda_ops_dtype dtype,
                                                  cuda_ops_dtype parameter_dtype, cuda_ops_stream stream);

/* The table for forward of aligned tensors (paths.h): fills in at most `room` reports, and returns how many rows there
 * are. device: NULL for the current one. */
int cuda_ops_group_norm_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_group_norm_sizes sizes,
                                   cuda_ops_dtype dtype, const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
