/* linear_cross_entropy on the CPU: for a chunk of rows, the losses, and the gradient, which overwrites the logits,
 *     row_scale * ((1 + 2 z_loss logsumexp) * softmax(logits) - q) * (1 - (logits / softcap)^2),
 *     q = (class == target) * (1 - label_smoothing) + label_smoothing / classes,
 * and the product that adds a chunk to grad_weight. Bound by the matrix products around it. */
#ifndef REAL

#include "cuda_ops/linear_cross_entropy.h"

#include "common/common.h"
#include "common/exponential.h"
#include "gemm/single_thread.h"

#define REAL float
#define FN(name) name##_f32
#include "linear_cross_entropy.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "linear_cross_entropy.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_linear_cross_entropy_rows_cpu(void *logits, void *losses, double *partial,
                                                       const int64_t *target, const void *row_scale, int64_t classes,
                                                       int64_t begin, int64_t end, int64_t ignore_index,
                                                       double label_smoothing, double z_loss, double softcap,
                                                       bool with_gradient, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_cross_entropy_rows_f32(logits, losses, partial, target, row_scale, classes, begin, end, ignore_index,
                                      label_smoothing, z_loss, softcap, with_gradient);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_cross_entropy_rows_f64(logits, losses, partial, target, row_scale, classes, begin, end, ignore_index,
                                      label_smoothing, z_loss, softcap, with_gradient);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_cross_entropy_weight_cpu(void *grad_weight, void *grad_bias, const void *grad_logits,
                                                         const void *input, void *workspace, int64_t rows,
                                                         int64_t in_features, int64_t classes,
                                                         cuda_ops_linear_block block, bool accumulate,
                                                         cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_cross_entropy_weight_f32(grad_weight, grad_bias, grad_logits, input, workspace, rows, in_features,
                                        classes, block, accumulate);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_cross_entropy_weight_f64(grad_weight, grad_bias, grad_logits, input, workspace, rows, in_features,
                                        classes, block, accumulate);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_linear_cross_entropy_scale_cpu(void *output, const void *input, const void *grad_output,
                                                        const void *total_weight, int64_t begin, int64_t end,
                                                        cuda_ops_reduction reduction, cuda_ops_dtype dtype)
{
    const bool mean = reduction == CUDA_OPS_REDUCTION_MEAN;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        linear_cross_entropy_scale_f32(output, input, *(const float *)grad_output,
                                       mean ? *(const float *)total_weight : 1, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        linear_cross_entropy_scale_f64(output, input, *(const double *)grad_output,
                                       mean ? *(const double *)total_weight : 1, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/log_sum_exp.h"

CUDA_OPS_SIMD static void FN(linear_cross_entropy_rows)(REAL *logits, REAL *losses, double *partial,
                                                        const int64_t *target, const REAL *row_scale, int64_t classes,
                                                        int64_t begin, int64_t end, int64_t ignore_index,
                                                        double label_smoothing, double z_loss, double softcap,
                                                        bool with_gradient)
{
    const REAL keep = (REAL)(1 - label_smoothing), spread = (REAL)(label_smoothing / (double)classes);
    const REAL z = (REAL)z_loss, cap = (REAL)softcap;
    double loss_total = 0, weight_total = 0;
    for (int64_t i = begin; i < end; i++) {
        REAL *const row = logits + i * classes;
        const int64_t t = target[i];
        const bool ignored = t == ignore_index, bad = !ignored && (t < 0 || t >= classes);
        double loss = bad ? (double)NAN : 0;
        if (ignored || bad) {
            if (with_gradient)
                for (int64_t c = 0; c < classes; c++)
                    row[c] = 0;
        } else {
            REAL maximum, log_sum;
            if (cap > 0)
                for (int64_t c = 0; c < classes; c++)
                    row[c] = cap * (REAL)tanh((double)(row[c] / cap));
            FN(row_log_sum_exp)(row, classes, &maximum, &log_sum);
            const REAL lse = maximum + log_sum;
            loss = keep * (log_sum - (row[t] - maximum)) + z * lse * lse;
            if (spread > 0) {
                double sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < classes; c++)
                    sum += log_sum - (row[c] - maximum);
                loss += spread * sum;
            }
            if (with_gradient) {
                const REAL scale = row_scale ? row_scale[i] : 1, by_softmax = scale * (1 + 2 * z * lse);
                if (cap > 0) {
                    /* The factor of a logit needs the logit, which row_softmax would overwrite. */
                    for (int64_t c = 0; c < classes; c++) {
                        const REAL capped = row[c] / cap, p = (REAL)exp((double)(row[c] - maximum - log_sum));
                        row[c] = (1 - capped * capped) *
                                 (by_softmax * p - scale * spread - (c == t ? scale * keep : (REAL)0));
                    }
                } else {
                    FN(row_softmax)(row, row, classes, by_softmax, maximum, log_sum);
                    if (spread > 0)
                        for (int64_t c = 0; c < classes; c++)
                            row[c] -= scale * spread;
                    row[t] -= scale * keep;
                }
            }
        }
        if (losses)
            losses[i] = (REAL)loss;
        loss_total += loss;
        weight_total += ignored || bad ? 0 : 1;
    }
    if (partial) {
        partial[0] = loss_total;
        partial[1] = weight_total;
    }
}

static void FN(linear_cross_entropy_weight)(REAL *grad_weight, REAL *grad_bias, const REAL *grad_logits,
                                            const REAL *input, void *workspace, int64_t rows, int64_t in_features,
                                            int64_t classes, cuda_ops_linear_block block, bool accumulate)
{
    const int64_t first = block.row_begin, count = block.row_end - block.row_begin;
    if (grad_weight)
        FN(cuda_ops_gemm)
    (grad_weight + first * in_features + block.column_begin, in_features, grad_logits + first, 1, classes,
     input + block.column_begin, in_features, 1, count, block.column_end - block.column_begin, rows, accumulate,
     workspace);
    if (!grad_bias || block.column_begin > 0)
        return;
    for (int64_t j = first; j < first + count; j += TILE) {
        const int64_t width = min_i64(TILE, first + count - j);
        double sum[TILE] = {0};
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < width; c++)
                sum[c] += (double)grad_logits[i * classes + j + c];
        for (int64_t c = 0; c < width; c++)
            grad_bias[j + c] = accumulate ? grad_bias[j + c] + (REAL)sum[c] : (REAL)sum[c];
    }
}

/* Without any weight every gradient is zero, and stays so. */
CUDA_OPS_SIMD static void FN(linear_cross_entropy_scale)(REAL *output, const REAL *input, REAL grad_output,
                                                         REAL total_weight, int64_t begin, int64_t end)
{
    const REAL factor = grad_output / total_weight;
    for (int64_t i = begin; i < end; i++)
        output[i] = input[i] == 0 ? input[i] : input[i] * factor;
}

#endif
