// linear: output[i][j] = sum over p of input[i][p] * weight[j][p] + bias[j], and its gradients
//     grad_input[i][p]  = sum over j of grad_output[i][j] * weight[j][p]
//     grad_weight[j][p] = sum over i of grad_output[i][j] * input[i][p]
//     grad_bias[j]      = sum over i of grad_output[i][j]
// The three products are gemm's (gemm.cu chooses the kernel; in float32 never TF32, which this header does not know).
// grad_bias is column_sums.cuh's, bound by memory.
#include "cuda_ops/linear.h"

#include "common/column_sums.cuh"
#include "common/common.cuh"
#include "cuda_ops/gemm.h"

// m x n from m x k and k x n, all dense.
static cuda_ops_gemm_problem product(int64_t m, int64_t n, int64_t k, int transpose_a, int transpose_b,
                                     cuda_ops_dtype dtype)
{
    cuda_ops_gemm_problem problem = {};
    problem.m = m, problem.n = n, problem.k = k, problem.batch = 1;
    problem.lda = transpose_a ? m : k, problem.ldb = transpose_b ? k : n, problem.ldd = n;
    problem.alpha = 1;
    problem.transpose_a = transpose_a, problem.transpose_b = transpose_b;
    problem.dtype = problem.output_dtype = problem.bias_dtype = dtype;
    return problem;
}

static cuda_ops_gemm_problem forward_product(int64_t rows, int64_t in_features, int64_t out_features,
                                             cuda_ops_dtype dtype)
{
    return product(rows, out_features, in_features, 0, 1, dtype);
}
static cuda_ops_gemm_problem input_product(int64_t rows, int64_t in_features, int64_t out_features,
                                           cuda_ops_dtype dtype)
{
    return product(rows, in_features, out_features, 0, 0, dtype);
}
static cuda_ops_gemm_problem weight_product(int64_t rows, int64_t in_features, int64_t out_features,
                                            cuda_ops_dtype dtype)
{
    return product(out_features, in_features, rows, 1, 0, dtype);
}

extern "C" int64_t cuda_ops_linear_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                          cuda_ops_dtype dtype)
{
    const cuda_ops_gemm_problem problem = forward_product(rows, in_features, out_features, dtype);
    return cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST);
}

extern "C" int64_t cuda_ops_linear_backward_input_workspace_cuda(int64_t rows, int64_t in_features,
                                                                 int64_t out_features, cuda_ops_dtype dtype)
{
    const cuda_ops_gemm_problem problem = input_product(rows, in_features, out_features, dtype);
    return cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST);
}

extern "C" int64_t cuda_ops_linear_backward_weight_workspace_cuda(int64_t rows, int64_t in_features,
                                                                  int64_t out_features, cuda_ops_dtype dtype)
{
    const cuda_ops_gemm_problem problem = weight_product(rows, in_features, out_features, dtype);
    return cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST);
}

extern "C" int64_t cuda_ops_linear_backward_bias_workspace_cuda(int64_t rows, int64_t out_features,
                                                                cuda_ops_dtype dtype)
{
    return column_sums_workspace(rows, out_features, dtype);
}

extern "C" cuda_ops_status cuda_ops_linear_forward_cuda(void *output, const void *input, const void *weight,
                                                        const void *bias, void *workspace, int64_t rows,
                                                        int64_t in_features, int64_t out_features, cuda_ops_dtype dtype,
                                                        cuda_ops_stream stream)
{
    const cuda_ops_gemm_problem problem = forward_product(rows, in_features, out_features, dtype);
    return cuda_ops_gemm_cuda(output, input, weight, bias, workspace, &problem, CUDA_OPS_GEMM_FASTEST, stream);
}

extern "C" cuda_ops_status cuda_ops_linear_backward_input_cuda(void *grad_input, const void *grad_output,
                                                               const void *weight, void *workspace, int64_t rows,
                                                               int64_t in_features, int64_t out_features,
                                                               cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    const cuda_ops_gemm_problem problem = input_product(rows, in_features, out_features, dtype);
    return cuda_ops_gemm_cuda(grad_input, grad_output, weight, nullptr, workspace, &problem, CUDA_OPS_GEMM_FASTEST,
                              stream);
}

extern "C" cuda_ops_status cuda_ops_linear_backward_weight_cuda(void *grad_weight, const void *grad_output,
                                                                const void *input, void *workspace, int64_t rows,
                                                                int64_t in_features, int64_t out_features,
                                                                cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    const cuda_ops_gemm_problem problem = weight_product(rows, in_features, out_features, dtype);
    return cuda_ops_gemm_cuda(grad_weight, grad_output, input, nullptr, workspace, &problem, CUDA_OPS_GEMM_FASTEST,
                              stream);
}

extern "C" cuda_ops_status cuda_ops_linear_backward_bias_cuda(void *grad_bias, const void *grad_output, void *workspace,
                                                              int64_t rows, int64_t out_features, cuda_ops_dtype dtype,
                                                              cuda_ops_dtype bias_dtype, cuda_ops_stream stream)
{
    CUDA_OPS_DISPATCH(dtype, T, {
        const T *const input = (const T *)grad_output;
        if (bias_dtype == dtype)
            return column_sums((T *)grad_bias, workspace, input, rows, out_features, stream);
        if constexpr (sizeof(T) == 2)
            if (bias_dtype == CUDA_OPS_FLOAT32)
                return column_sums((float *)grad_bias, workspace, input, rows, out_features, stream);
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
