// What the paths of linear_cross_entropy share: how one is called, and the problem as kernels see it.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_PROBLEM_CUH
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_PROBLEM_CUH

#include "cuda_ops/linear_cross_entropy.h"

#include "common/paths.h"
#include "common/thread_group.cuh"

static constexpr int THREADS = 256;

// Names as in the header. `quads`: groups of four features, the last one padded with zeros.
template <typename T, typename P>
struct head_problem {
    P *losses; // of rows, or the reduced one
    accumulate_type<T> *total_weight;
    T *grad_input;
    accumulate_type<T> *grad_weight, *grad_bias;
    cuda_ops_index_error *error;
    const T *input;
    const P *weight, *bias;
    const int64_t *target;
    const P *row_scale;
    int64_t rows, ignore_index;
    int in_features, classes, quads;
    accumulate_type<T> keep, spread; // see cross_entropy.cu
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
    double label_smoothing;
    cuda_ops_reduction reduction;
    cuda_ops_dtype dtype, parameter_dtype;
    cudaStream_t stream;
};

template <typename T, typename P>
static head_problem<T, P> problem_of(const HeadCall &call)
{
    typedef accumulate_type<T> A;
    head_problem<T, P> p = {};
    p.losses = (P *)call.losses, p.total_weight = (A *)call.total_weight, p.grad_input = (T *)call.grad_input;
    p.grad_weight = (A *)call.grad_weight, p.grad_bias = (A *)call.grad_bias, p.error = call.error;
    p.input = (const T *)call.input, p.weight = (const P *)call.weight, p.bias = (const P *)call.bias;
    p.target = call.target, p.row_scale = (const P *)call.row_scale;
    p.rows = call.rows, p.ignore_index = call.ignore_index, p.reduction = call.reduction;
    p.keep = (A)(1 - call.label_smoothing), p.spread = (A)(call.label_smoothing / (double)call.classes);
    return p;
}

static int64_t accumulate_bytes(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
}

#endif
