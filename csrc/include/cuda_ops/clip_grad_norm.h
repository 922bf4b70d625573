/* clip_grad_norm: the norm of all gradients, as of one vector, and then each of them in place
 *
 *   grad *= min(max_norm / (norm + 1e-6), 1)        norm = (sum |g|^norm_type)^(1 / norm_type), or the largest |g|
 *
 * in two steps: partial sums of |g|^norm_type (or partial maxima), in double, of as many gradients as there are; and
 * the scaling, which begins with what they come to. Nobody waits in between, and the same gradients give the same bits.
 *
 *   grads: arrays of any number of elements each, of one dtype a call; partials of several calls make one norm
 *   norm_type: greater than 0; INFINITY for the largest
 * NaN travels. A factor of 1 leaves the gradients as they are, untouched.
 */
#ifndef CUDA_OPS_CLIP_GRAD_NORM_H
#define CUDA_OPS_CLIP_GRAD_NORM_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The partial of elements [begin, end). */
cuda_ops_status cuda_ops_grad_norm_partial_cpu(double *partial, const void *grad, double norm_type, int64_t begin,
                                               int64_t end, cuda_ops_dtype dtype);
/* What the partials come to. */
double cuda_ops_grad_norm_cpu(const double *partials, int64_t count, double norm_type);
/* What the gradients are to be multiplied by. */
double cuda_ops_clip_factor_cpu(double norm, double max_norm);
cuda_ops_status cuda_ops_clip_grad_cpu(void *grad, double factor, int64_t begin, int64_t end, cuda_ops_dtype dtype);

/* The number of partials that the next function leaves. The arrays are in host memory, of `tensors` entries. */
int64_t cuda_ops_grad_norm_partials_cuda(const int64_t *counts, int64_t tensors);
/* One launch for 180 gradients that are not empty. */
cuda_ops_status cuda_ops_grad_norm_cuda(double *partials, const void *const *grads, const int64_t *counts,
                                        int64_t tensors, double norm_type, cuda_ops_dtype dtype,
                                        cuda_ops_stream stream);
/* One launch for 180 gradients that are not empty, and one at least, for the norm alone, where there are none.
 * norm: one element of norm_dtype, in device memory, which gets the norm; or NULL. */
cuda_ops_status cuda_ops_clip_grads_cuda(void *norm, cuda_ops_dtype norm_dtype, void *const *grads,
                                         const int64_t *counts, int64_t tensors, const double *partials,
                                         int64_t partial_count, double norm_type, double max_norm, cuda_ops_dtype dtype,
                                         cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
