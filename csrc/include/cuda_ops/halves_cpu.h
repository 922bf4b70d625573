/* float16 and bfloat16 on the CPU: kernels there compute in float32, of elements that are widened before and rounded
 * after. A caller does that by a few thousand elements at a time, so that float32 copies stay in the cache.
 *
 *   dtype: CUDA_OPS_FLOAT16 or CUDA_OPS_BFLOAT16, of the array that is not float32.
 *
 * Widening is exact. Rounding is to the nearest, ties to even: overflow is an infinity, results below the smallest
 * normal number are denormal, NaN stays NaN, with its sign. No workspace.
 */
#ifndef CUDA_OPS_HALVES_CPU_H
#define CUDA_OPS_HALVES_CPU_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

cuda_ops_status cuda_ops_widen_cpu(float *output, const void *input, int64_t count, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_round_cpu(void *output, const float *input, int64_t count, cuda_ops_dtype dtype);

/* Whether none of them is an infinity or NaN. */
int cuda_ops_are_finite_cpu(const void *input, int64_t count, cuda_ops_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
