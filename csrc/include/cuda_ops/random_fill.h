/* random_fill: fills a tensor with random numbers, uniform between `first` and `second`, or normal with mean `first` and
 * standard deviation `second`.
 *
 *   output: `count` elements, dense
 *   philox: the seed is the key, and (offset / 4, c) are the 64-bit halves of counter c; a call uses up
 *       CUDA_OPS_RANDOM_FILL_OFFSET_STEP of the offset. Counter c makes elements 4 c to 4 c + 3, of float64 2 c and
 *       2 c + 1, so that any thread makes any element
 *
 * Uniform numbers are first + u * (second - first) with u in [0, 1), of 24 bits of one word, or of float64 53 bits of
 * two; the sum may round to `second`. Normal numbers are a pair of Box and Muller's from a pair of these, the radius of
 * all 32 bits (53): up to 6.7 (8.5) standard deviations. fp16 and bf16 are rounded from float.
 */
#ifndef CUDA_OPS_RANDOM_FILL_H
#define CUDA_OPS_RANDOM_FILL_H

#include "cuda_ops/core.h"
#include "cuda_ops/philox.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_OPS_RANDOM_FILL_OFFSET_STEP 4

typedef enum cuda_ops_distribution {
    CUDA_OPS_UNIFORM = 0, /* first <= second */
    CUDA_OPS_NORMAL = 1   /* second >= 0 */
} cuda_ops_distribution;

/* Elements [begin, end). The values in `philox` count, its pointers are ignored. */
cuda_ops_status cuda_ops_random_fill_cpu(void *output, int64_t begin, int64_t end, cuda_ops_distribution distribution,
                                         double first, double second, cuda_ops_philox_state philox,
                                         cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_random_fill_cuda(void *output, int64_t count, cuda_ops_distribution distribution, double first,
                                          double second, cuda_ops_philox_state philox, cuda_ops_dtype dtype,
                                          cuda_ops_stream stream);

/* Of words to numbers in [0, 1). */
CUDA_OPS_HOST_DEVICE float cuda_ops_unit_float(uint32_t word)
{
    return (float)(word >> 8) * (1.0f / 16777216.0f);
}
CUDA_OPS_HOST_DEVICE double cuda_ops_unit_double(uint32_t high, uint32_t low)
{
    return (double)(((uint64_t)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

/* And to numbers in (0, 1], whose logarithm is finite. */
CUDA_OPS_HOST_DEVICE float cuda_ops_positive_unit_float(uint32_t word)
{
    return (float)word * (1.0f / 4294967296.0f) + 0.5f / 4294967296.0f;
}
CUDA_OPS_HOST_DEVICE double cuda_ops_positive_unit_double(uint32_t high, uint32_t low)
{
    return cuda_ops_unit_double(high, low) + 1.0 / 9007199254740992.0;
}

#ifdef __cplusplus
}
#endif

#endif
