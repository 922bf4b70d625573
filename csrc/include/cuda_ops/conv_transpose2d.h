/* conv_transpose2d: the gradient of a convolution for its input, as a layer: with the convolution of cuda_ops/conv2d.h,
 *
 *   input[n][o][y][x] * weight[o][c][r][s]  is added to
 *   output[n][g * C + c][y * stride - padding_top + r * dilation][... alike in x], which starts as bias[g * C + c].
 *
 * The sizes are those of the convolution, so that what it calls output is input here: out_channels, out_height and
 * out_width are input's, in_channels, in_height and in_width are output's, and weight is out_channels x in_channels /
 * groups x kernel_height x kernel_width. Rows and columns of output that nothing is added to are bias alone.
 *
 * The gradients are products of cuda_ops/conv2d.h too: FORWARD of grad_output is grad_input, BACKWARD_WEIGHT of
 * (grad_output = input, input = grad_output) is grad_weight. On CUDA output is cuda_ops_conv2d_backward_input_cuda's,
 * to which the caller adds bias.
 */
#ifndef CUDA_OPS_CONV_TRANSPOSE2D_H
#define CUDA_OPS_CONV_TRANSPOSE2D_H

#include "cuda_ops/conv2d.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As cuda_ops_conv2d_backward_input_cpu, with its plan and what was prepared for it. bias: in_channels values, or NULL.
 */
cuda_ops_status cuda_ops_conv_transpose2d_forward_cpu(void *output, const void *input, const void *weight,
                                                      const void *prepared, const void *bias,
                                                      const cuda_ops_conv2d_sizes *sizes, int64_t begin, int64_t end,
                                                      void *workspace, cuda_ops_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
