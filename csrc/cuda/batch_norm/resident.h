// batch_norm where a channel fits into the shared memory of one block: one kernel a pass, which reads things once.
#ifndef CUDA_OPS_BATCH_NORM_RESIDENT_H
#define CUDA_OPS_BATCH_NORM_RESIDENT_H

#include <cuda_runtime.h>

#include "cuda_ops/core.h"

// Whether the device has room for `tensors` of such channels: 1 (input) forward, 2 (and grad_output) backward.
bool batch_norm_is_resident(int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype, int tensors);

// As cuda_ops_batch_norm_forward_training_cuda, output not NULL.
cuda_ops_status batch_norm_resident_forward(void *output, double *mean, double *variance, const void *input,
                                            const void *weight, const void *bias, int64_t outer, int64_t channels,
                                            int64_t inner, double eps, cuda_ops_dtype dtype,
                                            cuda_ops_dtype parameter_dtype, cudaStream_t stream);

// As cuda_ops_batch_norm_backward_cuda in training, grad_input not NULL.
cuda_ops_status batch_norm_resident_backward(void *grad_input, void *grad_weight, void *grad_bias,
                                             const void *grad_output, const void *input, const void *weight,
                                             const void *mean, const void *variance, int64_t outer, int64_t channels,
                                             int64_t inner, double eps, cuda_ops_dtype dtype,
                                             cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype,
                                             cudaStream_t stream);

#endif
