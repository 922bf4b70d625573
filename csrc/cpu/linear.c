/* linear on the CPU: three matrix products over gemm/single_thread.h, which takes the transposed operands by their
 * strides, and a sum over rows for the bias. Bound by arithmetic; only the sum over rows is bound by memory. */
#ifndef REAL

#include "cuda_ops/linear.h"

#include "common/common.h"
#include "gemm/single_thread.h"

/* Columns of grad_output that are summed together: their sums stay in the first-level cache. */
enum { BIAS_COLUMNS = 64 };

#define REAL float
#define FN(name) name##_f32
#include "linear.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "linear.c"

#include "common/undef_real.h"

int64_t cuda_ops_linear_workspace_cpu(void)
{
    return GEMM_WORKSPACE_BYTES;
}

cuda_ops_status cuda_ops_linear_forward_cpu(void *output, const void *input, const void *weight, const void *bias,
                                            void *workspace, int64_t rows, int64_t in_features, int64_t out_features,
                                            cuda_ops_linear_block block, cuda_ops_dtype dtype)
{
    (void)rows;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_forward_f32(output, input, weight, bias, workspace, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_forward_f64(output, input, weight, bias, workspace, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_backward_input_cpu(void *grad_input, const void *grad_output, const void *weight,
                                                   void *workspace, int64_t rows, int64_t in_features,
                                                   int64_t out_features, cuda_ops_linear_block block,
                                                   cuda_ops_dtype dtype)
{
    (void)rows;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_backward_input_f32(grad_input, grad_output, weight, workspace, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_backward_input_f64(grad_input, grad_output, weight, workspace, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_backward_weight_cpu(void *grad_weight, const void *grad_output, const void *input,
                                                    void *workspace, int64_t rows, int64_t in_features,
                                                    int64_t out_features, cuda_ops_linear_block block,
                                                    cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_backward_weight_f32(grad_weight, grad_output, input, workspace, rows, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_backward_weight_f64(grad_weight, grad_output, input, workspace, rows, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_backward_bias_cpu(void *grad_bias, const void *grad_output, int64_t rows,
                                                  int64_t out_features, int64_t begin, int64_t end,
                                                  cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_backward_bias_f32(grad_bias, grad_output, rows, out_features, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_backward_bias_f64(grad_bias, grad_output, rows, out_features, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

CUDA_OPS_SIMD static void FN(linear_add_bias)(REAL *output, int64_t output_row, const REAL *bias, int64_t rows,
                                              int64_t columns)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            output[i * output_row + j] += bias[j];
}

static void FN(linear_forward)(REAL *output, const REAL *input, const REAL *weight, const REAL *bias, void *workspace,
                               int64_t in_features, int64_t out_features, cuda_ops_linear_block block)
{
    const int64_t rows = block.row_end - block.row_begin, columns = block.column_end - block.column_begin;
    REAL *const target = output + block.row_begin * out_features + block.column_begin;
    FN(cuda_ops_gemm)
    (target, out_features, input + block.row_begin * in_features, in_features, 1,
     weight + block.column_begin * in_features, 1, in_features, rows, columns, in_features, false, workspace);
    if (bias)
        FN(linear_add_bias)(target, out_features, bias + block.column_begin, rows, columns);
}

static void FN(linear_backward_input)(REAL *grad_input, const REAL *grad_output, const REAL *weight, void *workspace,
                                      int64_t in_features, int64_t out_features, cuda_ops_linear_block block)
{
    FN(cuda_ops_gemm)
    (grad_input + block.row_begin * in_features + block.column_begin, in_features,
     grad_output + block.row_begin * out_features, out_features, 1, weight + block.column_begin, in_features, 1,
     block.row_end - block.row_begin, block.column_end - block.column_begin, out_features, false, workspace);
}

static void FN(linear_backward_weight)(REAL *grad_weight, const REAL *grad_output, const REAL *input, void *workspace,
                                       int64_t rows, int64_t in_features, int64_t out_features,
                                       cuda_ops_linear_block block)
{
    FN(cuda_ops_gemm)
    (grad_weight + block.row_begin * in_features + block.column_begin, in_features, grad_output + block.row_begin, 1,
     out_features, input + block.column_begin, in_features, 1, block.row_end - block.row_begin,
     block.column_end - block.column_begin, rows, false, workspace);
}

/* Sums in double for both types: a batch may have a hundred thousand rows, and the sum is bound by memory anyway. */
CUDA_OPS_SIMD static void FN(linear_backward_bias)(REAL *grad_bias, const REAL *grad_output, int64_t rows,
                                                   int64_t out_features, int64_t begin, int64_t end)
{
    for (int64_t first = begin; first < end; first += BIAS_COLUMNS) {
        const int64_t columns = min_i64(BIAS_COLUMNS, end - first);
        double sum[BIAS_COLUMNS] = {0};
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++)
                sum[j] += (double)grad_output[i * out_features + first + j];
        for (int64_t j = 0; j < columns; j++)
            grad_bias[first + j] = (REAL)sum[j];
    }
}

#endif
