// What the paths of conv_bn_relu_pool share: how one is called. conv_bn_relu_pool.cu holds the table.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_PATHS_H
#define CUDA_OPS_CONV_BN_RELU_POOL_PATHS_H

#include <cuda_runtime.h>

#include "common/paths.h"
#include "cuda_ops/conv_bn_relu_pool.h"

// One pass of the whole block as a launcher gets it; the results of the other pass are NULL. conv_bn_relu_pool.cu has
// checked that the batch is not empty.
struct ConvBlockCall {
    bool backward;
    cuda_ops_conv_bn_relu_pool_sizes sizes;
    cuda_ops_dtype dtype, weight_dtype;
    void *output, *conv_output, *maximum; // forward's results; backward reads the last two
    uint8_t *argmax;
    double *statistics;
    const cuda_ops_running_statistics *running;
    void *grad_input, *grad_weight, *grad_bias, *grad_norm_weight, *grad_norm_bias;
    const void *grad_output, *input, *weight, *bias;
    const cuda_ops_norm_parameters *norm;
    void *workspace;
    cudaStream_t stream;
};

// The choice depends on sizes and dtypes, not on the batch, so that forward and backward agree.

// The convolution, its statistics, and the pooling, one after the other (general.cu).
Answer conv_bn_relu_pool_general_supports(const ConvBlockCall &call, const Device &device);
int64_t conv_bn_relu_pool_general_workspace(const ConvBlockCall &call, const Device &device);
cuda_ops_status conv_bn_relu_pool_general(const ConvBlockCall &call, const Device &device);

// ---- one_channel/: images of one channel, in float32, float16 or bfloat16. The convolution's output is not stored;
// argmax, a byte for each output, has an encoding of its own.
enum { CUDA_OPS_ONE_WIDEST = 1024 };

struct cuda_ops_conv_bn_relu_pool_one_sizes {
    int64_t batch, channels; // of the output
    int32_t height, width;   // of the images; 2 at least, and width CUDA_OPS_ONE_WIDEST at most
    int32_t output_channels_last;
    int32_t allow_tf32; // in float32: forward's operands may be rounded to TF32
};

// The number of doubles in `statistics`, of which the first are the mean and the variance of each channel.
int64_t conv_bn_relu_pool_one_channel_statistics(int64_t channels);
// Bytes of `workspace` of either pass, aligned to 16.
int64_t conv_bn_relu_pool_one_channel_workspace(const cuda_ops_conv_bn_relu_pool_one_sizes *sizes);
// weight is [channels][3][3], and like bias of weight_dtype.
cuda_ops_status conv_bn_relu_pool_one_channel_forward(void *output, uint8_t *argmax, double *statistics,
                                                      void *workspace, const cuda_ops_running_statistics *running,
                                                      const void *input, const void *weight, const void *bias,
                                                      const cuda_ops_norm_parameters *norm,
                                                      const cuda_ops_conv_bn_relu_pool_one_sizes *sizes,
                                                      cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                      cudaStream_t stream);
// All gradients but that of input; all of them but grad_weight may be NULL.
cuda_ops_status conv_bn_relu_pool_one_channel_backward(
    void *grad_weight, void *grad_bias, void *grad_norm_weight, void *grad_norm_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const double *statistics, const void *input, const void *weight,
    const cuda_ops_norm_parameters *norm, const cuda_ops_conv_bn_relu_pool_one_sizes *sizes, cuda_ops_dtype dtype,
    cuda_ops_dtype weight_dtype, cudaStream_t stream);

// ---- sm90/: the whole block on Hopper's tensor cores. input and grad_input are channels_last, output and
// grad_output contiguous; conv_output, argmax and maximum have a layout of their own. All aligned to 16 bytes.
Answer conv_bn_relu_pool_sm90_supports(const ConvBlockCall &call, const Device &device);
// Bytes of `workspace` of either pass, aligned to 16.
int64_t conv_bn_relu_pool_sm90_workspace(int64_t batch);
cuda_ops_status conv_bn_relu_pool_sm90_forward(void *output, void *conv_output, uint8_t *argmax, void *maximum,
                                               double *statistics, void *workspace,
                                               const cuda_ops_running_statistics *running, const void *input,
                                               const void *weight, const void *bias,
                                               const cuda_ops_norm_parameters *norm, int64_t batch,
                                               cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cudaStream_t stream);
cuda_ops_status conv_bn_relu_pool_sm90_backward(void *grad_input, void *grad_weight, void *grad_bias,
                                                void *grad_norm_weight, void *grad_norm_bias, void *workspace,
                                                const void *grad_output, const uint8_t *argmax, const void *maximum,
                                                const void *conv_output, const double *statistics, const void *input,
                                                const void *weight, const cuda_ops_norm_parameters *norm, int64_t batch,
                                                cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cudaStream_t stream);

// ---- tiled_sm80/: the whole block in float32. conv_output, argmax and maximum are always channels_last. All
// aligned to 16 bytes.
struct cuda_ops_conv_bn_relu_pool_tiled_sizes {
    int64_t batch;
    int32_t in_channels, out_channels;
    int32_t height, width;        // of input
    int32_t output_channels_last; // output and grad_output, else contiguous
    int32_t allow_tf32;           // the operands may be rounded to TF32; otherwise float32 multiply-adds
    int32_t allow_winograd;       // which may be those of Winograd's F(2x2, 3x3)
};

Answer conv_bn_relu_pool_tiled_supports(const ConvBlockCall &call, const Device &device);
// Bytes of `workspace` of either pass, aligned to 16.
int64_t conv_bn_relu_pool_tiled_workspace(const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes);
cuda_ops_status conv_bn_relu_pool_tiled_forward(float *output, float *conv_output, uint8_t *argmax, float *maximum,
                                                double *statistics, void *workspace,
                                                const cuda_ops_running_statistics *running, const float *input,
                                                const float *weight, const void *bias,
                                                const cuda_ops_norm_parameters *norm,
                                                const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes,
                                                cuda_ops_dtype bias_dtype, cudaStream_t stream);
cuda_ops_status conv_bn_relu_pool_tiled_backward(float *grad_input, float *grad_weight, void *grad_bias,
                                                 void *grad_norm_weight, void *grad_norm_bias, void *workspace,
                                                 const float *grad_output, const uint8_t *argmax, const float *maximum,
                                                 const float *conv_output, const double *statistics, const float *input,
                                                 const float *weight, const cuda_ops_norm_parameters *norm,
                                                 const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes,
                                                 cuda_ops_dtype bias_dtype, cudaStream_t stream);

#endif
