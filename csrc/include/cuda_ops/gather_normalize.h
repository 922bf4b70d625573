/* gather_normalize: output[b] = (images[indices[b]] / 255 - mean) / std, a batch gathered from a data set of bytes.
 *
 *   images: [count, row_size] bytes, dense
 *   indices: [rows], of index_bytes each: 4 (int32_t) or 8 (int64_t)
 *   output: [rows, row_size] of dtype
 *   labels: [count], of label_bytes each: 1 (uint8_t) or 8 (int64_t); or null
 *   output_labels: [rows], labels[indices[b]]; or null if labels is
 *   no workspace
 *
 * An index outside of [0, count) is never used as an address: its row is NaN and its label -1. Callers who want an
 * error look first on the CPU, with cuda_ops_gather_normalize_find_bad_index_cpu, and on CUDA pass a
 * cuda_ops_index_error (loss.h), which the kernel fills in; or null.
 */
#ifndef CUDA_OPS_GATHER_NORMALIZE_H
#define CUDA_OPS_GATHER_NORMALIZE_H

#include "cuda_ops/core.h"
#include "cuda_ops/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Position of the first of `rows` indices that is not in [0, count); -1 if there is none. */
int64_t cuda_ops_gather_normalize_find_bad_index_cpu(const void *indices, int index_bytes, int64_t rows, int64_t count);

/* Rows [begin, end) of the batch, so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_gather_normalize_cpu(void *output, int64_t *output_labels, const uint8_t *images,
                                              const void *indices, int index_bytes, const void *labels, int label_bytes,
                                              int64_t count, int64_t row_size, int64_t begin, int64_t end, double mean,
                                              double std, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_gather_normalize_cuda(void *output, int64_t *output_labels, cuda_ops_index_error *error,
                                               const uint8_t *images, const void *indices, int index_bytes,
                                               const void *labels, int label_bytes, int64_t count, int64_t rows,
                                               int64_t row_size, double mean, double std, cuda_ops_dtype dtype,
                                               cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
