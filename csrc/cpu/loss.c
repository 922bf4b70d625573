/* What the losses over classes share on the CPU: the search for bad class indices and the last stage of a reduction. */
#include "cuda_ops/loss.h"

#include "common/common.h"

int64_t cuda_ops_loss_find_bad_target_cpu(const int64_t *target, int64_t count, int64_t classes, int64_t ignore_index)
{
    for (int64_t i = 0; i < count; i++)
        if ((target[i] < 0 || target[i] >= classes) && target[i] != ignore_index)
            return i;
    return -1;
}

cuda_ops_status cuda_ops_loss_reduce_cpu(void *loss, void *total_weight, const double *partials, int64_t count,
                                         cuda_ops_reduction reduction, cuda_ops_dtype dtype)
{
    double sum = 0, weight = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += partials[2 * i];
        weight += partials[2 * i + 1];
    }
    const double result = reduction == CUDA_OPS_REDUCTION_MEAN ? sum / weight : sum;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        *(float *)loss = (float)result;
        *(float *)total_weight = (float)weight;
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        *(double *)loss = result;
        *(double *)total_weight = weight;
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
