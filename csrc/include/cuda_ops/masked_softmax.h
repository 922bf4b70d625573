/* masked_softmax: the softmax of scores along rows, some of which do not take part.
 *
 *   score = input * scale                          where the mask is true or there is none, and causality allows it
 *         + mask                                   of an additive mask
 *         = -inf                                   elsewhere
 *   output = exp(score - max) / sum(exp(score - max)), and 0 throughout where no score is above -inf
 *
 *   input, output: [rows, cols], dense, of the same dtype; output may be input
 *   workspace: see the query for it; none on the CPU
 * A row with a NaN or +inf among its scores is NaN throughout. The gradient is cuda_ops_softmax_backward's.
 */
#ifndef CUDA_OPS_MASKED_SOFTMAX_H
#define CUDA_OPS_MASKED_SOFTMAX_H

#include <stddef.h>

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_MASK_DIMS = 4 };
typedef enum cuda_ops_mask_kind {
    CUDA_OPS_MASK_NONE = 0,
    CUDA_OPS_MASK_BOOLEAN = 1, /* one byte each, 0 or 1: whether the score takes part */
    CUDA_OPS_MASK_ADDITIVE = 2 /* of the input's dtype */
} cuda_ops_mask_kind;

/* Row r's mask begins at the sum of index[d] * strides[d], where index are r's digits to the sizes, the last one
 * running fastest; its elements are col_stride apart, 0 or 1. Strides may be 0. The rows are the sizes' product. */
typedef struct cuda_ops_mask {
    const void *values;
    cuda_ops_mask_kind kind;
    int dims; /* at most CUDA_OPS_MASK_DIMS */
    int64_t sizes[CUDA_OPS_MASK_DIMS], strides[CUDA_OPS_MASK_DIMS], col_stride;
    /* Columns beyond a row's own number, modulo `queries`, do not take part; 0: they do. */
    int64_t queries;
} cuda_ops_mask;

/* Rows [begin, end), so that the caller spreads ranges over threads. */
cuda_ops_status cuda_ops_masked_softmax_forward_cpu(void *output, const void *input, const cuda_ops_mask *mask,
                                                    double scale, int64_t cols, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype);

/* Bytes of device memory, aligned to 16, that forward needs on the current device: 0 unless rows are few and long. */
size_t cuda_ops_masked_softmax_workspace_cuda(int64_t rows, int64_t cols, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_masked_softmax_forward_cuda(void *output, void *workspace, const void *input,
                                                     const cuda_ops_mask *mask, double scale, int64_t rows,
                                                     int64_t cols, cuda_ops_dtype dtype, cuda_ops_stream stream);

/* The table for a call whose tensors are aligned (paths.h): fills in at most `room` reports, and returns how many rows
 * there are. device: NULL for the current one. */
int cuda_ops_masked_softmax_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows, int64_t cols,
                                       cuda_ops_dtype dtype, const cuda_ops_device_facts *device);

/* Where a row's mask begins. */
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_mask_offset(const cuda_ops_mask *mask, int64_t row)
{
    int64_t offset = 0;
    for (int d = mask->dims - 1; d >= 0; d--) {
        int64_t quotient, index;
        if (row < (int64_t)1 << 31 && mask->sizes[d] < (int64_t)1 << 31) { /* a division of half the length */
            quotient = (uint32_t)row / (uint32_t)mask->sizes[d];
            index = (uint32_t)row % (uint32_t)mask->sizes[d];
        } else {
            quotient = row / mask->sizes[d];
            index = row % mask->sizes[d];
        }
        offset += index * mask->strides[d];
        row = quotient;
    }
    return offset;
}

#ifdef __cplusplus
}
#endif

#endif
