/* What the losses over classes (nll_loss, cross_entropy) share: reductions, and what becomes of a bad class index.
 *
 * Layout: input is [outer, classes, inner], dense. A column is one (outer, inner) pair, number outer_index * inner +
 * inner_index: the `classes` values of one sample, `inner` elements apart. target, and the losses before reduction,
 * are one value a column, in that order.
 *
 * A class index outside of [0, classes) that is not ignore_index is never used as an address: the loss of its column
 * is NaN, its weight in a mean is zero and its gradient is zero. Callers who want an error:
 *   - on the CPU look first, with cuda_ops_loss_find_bad_target_cpu;
 *   - on CUDA pass a cuda_ops_index_error, which the kernel fills in, and look at it whenever they like.
 */
#ifndef CUDA_OPS_LOSS_H
#define CUDA_OPS_LOSS_H

#include <stddef.h>

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_reduction {
    CUDA_OPS_REDUCTION_NONE = 0,
    CUDA_OPS_REDUCTION_MEAN = 1, /* the sum divided by the sum of the weights; 0 / 0 is NaN */
    CUDA_OPS_REDUCTION_SUM = 2
} cuda_ops_reduction;

/* In memory that both the device and the host reach (pinned host memory), so that nobody has to synchronise to see
 * it. One record a device: records are claimed by an atomic that other devices do not see. Of several bad indices
 * any one may be recorded, and a record is left alone until the host sets `state` back to CUDA_OPS_INDEX_ERROR_NONE. */
typedef struct cuda_ops_index_error {
    int state;
    int64_t position; /* number of the column */
    int64_t value;    /* the bad index */
    int64_t classes;
} cuda_ops_index_error;
enum { CUDA_OPS_INDEX_ERROR_NONE = 0, CUDA_OPS_INDEX_ERROR_BEING_WRITTEN = 1, CUDA_OPS_INDEX_ERROR_COMPLETE = 2 };

/* Position of the first class index that is neither in [0, classes) nor ignore_index; -1 if there is none. */
int64_t cuda_ops_loss_find_bad_target_cpu(const int64_t *target, int64_t count, int64_t classes, int64_t ignore_index);

/* The second stage of a mean or a sum on the CPU: `partials` holds `count` pairs (sum of losses, sum of weights), which
 * are added in order. loss, total_weight: one element of dtype each. */
cuda_ops_status cuda_ops_loss_reduce_cpu(void *loss, void *total_weight, const double *partials, int64_t count,
                                         cuda_ops_reduction reduction, cuda_ops_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
