/* pointwise_loss: losses of each element of input and target, then none, their mean, or their sum: mse_loss, l1_loss,
 * smooth_l1_loss, huber_loss, binary_cross_entropy_with_logits and kl_div.
 *
 *   input, target, gradient: `count` elements, dense, of the same dtype
 *   losses, grad_output: `count` elements without a reduction, else one; of dtype
 *   parameter: smooth_l1's beta, above 0, and huber's delta; of the others not looked at
 *   the formulas: cuda_ops/pointwise_loss_functions.h
 *   sums are taken in double; a mean is divided by count; what is left of no elements (0 / 0) is NaN
 */
#ifndef CUDA_OPS_POINTWISE_LOSS_H
#define CUDA_OPS_POINTWISE_LOSS_H

#include "cuda_ops/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of each loss its name in pointwise_loss_functions.h. */
#define CUDA_OPS_POINTWISE_LOSSES(X)                                                                                   \
    X(MSE, mse)                                                                                                        \
    X(L1, l1)                                                                                                          \
    X(SMOOTH_L1, smooth_l1)                                                                                            \
    X(HUBER, huber)                                                                                                    \
    X(BCE_WITH_LOGITS, bce)                                                                                            \
    X(KL_DIV, kl)                                                                                                      \
    X(KL_DIV_OF_LOG, kl_of_log)

typedef enum cuda_ops_pointwise_loss {
    CUDA_OPS_POINTWISE_LOSS_MSE,
    CUDA_OPS_POINTWISE_LOSS_L1,
    CUDA_OPS_POINTWISE_LOSS_SMOOTH_L1,
    CUDA_OPS_POINTWISE_LOSS_HUBER,
    CUDA_OPS_POINTWISE_LOSS_BCE_WITH_LOGITS,
    CUDA_OPS_POINTWISE_LOSS_KL_DIV,
    CUDA_OPS_POINTWISE_LOSS_KL_DIV_OF_LOG /* target is the logarithm of the probability */
} cuda_ops_pointwise_loss;

/* Factors that are broadcast: element i has values[i / inner % size], values[i / inner] where
 * size is 0; values is NULL for ones. Of the dtype of input. */
typedef struct cuda_ops_loss_factor {
    const void *values;
    int64_t inner, size;
} cuda_ops_loss_factor;

/* What a loss is multiplied by, and what its part of a positive target is (BCE_WITH_LOGITS alone). */
typedef struct cuda_ops_loss_factors {
    cuda_ops_loss_factor weight, pos_weight;
} cuda_ops_loss_factors;

/* Elements [begin, end). Exactly one of `losses` (the array of all) and `partial` (their sum and their number, in double;
 * see cuda_ops_loss_reduce_cpu) is not NULL. */
cuda_ops_status cuda_ops_pointwise_loss_forward_cpu(void *losses, double *partial, const void *input,
                                                    const void *target, const cuda_ops_loss_factors *factors,
                                                    int64_t begin, int64_t end, cuda_ops_pointwise_loss loss,
                                                    double parameter, cuda_ops_dtype dtype);
/* The gradient of input; by_target: of target. */
cuda_ops_status cuda_ops_pointwise_loss_backward_cpu(void *gradient, const void *grad_output, const void *input,
                                                     const void *target, const cuda_ops_loss_factors *factors,
                                                     int64_t count, int64_t begin, int64_t end,
                                                     cuda_ops_pointwise_loss loss, double parameter, int by_target,
                                                     cuda_ops_reduction reduction, cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 8, that forward needs for a mean or a sum. */
size_t cuda_ops_pointwise_loss_workspace_cuda(int64_t count);
cuda_ops_status cuda_ops_pointwise_loss_forward_cuda(void *losses, void *workspace, const void *input,
                                                     const void *target, const cuda_ops_loss_factors *factors,
                                                     int64_t count, cuda_ops_pointwise_loss loss, double parameter,
                                                     cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                     cuda_ops_stream stream);
cuda_ops_status cuda_ops_pointwise_loss_backward_cuda(void *gradient, const void *grad_output, const void *input,
                                                      const void *target, const cuda_ops_loss_factors *factors,
                                                      int64_t count, cuda_ops_pointwise_loss loss, double parameter,
                                                      int by_target, cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                      cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
