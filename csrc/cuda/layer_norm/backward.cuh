// What layer_norm's backward kernels take (backward.cu, backward_ring.cu).
#ifndef CUDA_OPS_LAYER_NORM_BACKWARD_CUH
#define CUDA_OPS_LAYER_NORM_BACKWARD_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "layer_norm/paths.h"

template <typename T>
struct BackwardRows {
    typedef accumulate_type<T> A;
    T *grad_input;
    A *partials;
    const T *grad_output, *grad_sum, *input;
    const double *mean;
    const A *rstd;
    const void *weight;
    int64_t rows;
    int cols, threads, cluster;
    A inverse_cols;
    bool rms, full_parameters;
};

// `partials`: where the blocks leave their sums, NULL where nobody wants them.
template <typename T>
static inline BackwardRows<T> backward_rows(const LayerNormCall &call, const RowShape &shape, bool partials)
{
    typedef accumulate_type<T> A;
    BackwardRows<T> a = {};
    a.grad_input = (T *)call.grad_input, a.partials = partials ? (A *)call.workspace : nullptr;
    a.grad_output = (const T *)call.grad_output, a.grad_sum = (const T *)call.grad_sum;
    a.input = (const T *)call.input, a.mean = call.saved_mean, a.rstd = (const A *)call.saved_rstd;
    a.weight = call.weight, a.rows = call.rows, a.cols = (int)call.cols;
    a.threads = shape.threads, a.cluster = shape.cluster, a.inverse_cols = A(1) / (A)call.cols;
    a.rms = call.rms, a.full_parameters = call.parameter_dtype != call.dtype;
    return a;
}

#endif
