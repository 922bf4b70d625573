// The two products of the path sm90 of linear_cross_entropy that gemm does not make, as sm90.cu asks for them.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_SM90_PRODUCTS_H
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_SM90_PRODUCTS_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda_ops/core.h"

// A tile's columns (classes), for each of which a row leaves a partial result.
static constexpr int HEAD_TILE_CLASSES = 192;

// A row's classes of one tile: `sum` of exp(logit - reference). The reference is that of the row if there are such and
// the tile's largest logit exceeds it by no more than LARGEST_EXPONENT, else that largest logit.
struct HeadPartial {
    float reference, sum;
};
static constexpr float LARGEST_EXPONENT = 32;

// logits = softcap * tanh((input * weight^T + bias) / softcap), or without tanh where softcap is zero, of `rows` rows;
// partials [rows][tiles]; the sums of a tile's logits, likewise, or NULL; target_logits [rows], where target is a class.
// exponentials [rows][pitch], or NULL: exp(logit - reference), times the derivative of the cap, in the inputs' dtype.
struct HeadLogits {
    void *exponentials;
    HeadPartial *partials;
    float *logit_sums, *target_logits;
    const void *input, *weight, *bias;
    const float *references; // or NULL
    const int64_t *target;
    int64_t rows, in_features, classes, pitch;
    float softcap;
    cuda_ops_dtype dtype, bias_dtype;
    cudaStream_t stream;
};

// sums (=, or += with `accumulate`) exponentials^T * input, in float32; or, where `rounded` is given, that is what they
// would have become, in the inputs' dtype, and they are read only if they are added to.
struct HeadWeightGradient {
    float *sums;
    void *rounded;
    const void *exponentials, *input;
    int64_t rows, in_features, classes, pitch;
    bool accumulate;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

// CUDA_OPS_INVALID_ARGUMENT where the driver has no tensor maps, or there are too many tiles.
cuda_ops_status head_logits_bfloat16(const HeadLogits &call);
cuda_ops_status head_logits_float16(const HeadLogits &call);
cuda_ops_status head_weight_gradient_bfloat16(const HeadWeightGradient &call);
cuda_ops_status head_weight_gradient_float16(const HeadWeightGradient &call);

#endif
