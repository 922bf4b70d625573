/* matmul on the CPU: one block of one product of a batch, by the kernels of gemm/gemm.c. Bound by arithmetic. */
#include "cuda_ops/gemm.h"

#include "gemm/single_thread.h"

int64_t cuda_ops_matmul_workspace_cpu(void)
{
    return GEMM_WORKSPACE_BYTES;
}

cuda_ops_status cuda_ops_matmul_cpu(void *d, const void *a, const void *b, void *workspace,
                                    const cuda_ops_gemm_problem *problem, int64_t index, cuda_ops_gemm_block block)
{
    const cuda_ops_gemm_problem *p = problem;
    if (p->dtype != CUDA_OPS_FLOAT32 && p->dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (p->alpha != 1 || p->output_dtype != p->dtype || p->activation != CUDA_OPS_GEMM_NONE)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t a_row = p->transpose_a ? 1 : p->lda, a_column = p->transpose_a ? p->lda : 1;
    const int64_t b_row = p->transpose_b ? 1 : p->ldb, b_column = p->transpose_b ? p->ldb : 1;
    const int64_t a_start = index * p->stride_a + block.row_begin * a_row;
    const int64_t b_start = index * p->stride_b + block.column_begin * b_column;
    const int64_t d_start = index * p->stride_d + block.row_begin * p->ldd + block.column_begin;
    const int64_t rows = block.row_end - block.row_begin, columns = block.column_end - block.column_begin;
    if (p->dtype == CUDA_OPS_FLOAT32)
        cuda_ops_gemm_f32((float *)d + d_start, p->ldd, (const float *)a + a_start, a_row, a_column,
                          (const float *)b + b_start, b_row, b_column, rows, columns, p->k, false, workspace);
    else
        cuda_ops_gemm_f64((double *)d + d_start, p->ldd, (const double *)a + a_start, a_row, a_column,
                          (const double *)b + b_start, b_row, b_column, rows, columns, p->k, false, workspace);
    return CUDA_OPS_SUCCESS;
}
