// What the paths of linear_relu share: how one is called. linear_relu.cu holds the table.
#ifndef CUDA_OPS_LINEAR_RELU_PATHS_H
#define CUDA_OPS_LINEAR_RELU_PATHS_H

#include <cuda_runtime.h>

#include "common/paths.h"
#include "cuda_ops/linear_relu.h"

// One pass as a launcher gets it; linear_relu.cu has checked that there is something to do.
struct LinearReluCall {
    bool backward;
    void *output;                               // forward's result
    void *grad_input, *grad_weight, *grad_bias; // backward's; each may be NULL
    const void *grad_output, *activated;        // activated: forward's output, for backward
    const void *input, *weight, *bias;          // bias: for forward; may be NULL
    void *workspace;
    int64_t rows, in_features, out_features;
    bool allow_tf32;
    cuda_ops_dtype dtype, parameter_dtype;
    cudaStream_t stream;
};

// fp16 and bf16 on Hopper, for sizes at which a GEMM has too few tiles to fill the GPU (linear_relu/sm90.cu).
Answer linear_relu_sm90_supports(const LinearReluCall &call, const Device &device);
Answer linear_relu_sm90_is_fast(const LinearReluCall &call, const Device &device);
int64_t linear_relu_sm90_workspace(const LinearReluCall &call, const Device &device);
cuda_ops_status linear_relu_sm90(const LinearReluCall &call, const Device &device);

// gemm.h's products, one after the other (linear_relu/gemm.cu).
Answer linear_relu_gemm_supports(const LinearReluCall &call, const Device &device);
Answer linear_relu_gemm_is_fast(const LinearReluCall &call, const Device &device);
int64_t linear_relu_gemm_workspace(const LinearReluCall &call, const Device &device);
cuda_ops_status linear_relu_gemm(const LinearReluCall &call, const Device &device);

// Takes every call, in one launch a pass (linear_relu/skinny/forward.cu and backward.cu).
cuda_ops_status linear_relu_skinny_forward(const LinearReluCall &call);
cuda_ops_status linear_relu_skinny_backward(const LinearReluCall &call);

// linear_relu/mask.cu, with which the backward of the first two paths begins: masked, and grad_bias unless that is
// NULL. Everything is of dtype (float32, float16 or bfloat16) but grad_bias, which is of parameter_dtype; pointers are
// aligned to 16 bytes, rows are whole 16-byte vectors, and there is a row. workspace: as many bytes as the function
// says.
int64_t linear_relu_mask_workspace(int64_t rows, int64_t out_features);
cuda_ops_status linear_relu_mask(void *masked, void *grad_bias, void *workspace, const void *grad_output,
                                 const void *output, int64_t rows, int64_t out_features, cuda_ops_dtype dtype,
                                 cuda_ops_dtype parameter_dtype, cudaStream_t stream);
// One launch for up to three results, each of which may be NULL; dtype is float16 or bfloat16. masked; with it
// partials, its column sums over *parts sets of rows (*parts x out_features floats, as many bytes as
// linear_relu_mask_workspace says); copy: weight, which is float32, rounded to dtype.
cuda_ops_status linear_relu_prepare(void *masked, void *partials, int64_t *parts, void *copy, const void *grad_output,
                                    const void *output, const void *weight, int64_t rows, int64_t in_features,
                                    int64_t out_features, cuda_ops_dtype dtype, cudaStream_t stream);

#endif
