#include "cuda_ops/group_norm.h"

#include "check.h"

static const double EPS = 1e-5;

/* Of the value (image, channel, i). */
static int64_t index_of(cuda_ops_group_norm_sizes s, int64_t image, int64_t channel, int64_t i)
{
    return s.channels_last ? (image * s.inner + i) * s.channels + channel
                           : (image * s.channels + channel) * s.inner + i;
}

/* `offset` moves all values: where it is large, a variance as E[x^2] - E[x]^2 would be worthless, and so would
 * normalised values relative to a mean that is rounded to float. */
static void check_norm(cuda_ops_group_norm_sizes s, bool affine, double offset, cuda_ops_dtype dtype)
{
    const int64_t count = s.images * s.channels * s.inner, rows = s.images * s.groups, width = s.channels / s.groups;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    const cuda_ops_dtype computed = computed_dtype(dtype);
    void *weight = guarded_numbers(s.channels, 3, computed), *bias = guarded_numbers(s.channels, 4, computed);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    void *grad_weight = guarded_new(s.channels, computed), *grad_bias = guarded_new(s.channels, computed);
    double *mean = guarded_new(rows, CUDA_OPS_FLOAT64), *variance = guarded_new(rows, CUDA_OPS_FLOAT64);
    for (int64_t i = 0; i < count; i++)
        set(input, i, get(input, i, dtype) + offset, dtype);
    const void *w = affine ? weight : NULL, *b = affine ? bias : NULL;

    const int64_t units = cuda_ops_group_norm_units_cpu(s);
    IN_TWO_PIECES(units, begin, end,
                  cuda_ops_group_norm_forward_cpu(output, mean, variance, input, w, b, s, EPS, begin, end, dtype));
    const int64_t bytes = cuda_ops_group_norm_workspace_cpu(s);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    memset(workspace, 0xff, (size_t)bytes);
    IN_TWO_PIECES(units, begin, end,
                  cuda_ops_group_norm_backward_cpu(grad_input, workspace, grad_output, input, w, mean, variance, s, EPS,
                                                   begin, end, dtype));
    IN_TWO_PIECES(s.channels, begin, end,
                  cuda_ops_group_norm_backward_sums_cpu(grad_weight, grad_bias, workspace, s, begin, end, computed));
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);

    /* The reference is in double too, and its mean is no better than 1e-16 times the offset. */
    const double own = dtype == CUDA_OPS_FLOAT64 ? 1 + 0.1 * offset : 1;
    const double n = (double)(width * s.inner), tolerance = rounding(dtype) * (1 + 0.001 * n) * own;
    double *sums = calloc((size_t)(2 * s.channels), sizeof(double)); /* grad_weight, grad_bias */
    CHECK(sums != NULL, "out of memory");
    for (int64_t row = 0; row < rows; row++) {
        const int64_t image = row / s.groups, first = row % s.groups * width;
        double m = 0, v = 0, mean_h = 0, slope = 0;
        for (int64_t c = first; c < first + width; c++)
            for (int64_t i = 0; i < s.inner; i++)
                m += get(input, index_of(s, image, c, i), dtype) / n;
        for (int64_t c = first; c < first + width; c++)
            for (int64_t i = 0; i < s.inner; i++)
                v += pow(get(input, index_of(s, image, c, i), dtype) - m, 2) / n;
        const double scale = 1 / sqrt(v + EPS);
        CHECK(fabs(mean[row] - m) <= (computed == CUDA_OPS_FLOAT32 ? 2e-7 : 1e-10), "mean %.17g, expected %.17g",
              mean[row], m);
        CHECK_NEAR(variance, row, v, tolerance, CUDA_OPS_FLOAT64);
        for (int64_t c = first; c < first + width; c++)
            for (int64_t i = 0; i < s.inner; i++) {
                const int64_t at = index_of(s, image, c, i);
                const double xhat = (get(input, at, dtype) - m) * scale, g = get(grad_output, at, dtype);
                const double h = g * (affine ? get(weight, c, computed) : 1);
                CHECK_NEAR(output, at, affine ? xhat * get(weight, c, computed) + get(bias, c, computed) : xhat,
                           tolerance, dtype);
                sums[c] += g * xhat;
                sums[s.channels + c] += g;
                mean_h += h / n;
                slope += h * xhat / n;
            }
        for (int64_t c = first; c < first + width; c++)
            for (int64_t i = 0; i < s.inner; i++) {
                const int64_t at = index_of(s, image, c, i);
                const double xhat = (get(input, at, dtype) - m) * scale;
                const double h = get(grad_output, at, dtype) * (affine ? get(weight, c, computed) : 1);
                CHECK_NEAR(grad_input, at, scale * (h - mean_h - xhat * slope), tolerance * (1 + scale), dtype);
            }
    }
    for (int64_t c = 0; c < s.channels; c++) {
        CHECK_NEAR(grad_weight, c, sums[c], tolerance * sqrt((double)(s.images * s.inner)), computed);
        CHECK_NEAR(grad_bias, c, sums[s.channels + c], tolerance * sqrt((double)(s.images * s.inner)), computed);
    }
    free(sums);
    guarded_free(input, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(weight, s.channels, computed);
    guarded_free(bias, s.channels, computed);
    guarded_free(output, count, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(grad_weight, s.channels, computed);
    guarded_free(grad_bias, s.channels, computed);
    guarded_free(mean, rows, CUDA_OPS_FLOAT64);
    guarded_free(variance, rows, CUDA_OPS_FLOAT64);
}

static void check_update(cuda_ops_dtype dtype)
{
    enum { IMAGES = 5, CHANNELS = 3, COUNT = 10 };
    double *mean = guarded_numbers(IMAGES * CHANNELS, 1, CUDA_OPS_FLOAT64);
    double *variance = guarded_numbers(IMAGES * CHANNELS, 2, CUDA_OPS_FLOAT64);
    void *running_mean = guarded_numbers(CHANNELS, 3, dtype), *running_var = guarded_numbers(CHANNELS, 4, dtype);
    double expected[2][CHANNELS];
    for (int c = 0; c < CHANNELS; c++) {
        double means = 0, variances = 0;
        for (int n = 0; n < IMAGES; n++) {
            means += mean[n * CHANNELS + c] / IMAGES;
            variances += variance[n * CHANNELS + c] / IMAGES * COUNT / (COUNT - 1);
        }
        expected[0][c] = 0.75 * get(running_mean, c, dtype) + 0.25 * means;
        expected[1][c] = 0.75 * get(running_var, c, dtype) + 0.25 * variances;
    }
    CHECK_OK(cuda_ops_instance_norm_update_cpu(running_mean, running_var, mean, variance, IMAGES, CHANNELS, COUNT, 0.25,
                                               dtype));
    for (int c = 0; c < CHANNELS; c++) {
        CHECK_NEAR(running_mean, c, expected[0][c], rounding(dtype), dtype);
        CHECK_NEAR(running_var, c, expected[1][c], rounding(dtype), dtype);
    }
    guarded_free(mean, IMAGES * CHANNELS, CUDA_OPS_FLOAT64);
    guarded_free(variance, IMAGES * CHANNELS, CUDA_OPS_FLOAT64);
    guarded_free(running_mean, CHANNELS, dtype);
    guarded_free(running_var, CHANNELS, dtype);
}

int main(void)
{
    /* images, channels, inner, groups: of one channel a group, one group; of a sum's 256 values and one more; in
     * channels_last units of several groups, the last one shorter, and of several tiles of channels */
    const int64_t sizes[][4] = {{1, 1, 2, 1},   {3, 6, 1, 2},   {2, 6, 5, 3},     {2, 4, 257, 4},  {1, 3, 256, 1},
                                {2, 70, 3, 35}, {2, 130, 4, 2}, {1, 300, 300, 3}, {2, 300, 3, 60}, {9, 4, 7, 1}};
    FOR_STORED_DTYPES(dtype)
    {
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
            for (int flags = 0; flags < 4; flags++) {
                const cuda_ops_group_norm_sizes s = {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], flags & 1};
                check_norm(s, flags & 2, 0, dtype);
            }
        for (int last = 0; last < 2; last++)
            check_norm((cuda_ops_group_norm_sizes){2, 6, 100, 2, last}, true, 10000, dtype);
        check_update(computed_dtype(dtype));
    }
    const cuda_ops_group_norm_sizes four = {1, 4, 1, 2, 0}, odd = {1, 4, 1, 3, 0}, none = {0, 4, 1, 2, 1};
    CHECK_STATUS(cuda_ops_group_norm_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, four, 0, 0, 0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(
        cuda_ops_group_norm_backward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, NULL, four, 0, 0, 0, CUDA_OPS_FLOAT16),
        CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_group_norm_backward_sums_cpu(NULL, NULL, NULL, four, 0, 0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_group_norm_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, odd, 0, 0, 2, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_group_norm_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, none, 0, 0, 2, CUDA_OPS_FLOAT32),
                 CUDA_OPS_SUCCESS);
    CHECK(cuda_ops_group_norm_units_cpu(none) == 0, "units of no images");
    CHECK_STATUS(cuda_ops_instance_norm_update_cpu(NULL, NULL, NULL, NULL, 0, 3, 2, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_SUCCESS);
    return 0;
}
