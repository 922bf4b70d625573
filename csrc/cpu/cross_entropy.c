/* cross_entropy on the CPU: loss = sum(q * (logsumexp - input)) for each column, and
 * grad_input = scale * (sum(q) * softmax - q), in one pass over input from the statistics that forward kept.
 * Bound by exp and by memory; q and the statistics are explained in the header. */
#ifndef REAL

#include "cuda_ops/cross_entropy.h"

#include "common/common.h"
#include "common/exponential.h"

/* The arguments that forward and backward share. Names as in the header. */
typedef struct problem {
    const int64_t *target;
    int64_t columns, classes, inner, ignore_index;
    double keep;   /* 1 - label_smoothing: what is left to the target */
    double spread; /* label_smoothing / classes: what every class gets */
} problem;

static problem make_problem(const int64_t *target, int64_t columns, int64_t classes, int64_t inner,
                            int64_t ignore_index, double label_smoothing)
{
    const problem p = {.target = target,
                       .columns = columns,
                       .classes = classes,
                       .inner = inner,
                       .ignore_index = ignore_index,
                       .keep = 1 - label_smoothing,
                       .spread = label_smoothing / (double)classes};
    return p;
}

#define REAL float
#define FN(name) name##_f32
#include "cross_entropy.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "cross_entropy.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_cross_entropy_forward_cpu(void *losses, double *partial, void *statistics, const void *input,
                                                   const int64_t *target, const void *probabilities, const void *weight,
                                                   int64_t columns, int64_t classes, int64_t inner, int64_t begin,
                                                   int64_t end, int64_t ignore_index, double label_smoothing,
                                                   cuda_ops_dtype dtype)
{
    const problem p = make_problem(target, columns, classes, inner, ignore_index, label_smoothing);
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        cross_entropy_forward_f32(losses, partial, statistics, input, probabilities, weight, &p, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        cross_entropy_forward_f64(losses, partial, statistics, input, probabilities, weight, &p, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_cross_entropy_backward_cpu(void *grad_input, const void *grad_output, const void *input,
                                                    const int64_t *target, const void *probabilities,
                                                    const void *weight, const void *statistics,
                                                    const void *total_weight, int64_t columns, int64_t classes,
                                                    int64_t inner, int64_t begin, int64_t end, int64_t ignore_index,
                                                    double label_smoothing, cuda_ops_reduction reduction,
                                                    cuda_ops_dtype dtype)
{
    const problem p = make_problem(target, columns, classes, inner, ignore_index, label_smoothing);
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        cross_entropy_backward_f32(grad_input, grad_output, input, probabilities, weight, statistics, total_weight, &p,
                                   begin, end, reduction);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        cross_entropy_backward_f64(grad_input, grad_output, input, probabilities, weight, statistics, total_weight, &p,
                                   begin, end, reduction);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"

/* The weight of class c in a column, from its probability and from smoothing. `y`: its probability, or NULL for class
 * indices. */
CUDA_OPS_INLINE REAL FN(share)(const REAL *y, const REAL *weight, int64_t c, REAL keep, REAL spread)
{
    const REAL share = y ? *y * keep + spread : spread;
    return weight ? weight[c] * share : share;
}

/* sum(share * (log_sum - (x - maximum))) and sum(share) over the classes of each of `count` columns: all of the loss
 * for probabilities, the smoothing's part for class indices. */
CUDA_OPS_INLINE void FN(share_sums)(double *loss, double *share_sum, const REAL *x, const REAL *y, const REAL *weight,
                                    const problem *p, int64_t count, const REAL *maximum, const REAL *log_sum)
{
    const REAL keep = (REAL)p->keep, spread = (REAL)p->spread;
    const int64_t cols = p->classes, inner = p->inner;
    if (inner == 1) {
        for (int64_t i = 0; i < count; i++) {
            const REAL *row = x + i * cols, *row_y = y ? y + i * cols : NULL;
            double losses = 0, shares = 0;
#pragma omp simd reduction(+ : losses, shares)
            for (int64_t c = 0; c < cols; c++) {
                const REAL share = FN(share)(row_y ? row_y + c : NULL, weight, c, keep, spread);
                losses += share * (log_sum[i] - (row[c] - maximum[i]));
                shares += share;
            }
            loss[i] = losses;
            share_sum[i] = shares;
        }
        return;
    }
    for (int64_t i = 0; i < count; i++)
        loss[i] = share_sum[i] = 0;
    for (int64_t c = 0; c < cols; c++)
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = c * inner + i;
            const REAL share = FN(share)(y ? y + at : NULL, weight, c, keep, spread);
            loss[i] += share * (log_sum[i] - (x[at] - maximum[i]));
            share_sum[i] += share;
        }
}

CUDA_OPS_SIMD static void FN(cross_entropy_forward)(REAL *losses, double *partial, REAL *statistics, const REAL *input,
                                                    const REAL *probabilities, const REAL *weight, const problem *p,
                                                    int64_t begin, int64_t end)
{
    const int64_t cols = p->classes, inner = p->inner, class_stride = inner, column_stride = inner == 1 ? cols : 1;
    double loss[TILE], q_sum[TILE], loss_total = 0, weight_total = 0;
    for (int64_t column = begin, count; column < end; column += count) {
        count = tile_columns(column, end, inner);
        const int64_t offset = column_offset(column, cols, inner);
        const REAL *x = input + offset;
        REAL *maximum = statistics + column, *log_sum = maximum + p->columns;
        FN(columns_log_sum_exp)(x, cols, inner, count, maximum, log_sum);
        if (probabilities || p->spread > 0) {
            const REAL *y = probabilities ? probabilities + offset : NULL;
            FN(share_sums)(loss, q_sum, x, y, weight, p, count, maximum, log_sum);
        } else {
            for (int64_t i = 0; i < count; i++)
                loss[i] = q_sum[i] = 0;
        }
        for (int64_t i = 0; i < count; i++) {
            REAL column_weight = 1;
            if (!probabilities) {
                const int64_t t = p->target[column + i];
                column_weight = 0;
                if (t == p->ignore_index) {
                    loss[i] = q_sum[i] = 0;
                } else if (t < 0 || t >= cols) {
                    loss[i] = NAN; /* a bad class index: see loss.h */
                    q_sum[i] = 0;
                } else {
                    column_weight = weight ? weight[t] : 1;
                    const REAL q = (REAL)p->keep * column_weight;
                    loss[i] += q * (log_sum[i] - (x[t * class_stride + i * column_stride] - maximum[i]));
                    q_sum[i] += q;
                }
            }
            statistics[2 * p->columns + column + i] = (REAL)q_sum[i];
            if (losses)
                losses[column + i] = (REAL)loss[i];
            loss_total += loss[i];
            weight_total += column_weight;
        }
    }
    if (partial) {
        partial[0] = loss_total;
        partial[1] = weight_total;
    }
}

CUDA_OPS_SIMD static void FN(cross_entropy_backward)(REAL *grad_input, const REAL *grad_output, const REAL *input,
                                                     const REAL *probabilities, const REAL *weight,
                                                     const REAL *statistics, const REAL *total_weight, const problem *p,
                                                     int64_t begin, int64_t end, cuda_ops_reduction reduction)
{
    const int64_t cols = p->classes, inner = p->inner, class_stride = inner, column_stride = inner == 1 ? cols : 1;
    const REAL keep = (REAL)p->keep, spread = (REAL)p->spread;
    const bool shared = probabilities || spread > 0;
    REAL scale[TILE], factor[TILE];
    for (int64_t column = begin, count; column < end; column += count) {
        count = tile_columns(column, end, inner);
        const int64_t offset = column_offset(column, cols, inner);
        const REAL *x = input + offset, *y = probabilities ? probabilities + offset : NULL;
        const REAL *maximum = statistics + column, *log_sum = maximum + p->columns, *q_sum = log_sum + p->columns;
        REAL *dx = grad_input + offset;
        for (int64_t i = 0; i < count; i++) {
            REAL g = grad_output[reduction == CUDA_OPS_REDUCTION_NONE ? column + i : 0];
            if (reduction == CUDA_OPS_REDUCTION_MEAN)
                g = *total_weight == 0 ? (REAL)NAN : g / *total_weight; /* the mean itself is 0 / 0 there */
            const int64_t t = probabilities ? 0 : p->target[column + i];
            const bool counts = probabilities || (t != p->ignore_index && 0 <= t && t < cols);
            /* Zero, even where g is NaN, for a column that is left out. */
            scale[i] = counts ? g : 0;
            factor[i] = counts ? g * q_sum[i] : 0;
        }
        if (inner == 1)
            for (int64_t i = 0; i < count; i++)
                FN(row_softmax)(dx + i * cols, x + i * cols, cols, factor[i], maximum[i], log_sum[i]);
        else
            for (int64_t c = 0; c < cols; c++)
                for (int64_t i = 0; i < count; i++)
                    dx[c * inner + i] = factor[i] * FN(exponential)((x[c * inner + i] - maximum[i]) - log_sum[i]);
        if (shared && inner == 1)
            for (int64_t i = 0; i < count; i++)
                for (int64_t c = 0; c < cols; c++)
                    dx[i * cols + c] -= scale[i] * FN(share)(y ? y + i * cols + c : NULL, weight, c, keep, spread);
        else if (shared)
            for (int64_t c = 0; c < cols; c++)
                for (int64_t i = 0; i < count; i++)
                    dx[c * inner + i] -= scale[i] * FN(share)(y ? y + c * inner + i : NULL, weight, c, keep, spread);
        if (!probabilities)
            for (int64_t i = 0; i < count; i++) {
                const int64_t t = p->target[column + i];
                if (t == p->ignore_index)
                    continue;
                if (0 <= t && t < cols)
                    dx[t * class_stride + i * column_stride] -= scale[i] * keep * (weight ? weight[t] : 1);
                else
                    for (int64_t c = 0; c < cols; c++) /* zero, even where the softmax is NaN */
                        dx[c * class_stride + i * column_stride] = 0;
            }
    }
}

#endif
