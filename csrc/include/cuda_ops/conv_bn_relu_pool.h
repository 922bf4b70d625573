/* conv_bn_relu_pool: max_pool2d(relu(batch_norm(conv2d(input)))). First what follows the convolution,
 *
 *     output[window] = max over the window of relu((conv_output - center) * scale + offset)
 *
 * in one pass over the convolution's output, which conv2d.h makes; batch_norm.h makes its mean and variance. Then the
 * whole block.
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
 *     grad_conv_output = norm_weight / sqrt(variance + eps) *
 *                        (dz - grad_norm_bias / n - normalised * grad_norm_weight / n)
 */
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_H
#define CUDA_OPS_CONV_BN_RELU_POOL_H

#include "cuda_ops/batch_norm.h"
#include "cuda_ops/conv2d.h"
#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"
#include "cuda_ops/pool2d.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_POOL_LARGEST = 255, CUDA_OPS_POOL_INACTIVE = 255 };

/* On the CPU forward is: prepare_forward, pool over ranges. Backward: sums over channels [begin, end),
 * prepare_backward, grad_conv over ranges. Ranges are of the batch * channels planes, or with channels_last of the
 * batch * height.output rows (pool) and the batch * height.input rows (grad_conv).
 *
 * coefficients: CUDA_OPS_CONV_BN_RELU_POOL_COEFFICIENTS * channels elements of `dtype`, passed from step to step.
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

/* Bytes of `workspace` of either pass, aligned to 16. */
int64_t cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(const cuda_ops_pool2d *pool);

/* mean, variance: of the batch, or with statistics_dtype other than float64 beside another `dtype`, running ones.
 * argmax and maximum: both or neither NULL. running: NULL where there are none to be kept. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_pool_forward_cuda(
    void *output, uint8_t *argmax, void *maximum, void *workspace, const cuda_ops_running_statistics *running,
    const void *conv_output, const void *mean, const void *variance, const cuda_ops_norm_parameters *norm,
    const cuda_ops_pool2d *pool, cuda_ops_dtype dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream);

/* grad_norm_weight, grad_norm_bias (of norm->dtype) and grad_bias (of bias_dtype; that of the convolution, 0 but for
 * NaN, since batch_norm takes the mean off again) may each be NULL. norm->bias is not read. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_pool_backward_cuda(
    void *grad_conv_output, void *grad_norm_weight, void *grad_norm_bias, void *grad_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const void *maximum, const void *conv_output, const double *mean,
    const double *variance, const cuda_ops_norm_parameters *norm, const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
    cuda_ops_dtype bias_dtype, cuda_ops_stream stream);

/* The whole block, convolution included, in training, by one of the paths of
 * csrc/cuda/conv_bn_relu_pool/conv_bn_relu_pool.cu. Which one depends on the sizes, their dtype and the current device,
 * not on the batch, so that forward and backward agree on what is kept for backward. */
typedef struct cuda_ops_conv_bn_relu_pool_sizes {
    cuda_ops_conv2d_sizes conv; /* output_channels_last: that of conv_output, and pool.channels_last */
    cuda_ops_pool2d pool;       /* of the convolution's output */
} cuda_ops_conv_bn_relu_pool_sizes;

typedef enum cuda_ops_conv_bn_relu_pool_path {
    CUDA_OPS_CONV_BN_RELU_POOL_GENERAL = 0,     /* conv2d.h, batch_norm.h and the pooling above; everything */
    CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL = 1, /* conv_output is never stored; no gradient of input */
    CUDA_OPS_CONV_BN_RELU_POOL_SM90 = 2, /* fp16 and bf16 on Hopper's tensor cores; keeps tensors in its own layout */
    CUDA_OPS_CONV_BN_RELU_POOL_TILED = 3 /* float32, TF32 where it is allowed; what is kept is channels_last */
} cuda_ops_conv_bn_relu_pool_path;

/* What a path takes, and what its forward pass keeps for backward. */
typedef struct cuda_ops_conv_bn_relu_pool_plan {
    cuda_ops_conv_bn_relu_pool_path path;
    int takes_contiguous, takes_channels_last; /* memory formats of input and grad_input; weight is contiguous but for
                                                * GENERAL */
    int aligned;                               /* all tensors are to be aligned to 16 bytes */
    int makes_grad_input;
    int keeps_conv_output, keeps_maximum; /* of the sizes above; else empty. argmax is always kept */
    int64_t statistics;                   /* how many doubles, of which the first are mean and variance by channel */
} cuda_ops_conv_bn_relu_pool_plan;

/* CUDA_OPS_INVALID_ARGUMENT for sizes beyond the limits. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_plan_cuda(cuda_ops_conv_bn_relu_pool_plan *plan,
                                                     const cuda_ops_conv_bn_relu_pool_sizes *sizes,
                                                     cuda_ops_dtype dtype);
/* Bytes of `workspace` of either pass, aligned to 256. */
int64_t cuda_ops_conv_bn_relu_pool_workspace_cuda(const cuda_ops_conv_bn_relu_pool_sizes *sizes, cuda_ops_dtype dtype);

/* weight and bias (which may be NULL) are of weight_dtype: `dtype`, or float32 beside fp16 and bf16 but for GENERAL,
 * which takes one dtype. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_forward_cuda(
    void *output, void *conv_output, uint8_t *argmax, void *maximum, double *statistics, void *workspace,
    const cuda_ops_running_statistics *running, const void *input, const void *weight, const void *bias,
    const cuda_ops_norm_parameters *norm, const cuda_ops_conv_bn_relu_pool_sizes *sizes, cuda_ops_dtype dtype,
    cuda_ops_dtype weight_dtype, cuda_ops_stream stream);
/* Any gradient but grad_weight may be NULL. grad_weight and grad_bias are of weight_dtype. */
cuda_ops_status cuda_ops_conv_bn_relu_pool_backward_cuda(
    void *grad_input, void *grad_weight, void *grad_bias, void *grad_norm_weight, void *grad_norm_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const void *maximum, const void *conv_output,
    const double *statistics, const void *input, const void *weight, const cuda_ops_norm_parameters *norm,
    const cuda_ops_conv_bn_relu_pool_sizes *sizes, cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
    cuda_ops_stream stream);

/* The table for such sizes (paths.h): fills in at most `room` reports, and returns how many rows there are. device:
 * NULL for the current one. */
int cuda_ops_conv_bn_relu_pool_paths_cuda(cuda_ops_path_report *reports, int room,
                                          const cuda_ops_conv_bn_relu_pool_sizes *sizes, cuda_ops_dtype dtype,
                                          const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
