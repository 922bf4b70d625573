/* scale_channels: the excitation of a squeeze-and-excitation block, a factor for each channel of each image.
 *
 *     output[o][p][i] = input[o][p][i] * f(scale[o][i])
 *
 *   output, input and their gradients: [outer, count, inner], dense: images, pixels and channels where channels are
 *       innermost; else channels of images, pixels, and 1
 *   scale, grad_scale: [outer, inner]
 *   f: sigmoid, hardsigmoid, or the scale itself
 *   backward: grad_input = grad_output * f(scale)
 *             grad_scale[o][i] = f'(scale[o][i]) * sum over p of grad_output * input
 *       Either may be NULL, not wanted; without grad_scale `input` is not read.
 *
 * All of one dtype. Sums are taken in a fixed order, so that results repeat bit by bit.
 */
#ifndef CUDA_OPS_SCALE_CHANNELS_H
#define CUDA_OPS_SCALE_CHANNELS_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_channel_gate {
    CUDA_OPS_CHANNEL_GATE_NONE = 0,
    CUDA_OPS_CHANNEL_GATE_SIGMOID = 1,
    CUDA_OPS_CHANNEL_GATE_HARDSIGMOID = 2
} cuda_ops_channel_gate;

/* Units that the caller spreads over threads, the same in both directions: some channels of an image each. */
int64_t cuda_ops_scale_channels_units_cpu(int64_t outer, int64_t inner);
/* Units [begin, end). In bfloat16 scale and grad_scale are of float32. */
cuda_ops_status cuda_ops_scale_channels_forward_cpu(void *output, const void *input, const void *scale, int64_t count,
                                                    int64_t inner, cuda_ops_channel_gate gate, int64_t begin,
                                                    int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_scale_channels_backward_cpu(void *grad_input, void *grad_scale, const void *grad_output,
                                                     const void *input, const void *scale, int64_t count, int64_t inner,
                                                     cuda_ops_channel_gate gate, int64_t begin, int64_t end,
                                                     cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_scale_channels_forward_cuda(void *output, const void *input, const void *scale, int64_t outer,
                                                     int64_t count, int64_t inner, cuda_ops_channel_gate gate,
                                                     cuda_ops_dtype dtype, cuda_ops_stream stream);
/* Bytes that backward needs where grad_scale is wanted; may be 0. */
int64_t cuda_ops_scale_channels_workspace_cuda(int64_t outer, int64_t count, int64_t inner, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_scale_channels_backward_cuda(void *grad_input, void *grad_scale, void *workspace,
                                                      const void *grad_output, const void *input, const void *scale,
                                                      int64_t outer, int64_t count, int64_t inner,
                                                      cuda_ops_channel_gate gate, cuda_ops_dtype dtype,
                                                      cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
