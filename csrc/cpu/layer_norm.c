/* layer_norm, rms_norm and both after an addition, on the CPU:
 *
 *     output     = (input - mean) * rstd * weight + bias
 *     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)) + grad_sum     with h = grad_output * weight
 *
 * A row stays in the cache for its passes: mean, squares of differences from it, result; backward the two sums and, in
 * the same pass, what the row adds to grad_weight and grad_bias; then grad_input. x - center is exact for values near
 * the mean, and `rest` holds what rounding the mean to the dtype left out. Sums of up to SHORT elements, or of SHORT
 * rows, are in the dtype, sums of those in double. Bound by memory. */
#ifndef REAL

#include "cuda_ops/layer_norm.h"

#include "common/common.h"
#include "cuda_ops/dropout.h"

enum {
    SHORT = 256,      /* elements, or rows, that one sum in the dtype covers */
    LEAST_ROWS = 8,   /* of a chunk */
    MOST_CHUNKS = 32, /* of the rows of backward */
    TILE = 128        /* columns whose sums are added at a time */
};

typedef struct forward_pass {
    void *output, *sum;
    double *mean;
    void *rstd;
    const void *input, *residual, *weight, *bias;
    int64_t cols;
    double eps;
    bool rms;
    double p;
    cuda_ops_philox_state philox;
    cuda_ops_dtype dtype;
} forward_pass;

typedef struct backward_pass {
    void *grad_input, *workspace;
    const void *grad_output, *grad_sum, *input, *weight;
    const double *mean;
    const void *rstd;
    int64_t rows, cols;
    bool rms;
} backward_pass;

static int64_t rows_of_chunk(int64_t rows)
{
    return max_i64(LEAST_ROWS, (rows + MOST_CHUNKS - 1) / MOST_CHUNKS);
}

int64_t cuda_ops_layer_norm_chunk_rows_cpu(int64_t rows)
{
    return rows_of_chunk(rows);
}

int64_t cuda_ops_layer_norm_chunks_cpu(int64_t rows, int64_t cols)
{
    const int64_t step = rows_of_chunk(rows);
    return cols == 0 ? 0 : (rows + step - 1) / step;
}

/* The workspace has of each chunk its sums in double for grad_weight and grad_bias, and as many in the dtype. */
static double *chunk_sums(const void *workspace, int64_t cols, int64_t chunk)
{
    return (double *)workspace + 4 * cols * chunk;
}

int64_t cuda_ops_layer_norm_workspace_cpu(int64_t rows, int64_t cols)
{
    return cuda_ops_layer_norm_chunks_cpu(rows, cols) * 4 * cols * (int64_t)sizeof(double);
}

#define REAL float
#define FN(name) name##_f32
#include "layer_norm.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "layer_norm.c"

#include "common/undef_real.h"

static cuda_ops_status forward(const forward_pass *pass, int64_t begin, int64_t end)
{
    if (pass->cols == 0)
        return CUDA_OPS_SUCCESS;
    switch (pass->dtype) {
    case CUDA_OPS_FLOAT32:
        forward_f32(pass, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        forward_f64(pass, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_layer_norm_forward_cpu(void *output, double *mean, void *rstd, const void *input,
                                                const void *weight, const void *bias, int64_t cols, double eps,
                                                cuda_ops_norm norm, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const forward_pass pass = {.output = output,
                               .mean = mean,
                               .rstd = rstd,
                               .input = input,
                               .weight = weight,
                               .bias = bias,
                               .cols = cols,
                               .eps = eps,
                               .rms = norm == CUDA_OPS_RMS_NORM,
                               .dtype = dtype};
    return forward(&pass, begin, end);
}

cuda_ops_status cuda_ops_add_layer_norm_forward_cpu(void *output, void *sum, double *mean, void *rstd,
                                                    const void *input, const void *residual, const void *weight,
                                                    const void *bias, int64_t cols, double eps, cuda_ops_norm norm,
                                                    double p, cuda_ops_philox_state philox, int64_t begin, int64_t end,
                                                    cuda_ops_dtype dtype)
{
    if (!(p >= 0.0 && p <= 1.0))
        return CUDA_OPS_INVALID_ARGUMENT;
    const forward_pass pass = {.output = output,
                               .sum = sum,
                               .mean = mean,
                               .rstd = rstd,
                               .input = input,
                               .residual = residual,
                               .weight = weight,
                               .bias = bias,
                               .cols = cols,
                               .eps = eps,
                               .rms = norm == CUDA_OPS_RMS_NORM,
                               .p = p,
                               .philox = philox,
                               .dtype = dtype};
    return forward(&pass, begin, end);
}

static cuda_ops_status backward_rows(const backward_pass *pass, int64_t chunk, int64_t begin, int64_t end,
                                     cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        backward_rows_f32(pass, chunk, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        backward_rows_f64(pass, chunk, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_layer_norm_backward_rows_cpu(void *grad_input, void *workspace, const void *grad_output,
                                                      const void *grad_sum, const void *input, const void *weight,
                                                      const double *mean, const void *rstd, int64_t rows, int64_t cols,
                                                      cuda_ops_norm norm, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    const backward_pass pass = {.grad_input = grad_input,
                                .workspace = workspace,
                                .grad_output = grad_output,
                                .grad_sum = grad_sum,
                                .input = input,
                                .weight = weight,
                                .mean = mean,
                                .rstd = rstd,
                                .rows = rows,
                                .cols = cols,
                                .rms = norm == CUDA_OPS_RMS_NORM};
    const int64_t step = rows_of_chunk(rows);
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    for (int64_t row = begin, next; row < end && status == CUDA_OPS_SUCCESS; row = next) {
        next = min_i64(end, (row / step + 1) * step);
        status = backward_rows(&pass, row / step, row, next, dtype);
    }
    return status;
}

cuda_ops_status cuda_ops_layer_norm_backward_cpu(void *grad_input, void *workspace, const void *grad_output,
                                                 const void *grad_sum, const void *input, const void *weight,
                                                 const double *mean, const void *rstd, int64_t rows, int64_t cols,
                                                 cuda_ops_norm norm, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    const int64_t step = rows_of_chunk(rows);
    return cuda_ops_layer_norm_backward_rows_cpu(grad_input, workspace, grad_output, grad_sum, input, weight, mean,
                                                 rstd, rows, cols, norm, begin * step, min_i64(rows, end * step),
                                                 dtype);
}

cuda_ops_status cuda_ops_layer_norm_backward_sums_cpu(void *grad_weight, void *grad_bias, const void *workspace,
                                                      int64_t rows, int64_t cols, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    const int64_t chunks = cuda_ops_layer_norm_chunks_cpu(rows, cols);
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        backward_sums_f32(grad_weight, grad_bias, workspace, chunks, cols, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        backward_sums_f64(grad_weight, grad_bias, workspace, chunks, cols, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* The mean, of elements that are made smaller first: their sum might be too large for the dtype. */
CUDA_OPS_INLINE double FN(row_mean)(const REAL *x, int64_t cols, double inverse_cols)
{
    double sum = 0;
    for (int64_t first = 0; first < cols; first += SHORT) {
        const int64_t last = min_i64(first + SHORT, cols);
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t c = first; c < last; c++)
            part += x[c] * ((REAL)1 / SHORT);
        sum += (double)part * (inverse_cols * SHORT);
    }
    return sum;
}

/* Adds the sums of x - center and of its squares. */
CUDA_OPS_INLINE void FN(add_differences)(double *sum, double *squares, const REAL *x, int64_t cols, REAL center)
{
    for (int64_t first = 0; first < cols; first += SHORT) {
        const int64_t last = min_i64(first + SHORT, cols);
        REAL part = 0, part_squares = 0;
#pragma omp simd reduction(+ : part, part_squares)
        for (int64_t c = first; c < last; c++) {
            const REAL difference = x[c] - center;
            part += difference;
            part_squares += difference * difference;
        }
        *sum += (double)part;
        *squares += (double)part_squares;
    }
}

/* y = (x - center) * scale + shift, times weight, plus bias. Compiled once for each of the cases. */
CUDA_OPS_INLINE void FN(write_row)(REAL *restrict y, const REAL *restrict x, const REAL *restrict weight,
                                   const REAL *restrict bias, int64_t cols, REAL center, REAL scale, REAL shift)
{
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) {
        REAL value = (x[c] - center) * scale + shift;
        if (weight)
            value *= weight[c];
        if (bias)
            value += bias[c];
        y[c] = value;
    }
}

CUDA_OPS_SIMD static void FN(forward)(const forward_pass *pass, int64_t begin, int64_t end)
{
    const int64_t cols = pass->cols;
    const double inverse_cols = 1 / (double)cols;
    const REAL *weight = pass->weight, *bias = pass->bias;
    for (int64_t row = begin; row < end; row++) {
        const REAL *x = (const REAL *)pass->input + row * cols;
        REAL *y = (REAL *)pass->output + row * cols;
        if (pass->residual) {
            const REAL *restrict residual = (const REAL *)pass->residual + row * cols;
            REAL *restrict sum = (REAL *)pass->sum + row * cols;
            if (pass->p > 0) {
                (void)cuda_ops_dropout_cpu((REAL *)pass->sum, (const REAL *)pass->input, row * cols, (row + 1) * cols,
                                           pass->p, pass->philox, pass->dtype);
                x = sum;
            }
#pragma omp simd
            for (int64_t c = 0; c < cols; c++)
                sum[c] = x[c] + residual[c];
            x = sum;
        }
        double mean = 0, sum = 0, squares = 0;
        if (!pass->rms)
            mean = FN(row_mean)(x, cols, inverse_cols);
        const REAL center = (REAL)mean;
        FN(add_differences)(&sum, &squares, x, cols, center);
        const double rest =
            pass->rms ? 0 : sum / (double)cols; /* the mean less center, of the differences themselves */
        const double biased = squares * inverse_cols - rest * rest;
        const double rstd = 1 / sqrt((biased < 0 ? 0 : biased) + pass->eps);
        if (pass->mean)
            pass->mean[row] = (double)center + rest;
        ((REAL *)pass->rstd)[row] = (REAL)rstd;
        const REAL scale = (REAL)rstd, shift = (REAL)(-rest * rstd);
        if (weight && bias)
            FN(write_row)(y, x, weight, bias, cols, center, scale, shift);
        else if (weight)
            FN(write_row)(y, x, weight, NULL, cols, center, scale, shift);
        else
            FN(write_row)(y, x, NULL, bias, cols, center, scale, shift);
    }
}

/* The sums of h and of h * xhat of a row, each over n; and what the row adds to grad_weight and grad_bias, if those are
 * wanted. */
CUDA_OPS_INLINE void FN(backward_row_sums)(double means[2], REAL *restrict grad_weight, REAL *restrict grad_bias,
                                           const REAL *restrict g, const REAL *restrict x, const REAL *restrict weight,
                                           int64_t cols, double inverse_cols, REAL center, REAL scale, REAL shift)
{
    double sum = 0, products = 0;
    for (int64_t first = 0; first < cols; first += SHORT) {
        const int64_t last = min_i64(first + SHORT, cols);
        REAL part = 0, part_products = 0;
#pragma omp simd reduction(+ : part, part_products)
        for (int64_t c = first; c < last; c++) {
            const REAL xhat = (x[c] - center) * scale + shift, h = weight ? g[c] * weight[c] : g[c];
            part += h;
            part_products += h * xhat;
            if (grad_weight) {
                grad_weight[c] += g[c] * xhat;
                grad_bias[c] += g[c];
            }
        }
        sum += (double)part;
        products += (double)part_products;
    }
    means[0] = sum * inverse_cols;
    means[1] = products * inverse_cols;
}

CUDA_OPS_INLINE void FN(backward_write_row)(REAL *restrict dx, const REAL *restrict g, const REAL *restrict more,
                                            const REAL *restrict x, const REAL *restrict weight, int64_t cols,
                                            REAL center, REAL scale, REAL shift, REAL mean, REAL slope)
{
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) {
        const REAL xhat = (x[c] - center) * scale + shift, h = weight ? g[c] * weight[c] : g[c];
        const REAL value = scale * (h - mean - xhat * slope);
        dx[c] = more ? value + more[c] : value;
    }
}

CUDA_OPS_INLINE void FN(flush)(double *restrict sums, REAL *restrict part, int64_t count)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        sums[i] += (double)part[i];
        part[i] = 0;
    }
}

/* Rows [begin, end) of one chunk. Its sums begin with its first row, and are in double after its last. */
CUDA_OPS_SIMD static void FN(backward_rows)(const backward_pass *pass, int64_t chunk, int64_t begin, int64_t end)
{
    const int64_t cols = pass->cols, step = rows_of_chunk(pass->rows);
    const int64_t first = chunk * step, last = min_i64(first + step, pass->rows);
    const double inverse_cols = 1 / (double)cols;
    const REAL *weight = pass->weight;
    double *sums = NULL;
    REAL *grad_weight = NULL, *grad_bias = NULL;
    if (pass->workspace) {
        sums = chunk_sums(pass->workspace, cols, chunk);
        grad_weight = (REAL *)(sums + 2 * cols);
        grad_bias = grad_weight + cols;
        if (begin == first)
            memset(sums, 0, (size_t)(4 * cols) * sizeof(double));
    }
    for (int64_t row = begin; row < end; row++) {
        const REAL *x = (const REAL *)pass->input + row * cols, *g = (const REAL *)pass->grad_output + row * cols;
        const double mean = pass->rms ? 0 : pass->mean[row];
        const REAL center = (REAL)mean, scale = ((const REAL *)pass->rstd)[row];
        const REAL shift = (REAL)((double)center - mean) * scale;
        double means[2];
        if (sums && weight)
            FN(backward_row_sums)(means, grad_weight, grad_bias, g, x, weight, cols, inverse_cols, center, scale,
                                  shift);
        else if (sums)
            FN(backward_row_sums)(means, grad_weight, grad_bias, g, x, NULL, cols, inverse_cols, center, scale, shift);
        else
            FN(backward_row_sums)(means, NULL, NULL, g, x, weight, cols, inverse_cols, center, scale, shift);
        if (sums && ((row - first) % SHORT == SHORT - 1 || row == last - 1))
            FN(flush)(sums, grad_weight, 2 * cols);
        if (!pass->grad_input)
            continue;
        REAL *dx = (REAL *)pass->grad_input + row * cols;
        const REAL *more = pass->grad_sum ? (const REAL *)pass->grad_sum + row * cols : NULL;
        const REAL mean_h = pass->rms ? 0 : (REAL)means[0], slope = (REAL)means[1];
        if (weight && !more)
            FN(backward_write_row)(dx, g, NULL, x, weight, cols, center, scale, shift, mean_h, slope);
        else
            FN(backward_write_row)(dx, g, more, x, weight, cols, center, scale, shift, mean_h, slope);
    }
}

CUDA_OPS_SIMD static void FN(backward_sums)(REAL *grad_weight, REAL *grad_bias, const void *workspace, int64_t chunks,
                                            int64_t cols, int64_t begin, int64_t end)
{
    for (int which = 0; which < 2; which++) {
        REAL *to = which == 0 ? grad_weight : grad_bias;
        for (int64_t first = begin; first < end && to; first += TILE) {
            const int64_t count = min_i64(TILE, end - first);
            double sum[TILE] = {0};
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                const double *from = chunk_sums(workspace, cols, chunk) + which * cols + first;
                for (int64_t i = 0; i < count; i++)
                    sum[i] += from[i];
            }
            for (int64_t i = 0; i < count; i++)
                to[first + i] = (REAL)sum[i];
        }
    }
}

#endif
