/* permute_contiguous: a tensor with its dimensions in another order, copied so that it is contiguous.
 *
 *     output[i0, i1, ...] = input[i0 * strides[0] + i1 * strides[1] + ...],   output dense in this order
 *
 *   dims: how many dimensions, up to CUDA_OPS_PERMUTE_DIMS; sizes and strides are output's dimensions, strides those of
 *       input, in elements. Neighbouring dimensions that lie alike should be one (cuda_ops_permute_collapse).
 *   element_bytes: 2, 4 or 8; values are copied as they are
 *
 * Nothing is computed: results are the input's bits.
 */
#ifndef CUDA_OPS_PERMUTE_CONTIGUOUS_H
#define CUDA_OPS_PERMUTE_CONTIGUOUS_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_PERMUTE_DIMS = 8 };

typedef struct cuda_ops_permutation {
    int dims;
    int64_t sizes[CUDA_OPS_PERMUTE_DIMS], strides[CUDA_OPS_PERMUTE_DIMS];
} cuda_ops_permutation;

/* Drops dimensions of one element and makes neighbours that lie alike one; 0 if more than CUDA_OPS_PERMUTE_DIMS are
 * left, of which there is then no permutation here. */
int cuda_ops_permute_collapse(cuda_ops_permutation *permutation, int dims, const int64_t *sizes,
                              const int64_t *strides);

/* Elements [begin, end) of output. */
cuda_ops_status cuda_ops_permute_contiguous_cpu(void *output, const void *input,
                                                const cuda_ops_permutation *permutation, int64_t begin, int64_t end,
                                                int element_bytes);
cuda_ops_status cuda_ops_permute_contiguous_cuda(void *output, const void *input,
                                                 const cuda_ops_permutation *permutation, int element_bytes,
                                                 cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
