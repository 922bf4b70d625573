/* adam: one step of Adam, or of AdamW, in place over a list of parameters. For each element, with g = grad (or -grad to
 * maximize) and t = the step's number, from 1 on:
 *
 *   param          -= lr * weight_decay * param                       if weight_decay != 0 and decoupled (AdamW)
 *   g              += weight_decay * param                            if weight_decay != 0 and not decoupled (Adam)
 *   exp_avg        += (1 - beta1) * (g - exp_avg)
 *   exp_avg_sq      = beta2 * exp_avg_sq + (1 - beta2) * g * g
 *   max_exp_avg_sq  = max(max_exp_avg_sq, exp_avg_sq)                 if amsgrad, and then it is used below
 *   param          -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
 *
 *   param, grad: `count` elements each, dense, in the same order. exp_avg, exp_avg_sq and, with amsgrad alone,
 *   max_exp_avg_sq: alike, of state_dtype, which is dtype, or float32 beside float16 and bfloat16.
 *   All but grad are updated in place; grad too where it is to be unscaled (grad_scale).
 *   Halves are computed with in float32 and rounded once.
 */
#ifndef CUDA_OPS_ADAM_H
#define CUDA_OPS_ADAM_H

#include <stddef.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_adam_options {
    double lr, beta1, beta2, eps, weight_decay;
    int amsgrad, decoupled, maximize; /* 0 or 1 */
} cuda_ops_adam_options;

/* Elements [begin, end) of one parameter, so that the caller spreads ranges over threads. step: t above.
 * grad_scale: what the gradient is divided by, in memory too if it is not 1. */
cuda_ops_status cuda_ops_adam_cpu(void *param, void *grad, void *exp_avg, void *exp_avg_sq, void *max_exp_avg_sq,
                                  double step, double grad_scale, const cuda_ops_adam_options *options, int64_t begin,
                                  int64_t end, cuda_ops_dtype dtype);

/* The tensors of a list: arrays of `tensors` entries in host memory, which may be freed on return. */
typedef struct cuda_ops_adam_list {
    void *const *params, *const *grads, *const *exp_avgs, *const *exp_avg_sqs;
    void *const *max_exp_avg_sqs; /* NULL without amsgrad */
    const int64_t *counts;
    /* One of these two. The number of each parameter's step, t above; or where its counter is in device memory, one
     * element of step_dtype (float32 or float64) that the step adds 1 to before it uses it. */
    const double *steps;
    void *const *device_steps;
    int64_t tensors;
} cuda_ops_adam_list;

/* Single values in device memory, read when the kernel runs, so that a captured graph follows them; or NULL. */
typedef struct cuda_ops_adam_device_scalars {
    const void *lr;          /* of lr_dtype, in place of options->lr */
    const float *grad_scale; /* gradients are divided by it, in memory too */
    const float *found_inf;  /* not 0: the step is left out, and no counter moves */
    cuda_ops_dtype lr_dtype, step_dtype;
    /* The norm of all gradients, after grad_scale, or NULL: the step is that of gradients times
     * min(max_grad_norm / (grad_norm + 1e-6), 1), which in memory stay as they are. */
    const float *grad_norm;
    double max_grad_norm;
} cuda_ops_adam_device_scalars;

/* Bytes of workspace: some where steps are counted on the device, else none. */
size_t cuda_ops_adam_workspace_cuda(int64_t tensors, int steps_on_device);

/* The whole list: one launch for some fifty parameters that are not empty, and, where steps are counted on the device,
 * another, of one block, for their counters. */
cuda_ops_status cuda_ops_adam_cuda(const cuda_ops_adam_list *list, const cuda_ops_adam_device_scalars *scalars,
                                   void *workspace, const cuda_ops_adam_options *options, cuda_ops_dtype dtype,
                                   cuda_ops_dtype state_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
