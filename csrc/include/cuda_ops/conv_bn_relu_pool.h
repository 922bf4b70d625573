/* conv_bn_relu_pool: max_pool2d(relu(batch_norm(conv2d(input)))), by what follows the convolution and its statistics.
 *
 *     output[window] = max over the window of relu((conv_output - center) * scale + offset)
 *
 * in one pass over the output of the convolution, which conv2d.h makes; batch_norm.h makes its mean and variance.
 *
 *   conv_output, grad_conv_output:         batch x channels x height.input x width.input, laid out as pool2d.h says
 *   output, grad_output, argmax, maximum:  batch x channels x height.output x width.output, in the same order
 *   argmax:        h * kernel width + w of the value taken within its window, or CUDA_OPS_POOL_INACTIVE where relu gave
 *                  0 and no gradient passes. Of equal values the first is taken, of several NaNs the last; a NaN passes
 *                  on to the output as in PyTorch. Windows have at most CUDA_OPS_POOL_LARGEST positions.
 *   maximum:       conv_output at argmax: what the gradients of batch_norm's parameters need of it
 *   mean, variance (biased), norm_weight, norm_bias: [channels]; the last two may be NULL for 1 and 0
 *
 * The pooling has no dilation and, its padding being at most half of the kernel, no window without a position.
 * Sums are taken in an order that depends on the sizes alone: results repeat bit by bit, on the CPU for any number of
 * threads.
 *
 * Backward in training, with dz = grad_output where argmax is active, n values in a channel, and normalised =
 * (conv_output - mean) / sqrt(variance + eps):
 *
 *     grad_norm_bias   = sum of dz,    grad_norm_weight = sum of dz * normalised
 *     grad_conv_output = norm_weight / sqrt(variance + eps) * (dz - grad_norm_bias / n - normalised * grad_norm_weight
 * / n)
 */
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_H
#define CUDA_OPS_CONV_BN_RELU_POOL_H

#include "cuda_ops/core.h"
#include "cuda_ops/pool2d.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_POOL_LARGEST = 255, CUDA_OPS_POOL_INACTIVE = 255 };

/* On the CPU forward is: prepare_forward, pool over ranges. Backward: sums over channels [begin, end),
 * prepare_backward, grad_conv over ranges. Ranges are of the batch * channels planes, or with channels_last of the
 * batch * height.output rows (pool) and the batch * height.input rows (grad_conv).
 *
 * coefficients: CUDA_OPS_CONV_BN_RELU_POOL_COEFFICIENTS * channels elements of `dtype`, handed from step to step.
 * sums: 2 * channels. mean and variance are of `statistics_dtype`, all else of `dtype`. */
enum { CUDA_OPS_CONV_BN_RELU_POOL_COEFFICIENTS = 4 };

cuda_ops_status cuda_ops_conv_bn_relu_pool_prepare_forward_cpu(void *coefficients, const void *mean,
                                                               const void *variance, const void *norm_weight,
                                                               const void *norm_bias, int64_t channels, double eps,
                                                               cuda_ops_dtype dtype, cuda_ops_dtype statistics_dtype);
/* argmax and maximum: both or neither NULL. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_pool_cpu(void *output, uint8_t *argmax, void *maximum,
                                                    const void *conv_output, const void *coefficients,
                                                    const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv_bn_relu_pool_sums_cpu(double *sums, const void *grad_output, const uint8_t *argmax,
                                                    const void *maximum, const double *mean,
                                                    const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype);
/* grad_norm_weight, grad_norm_bias: each may be NULL. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_prepare_backward_cpu(void *grad_norm_weight, void *grad_norm_bias,
                                                                void *coefficients, const double *sums,
                                                                const double *mean, const double *variance,
                                                                const void *norm_weight, const cuda_ops_pool2d *pool,
                                                                double eps, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_conv_bn_relu_pool_grad_conv_cpu(void *grad_conv_output, const void *grad_output,
                                                         const uint8_t *argmax, const void *conv_output,
                                                         const void *coefficients, const cuda_ops_pool2d *pool,
                                                         int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* Parameters of any dtypes, by channel; a pointer may be NULL where the comment says so. */
typedef struct cuda_ops_norm_parameters {
    const void *weight, *bias; /* of `dtype`; NULL for 1 and 0 */
    cuda_ops_dtype dtype;
    double eps;
} cuda_ops_norm_parameters;

/* What training does to the running statistics, in place: running = (1 - momentum) * running + momentum * (mean, or
 * variance made unbiased), and one more batch. */
typedef struct cuda_ops_running_statistics {
    void *mean, *variance; /* of `dtype`; both or neither NULL */
    cuda_ops_dtype dtype;
    int64_t *batches; /* NULL, or one number */
    double momentum;
} cuda_ops_running_statistics;

/* Bytes of `workspace` of either pass, aligned to 16. */
int64_t cuda_ops_conv_bn_relu_pool_workspace_cuda(const cuda_ops_pool2d *pool);

/* mean, variance: of the batch, or with statistics_dtype other than float64 beside another `dtype`, running ones.
 * argmax and maximum: both or neither NULL. running: NULL where there are none to be kept. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_forward_cuda(void *output, uint8_t *argmax, void *maximum, void *workspace,
                                                        const cuda_ops_running_statistics *running,
                                                        const void *conv_output, const void *mean, const void *variance,
                                                        const cuda_ops_norm_parameters *norm,
                                                        const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
                                                        cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

/* grad_norm_weight, grad_norm_bias (of norm->dtype) and grad_bias (of bias_dtype; that of the convolution, 0 but for
 * NaN, since batch_norm takes the mean off again) may each be NULL. norm->bias is not read. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_backward_cuda(
    void *grad_conv_output, void *grad_norm_weight, void *grad_norm_bias, void *grad_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const void *maximum, const void *conv_output, const double *mean,
    const double *variance, const cuda_ops_norm_parameters *norm, const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
    cuda_ops_dtype bias_dtype, cuda_ops_stream stream);

/* The whole block, convolution included, for pictures of one channel: kernel 3x3, stride 1, padding 1, pooling 2x2, in
 * training, in float32, float16 or bfloat16. The output of the convolution is never stored. */
enum { CUDA_OPS_ONE_WIDEST = 1024 };

typedef struct cuda_ops_conv_bn_relu_pool_one_sizes {
    int64_t batch, channels; /* of the output */
    int32_t height, width;   /* of the pictures; 2 at least, and width CUDA_OPS_ONE_WIDEST at most */
    int32_t output_channels_last;
} cuda_ops_conv_bn_relu_pool_one_sizes;

/* How many doubles `statistics` has, of which the first are the mean and the variance of each channel. */
int64_t cuda_ops_conv_bn_relu_pool_one_statistics(int64_t channels);
/* Bytes of `workspace` of either pass, aligned to 16. */
int64_t cuda_ops_conv_bn_relu_pool_one_workspace_cuda(const cuda_ops_conv_bn_relu_pool_one_sizes *sizes);

/* places: a byte for each output, for backward alone. weight is [channels][3][3], and like bias of weight_dtype; bias
 * may be NULL. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_one_forward_cuda(void *output, uint8_t *places, double *statistics,
                                                            void *workspace, const cuda_ops_running_statistics *running,
                                                            const void *input, const void *weight, const void *bias,
                                                            const cuda_ops_norm_parameters *norm,
                                                            const cuda_ops_conv_bn_relu_pool_one_sizes *sizes,
                                                            cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                            cuda_ops_stream stream);
/* All gradients but that of input; all of them but grad_weight may be NULL. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_one_backward_cuda(
    void *grad_weight, void *grad_bias, void *grad_norm_weight, void *grad_norm_bias, void *workspace,
    const void *grad_output, const uint8_t *places, const double *statistics, const void *input, const void *weight,
    const cuda_ops_norm_parameters *norm, const cuda_ops_conv_bn_relu_pool_one_sizes *sizes, cuda_ops_dtype dtype,
    cuda_ops_dtype weight_dtype, cuda_ops_stream stream);

/* The whole block on Hopper's tensor cores, in training: where `supported` says so of the current device and the sizes
 * (of the convolution's input; float16 or bfloat16, 32 channels in, 64 out, pictures of 14 x 14), for kernel 3x3,
 * stride 1, padding 1 and pooling 2x2. input and grad_input are channels_last, output and grad_output contiguous, as is
 * weight. conv_output, argmax and maximum have the sizes that they have above, but their order is private; statistics:
 * mean (without bias) and variance of each channel, for backward alone. All pointers are aligned to 16 bytes. weight
 * and bias are of weight_dtype: `dtype` or float32. */
int cuda_ops_conv_bn_relu_pool_sm90_supported(cuda_ops_dtype dtype, int64_t in_channels, int64_t height, int64_t width,
                                              int64_t out_channels);
/* Bytes of `workspace` of either pass, aligned to 16. */
int64_t cuda_ops_conv_bn_relu_pool_sm90_workspace(int64_t batch);
/* bias may be NULL. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_sm90_forward_cuda(void *output, void *conv_output, uint8_t *argmax,
                                                             void *maximum, double *statistics, void *workspace,
                                                             const cuda_ops_running_statistics *running,
                                                             const void *input, const void *weight, const void *bias,
                                                             const cuda_ops_norm_parameters *norm, int64_t batch,
                                                             cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                             cuda_ops_stream stream);
/* Any gradient but grad_weight may be NULL. grad_weight and grad_bias are of weight_dtype. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_sm90_backward_cuda(
    void *grad_input, void *grad_weight, void *grad_bias, void *grad_norm_weight, void *grad_norm_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const void *maximum, const void *conv_output,
    const double *statistics, const void *input, const void *weight, const cuda_ops_norm_parameters *norm,
    int64_t batch, cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cuda_ops_stream stream);

/* The whole block in float32, in training: where `supported` says so of the current device and the sizes (numbers of
 * channels that are multiples of 8, from 16 to 128; a GPU with 160 KB of shared memory a block), for kernel 3x3, stride
 * 1, padding 1 and pooling 2x2. input and grad_input are channels_last, weight and grad_weight contiguous; conv_output,
 * places and maximum have the sizes that conv_output, argmax and maximum have above, but are always channels_last.
 * statistics: mean (without bias) and variance of each channel. All pointers are aligned to 16 bytes. */
typedef struct cuda_ops_conv_bn_relu_pool_tiled_sizes {
    int64_t batch;
    int32_t in_channels, out_channels;
    int32_t height, width;        /* of input */
    int32_t output_channels_last; /* output and grad_output, else contiguous */
    int32_t allow_tf32;           /* what is multiplied may be rounded to TF32; otherwise it is multiplied as it is */
} cuda_ops_conv_bn_relu_pool_tiled_sizes;

int cuda_ops_conv_bn_relu_pool_tiled_supported(cuda_ops_dtype dtype, int64_t in_channels, int64_t height, int64_t width,
                                               int64_t out_channels);
/* Bytes of `workspace` of either pass, aligned to 16. */
int64_t cuda_ops_conv_bn_relu_pool_tiled_workspace_cuda(const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes);
/* bias (of bias_dtype) may be NULL. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_tiled_forward_cuda(float *output, float *conv_output, uint8_t *places,
                                                              float *maximum, double *statistics, void *workspace,
                                                              const cuda_ops_running_statistics *running,
                                                              const float *input, const float *weight, const void *bias,
                                                              const cuda_ops_norm_parameters *norm,
                                                              const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes,
                                                              cuda_ops_dtype bias_dtype, cuda_ops_stream stream);
/* Any gradient but grad_weight may be NULL. grad_bias is of bias_dtype. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_tiled_backward_cuda(
    float *grad_input, float *grad_weight, void *grad_bias, void *grad_norm_weight, void *grad_norm_bias,
    void *workspace, const float *grad_output, const uint8_t *places, const float *maximum, const float *conv_output,
    const double *statistics, const float *input, const float *weight, const cuda_ops_norm_parameters *norm,
    const cuda_ops_conv_bn_relu_pool_tiled_sizes *sizes, cuda_ops_dtype bias_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
