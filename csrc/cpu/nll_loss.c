/* nll_loss on the CPU: loss = -weight[target] * input[target] for each column. Bound by memory: one read a column
 * forward, one write of every element of grad_input backward. */
#ifndef REAL

#include "cuda_ops/nll_loss.h"

#include "common/common.h"
#include "common/half.h"

/* Whether `target` may be used as an address. A column where it may not has the loss NaN (loss.h). */
static inline bool is_class(int64_t target, int64_t classes)
{
    return 0 <= target && target < classes;
}

/* Where a column's element of class t is; without divisions where columns are rows. */
static inline int64_t place_of(int64_t column, int64_t t, int64_t classes, int64_t inner)
{
    return inner == 1 ? column * classes + t : (column / inner * classes + t) * inner + column % inner;
}

enum { AHEAD = 16 }; /* columns, of a prefetch */
#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

#define REAL float
#define FN(name) name##_f32
#include "nll_loss.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "nll_loss.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_nll_loss_forward_cpu(void *losses, double *partial, const void *input, const int64_t *target,
                                              const void *weight, int64_t classes, int64_t inner, int64_t begin,
                                              int64_t end, int64_t ignore_index, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
    case CUDA_OPS_FLOAT32:
        nll_loss_forward_f32(losses, partial, input, target, weight, classes, inner, begin, end, ignore_index, dtype);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        nll_loss_forward_f64(losses, partial, input, target, weight, classes, inner, begin, end, ignore_index, dtype);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_nll_loss_backward_cpu(void *grad_input, const void *grad_output, const int64_t *target,
                                               const void *weight, const void *total_weight, int64_t classes,
                                               int64_t inner, int64_t begin, int64_t end, int64_t ignore_index,
                                               cuda_ops_reduction reduction, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
    case CUDA_OPS_FLOAT32:
        nll_loss_backward_f32(grad_input, grad_output, target, weight, total_weight, classes, inner, begin, end,
                              ignore_index, reduction, dtype);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        nll_loss_backward_f64(grad_input, grad_output, target, weight, total_weight, classes, inner, begin, end,
                              ignore_index, reduction, dtype);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

static void FN(nll_loss_forward)(REAL *losses, double *partial, const void *input, const int64_t *target,
                                 const REAL *weight, int64_t classes, int64_t inner, int64_t begin, int64_t end,
                                 int64_t ignore_index, cuda_ops_dtype dtype)
{
    double loss_sum = 0, weight_sum = 0;
    const size_t bytes = is_half(dtype) ? sizeof(uint16_t) : sizeof(REAL);
    for (int64_t column = begin; column < end; column++) {
        const int64_t t = target[column];
        REAL loss = 0, w = 0;
        /* Each element is in a line, and often in a page, of its own. */
        if (inner == 1 && column + AHEAD < end && is_class(target[column + AHEAD], classes))
            PREFETCH((const char *)input +
                     (size_t)place_of(column + AHEAD, target[column + AHEAD], classes, 1) * bytes);
        if (t != ignore_index) {
            if (is_class(t, classes)) {
                const int64_t at = place_of(column, t, classes, inner);
                w = weight ? weight[t] : 1;
                loss = -w * (is_half(dtype) ? (REAL)widened_half(((const uint16_t *)input)[at], dtype)
                                            : ((const REAL *)input)[at]);
            } else {
                loss = (REAL)NAN;
            }
        }
        if (losses)
            losses[column] = loss;
        loss_sum += loss;
        weight_sum += w;
    }
    if (partial) {
        partial[0] = loss_sum;
        partial[1] = weight_sum;
    }
}

static void FN(nll_loss_backward)(void *grad_input, const REAL *grad_output, const int64_t *target, const REAL *weight,
                                  const REAL *total_weight, int64_t classes, int64_t inner, int64_t begin, int64_t end,
                                  int64_t ignore_index, cuda_ops_reduction reduction, cuda_ops_dtype dtype)
{
    const size_t bytes = is_half(dtype) ? sizeof(uint16_t) : sizeof(REAL);
    /* The columns of the range are whole rows if inner is 1, else runs of up to `inner` elements per class. */
    for (int64_t column = begin, count; column < end; column += count) {
        char *dx = (char *)grad_input + (size_t)(column / inner * classes * inner + column % inner) * bytes;
        count = inner == 1 ? end - column : min_i64(end - column, inner - column % inner);
        if (inner == 1)
            memset(dx, 0, (size_t)(count * classes) * bytes);
        else
            for (int64_t c = 0; c < classes; c++)
                memset(dx + (size_t)(c * inner) * bytes, 0, (size_t)count * bytes);
    }
    for (int64_t column = begin; column < end; column++) {
        const int64_t t = target[column];
        if (t == ignore_index || !is_class(t, classes))
            continue;
        REAL g = grad_output[reduction == CUDA_OPS_REDUCTION_NONE ? column : 0] * (weight ? weight[t] : 1);
        if (reduction == CUDA_OPS_REDUCTION_MEAN)
            g /= *total_weight;
        const int64_t at = place_of(column, t, classes, inner);
        if (is_half(dtype))
            ((uint16_t *)grad_input)[at] = rounded_half((float)-g, dtype);
        else
            ((REAL *)grad_input)[at] = -g;
    }
}

#endif
