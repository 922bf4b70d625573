/* round_list: a list of float32 arrays, each rounded to float16 or bfloat16, to the nearest, ties to even: what a step
 * in half precision multiplies by, of all parameters at once. (Of one array on the CPU: halves_cpu.h.)
 *
 *   outputs[i] = inputs[i], counts[i] elements, which overlap nothing that is written
 *   dtype: CUDA_OPS_FLOAT16 or CUDA_OPS_BFLOAT16, of the outputs
 *
 * The lists are in host memory, of `tensors` entries. No workspace.
 */
#ifndef CUDA_OPS_ROUND_LIST_H
#define CUDA_OPS_ROUND_LIST_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One launch for 128 arrays that are not empty. */
cuda_ops_status cuda_ops_round_list_cuda(void *const *outputs, const float *const *inputs, const int64_t *counts,
                                         int64_t tensors, cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
