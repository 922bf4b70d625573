/* index_add: rows of one tensor are added to rows of another, as indices say,
 *     output[o, r, i] = input[o, r, i] + alpha * sum of source[o, k, i] over the k with index[k] = r;
 * scatter_add: each element goes to a row of its own,
 *     output[o, r, i] = input[o, r, i] + sum of source[o, k, i] over the k with index[o, k, i] = r.
 *
 *   output, input: [outer, rows, inner], dense, of dtype. index_add's output may be input; scatter_add's is, so that
 *       rows that nothing is added to are not touched
 *   source: [outer, count, inner]
 *   index: [count], or [outer, count, inner], of index_bytes each: 4 (int32_t) or 8
 *   rows and outer * count are below 2^31 - 1, and for scatter_add outer * count * inner too
 *
 * index_add adds in the order of k, on the CPU in double (halves of short rows in float), on CUDA in float for all but float64
 * and by chunks of 64; results repeat bit by bit. So does scatter_add on the CPU, in dtype, of halves in float. On CUDA scatter_add, and index_add where rows have one or two
 * elements, add in the order in which the values come, halves in float; or, if `deterministic`, integers, whose order does
 * not matter (csrc/cuda/common/ordered_sums.cuh).
 *
 * An index outside of [0, rows) is never used as an address: its element goes nowhere, and its gradient is 0. Callers who
 * want an error look first on the CPU, with cuda_ops_embedding_find_bad_index_cpu, and on CUDA pass a
 * cuda_ops_index_error (loss.h), which the forward kernels fill in; or NULL.
 */
#ifndef CUDA_OPS_SCATTER_H
#define CUDA_OPS_SCATTER_H

#include <stddef.h>

#include "cuda_ops/core.h"
#include "cuda_ops/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_ops_scatter_sizes {
    int64_t outer, rows, count, inner;
} cuda_ops_scatter_sizes;

/* Rows [begin, end) of the outer * rows of output. starts, slots: those of cuda_ops_embedding_sort_cpu. */
cuda_ops_status cuda_ops_index_add_cpu(void *output, const void *input, const void *source, const int64_t *starts,
                                       const int64_t *slots, cuda_ops_scatter_sizes sizes, double alpha, int64_t begin,
                                       int64_t end, cuda_ops_dtype dtype);

/* Of short rows that is slow, and where each element has an index of its own it cannot be done. Then sums of some columns of
 * a part wait in a workspace, and values are added to them as they come. Units [0, count) are independent of each other. */
typedef struct cuda_ops_scatter_plan {
    int64_t columns, tiles; /* of inner: in a unit, and how many units of a part that makes */
    int64_t count;          /* outer * tiles */
    size_t workspace_bytes; /* for one unit at a time */
} cuda_ops_scatter_plan;

cuda_ops_scatter_plan cuda_ops_scatter_plan_cpu(cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype);
/* One index for all of a row: cuda_ops_index_add_cpu's result, of halves with sums in float. */
cuda_ops_status cuda_ops_index_add_elements_cpu(void *output, const void *input, const void *source, const void *index,
                                                int index_bytes, cuda_ops_scatter_sizes sizes, double alpha,
                                                const cuda_ops_scatter_plan *plan, int64_t begin, int64_t end,
                                                void *workspace, cuda_ops_dtype dtype);
/* Halves, each with an index of its own. Adds to output. */
cuda_ops_status cuda_ops_scatter_add_halves_cpu(void *output, const void *source, const void *index, int index_bytes,
                                                cuda_ops_scatter_sizes sizes, const cuda_ops_scatter_plan *plan,
                                                int64_t begin, int64_t end, void *workspace, cuda_ops_dtype dtype);

/* grad_source[o, k, i] = alpha * grad_output[o, index[k], i]: rows [begin, end) of the outer * count of grad_source. */
cuda_ops_status cuda_ops_index_add_backward_cpu(void *grad_source, const void *grad_output, const void *index,
                                                int index_bytes, cuda_ops_scatter_sizes sizes, double alpha,
                                                int64_t begin, int64_t end, cuda_ops_dtype dtype);
/* Adds to output. Lines [begin, end) of the outer * inner. */
cuda_ops_status cuda_ops_scatter_add_cpu(void *output, const void *source, const void *index, int index_bytes,
                                         cuda_ops_scatter_sizes sizes, int64_t begin, int64_t end,
                                         cuda_ops_dtype dtype);
/* grad_source[o, k, i] = grad_output[o, index[o, k, i], i]: rows [begin, end) of the outer * count of grad_source. */
cuda_ops_status cuda_ops_scatter_add_backward_cpu(void *grad_source, const void *grad_output, const void *index,
                                                  int index_bytes, cuda_ops_scatter_sizes sizes, int64_t begin,
                                                  int64_t end, cuda_ops_dtype dtype);

/* workspace: of so many bytes of device memory, aligned to 16. deterministic: 0, or 1 where results are to repeat bit by
 * bit; the same for the workspace and the call. */
size_t cuda_ops_index_add_workspace_cuda(cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype, int deterministic);
cuda_ops_status cuda_ops_index_add_cuda(void *output, cuda_ops_index_error *error, void *workspace, const void *input,
                                        const void *source, const void *index, int index_bytes,
                                        cuda_ops_scatter_sizes sizes, double alpha, cuda_ops_dtype dtype,
                                        int deterministic, cuda_ops_stream stream);
cuda_ops_status cuda_ops_index_add_backward_cuda(void *grad_source, const void *grad_output, const void *index,
                                                 int index_bytes, cuda_ops_scatter_sizes sizes, double alpha,
                                                 cuda_ops_dtype dtype, cuda_ops_stream stream);
size_t cuda_ops_scatter_add_workspace_cuda(cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype, int deterministic);
/* Adds to output. */
cuda_ops_status cuda_ops_scatter_add_cuda(void *output, cuda_ops_index_error *error, void *workspace,
                                          const void *source, const void *index, int index_bytes,
                                          cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype, int deterministic,
                                          cuda_ops_stream stream);
cuda_ops_status cuda_ops_scatter_add_backward_cuda(void *grad_source, const void *grad_output, const void *index,
                                                   int index_bytes, cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype,
                                                   cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
