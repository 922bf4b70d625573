/* softmax: output = exp(input) / sum(exp(input)), the sum along the middle dimension.
 *
 *   input, output, grad_output, grad_input: [outer, cols, inner], dense, of the same dtype
 *   output may be input, and grad_input may be grad_output or output
 *   workspace: see the query for it; none on the CPU
 * A column (see loss.h) with a NaN or +inf in it, or of -inf alone, is NaN throughout.
 */
#ifndef CUDA_OPS_SOFTMAX_H
#define CUDA_OPS_SOFTMAX_H

#include <stddef.h>

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Columns [begin, end) of the outer * inner there are, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_softmax_forward_cpu(void *output, const void *input, int64_t cols, int64_t inner,
                                             int64_t begin, int64_t end, cuda_ops_dtype dtype);
/* grad_input = output * (grad_output - sum(grad_output * output)) * scale */
cuda_ops_status cuda_ops_softmax_backward_cpu(void *grad_input, const void *grad_output, const void *output,
                                              double scale, int64_t cols, int64_t inner, int64_t begin, int64_t end,
                                              cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 16, that a pass needs on the current device: 0 unless columns are few and long. */
size_t cuda_ops_softmax_workspace_cuda(int backward, int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_softmax_forward_cuda(void *output, void *workspace, const void *input, int64_t outer,
                                              int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                              cuda_ops_stream stream);
cuda_ops_status cuda_ops_softmax_backward_cuda(void *grad_input, void *workspace, const void *grad_output,
                                               const void *output, double scale, int64_t outer, int64_t cols,
                                               int64_t inner, cuda_ops_dtype dtype, cuda_ops_stream stream);

/* The table for a call whose tensors are aligned (paths.h): fills in at most `room` reports, and returns how many rows
 * there are. device: NULL for the current one. */
int cuda_ops_softmax_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int64_t outer, int64_t cols,
                                int64_t inner, cuda_ops_dtype dtype, const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
