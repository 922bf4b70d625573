/* sgd: one step of stochastic gradient descent, in place over a list of parameters. For each element, with
 * g = grad (or -grad to maximize):
 *
 *   g      += weight_decay * param                                    if weight_decay != 0
 *   buffer  = first ? g : momentum * buffer + (1 - dampening) * g     if momentum != 0
 *   g       = nesterov ? g + momentum * buffer : buffer               if momentum != 0
 *   param  -= lr * g
 *
 *   param, grad, buffer: `count` elements each, dense, in the same order; param and buffer are updated in place.
 *   buffer is only touched if momentum != 0, and only read if not `first`.
 *   Halves are computed with in float32 and rounded once. No workspace.
 */
#ifndef CUDA_OPS_SGD_H
#define CUDA_OPS_SGD_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_sgd_options {
    double lr, momentum, dampening, weight_decay;
    int nesterov, maximize; /* 0 or 1 */
} cuda_ops_sgd_options;

/* Elements [begin, end) of one parameter, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_sgd_cpu(void *param, const void *grad, void *buffer, int first,
                                 const cuda_ops_sgd_options *options, int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* The whole list: one launch for about a hundred parameters that are not empty. The arrays of pointers, `counts` and
 * `first` are in host memory, of `tensors` entries, and may be freed on return; buffers may be NULL if momentum = 0.
 * lr: one float32 or float64 (lr_dtype) in device memory, read when the kernel runs and used instead of options->lr,
 * so that a captured graph follows it; or NULL. */
cuda_ops_status cuda_ops_sgd_cuda(void *const *params, const void *const *grads, void *const *buffers,
                                  const int64_t *counts, const uint8_t *first, int64_t tensors,
                                  const cuda_ops_sgd_options *options, const void *lr, cuda_ops_dtype lr_dtype,
                                  cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
