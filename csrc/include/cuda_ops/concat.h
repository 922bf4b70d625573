/* concat: tensors one behind the other along a dimension. inputs[i] is dense [outer, cols[i], inner], output
 *
 *     [outer, cols[0] + cols[1] + ..., inner],   of which input i has the columns from cols[0] + ... + cols[i - 1] on
 *
 *   count: how many inputs; their pointers and cols are read from host memory, in the call
 *   element_bytes: 2, 4 or 8; values are copied as they are
 *
 * On CUDA a launch takes CUDA_OPS_CONCAT_INPUTS of them.
 */
#ifndef CUDA_OPS_CONCAT_H
#define CUDA_OPS_CONCAT_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_CONCAT_INPUTS = 256 };

/* Elements [begin, end) of output. */
cuda_ops_status cuda_ops_concat_cpu(void *output, const void *const *inputs, const int64_t *cols, int64_t count,
                                    int64_t outer, int64_t inner, int64_t begin, int64_t end, int element_bytes);
cuda_ops_status cuda_ops_concat_cuda(void *output, const void *const *inputs, const int64_t *cols, int64_t count,
                                     int64_t outer, int64_t inner, int element_bytes, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
