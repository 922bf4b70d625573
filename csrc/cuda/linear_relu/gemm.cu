// linear_relu by gemm.h's Hopper kernels (linear_relu.cu has the formulas): forward is one product with bias and relu
// in its epilogue, backward is the mask (linear_relu/mask.cu; where rows are no whole vectors of 16 bytes, relu.cu and
// linear.cu) and a product for each gradient. A product takes one dtype, so that float32 weights beside fp16 or bf16 are
// rounded to a copy first. Bound by what bounds the products. Those of few columns are gemm/narrow's.
#include "linear_relu/paths.h"

#include <initializer_list>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "cuda_ops/gemm.h"
#include "cuda_ops/linear.h"
#include "cuda_ops/relu.h"
#include "gemm/paths.h"
#include "gemm/sm90_unaligned/sm90_unaligned.h"

// From so many rows on, separate products are faster than the skinny path's single launch (benchmarks/notes/mnist.md).
static constexpr int64_t LEAST_ROWS = 1024;
// In float32 on Hopper: from so many weights on with any number of rows; in TF32 from so many.
static constexpr int64_t MANY_WEIGHTS = 1 << 14, MANY_WEIGHTS_TF32 = 1 << 17;
static constexpr int THREADS = 256;

// For weights that are not aligned to 16 bytes; linear_relu/mask.cu rounds the others.
template <typename T>
__global__ void __launch_bounds__(THREADS) linear_relu_round_kernel(T *copy, const float *weight, int64_t count)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count())
        copy[i] = store_from_accumulate<T>(weight[i]);
}

// m x n from m x k and k x n, all dense.
static cuda_ops_gemm_problem product(const LinearReluCall &call, int64_t m, int64_t n, int64_t k, int transpose_a,
                                     int transpose_b)
{
    cuda_ops_gemm_problem problem = {};
    problem.m = m, problem.n = n, problem.k = k, problem.batch = 1;
    problem.lda = transpose_a ? m : k, problem.ldb = transpose_b ? k : n, problem.ldd = n;
    problem.alpha = 1;
    problem.transpose_a = transpose_a, problem.transpose_b = transpose_b;
    problem.dtype = problem.output_dtype = problem.bias_dtype = call.dtype;
    problem.allow_tf32 = call.dtype == CUDA_OPS_FLOAT32 && call.allow_tf32;
    return problem;
}

static cuda_ops_gemm_problem forward_product(const LinearReluCall &call)
{
    cuda_ops_gemm_problem problem = product(call, call.rows, call.out_features, call.in_features, 0, 1);
    problem.activation = CUDA_OPS_GEMM_RELU;
    problem.bias_dtype = call.parameter_dtype;
    return problem;
}
static cuda_ops_gemm_problem input_product(const LinearReluCall &call)
{
    return product(call, call.rows, call.in_features, call.out_features, 0, 0);
}
static cuda_ops_gemm_problem weight_product(const LinearReluCall &call)
{
    cuda_ops_gemm_problem problem = product(call, call.out_features, call.in_features, call.rows, 1, 0);
    problem.output_dtype = call.parameter_dtype;
    return problem;
}

// Whether linear_relu/mask.cu takes the backward pass's mask. Otherwise relu's and linear's kernels do, of which that for
// grad_bias has the products' dtype.
static bool has_whole_vectors(const LinearReluCall &call)
{
    return call.out_features % (16 / dtype_size(call.dtype)) == 0 && is_aligned_16(call.grad_output) &&
           is_aligned_16(call.activated);
}

Answer linear_relu_gemm_supports(const LinearReluCall &call, const Device &)
{
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("does not take float64");
    if (call.rows == 0 || call.in_features == 0 || call.out_features == 0)
        return no("a size is zero");
    if (call.backward && !has_whole_vectors(call) && call.parameter_dtype != call.dtype)
        return no("rows of grad_output are not whole aligned vectors of 16 bytes, and grad_bias is of another dtype");
    return YES;
}

// Judges both passes together, so that forward and backward agree.
Answer linear_relu_gemm_is_fast(const LinearReluCall &call, const Device &device)
{
    if (device.capability == 90 && call.dtype == CUDA_OPS_FLOAT32 &&
        call.in_features * call.out_features >= (call.allow_tf32 ? MANY_WEIGHTS_TF32 : MANY_WEIGHTS))
        return YES;
    if (call.rows < LEAST_ROWS)
        return no("fewer than 1024 rows: the skinny path's single launch is faster");
    if (call.dtype == CUDA_OPS_FLOAT64 || call.in_features == 0 || call.out_features == 0)
        return no("no product for Hopper's tensor cores");
    const bool tensor_cores = device.capability == 90 && (call.dtype != CUDA_OPS_FLOAT32 || call.allow_tf32);
    // Activation and parameter dtype make no difference to gemm.h's choice.
    for (const cuda_ops_gemm_problem &problem :
         {product(call, call.rows, call.out_features, call.in_features, 0, 1), input_product(call),
          product(call, call.out_features, call.in_features, call.rows, 1, 0)}) {
        const int path = gemm_path_on(problem, device);
        if (path != GEMM_SM90 && path != GEMM_SM90_SKINNY && path != GEMM_PADDED && path != GEMM_SM90_3XTF32 &&
            path != GEMM_SM90_UNALIGNED && !(path == GEMM_NARROW && tensor_cores))
            return no("one of the three products would go neither by TMA and wgmma nor, with few columns, as a stream");
    }
    return YES;
}

static int64_t rounded_up(int64_t bytes)
{
    return ceil_div(bytes, 256) * 256;
}

// The parts of the workspace, in their order.
struct GemmWorkspace {
    int64_t weight, masked, partials, product; // bytes
};

static GemmWorkspace workspace_of(const LinearReluCall &call)
{
    const bool copies = call.parameter_dtype != call.dtype;
    GemmWorkspace parts = {};
    parts.weight = copies ? rounded_up(call.in_features * call.out_features * dtype_size(call.dtype)) : 0;
    if (!call.backward) {
        const cuda_ops_gemm_problem problem = forward_product(call);
        parts.product = cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST);
        return parts;
    }
    parts.masked = rounded_up(call.rows * call.out_features * dtype_size(call.dtype));
    // Both ways: the call's pointers, which are not known here, may be less aligned.
    const int64_t mask = linear_relu_mask_workspace(call.rows, call.out_features),
                  sums = cuda_ops_linear_backward_bias_workspace_cuda(call.rows, call.out_features, call.dtype);
    parts.partials = rounded_up(mask > sums ? mask : sums);
    for (const cuda_ops_gemm_problem &problem : {input_product(call), weight_product(call)}) {
        const int64_t bytes = cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST);
        parts.product = bytes > parts.product ? bytes : parts.product;
    }
    return parts;
}

int64_t linear_relu_gemm_workspace(const LinearReluCall &call, const Device &)
{
    const GemmWorkspace parts = workspace_of(call);
    return parts.weight + parts.masked + parts.partials + parts.product;
}

template <typename T>
static cuda_ops_status round_weight(T *copy, const LinearReluCall &call)
{
    const int64_t count = call.in_features * call.out_features;
    if (is_aligned_16(call.weight) && count % vector16<T>::size == 0)
        return linear_relu_prepare(nullptr, nullptr, nullptr, copy, nullptr, nullptr, call.weight, call.rows,
                                   call.in_features, call.out_features, call.dtype, call.stream);
    launch_dependent(linear_relu_round_kernel<T>, clamp_grid(ceil_div(count, THREADS)), THREADS, 0, call.stream, copy,
                     (const float *)call.weight, count);
    return launch_status();
}

// The weight in the products' dtype.
static cuda_ops_status weight_for(const LinearReluCall &call, const void **weight)
{
    *weight = call.weight;
    if (call.parameter_dtype == call.dtype)
        return CUDA_OPS_SUCCESS;
    *weight = call.workspace;
    return call.dtype == CUDA_OPS_FLOAT16 ? round_weight((__half *)call.workspace, call)
                                          : round_weight((__nv_bfloat16 *)call.workspace, call);
}

// masked and grad_bias, which may be NULL.
static cuda_ops_status mask(const LinearReluCall &call, void *masked, void *partials)
{
    if (has_whole_vectors(call))
        return linear_relu_mask(masked, call.grad_bias, partials, call.grad_output, call.activated, call.rows,
                                call.out_features, call.dtype, call.parameter_dtype, call.stream);
    const cuda_ops_status status = cuda_ops_relu_backward_cuda(masked, call.grad_output, call.activated,
                                                               call.rows * call.out_features, call.dtype, call.stream);
    if (status != CUDA_OPS_SUCCESS || !call.grad_bias)
        return status;
    return cuda_ops_linear_backward_bias_cuda(call.grad_bias, masked, partials, call.rows, call.out_features,
                                              call.dtype, call.parameter_dtype, call.stream);
}

cuda_ops_status linear_relu_gemm(const LinearReluCall &call, const Device &)
{
    const GemmWorkspace parts = workspace_of(call);
    char *const masked = (char *)call.workspace + parts.weight, *const partials = masked + parts.masked,
                *const space = partials + parts.partials;
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    const void *weight = nullptr;
    if (!call.backward || call.grad_input)
        status = weight_for(call, &weight);
    if (status == CUDA_OPS_SUCCESS && !call.backward) {
        const cuda_ops_gemm_problem problem = forward_product(call);
        return cuda_ops_gemm_cuda(call.output, call.input, weight, call.bias, space, &problem, CUDA_OPS_GEMM_FASTEST,
                                  call.stream);
    }
    if (status == CUDA_OPS_SUCCESS)
        status = mask(call, masked, partials);
    if (status == CUDA_OPS_SUCCESS && call.grad_input) {
        const cuda_ops_gemm_problem problem = input_product(call);
        status = cuda_ops_gemm_cuda(call.grad_input, masked, weight, nullptr, space, &problem, CUDA_OPS_GEMM_FASTEST,
                                    call.stream);
    }
    if (status == CUDA_OPS_SUCCESS && call.grad_weight) {
        const cuda_ops_gemm_problem problem = weight_product(call);
        status = cuda_ops_gemm_cuda(call.grad_weight, masked, call.input, nullptr, space, &problem,
                                    CUDA_OPS_GEMM_FASTEST, call.stream);
    }
    return status;
}
