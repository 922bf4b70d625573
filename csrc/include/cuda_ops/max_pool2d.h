/* max_pool2d: the largest value of each window, and where in its plane it is.
 *
 *   input, grad_input:                 batch x channels x height.input x width.input, laid out as pool2d.h says
 *   output, grad_output, indices:      batch x channels x height.output x width.output, in the same order
 *   indices:                           h * width.input + w of the value taken
 *
 * NaN is larger than everything, and of several NaNs the last is taken, of several equal values the first, in the
 * order of rows. A window with no position in the input (dilation and ceil_mode can make one) gives -infinity and the
 * index -1.
 * backward: grad_input[i] = the sum of grad_output over the windows whose index is i. Indices are those that forward
 * gave; others read and write nothing outside of the arrays, and what they contribute is not specified.
 * No workspace. Results repeat bit by bit.
 */
#ifndef CUDA_OPS_MAX_POOL2D_H
#define CUDA_OPS_MAX_POOL2D_H

#include "cuda_ops/core.h"
#include "cuda_ops/pool2d.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Planes [begin, end) of batch * channels; with channels_last, rows [begin, end) of batch * height.output (forward) or
 * batch * height.input (backward). */
cuda_ops_status cuda_ops_max_pool2d_forward_cpu(void *output, int64_t *indices, const void *input,
                                                const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_max_pool2d_backward_cpu(void *grad_input, const void *grad_output, const int64_t *indices,
                                                 const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                 cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_max_pool2d_forward_cuda(void *output, int64_t *indices, const void *input,
                                                 const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
                                                 cuda_ops_stream stream);
cuda_ops_status cuda_ops_max_pool2d_backward_cuda(void *grad_input, const void *grad_output, const int64_t *indices,
                                                  const cuda_ops_pool2d *pool, cuda_ops_dtype dtype,
                                                  cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
