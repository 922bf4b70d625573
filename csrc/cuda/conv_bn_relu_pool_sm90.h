// The tensor-core path of conv_bn_relu_pool for Hopper: what conv_bn_relu_pool.cu needs to know of it.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM90_H
#define CUDA_OPS_CONV_BN_RELU_POOL_SM90_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

// 1 where the current device and the sizes are those that the path is written for: device 9.0, float16 or bfloat16,
// training, 32 channels in and 64 out, pictures of 14 x 14, a 3 x 3 kernel with stride 1 and padding 1, a 2 x 2 pool;
// input channels_last [batch][14][14][32], output contiguous [batch][64][7][7]. Pointers must be 16-byte aligned.
int conv_bn_relu_pool_sm90_supported(cuda_ops_dtype dtype, int64_t in_channels, int64_t height, int64_t width,
                                     int64_t out_channels);

// What forward keeps for backward, one opaque buffer: the convolution's values as they lay in the accumulators, the
// value at each window's largest element, and which element that was.
int64_t conv_bn_relu_pool_sm90_saved_bytes(int64_t batch);
int64_t conv_bn_relu_pool_sm90_forward_workspace(int64_t batch);
int64_t conv_bn_relu_pool_sm90_backward_workspace(int64_t batch);

// Parameters (weight [64][32][3][3], bias, bn_weight, bn_bias, running_mean, running_var, each [64]) are of
// parameter_dtype: dtype or float32. bias, bn_weight, bn_bias and the running pair may be NULL. mean (of the
// convolution without its bias) and rstd: float [64], for backward. Running statistics are updated in place.
cuda_ops_status conv_bn_relu_pool_sm90_forward(void *output, float *mean, float *rstd, void *saved, void *running_mean,
                                               void *running_var, const void *input, const void *weight,
                                               const void *bias, const void *bn_weight, const void *bn_bias,
                                               cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, int64_t batch,
                                               double momentum, double eps, void *workspace, cudaStream_t stream);

// grad_output contiguous [batch][64][7][7]; grad_input channels_last, NULL where not wanted. grad_weight,
// grad_bn_weight and grad_bn_bias are of parameter_dtype; the gradient of the convolution's bias is zero and is not
// written.
cuda_ops_status conv_bn_relu_pool_sm90_backward(void *grad_input, void *grad_weight, void *grad_bn_weight,
                                                void *grad_bn_bias, const void *grad_output, const void *input,
                                                const void *weight, const void *bn_weight, const float *mean,
                                                const float *rstd, const void *saved, cuda_ops_dtype dtype,
                                                cuda_ops_dtype parameter_dtype, int64_t batch, void *workspace,
                                                cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
