/* embedding: output[i] = weight[indices[i]], rows of a table; and token_position_embedding: output[b, t] =
 * token_weight[tokens[b, t]] + position_weight[t].
 *
 *   weight, grad_weight: [rows, cols]                        indices: [count], of index_bytes each: 4 (int32_t) or 8
 *   output, grad_output: [count, cols]
 *   all dense; dtype is that of the weights and their gradients, and output_dtype (where there is one) that of output and
 *   grad_output: the same, or on CUDA fp16 or bf16 beside float32
 *   count and rows are below 2^31, on the CPU too
 *
 * The gradient of a row is the sum of the rows of grad_output whose index it is, added in their order, on the CPU in
 * double, on CUDA in float for all but float64 and by chunks of 64; of a row that no index names, and of row padding_index (-1: none), it is 0.
 * scale_by_frequency divides the gradient of a row by how many indices name it.
 *
 * An index outside of [0, rows) is never used as an address: its row of output is NaN, and grad_output's goes nowhere.
 * Callers who want an error look first on the CPU, with cuda_ops_embedding_find_bad_index_cpu, and on CUDA pass a
 * cuda_ops_index_error (loss.h), which the forward kernels fill in; or NULL.
 */
#ifndef CUDA_OPS_EMBEDDING_H
#define CUDA_OPS_EMBEDDING_H

#include <stddef.h>

#include "cuda_ops/core.h"
#include "cuda_ops/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Position of the first of `count` indices that is not in [0, rows); -1 if there is none. */
int64_t cuda_ops_embedding_find_bad_index_cpu(const void *indices, int index_bytes, int64_t count, int64_t rows);

/* Rows [begin, end) of output, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_embedding_forward_cpu(void *output, const void *weight, const void *indices, int index_bytes,
                                               int64_t rows, int64_t cols, int64_t begin, int64_t end,
                                               cuda_ops_dtype dtype);
/* The positions at which an index names a row, in their order: those of row r are slots[starts[r]] to
 * slots[starts[r + 1] - 1]. starts: rows + 2 numbers; slots: count. */
cuda_ops_status cuda_ops_embedding_sort_cpu(int64_t *starts, int64_t *slots, const void *indices, int index_bytes,
                                            int64_t count, int64_t rows, int64_t padding_index);
/* Rows [begin, end) of grad_weight, by starts and slots; halves too. */
cuda_ops_status cuda_ops_embedding_backward_cpu(void *grad_weight, const void *grad_output, const int64_t *starts,
                                                const int64_t *slots, int64_t cols, int scale_by_frequency,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* Rows [begin, end) of the batch * positions of output; position_weight has at least `positions` rows. */
cuda_ops_status cuda_ops_token_position_embedding_forward_cpu(void *output, const void *token_weight,
                                                              const void *position_weight, const void *tokens,
                                                              int index_bytes, int64_t rows, int64_t cols,
                                                              int64_t positions, int64_t begin, int64_t end,
                                                              cuda_ops_dtype dtype);
/* Rows [begin, end) of grad_position_weight: sums over the batch, and 0 from row `positions` on. */
cuda_ops_status cuda_ops_position_embedding_backward_cpu(void *grad_position_weight, const void *grad_output,
                                                         int64_t batch, int64_t positions, int64_t cols, int64_t begin,
                                                         int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_embedding_forward_cuda(void *output, cuda_ops_index_error *error, const void *weight,
                                                const void *indices, int index_bytes, int64_t count, int64_t rows,
                                                int64_t cols, cuda_ops_dtype dtype, cuda_ops_stream stream);
/* Bytes of device memory, aligned to 16, that backward needs. */
size_t cuda_ops_embedding_backward_workspace_cuda(int64_t count, int64_t rows, int64_t cols, cuda_ops_dtype dtype);
/* accumulate: what is in grad_weight is added to; else it is overwritten. */
cuda_ops_status cuda_ops_embedding_backward_cuda(void *grad_weight, void *workspace, const void *grad_output,
                                                 const void *indices, int index_bytes, int64_t count, int64_t rows,
                                                 int64_t cols, int64_t padding_index, int scale_by_frequency,
                                                 int accumulate, cuda_ops_dtype dtype, cuda_ops_dtype output_dtype,
                                                 cuda_ops_stream stream);

cuda_ops_status cuda_ops_token_position_embedding_forward_cuda(void *output, cuda_ops_index_error *error,
                                                               const void *token_weight, const void *position_weight,
                                                               const void *tokens, int index_bytes, int64_t batch,
                                                               int64_t positions, int64_t rows, int64_t cols,
                                                               cuda_ops_dtype dtype, cuda_ops_dtype output_dtype,
                                                               cuda_ops_stream stream);
size_t cuda_ops_position_embedding_backward_workspace_cuda(int64_t batch, int64_t positions, int64_t cols,
                                                           cuda_ops_dtype dtype);
/* grad_position_weight: [rows, cols], rows at least `positions`. */
cuda_ops_status cuda_ops_position_embedding_backward_cuda(void *grad_position_weight, void *workspace,
                                                          const void *grad_output, int64_t batch, int64_t positions,
                                                          int64_t rows, int64_t cols, cuda_ops_dtype dtype,
                                                          cuda_ops_dtype output_dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
