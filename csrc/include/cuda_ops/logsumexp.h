/* logsumexp: output = log(sum(exp(input))), the sum along the middle dimension; grad_input = grad_output * exp(input -
 * output).
 *
 *   input, grad_input: [outer, cols, inner], dense      output, grad_output: [outer, inner]; all of the same dtype
 *   grad_input may be input
 * Of a column (see loss.h) with a NaN it is NaN, of one with +inf else +inf, of -inf alone, or of nothing, -inf.
 */
#ifndef CUDA_OPS_LOGSUMEXP_H
#define CUDA_OPS_LOGSUMEXP_H

#include <stddef.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Columns [begin, end) of the outer * inner there are, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_logsumexp_forward_cpu(void *output, const void *input, int64_t cols, int64_t inner,
                                               int64_t begin, int64_t end, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_logsumexp_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                                const void *output, int64_t cols, int64_t inner, int64_t begin,
                                                int64_t end, cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 16, that forward needs on the current device: 0 unless columns are few and long. */
size_t cuda_ops_logsumexp_workspace_cuda(int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_logsumexp_forward_cuda(void *output, void *workspace, const void *input, int64_t outer,
                                                int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                                cuda_ops_stream stream);
cuda_ops_status cuda_ops_logsumexp_backward_cuda(void *grad_input, const void *grad_output, const void *input,
                                                 const void *output, int64_t outer, int64_t cols, int64_t inner,
                                                 cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
