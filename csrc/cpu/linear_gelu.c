/* linear_gelu on the CPU: linear's matrix product (gemm/single_thread.h) in blocks of rows that fit into the cache,
 * with bias and gelu as each block's epilogue. Backward computes the preactivation's gradient and leaves the rest to
 * linear. Bound by arithmetic: the product's, and for gelu about thirty operations an element, which the compiler
 * vectorises in float. */
#ifndef REAL

#include "cuda_ops/linear_gelu.h"

#include "common/common.h"
#include "gemm/single_thread.h"

/* Elements of output in a block: in doubles, half of a second-level cache. */
enum { BLOCK_ELEMENTS = 1 << 16 };

#define REAL float
#define FN(name) name##_f32
#define PRECISION 32
#include "linear_gelu.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "linear_gelu.c"

#include "common/undef_real.h"

static bool is_gelu(cuda_ops_gelu gelu)
{
    return gelu == CUDA_OPS_GELU_EXACT || gelu == CUDA_OPS_GELU_TANH;
}

cuda_ops_status cuda_ops_linear_gelu_forward_cpu(void *output, void *preactivation, const void *input,
                                                 const void *weight, const void *bias, void *workspace, int64_t rows,
                                                 int64_t in_features, int64_t out_features, cuda_ops_linear_block block,
                                                 cuda_ops_gelu gelu, cuda_ops_dtype dtype)
{
    (void)rows;
    if (!is_gelu(gelu))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_gelu_forward_f32(output, preactivation, input, weight, bias, workspace, in_features, out_features, block,
                                gelu);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_gelu_forward_f64(output, preactivation, input, weight, bias, workspace, in_features, out_features, block,
                                gelu);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_gelu_backward_cpu(void *grad_preactivation, const void *grad_output,
                                                  const void *preactivation, int64_t begin, int64_t end,
                                                  cuda_ops_gelu gelu, cuda_ops_dtype dtype)
{
    if (!is_gelu(gelu))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        if (gelu == CUDA_OPS_GELU_TANH)
            linear_gelu_backward_tanh_f32(grad_preactivation, grad_output, preactivation, begin, end);
        else
            linear_gelu_backward_f32(grad_preactivation, grad_output, preactivation, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        if (gelu == CUDA_OPS_GELU_TANH)
            linear_gelu_backward_tanh_f64(grad_preactivation, grad_output, preactivation, begin, end);
        else
            linear_gelu_backward_f64(grad_preactivation, grad_output, preactivation, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/activation_functions.h"

/* output = gelu(row), where row may be output; both along one line. */
CUDA_OPS_SIMD static void FN(gelu_line)(REAL *output, const REAL *row, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        output[j] = FN(gelu)(row[j]);
}

CUDA_OPS_SIMD static void FN(gelu_tanh_line)(REAL *output, const REAL *row, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        output[j] = FN(gelu_tanh)(row[j]);
}

static void FN(linear_gelu_forward)(REAL *output, REAL *preactivation, const REAL *input, const REAL *weight,
                                    const REAL *bias, void *workspace, int64_t in_features, int64_t out_features,
                                    cuda_ops_linear_block block, cuda_ops_gelu gelu)
{
    const int64_t columns = block.column_end - block.column_begin;
    const int64_t block_rows = max_i64(256, BLOCK_ELEMENTS / max_i64(1, columns));
    REAL *const sums = preactivation ? preactivation : output;
    for (int64_t row = block.row_begin; row < block.row_end; row += block_rows) {
        const int64_t rows = min_i64(block_rows, block.row_end - row);
        const int64_t first = row * out_features + block.column_begin;
        FN(cuda_ops_gemm)
        (sums + first, out_features, input + row * in_features, in_features, 1,
         weight + block.column_begin * in_features, 1, in_features, rows, columns, in_features, false, workspace);
        for (int64_t i = 0; i < rows; i++) {
            REAL *const line = sums + first + i * out_features;
            if (bias)
                for (int64_t j = 0; j < columns; j++)
                    line[j] += bias[block.column_begin + j];
            if (gelu == CUDA_OPS_GELU_TANH)
                FN(gelu_tanh_line)(output + first + i * out_features, line, columns);
            else
                FN(gelu_line)(output + first + i * out_features, line, columns);
        }
    }
}

CUDA_OPS_SIMD static void FN(linear_gelu_backward)(REAL *grad_preactivation, const REAL *grad_output,
                                                   const REAL *preactivation, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        grad_preactivation[i] = grad_output[i] * FN(gelu_slope)(preactivation[i]);
}

CUDA_OPS_SIMD static void FN(linear_gelu_backward_tanh)(REAL *grad_preactivation, const REAL *grad_output,
                                                        const REAL *preactivation, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        grad_preactivation[i] = grad_output[i] * FN(gelu_tanh_slope)(preactivation[i]);
}

#endif
