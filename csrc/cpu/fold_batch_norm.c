/* fold_batch_norm on the CPU: folded_weight = weight * scale, folded_bias = (bias - mean) * scale + norm_bias, with a
 * scale a channel. Bound by memory: the weight is read once and written once. */
#ifndef REAL

#include "cuda_ops/fold_batch_norm.h"

#include <math.h>

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "fold_batch_norm.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "fold_batch_norm.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_fold_batch_norm_cpu(void *folded_weight, void *folded_bias, const cuda_ops_fold *fold,
                                             int64_t begin, int64_t end)
{
    switch (fold->weight_dtype) {
    case CUDA_OPS_FLOAT32:
        fold_batch_norm_f32(folded_weight, folded_bias, fold, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        fold_batch_norm_f64(folded_weight, folded_bias, fold, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static void FN(scale_channel)(REAL *to, const REAL *from, int64_t count, REAL scale)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i] * scale;
}

static void FN(fold_batch_norm)(REAL *weight, REAL *bias, const cuda_ops_fold *fold, int64_t begin, int64_t end)
{
    const REAL *const from = fold->weight, *const from_bias = fold->bias;
    const REAL *const norm_weight = fold->norm_weight, *const norm_bias = fold->norm_bias;
    const REAL *const mean = fold->mean, *const variance = fold->variance;
    for (int64_t o = begin; o < end; o++) {
        const double scale = (norm_weight ? (double)norm_weight[o] : 1.0) / sqrt((double)variance[o] + fold->eps);
        const double before = (from_bias ? (double)from_bias[o] : 0.0) - (double)mean[o];
        bias[o] = (REAL)(before * scale + (norm_bias ? (double)norm_bias[o] : 0.0));
        FN(scale_channel)(weight + o * fold->count, from + o * fold->count, fold->count, (REAL)scale);
    }
}

#endif
