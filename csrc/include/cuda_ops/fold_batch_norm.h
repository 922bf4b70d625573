/* fold_batch_norm: a convolution and the batch_norm with running statistics behind it, as one convolution:
 *
 *   scale[o]            = norm_weight[o] / sqrt(variance[o] + eps)
 *   folded_weight[o][i] = weight[o][i] * scale[o]
 *   folded_bias[o]      = (bias[o] - mean[o]) * scale[o] + norm_bias[o]
 *
 *   weight, folded_weight: channels x count, where count is whatever an output channel has, in any order
 *   bias: channels, of weight's dtype; may be NULL, as norm_weight and norm_bias may, for 0, 1 and 0
 *   scales are made in double, and rounded to what the weight is multiplied in
 *   no workspace
 */
#ifndef CUDA_OPS_FOLD_BATCH_NORM_H
#define CUDA_OPS_FOLD_BATCH_NORM_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_fold {
    const void *weight, *bias;
    const void *norm_weight, *norm_bias;
    const void *mean, *variance;
    int64_t channels, count;
    double eps;
    cuda_ops_dtype weight_dtype;
    cuda_ops_dtype norm_dtype;       /* of norm_weight and norm_bias */
    cuda_ops_dtype statistics_dtype; /* of mean and variance */
} cuda_ops_fold;

/* Channels [begin, end). All tensors are of one dtype, float32 or float64. */
cuda_ops_status cuda_ops_fold_batch_norm_cpu(void *folded_weight, void *folded_bias, const cuda_ops_fold *fold,
                                             int64_t begin, int64_t end);

/* dtype: of what is written. weight_dtype is that, or float32 beside a half. */
cuda_ops_status cuda_ops_fold_batch_norm_cuda(void *folded_weight, void *folded_bias, const cuda_ops_fold *fold,
                                              cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
