/* add2: output[i] = input[i] + other[i].
 *
 *   output, input, other: `count` elements, dense, of the same dtype and in the same order
 *   output may be input or other (elementwise in place)
 *   no workspace
 *
 * There is no backward: the gradient of both addends is grad_output itself.
 */
#ifndef CUDA_OPS_ADD2_H
#define CUDA_OPS_ADD2_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end) of the arrays, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_add2_forward_cpu(void *output, const void *input, const void *other, int64_t begin,
                                          int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_add2_forward_cuda(void *output, const void *input, const void *other, int64_t count,
                                           cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
