/* interleave: the columns of two matrices by turns, and the reverse.
 *
 *     output[r, 2 c] = input[r, c],   output[r, 2 c + 1] = other[r, c]
 *
 *   output: dense [rows, 2 cols]; rows of input and other are input_stride and other_stride elements apart, and dense
 *   element_bytes: 2, 4 or 8; values are copied as they are
 *   backward: grad_input and grad_other, dense [rows, cols], of grad, dense [rows, 2 cols]
 */
#ifndef CUDA_OPS_INTERLEAVE_H
#define CUDA_OPS_INTERLEAVE_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [begin, end). */
cuda_ops_status cuda_ops_interleave_forward_cpu(void *output, const void *input, const void *other,
                                                int64_t input_stride, int64_t other_stride, int64_t cols, int64_t begin,
                                                int64_t end, int element_bytes);
cuda_ops_status cuda_ops_interleave_backward_cpu(void *grad_input, void *grad_other, const void *grad, int64_t cols,
                                                 int64_t begin, int64_t end, int element_bytes);

cuda_ops_status cuda_ops_interleave_forward_cuda(void *output, const void *input, const void *other,
                                                 int64_t input_stride, int64_t other_stride, int64_t rows, int64_t cols,
                                                 int element_bytes, cuda_ops_stream stream);
cuda_ops_status cuda_ops_interleave_backward_cuda(void *grad_input, void *grad_other, const void *grad, int64_t rows,
                                                  int64_t cols, int element_bytes, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
