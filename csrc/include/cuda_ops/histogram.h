/* histc: how many of a tensor's elements lie in each of `bins` bins of equal width between `low` and `high`; and
 * bincount: how often each of the numbers 0, 1, ... occurs, or the sum of the weights that stand beside it.
 *
 * An element v of low <= v <= high is in bin floor((v - low) * bins / (high - low)), and `high` itself in the last one;
 * others, NaN among them, are in none. It is computed in that order in the accumulation type, as PyTorch does. low is
 * below high, and both are finite.
 *
 *   input: `count` elements, dense. Of bincount integers of key_bytes each: 1 (uint8_t), 4 (int32_t) or 8 (int64_t);
 *       those outside of [0, bins) are left out
 *   weights: `count` elements of dtype, float32 or float64, or NULL
 *
 * Counts are integers throughout: exact, and the same in every run. So are sums of weights of few bins: how they are cut
 * depends on the sizes alone (csrc/cuda/histogram/histogram.cu); and on CUDA those of many, if `deterministic`.
 */
#ifndef CUDA_OPS_HISTOGRAM_H
#define CUDA_OPS_HISTOGRAM_H

#include <stddef.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end) of input. They are added (+=) to `counts` of `bins` integers, so that each thread may have its
 * own. */
cuda_ops_status cuda_ops_histc_cpu(int64_t *counts, const void *input, int64_t begin, int64_t end, int64_t bins,
                                   double low, double high, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_bincount_cpu(int64_t *counts, const void *input, int key_bytes, int64_t begin, int64_t end,
                                      int64_t bins);
/* Added (+=) to `sums`, in double and in the order of the elements. */
cuda_ops_status cuda_ops_bincount_weights_cpu(double *sums, const void *input, int key_bytes, const void *weights,
                                              int64_t begin, int64_t end, int64_t bins, cuda_ops_dtype dtype);
/* range: the smallest and the largest of elements [begin, end), of which there is one at least. */
cuda_ops_status cuda_ops_bincount_range_cpu(int64_t *range, const void *input, int key_bytes, int64_t begin,
                                            int64_t end);

/* output: `bins` elements of dtype. workspace: cuda_ops_histc_workspace_cuda bytes, aligned to 16. */
size_t cuda_ops_histc_workspace_cuda(int64_t bins);
cuda_ops_status cuda_ops_histc_cuda(void *output, void *workspace, const void *input, int64_t count, int64_t bins,
                                    double low, double high, cuda_ops_dtype dtype, cuda_ops_stream stream);

cuda_ops_status cuda_ops_bincount_cuda(int64_t *counts, const void *input, int key_bytes, int64_t count, int64_t bins,
                                       cuda_ops_stream stream);
/* sums: `bins` elements of dtype. deterministic: 0, or 1 where they are to repeat bit by bit; the same for the workspace and
 * the call. */
size_t cuda_ops_bincount_weights_workspace_cuda(int64_t count, int64_t bins, cuda_ops_dtype dtype, int deterministic);
cuda_ops_status cuda_ops_bincount_weights_cuda(void *sums, void *workspace, const void *input, int key_bytes,
                                               const void *weights, int64_t count, int64_t bins, cuda_ops_dtype dtype,
                                               int deterministic, cuda_ops_stream stream);
/* range, on the device: ~smallest and the largest of the elements; both -1 where they are negative. */
cuda_ops_status cuda_ops_bincount_range_cuda(int64_t *range, const void *input, int key_bytes, int64_t count,
                                             cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
