// What the paths of linear_cross_entropy share: how one is called, and the problem as kernels see it.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_PROBLEM_CUH
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_PROBLEM_CUH

#include "cuda_ops/linear_cross_entropy.h"

#include "common/paths.h"
#include "common/thread_group.cuh"

static constexpr int THREADS = 256;

// What the gradient of a weight of P beside an input of T is kept in until backward scales it.
template <typename T, typename P>
struct weight_gradient {
    typedef accumulate_type<T> type;
};
template <>
struct weight_gradient<__nv_bfloat16, __nv_bfloat16> {
    typedef __nv_bfloat16 type;
};
template <typename T, typename P>
using weight_gradient_type = typename weight_gradient<T, P>::type;

// Names as in the header. `quads`: groups of four features, the last one padded with zeros.
template <typename T, typename P>
struct head_problem {
    P *losses; // of rows, or the reduced one
    accumulate_type<T> *total_weight;
    T *grad_input;
    weight_gradient_type<T, P> *grad_weight;
    accumulate_type<T> *grad_bias;
    cuda_ops_index_error *error;
    const T *input;
    const P *weight, *bias;
    const int64_t *target;
    const P *row_scale;
    int64_t rows, ignore_index;
    int in_features, classes, quads;
    accumulate_type<T> keep, spread; // see cross_entropy.cu
    accumulate_type<T> z_loss, softcap;
    cuda_ops_reduction reduction;
    bool vectors; // whether four features at once may be loaded and stored
};

// One call as a launcher gets it.
struct HeadCall {
    void *losses, *total_weight, *grad_input, *grad_weight, *grad_bias, *workspace;
    cuda_ops_index_error *error;
    const void *input, *weight, *bias, *row_scale;
    const int64_t *target;
    int64_t rows, in_features, classes, ignore_index;
    double label_smoothing, z_loss, softcap;
    cuda_ops_reduction reduction;
    cuda_ops_dtype dtype, parameter_dtype;
    cudaStream_t stream;
    bool with_gradient; // of any of the three
};

// Whether the gradient of weight is rounded from its float32 sums.
static inline bool rounds_weight_gradient(const HeadCall &call)
{
    return call.with_gradient && call.parameter_dtype == CUDA_OPS_BFLOAT16;
}

// For paths that leave a loss and a weight for each row: their reduction to call.losses and call.total_weight.
cuda_ops_status head_reduce_rows(const HeadCall &call, const double *row_losses);

// And for those that leave float32 sums: call.grad_weight of them.
cuda_ops_status head_round_weight_gradient(const HeadCall &call, const float *sums);

template <typename T, typename P>
static head_problem<T, P> problem_of(const HeadCall &call)
{
    typedef accumulate_type<T> A;
    head_problem<T, P> p = {};
    p.losses = (P *)call.losses, p.total_weight = (A *)call.total_weight, p.grad_input = (T *)call.grad_input;
    p.grad_weight = (weight_gradient_type<T, P> *)call.grad_weight, p.grad_bias = (A *)call.grad_bias,
    p.error = call.error;
    p.input = (const T *)call.input, p.weight = (const P *)call.weight, p.bias = (const P *)call.bias;
    p.target = call.target, p.row_scale = (const P *)call.row_scale;
    p.rows = call.rows, p.ignore_index = call.ignore_index, p.reduction = call.reduction;
    p.keep = (A)(1 - call.label_smoothing), p.spread = (A)(call.label_smoothing / (double)call.classes);
    p.z_loss = (A)call.z_loss, p.softcap = (A)call.softcap;
    return p;
}

static inline int64_t accumulate_bytes(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
}

#endif
