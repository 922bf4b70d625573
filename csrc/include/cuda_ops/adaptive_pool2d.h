/* adaptive_avg_pool2d and adaptive_max_pool2d: pools whose windows follow from the sizes of input and output. Along an
 * axis, window `o` covers the positions
 *
 *     floor(o * input / output) ... ceil((o + 1) * input / output) - 1
 *
 * so that neighbours overlap where input is no multiple of output.
 *
 *   input, grad_input:               batch x channels x height.input x width.input, laid out as pool2d.h says
 *   output, grad_output, indices:    batch x channels x height.output x width.output, in the same order
 *   indices:                         h * width.input + w of the value taken
 *   workspace:                       of cuda_ops_adaptive_avg_pool2d_workspace_cuda bytes, aligned to 16
 *
 * avg: the window's mean; backward: the sum of grad_output / (positions of the window) over the windows that hold a
 * position. max: NaN is larger than everything, and of several NaNs the last is taken, of several equal values the
 * first, in the order of rows; backward: the sum of grad_output over the windows whose index is that of the position.
 * Indices from elsewhere than forward read and write nothing outside of the arrays. Results repeat bit by bit.
 */
#ifndef CUDA_OPS_ADAPTIVE_POOL2D_H
#define CUDA_OPS_ADAPTIVE_POOL2D_H

#include <stdbool.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_adaptive_axis {
    int32_t input, output;
} cuda_ops_adaptive_axis;

typedef struct cuda_ops_adaptive_pool2d {
    int64_t batch, channels;
    cuda_ops_adaptive_axis height, width;
    int32_t channels_last;
} cuda_ops_adaptive_pool2d;

/* First position of a window, and one past the last. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_adaptive_start(cuda_ops_adaptive_axis axis, int32_t window)
{
    return (int32_t)((int64_t)window * axis.input / axis.output);
}
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_adaptive_end(cuda_ops_adaptive_axis axis, int32_t window)
{
    return (int32_t)((((int64_t)window + 1) * axis.input + axis.output - 1) / axis.output);
}

/* First window that holds a position, and one past the last: the same with input and output exchanged. */
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_adaptive_first_window(cuda_ops_adaptive_axis axis, int32_t position)
{
    return (int32_t)((int64_t)position * axis.output / axis.input);
}
CUDA_OPS_HOST_DEVICE int32_t cuda_ops_adaptive_end_window(cuda_ops_adaptive_axis axis, int32_t position)
{
    return (int32_t)((((int64_t)position + 1) * axis.output + axis.input - 1) / axis.input);
}

/* Whether a position lies in more than one window. */
CUDA_OPS_HOST_DEVICE bool cuda_ops_adaptive_pool2d_overlaps(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->height.input % pool->height.output != 0 || pool->width.input % pool->width.output != 0;
}

/* Whether a call may be made with this geometry: sizes are positive, and a plane's positions number less than 2^31. */
CUDA_OPS_HOST_DEVICE bool cuda_ops_adaptive_pool2d_valid(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->batch >= 0 && pool->channels >= 0 && pool->height.input >= 1 && pool->width.input >= 1 &&
           pool->height.output >= 1 && pool->width.output >= 1 &&
           (int64_t)pool->height.input * pool->width.input <= INT32_MAX &&
           (int64_t)pool->height.output * pool->width.output <= INT32_MAX;
}

/* Planes [begin, end) of batch * channels; with channels_last, rows [begin, end) of batch * height.output (forward) or
 * batch * height.input (backward). Backward takes float16 and bfloat16 too where windows do not overlap. */
cuda_ops_status cuda_ops_adaptive_avg_pool2d_forward_cpu(void *output, const void *input,
                                                         const cuda_ops_adaptive_pool2d *pool, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_adaptive_avg_pool2d_backward_cpu(void *grad_input, const void *grad_output,
                                                          const cuda_ops_adaptive_pool2d *pool, int64_t begin,
                                                          int64_t end, cuda_ops_dtype dtype);
/* Whether the next one takes halves. */
int cuda_ops_adaptive_max_pool2d_takes_halves_cpu(const cuda_ops_adaptive_pool2d *pool);
cuda_ops_status cuda_ops_adaptive_max_pool2d_forward_cpu(void *output, int64_t *indices, const void *input,
                                                         const cuda_ops_adaptive_pool2d *pool, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_adaptive_max_pool2d_backward_cpu(void *grad_input, const void *grad_output,
                                                          const int64_t *indices, const cuda_ops_adaptive_pool2d *pool,
                                                          int64_t begin, int64_t end, cuda_ops_dtype dtype);

int64_t cuda_ops_adaptive_avg_pool2d_workspace_cuda(const cuda_ops_adaptive_pool2d *pool, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_adaptive_avg_pool2d_forward_cuda(void *output, void *workspace, const void *input,
                                                          const cuda_ops_adaptive_pool2d *pool, cuda_ops_dtype dtype,
                                                          cuda_ops_stream stream);
cuda_ops_status cuda_ops_adaptive_avg_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                           const cuda_ops_adaptive_pool2d *pool, cuda_ops_dtype dtype,
                                                           cuda_ops_stream stream);
cuda_ops_status cuda_ops_adaptive_max_pool2d_forward_cuda(void *output, int64_t *indices, const void *input,
                                                          const cuda_ops_adaptive_pool2d *pool, cuda_ops_dtype dtype,
                                                          cuda_ops_stream stream);
cuda_ops_status cuda_ops_adaptive_max_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                           const int64_t *indices, const cuda_ops_adaptive_pool2d *pool,
                                                           cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
