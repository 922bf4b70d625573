/* dropout: output[i] = input[i] * (0 with probability p, else 1 / (1 - p)); with p = 1 always 0. dropout_add adds
 * residual[i] to that, rounded once.
 *
 *   output, input, residual: `count` elements, dense, of the same dtype; output may be input or residual
 *   p: in [0, 1]
 *
 * No mask need be stored. Element i is dropped if word i % 4 of Philox, with the seed as key and (offset / 4, i / 4) as the
 * two 64-bit halves of the counter, is below p * 2^32; whoever knows seed and offset gets the same mask again. That is
 * how PyTorch's CUDA generator numbers its streams, with element quadruples instead of threads; a call uses up 4 of
 * its offset.
 * backward, of both, is the same product with grad_output instead of input.
 *
 * The CPU, which takes longer to draw a mask than to read it, can keep one: bit i % 32 of kept[i / 32] is 1 where element i
 * is kept.
 */
#ifndef CUDA_OPS_DROPOUT_H
#define CUDA_OPS_DROPOUT_H

#include "cuda_ops/core.h"
#include "cuda_ops/philox.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_OPS_DROPOUT_OFFSET_STEP 4

/* Elements [begin, end). Serves forward and backward. The values in `philox` count, its pointers are ignored. */
cuda_ops_status cuda_ops_dropout_cpu(void *output, const void *input, int64_t begin, int64_t end, double p,
                                     cuda_ops_philox_state philox, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_dropout_add_cpu(void *output, const void *input, const void *residual, int64_t begin,
                                         int64_t end, double p, cuda_ops_philox_state philox, cuda_ops_dtype dtype);

enum { CUDA_OPS_DROPOUT_KEPT_BLOCK = 128 };

/* The same of blocks [begin, end) of that many elements, of `count` in all, with what is kept: in all words of a block that
 * have an element. residual may be NULL. */
cuda_ops_status cuda_ops_dropout_keep_cpu(void *output, uint32_t *kept, const void *input, const void *residual,
                                          int64_t count, int64_t begin, int64_t end, double p,
                                          cuda_ops_philox_state philox, cuda_ops_dtype dtype);
/* And that product with what was kept. */
cuda_ops_status cuda_ops_dropout_kept_cpu(void *output, const void *input, const uint32_t *kept, int64_t count,
                                          int64_t begin, int64_t end, double p, cuda_ops_dtype dtype);

/* state: 2 elements, set to the seed and the offset that were used, which under graph capture the host never sees. */
cuda_ops_status cuda_ops_dropout_forward_cuda(void *output, int64_t *state, const void *input, int64_t count, double p,
                                              cuda_ops_philox_state philox, cuda_ops_dtype dtype,
                                              cuda_ops_stream stream);
cuda_ops_status cuda_ops_dropout_add_forward_cuda(void *output, int64_t *state, const void *input, const void *residual,
                                                  int64_t count, double p, cuda_ops_philox_state philox,
                                                  cuda_ops_dtype dtype, cuda_ops_stream stream);
cuda_ops_status cuda_ops_dropout_backward_cuda(void *grad_input, const void *grad_output, const int64_t *state,
                                               int64_t count, double p, cuda_ops_dtype dtype, cuda_ops_stream stream);

/* Words below it drop their element. That 32 bits cannot say 2^32, for p = 1, is no matter: its scale is 0. */
CUDA_OPS_HOST_DEVICE uint32_t cuda_ops_dropout_threshold(double p)
{
    const double threshold = p * 4294967296.0 + 0.5;
    return threshold < 4294967295.0 ? (uint32_t)threshold : 0xffffffffu;
}

CUDA_OPS_HOST_DEVICE double cuda_ops_dropout_scale(double p)
{
    return p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
}

#ifdef __cplusplus
}
#endif

#endif
