/* avg_pool2d: the sum of each window over a divisor.
 *
 *   input, grad_input:      batch x channels x height.input x width.input, laid out as pool2d.h says
 *   output, grad_output:    batch x channels x height.output x width.output, in the same order
 *
 * The divisor is divisor_override if that is not zero; else the number of positions that the window covers, padding
 * included if count_include_pad (but nothing past the padding, where ceil_mode lets a window end), else in the input.
 * backward: grad_input[i] = the sum of grad_output / divisor over the windows that hold i.
 * Both axes have dilation 1. No workspace. Results repeat bit by bit.
 */
#ifndef CUDA_OPS_AVG_POOL2D_H
#define CUDA_OPS_AVG_POOL2D_H

#include "cuda_ops/core.h"
#include "cuda_ops/pool2d.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Planes [begin, end) of batch * channels; with channels_last, rows [begin, end) of batch * height.output (forward) or
 * batch * height.input (backward). Forward with channels_last takes bfloat16 too. */
cuda_ops_status cuda_ops_avg_pool2d_forward_cpu(void *output, const void *input, const cuda_ops_pool2d *pool,
                                                bool count_include_pad, int64_t divisor_override, int64_t begin,
                                                int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_avg_pool2d_backward_cpu(void *grad_input, const void *grad_output, const cuda_ops_pool2d *pool,
                                                 bool count_include_pad, int64_t divisor_override, int64_t begin,
                                                 int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_avg_pool2d_forward_cuda(void *output, const void *input, const cuda_ops_pool2d *pool,
                                                 bool count_include_pad, int64_t divisor_override, cuda_ops_dtype dtype,
                                                 cuda_ops_stream stream);
cuda_ops_status cuda_ops_avg_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                  const cuda_ops_pool2d *pool, bool count_include_pad,
                                                  int64_t divisor_override, cuda_ops_dtype dtype,
                                                  cuda_ops_stream stream);

/* Positions along an axis that count in the divisor of the window that begins at `start`. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_avg_pool_extent(cuda_ops_pool_axis axis, int32_t start, bool count_include_pad)
{
    const int32_t first = count_include_pad || start > 0 ? start : 0;
    const int32_t limit = count_include_pad ? axis.input + axis.padding : axis.input;
    const int32_t end = start + axis.kernel;
    return (end < limit ? end : limit) - first;
}

#ifdef __cplusplus
}
#endif

#endif
