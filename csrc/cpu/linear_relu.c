/* linear_relu on the CPU: linear's matrix product (gemm/single_thread.h) in blocks of rows that fit into the cache,
 * with bias and relu as each block's epilogue. Backward masks the gradient and leaves the rest to linear. Bound by
 * arithmetic. */
#ifndef REAL

#include "cuda_ops/linear_relu.h"

#include "common/common.h"
#include "gemm/single_thread.h"

/* Elements of output in a block: in doubles, half of a second-level cache. */
enum { BLOCK_ELEMENTS = 1 << 16 };

#define REAL float
#define FN(name) name##_f32
#include "linear_relu.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "linear_relu.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_linear_relu_forward_cpu(void *output, const void *input, const void *weight, const void *bias,
                                                 void *workspace, int64_t rows, int64_t in_features,
                                                 int64_t out_features, cuda_ops_linear_block block,
                                                 cuda_ops_dtype dtype)
{
    (void)rows;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_relu_forward_f32(output, input, weight, bias, workspace, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_relu_forward_f64(output, input, weight, bias, workspace, in_features, out_features, block);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_relu_mask_cpu(void *masked, const void *grad_output, const void *output, int64_t begin,
                                              int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_relu_mask_f32(masked, grad_output, output, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_relu_mask_f64(masked, grad_output, output, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* A NaN stays: it is not <= 0. */
CUDA_OPS_SIMD static void FN(linear_relu_epilogue)(REAL *output, int64_t output_row, const REAL *bias, int64_t rows,
                                                   int64_t columns)
{
    for (int64_t i = 0; i < rows; i++) {
        REAL *row = output + i * output_row;
        if (bias)
            for (int64_t j = 0; j < columns; j++) {
                const REAL value = row[j] + bias[j];
                row[j] = value <= 0 ? 0 : value;
            }
        else
            for (int64_t j = 0; j < columns; j++)
                row[j] = row[j] <= 0 ? 0 : row[j];
    }
}

static void FN(linear_relu_forward)(REAL *output, const REAL *input, const REAL *weight, const REAL *bias,
                                    void *workspace, int64_t in_features, int64_t out_features,
                                    cuda_ops_linear_block block)
{
    const int64_t columns = block.column_end - block.column_begin;
    const int64_t block_rows = max_i64(256, BLOCK_ELEMENTS / max_i64(1, columns));
    for (int64_t row = block.row_begin; row < block.row_end; row += block_rows) {
        const int64_t rows = min_i64(block_rows, block.row_end - row);
        REAL *const target = output + row * out_features + block.column_begin;
        FN(cuda_ops_gemm)
        (target, out_features, input + row * in_features, in_features, 1, weight + block.column_begin * in_features, 1,
         in_features, rows, columns, in_features, false, workspace);
        FN(linear_relu_epilogue)(target, out_features, bias ? bias + block.column_begin : NULL, rows, columns);
    }
}

CUDA_OPS_SIMD static void FN(linear_relu_mask)(REAL *masked, const REAL *grad_output, const REAL *output, int64_t begin,
                                               int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        masked[i] = output[i] <= 0 ? 0 : grad_output[i];
}

#endif
