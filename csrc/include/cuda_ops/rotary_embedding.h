/* rotary_embedding: turns the features of queries or keys by an angle for each position and pair of features (Su et al.,
 * RoFormer, 2021). A pair is element e < features / 2 and the one half of the features behind it:
 *   output[e]        = input[e]        * cos[e]        - input[e + half] * sin[e]
 *   output[e + half] = input[e + half] * cos[e + half] + input[e]        * sin[e + half]
 * and, `transposed`, the gradient of input of that of output:
 *   output[e]        = input[e]        * cos[e]        + input[e + half] * sin[e + half]
 *   output[e + half] = input[e + half] * cos[e + half] - input[e]        * sin[e]
 *
 *   input, output: [batch][heads][length][features], features even and next to each other, the others at any strides; they
 *     do not overlap
 *   cos, sin: [length][features], dense, for each of the batch table_stride elements further, or the same ones for all (0)
 *   no workspace
 *
 * dtypes: of input, of cos and sin, of output
 *   CPU: float32 or float64 in all three
 *   CUDA: one dtype in all; float16 or bfloat16 beside float32 tables, with an output in that dtype or float32, and
 *     float32 with an output in that dtype
 * Sums are made in float32 (float64 for float64) and rounded once.
 */
#ifndef CUDA_OPS_ROTARY_EMBEDDING_H
#define CUDA_OPS_ROTARY_EMBEDDING_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t batch, heads, length, features;
    int64_t input_strides[3], output_strides[3]; /* of batch, heads and length, in elements */
    int64_t table_stride;
    int transposed;
    cuda_ops_dtype dtype, table_dtype, output_dtype;
} cuda_ops_rotary_embedding_call;

/* Rows [begin, end) of batch * length. */
cuda_ops_status cuda_ops_rotary_embedding_cpu(void *output, const void *input, const void *cos, const void *sin,
                                              const cuda_ops_rotary_embedding_call *call, int64_t begin, int64_t end);

cuda_ops_status cuda_ops_rotary_embedding_cuda(void *output, const void *input, const void *cos, const void *sin,
                                               const cuda_ops_rotary_embedding_call *call, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
