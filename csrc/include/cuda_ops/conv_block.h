/* conv_block: conv2d (3x3, stride 1, padding 1), batch_norm in training, relu and max_pool2d (2x2) as one block on the
 * CPU, of float32 or halves: a faster way to what conv2d.h, batch_norm.h and conv_bn_relu_pool.h compute step by step.
 *
 *   input, grad_input:    batch x in_channels x height x width
 *   weight, grad_weight:  out_channels x in_channels x 3 x 3, contiguous
 *   output, grad_output:  batch x out_channels x height / 2 x width / 2
 *   input and output are each in that order or channels last, as the sizes' flags say; gradients as they are.
 *
 * Several input channels: the convolution by Winograd's F(2x2, 3x3), which needs 4 products where the sum itself has
 * 9, forward and in both gradients; a tile of it is a window of the pooling. One input channel: the convolution is
 * never stored, and the gradients follow from the products of the input with the gradient at the windows' maxima.
 * Either way images are taken one by one, so that an image's data stay in the second-level cache.
 *
 * Halves are widened image by image, and what is computed of them in float32 is rounded once. bfloat16 with several
 * input channels, where the processor multiplies it (AMX, AVX512-BF16) and both numbers of channels are multiples of 32:
 * the sums as they stand, of bfloat16 numbers (weight and the gradient of the convolution are rounded to it), in
 * float32.
 *
 * The work is split into `chunks` of images, whose number depends on the batch alone, and their sums are added in
 * order: results repeat bit by bit for any number of threads.
 *
 * Steps; those with [begin, end) may be spread over threads, and are of chunks but for the ones over channels:
 *     forward:   prepare, convolve, statistics, pool
 *     backward:  sums, prepare_backward, gradients, reduce_weight. With one input channel the last is
 *                left out, and gradients where grad_input is not wanted.
 */
#ifndef CUDA_OPS_CONV_BLOCK_H
#define CUDA_OPS_CONV_BLOCK_H

#include <stddef.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dtype: of input, output, their gradients, conv_output and maximum: float32, float16 or bfloat16. Parameters and their
 * gradients are float32. */
typedef struct cuda_ops_conv_block_sizes {
    int64_t batch, in_channels, out_channels, height, width;
    int input_channels_last, output_channels_last;
    cuda_ops_dtype dtype;
} cuda_ops_conv_block_sizes;

/* Buffers, aligned to 64 bytes. What backward takes from forward: conv_output, argmax, maximum, moments. */
typedef struct cuda_ops_conv_block_plan {
    int64_t chunks;
    size_t prepared_bytes;    /* of weights, from `prepare`, of use as long as the weight is the same */
    size_t conv_output_bytes; /* 0 with one input channel */
    size_t argmax_bytes;      /* one byte a window: 0 to 3, or 255 where relu gave 0 */
    size_t maximum_bytes;     /* conv_output where argmax points; 0 with one input channel */
    size_t moments_bytes;
    size_t partials_bytes;  /* from `sums` to `prepare_backward` */
    size_t weights_bytes;   /* from `gradients` to `reduce_weight` */
    size_t workspace_bytes; /* for each range that runs at the same time */
} cuda_ops_conv_block_plan;

/* CUDA_OPS_INVALID_ARGUMENT where the sizes are not this block's: height and width even and at least 2, in_channels 1
 * or a multiple of 16, out_channels a multiple of 16, batch at least 1, and height * width * channels at most 2^18;
 * CUDA_OPS_UNSUPPORTED_DTYPE for float64. */
cuda_ops_status cuda_ops_conv_block_plan_cpu(cuda_ops_conv_block_plan *plan, const cuda_ops_conv_block_sizes *sizes);

/* Sixteens of output channels [begin, end) of out_channels / 16. What convolve and pool take of `prepared`, or, if
 * backward, what gradients takes: each may be prepared without the other. */
cuda_ops_status cuda_ops_conv_block_prepare_cpu(void *prepared, const float *weight, int backward,
                                                const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end);
/* bias may be NULL. */
cuda_ops_status cuda_ops_conv_block_convolve_cpu(void *conv_output, void *moments, const void *input,
                                                 const void *prepared, const float *bias,
                                                 const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end,
                                                 void *workspace);
/* Of the batch, the variance biased. Not to be spread. With one input channel the first
 * CUDA_OPS_CONV_BLOCK_TAP_MOMENTS numbers of `moments`, doubles, are then all that backward takes of them. */
enum { CUDA_OPS_CONV_BLOCK_TAP_MOMENTS = 9 + 81 };
cuda_ops_status cuda_ops_conv_block_statistics_cpu(double *mean, double *variance, void *moments, const float *weight,
                                                   const float *bias, const cuda_ops_conv_block_sizes *sizes);
/* mean, variance: of the batch or any other; norm_weight and norm_bias may be NULL for 1 and 0. */
cuda_ops_status cuda_ops_conv_block_pool_cpu(void *output, uint8_t *argmax, void *maximum, const void *conv_output,
                                             const void *input, const void *prepared, const float *bias,
                                             const double *mean, const double *variance, const float *norm_weight,
                                             const float *norm_bias, double eps, const cuda_ops_conv_block_sizes *sizes,
                                             int64_t begin, int64_t end, void *workspace);

cuda_ops_status cuda_ops_conv_block_sums_cpu(void *partials, const void *grad_output, const uint8_t *argmax,
                                             const void *maximum, const void *input, const double *mean,
                                             const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end,
                                             void *workspace);
/* coefficients: 4 * out_channels floats, from here to `gradients`. grad_weight: written with one input channel alone.
 * grad_norm_weight and grad_norm_bias may be NULL. Not to be spread. The gradient of the convolution's bias is zero,
 * since batch norm takes the mean off again. */
cuda_ops_status cuda_ops_conv_block_prepare_backward_cpu(float *coefficients, float *grad_norm_weight,
                                                         float *grad_norm_bias, float *grad_weight,
                                                         const void *partials, const void *moments, const float *weight,
                                                         const float *bias, const double *mean, const double *variance,
                                                         const float *norm_weight, double eps,
                                                         const cuda_ops_conv_block_sizes *sizes);
/* grad_input may be NULL with several input channels; with one, neither weights nor conv_output is touched. */
cuda_ops_status cuda_ops_conv_block_gradients_cpu(void *grad_input, void *weights, const void *grad_output,
                                                  const uint8_t *argmax, const void *conv_output, const void *input,
                                                  const void *prepared, const float *bias, const float *coefficients,
                                                  const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end,
                                                  void *workspace);
/* Input channels [begin, end). */
cuda_ops_status cuda_ops_conv_block_reduce_weight_cpu(float *grad_weight, const void *weights,
                                                      const cuda_ops_conv_block_sizes *sizes, int64_t begin,
                                                      int64_t end);

#ifdef __cplusplus
}
#endif

#endif
