#include "cuda_ops/layer_norm.h"

#include "check.h"

#include "cuda_ops/dropout.h"

static const double EPS = 1e-5;

/* `offset` moves all values: where it is large, a variance as E[x^2] - E[x]^2 would be worthless, and so would
 * normalised values relative to a mean that is rounded to float. */
static void check_norm(int64_t rows, int64_t cols, cuda_ops_norm norm, bool affine, double p, bool adds, double offset,
                       cuda_ops_dtype dtype)
{
    const int64_t count = rows * cols;
    const bool rms = norm == CUDA_OPS_RMS_NORM;
    void *input = guarded_numbers(count, 1, dtype), *residual = guarded_numbers(count, 2, dtype);
    void *grad_output = guarded_numbers(count, 3, dtype), *grad_sum = guarded_numbers(count, 4, dtype);
    void *weight = guarded_numbers(cols, 5, dtype), *bias = guarded_numbers(cols, 6, dtype);
    void *output = guarded_new(count, dtype), *sum = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    void *grad_weight = guarded_new(cols, dtype), *grad_bias = guarded_new(cols, dtype),
         *rstd = guarded_new(rows, dtype);
    double *mean = guarded_new(rows, CUDA_OPS_FLOAT64);
    for (int64_t i = 0; i < count; i++)
        set(input, i, get(input, i, dtype) + offset, dtype);
    const void *w = affine ? weight : NULL, *b = affine ? bias : NULL;

    const cuda_ops_philox_state philox = {7, 40, NULL, NULL};
    if (adds) {
        IN_TWO_PIECES(rows, begin, end,
                      cuda_ops_add_layer_norm_forward_cpu(output, sum, rms ? NULL : mean, rstd, input, residual, w, b,
                                                          cols, EPS, norm, p, philox, begin, end, dtype));
        void *kept = guarded_new(count, dtype);
        CHECK_OK(cuda_ops_dropout_cpu(kept, input, 0, count, p, philox, dtype));
        for (int64_t i = 0; i < count; i++) {
            CHECK_NEAR(sum, i, get(kept, i, dtype) + get(residual, i, dtype), rounding(dtype), dtype);
            set(input, i, get(sum, i, dtype), dtype); /* what is normalised */
        }
        guarded_free(kept, count, dtype);
    } else {
        IN_TWO_PIECES(rows, begin, end,
                      cuda_ops_layer_norm_forward_cpu(output, rms ? NULL : mean, rstd, input, w, b, cols, EPS, norm,
                                                      begin, end, dtype));
    }

    const int64_t chunks = cuda_ops_layer_norm_chunks_cpu(rows, cols);
    const int64_t bytes = cuda_ops_layer_norm_workspace_cpu(rows, cols);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    memset(workspace, 0xff, (size_t)bytes);
    IN_TWO_PIECES(chunks, begin, end,
                  cuda_ops_layer_norm_backward_cpu(grad_input, workspace, grad_output, adds ? grad_sum : NULL, input, w,
                                                   rms ? NULL : mean, rstd, rows, cols, norm, begin, end, dtype));
    IN_TWO_PIECES(
        cols, begin, end,
        cuda_ops_layer_norm_backward_sums_cpu(grad_weight, grad_bias, workspace, rows, cols, begin, end, dtype));
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);

    /* The reference is in double too, and its mean is no better than 1e-16 times the offset. */
    const double own = dtype == CUDA_OPS_FLOAT64 ? 1 + 0.1 * offset : 1;
    const double tolerance = rounding(dtype) * (1 + 0.001 * (double)cols) * own;
    double *sums = calloc((size_t)(2 * cols), sizeof(double)); /* grad_weight, grad_bias */
    CHECK(sums != NULL, "out of memory");
    for (int64_t r = 0; r < rows; r++) {
        double m = 0, v = 0, mean_h = 0, slope = 0;
        for (int64_t c = 0; c < cols && !rms; c++)
            m += get(input, r * cols + c, dtype) / (double)cols;
        for (int64_t c = 0; c < cols; c++)
            v += pow(get(input, r * cols + c, dtype) - m, 2) / (double)cols;
        const double scale = 1 / sqrt(v + EPS);
        if (!rms)
            /* not relative to the mean, but to the deviation, which is about 1 */
            CHECK(fabs(mean[r] - m) <= (dtype == CUDA_OPS_FLOAT32 ? 2e-7 : 1e-10), "mean %.17g, expected %.17g",
                  mean[r], m);
        CHECK_NEAR(rstd, r, scale, tolerance, dtype);
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = r * cols + c;
            const double xhat = (get(input, i, dtype) - m) * scale, g = get(grad_output, i, dtype);
            const double h = g * (affine ? get(weight, c, dtype) : 1);
            CHECK_NEAR(output, i, affine ? xhat * get(weight, c, dtype) + get(bias, c, dtype) : xhat, tolerance, dtype);
            sums[c] += g * xhat;
            sums[cols + c] += g;
            mean_h += rms ? 0 : h / (double)cols;
            slope += h * xhat / (double)cols;
        }
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = r * cols + c;
            const double xhat = (get(input, i, dtype) - m) * scale;
            const double h = get(grad_output, i, dtype) * (affine ? get(weight, c, dtype) : 1);
            CHECK_NEAR(grad_input, i, scale * (h - mean_h - xhat * slope) + (adds ? get(grad_sum, i, dtype) : 0),
                       tolerance * (1 + scale), dtype);
        }
    }
    for (int64_t c = 0; c < cols; c++) {
        CHECK_NEAR(grad_weight, c, sums[c], tolerance * sqrt((double)rows), dtype);
        CHECK_NEAR(grad_bias, c, sums[cols + c], tolerance * sqrt((double)rows), dtype);
    }
    free(sums);
    guarded_free(input, count, dtype);
    guarded_free(residual, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(grad_sum, count, dtype);
    guarded_free(weight, cols, dtype);
    guarded_free(bias, cols, dtype);
    guarded_free(output, count, dtype);
    guarded_free(sum, count, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(grad_weight, cols, dtype);
    guarded_free(grad_bias, cols, dtype);
    guarded_free(rstd, rows, dtype);
    guarded_free(mean, rows, CUDA_OPS_FLOAT64);
}

/* Sums of squares, and of values, that are near the largest float; what is not wanted is NULL. */
static void check_corners(cuda_ops_dtype dtype)
{
    enum { COLS = 600 };
    void *x = guarded_numbers(COLS, 1, dtype), *y = guarded_new(COLS, dtype), *rstd = guarded_new(1, dtype);
    double mean;
    for (int64_t c = 0; c < COLS; c++)
        set(x, c, 1e38, dtype);
    CHECK_OK(
        cuda_ops_layer_norm_forward_cpu(y, &mean, rstd, x, NULL, NULL, COLS, EPS, CUDA_OPS_LAYER_NORM, 0, 1, dtype));
    CHECK(fabs(mean / 1e38 - 1) < 1e-6, "the mean of many 1e38 is %g", mean);
    CHECK_OK(cuda_ops_layer_norm_backward_cpu(y, NULL, x, NULL, x, NULL, NULL, rstd, 1, COLS, CUDA_OPS_RMS_NORM, 0, 1,
                                              dtype));
    guarded_free(x, COLS, dtype);
    guarded_free(y, COLS, dtype);
    guarded_free(rstd, 1, dtype);
}

int main(void)
{
    /* Rows of one element, of a sum's 256 and one more; rows of one chunk of 8, of several, and more than 256 a chunk */
    const int64_t sizes[][2] = {{1, 1}, {3, 5}, {8, 31}, {9, 33}, {67, 256}, {5, 257}, {300, 3}, {9000, 2}, {2, 5003}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (int flags = 0; flags < 8; flags++)
                check_norm(sizes[s][0], sizes[s][1], flags & 1, flags & 2, flags & 4 ? 0.25 : 0, flags & 4, 0, dtype);
        check_norm(4, 700, CUDA_OPS_LAYER_NORM, true, 0, false, 10000, dtype);
        check_norm(4, 700, CUDA_OPS_RMS_NORM, true, 0, true, 0, dtype);
        check_norm(4, 700, CUDA_OPS_LAYER_NORM, true, 1, true, 0, dtype);
        check_corners(dtype);
    }
    const cuda_ops_philox_state philox = {0};
    CHECK_STATUS(cuda_ops_layer_norm_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, 1, 0, CUDA_OPS_RMS_NORM, 0, 0,
                                                 CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_layer_norm_backward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 1,
                                                  CUDA_OPS_RMS_NORM, 0, 0, CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_add_layer_norm_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, 0,
                                                     CUDA_OPS_RMS_NORM, 1.5, philox, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_layer_norm_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, CUDA_OPS_LAYER_NORM, 0, 3,
                                                 CUDA_OPS_FLOAT32),
                 CUDA_OPS_SUCCESS);
    return 0;
}
