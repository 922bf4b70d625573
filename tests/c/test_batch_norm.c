#include "cuda_ops/batch_norm.h"

#include "check.h"

static const double EPS = 1e-5;

typedef struct sizes {
    int64_t outer, channels, inner;
} sizes;

static int64_t element(sizes s, int64_t o, int64_t c, int64_t i)
{
    return (o * s.channels + c) * s.inner + i;
}

/* `offset` moves all values of a channel: where it is large, a variance as E[x^2] - E[x]^2 would be worthless. */
static void check_batch_norm(sizes s, bool training, bool affine, double offset, cuda_ops_dtype dtype)
{
    const int64_t count = s.outer * s.channels * s.inner, values = s.outer * s.inner;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *weight = guarded_numbers(s.channels, 3, dtype), *bias = guarded_numbers(s.channels, 4, dtype);
    void *running_mean = guarded_numbers(s.channels, 5, dtype), *running_var = guarded_numbers(s.channels, 6, dtype);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    void *grad_weight = guarded_new(s.channels, dtype), *grad_bias = guarded_new(s.channels, dtype);
    double *mean = guarded_new(s.channels, CUDA_OPS_FLOAT64), *variance = guarded_new(s.channels, CUDA_OPS_FLOAT64);
    for (int64_t i = 0; i < count; i++)
        set(input, i, get(input, i, dtype) + offset, dtype);
    for (int64_t c = 0; c < s.channels; c++)
        set(running_var, c, fabs(get(running_var, c, dtype)) + 0.5, dtype);

    const int64_t bytes = cuda_ops_batch_norm_workspace_cpu(s.outer, s.channels, s.inner);
    const int64_t blocks = cuda_ops_batch_norm_blocks_cpu(s.outer, s.channels, s.inner);
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(s.outer, s.channels, s.inner);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    memset(workspace, 0xff, (size_t)bytes);
    if (training) {
        IN_TWO_PIECES(
            blocks, begin, end,
            cuda_ops_batch_norm_moments_cpu(workspace, input, s.outer, s.channels, s.inner, begin, end, dtype));
        CHECK_OK(cuda_ops_batch_norm_prepare_training_cpu(mean, variance, workspace, affine ? weight : NULL,
                                                          affine ? bias : NULL, s.outer, s.channels, s.inner, EPS,
                                                          dtype));
    } else {
        CHECK_OK(cuda_ops_batch_norm_prepare_inference_cpu(workspace, affine ? weight : NULL, affine ? bias : NULL,
                                                           running_mean, running_var, s.outer, s.channels, s.inner, EPS,
                                                           dtype));
    }
    IN_TWO_PIECES(
        rows, begin, end,
        cuda_ops_batch_norm_normalize_cpu(output, workspace, input, s.outer, s.channels, s.inner, begin, end, dtype));

    const void *used_mean = training ? (void *)mean : running_mean,
               *used_var = training ? (void *)variance : running_var;
    memset(workspace, 0xff, (size_t)bytes);
    IN_TWO_PIECES(blocks, begin, end,
                  cuda_ops_batch_norm_sums_cpu(workspace, grad_output, input, used_mean, s.outer, s.channels, s.inner,
                                               training, begin, end, dtype));
    CHECK_OK(cuda_ops_batch_norm_prepare_backward_cpu(grad_weight, grad_bias, workspace, affine ? weight : NULL,
                                                      used_mean, used_var, s.outer, s.channels, s.inner, EPS, training,
                                                      dtype));
    IN_TWO_PIECES(rows, begin, end,
                  cuda_ops_batch_norm_grad_input_cpu(grad_input, workspace, grad_output, input, s.outer, s.channels,
                                                     s.inner, training, begin, end, dtype));
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);

    /* Values are near `offset`, and rounding them to the dtype is relative to it. */
    const double tolerance = rounding(dtype) * (1 + offset * 0.1) * (1 + 0.01 * (double)values);
    for (int64_t c = 0; c < s.channels; c++) {
        double m = 0, v = 0;
        for (int64_t o = 0; o < s.outer; o++)
            for (int64_t i = 0; i < s.inner; i++)
                m += get(input, element(s, o, c, i), dtype) / (double)values;
        for (int64_t o = 0; o < s.outer; o++)
            for (int64_t i = 0; i < s.inner; i++)
                v += pow(get(input, element(s, o, c, i), dtype) - m, 2) / (double)values;
        if (training) {
            CHECK_NEAR(mean, c, m, dtype == CUDA_OPS_FLOAT32 ? 2e-7 : 1e-13, CUDA_OPS_FLOAT64);
            CHECK_NEAR(variance, c, v, dtype == CUDA_OPS_FLOAT32 ? 1e-6 : 1e-12, CUDA_OPS_FLOAT64);
        } else {
            m = get(running_mean, c, dtype);
            v = get(running_var, c, dtype);
        }
        const double rstd = 1 / sqrt(v + EPS), w = affine ? get(weight, c, dtype) : 1;
        double sum = 0, sum_products = 0;
        for (int64_t o = 0; o < s.outer; o++) {
            for (int64_t i = 0; i < s.inner; i++) {
                const int64_t e = element(s, o, c, i);
                const double normalized = (get(input, e, dtype) - m) * rstd, g = get(grad_output, e, dtype);
                CHECK_NEAR(output, e, normalized * w + (affine ? get(bias, c, dtype) : 0), tolerance, dtype);
                sum += g;
                sum_products += g * normalized;
            }
        }
        CHECK_NEAR(grad_bias, c, sum, tolerance * (double)values, dtype);
        CHECK_NEAR(grad_weight, c, sum_products, tolerance * (double)values, dtype);
        for (int64_t o = 0; o < s.outer; o++) {
            for (int64_t i = 0; i < s.inner; i++) {
                const int64_t e = element(s, o, c, i);
                const double normalized = (get(input, e, dtype) - m) * rstd;
                double g = get(grad_output, e, dtype);
                if (training)
                    g -= (sum + normalized * sum_products) / (double)values;
                CHECK_NEAR(grad_input, e, g * rstd * w, tolerance * (1 + rstd), dtype);
            }
        }
    }
    guarded_free(input, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(weight, s.channels, dtype);
    guarded_free(bias, s.channels, dtype);
    guarded_free(running_mean, s.channels, dtype);
    guarded_free(running_var, s.channels, dtype);
    guarded_free(output, count, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(grad_weight, s.channels, dtype);
    guarded_free(grad_bias, s.channels, dtype);
    guarded_free(mean, s.channels, CUDA_OPS_FLOAT64);
    guarded_free(variance, s.channels, CUDA_OPS_FLOAT64);
}

/* batch_norm_act with running statistics: hardswish of the sum, and relu's gate, by their formulas. */
static void check_act(sizes s, bool with_residual, cuda_ops_dtype dtype)
{
    const int64_t count = s.outer * s.channels * s.inner;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *residual = guarded_numbers(count, 3, dtype), *weight = guarded_numbers(s.channels, 4, dtype);
    void *mean = guarded_numbers(s.channels, 5, dtype), *variance = guarded_numbers(s.channels, 6, dtype);
    void *output = guarded_new(count, dtype), *grad_sum = guarded_new(count, dtype);
    for (int64_t c = 0; c < s.channels; c++)
        set(variance, c, fabs(get(variance, c, dtype)) + 0.5, dtype);
    const int64_t bytes = cuda_ops_batch_norm_workspace_cpu(s.outer, s.channels, s.inner);
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(s.outer, s.channels, s.inner);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    cuda_ops_batch_norm_epilogue f = {with_residual ? residual : NULL, CUDA_OPS_ACTIVATION_HARDSWISH, 0, 0};
    CHECK_OK(cuda_ops_batch_norm_prepare_inference_cpu(workspace, weight, NULL, mean, variance, s.outer, s.channels,
                                                       s.inner, EPS, dtype));
    IN_TWO_PIECES(rows, begin, end,
                  cuda_ops_batch_norm_act_normalize_cpu(output, workspace, input, &f, s.outer, s.channels, s.inner,
                                                        begin, end, dtype));
    f = (cuda_ops_batch_norm_epilogue){f.residual, CUDA_OPS_ACTIVATION_HARDTANH, 0, NAN};
    memset(workspace, 0xff, (size_t)bytes);
    CHECK_OK(cuda_ops_batch_norm_act_prepare_gate_cpu(workspace, weight, NULL, mean, variance, s.outer, s.channels,
                                                      s.inner, EPS, 0, dtype));
    IN_TWO_PIECES(rows, begin, end,
                  cuda_ops_batch_norm_act_gate_cpu(grad_sum, workspace, grad_output, input, &f, s.outer, s.channels,
                                                   s.inner, begin, end, dtype));
    for (int64_t c = 0; c < s.channels; c++) {
        const double m = get(mean, c, dtype), scale = get(weight, c, dtype) / sqrt(get(variance, c, dtype) + EPS);
        for (int64_t o = 0; o < s.outer; o++) {
            for (int64_t i = 0; i < s.inner; i++) {
                const int64_t e = element(s, o, c, i);
                const double z = (get(input, e, dtype) - m) * scale + (with_residual ? get(residual, e, dtype) : 0);
                const double part = z <= -3 ? 0 : z >= 3 ? 1 : z / 6 + 0.5;
                CHECK_NEAR(output, e, z * part, 20 * rounding(dtype), dtype);
                if (fabs(z) > 100 * rounding(dtype))
                    CHECK_NEAR(grad_sum, e, z > 0 ? get(grad_output, e, dtype) : 0, 0, dtype);
            }
        }
    }
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);
    void *const tensors[] = {input, grad_output, residual, output, grad_sum};
    for (size_t t = 0; t < sizeof tensors / sizeof *tensors; t++)
        guarded_free(tensors[t], count, dtype);
    guarded_free(weight, s.channels, dtype);
    guarded_free(mean, s.channels, dtype);
    guarded_free(variance, s.channels, dtype);
}

static void check_update(cuda_ops_dtype dtype)
{
    enum { CHANNELS = 5, COUNT = 7 };
    void *running_mean = guarded_numbers(CHANNELS, 1, dtype), *running_var = guarded_numbers(CHANNELS, 2, dtype);
    double *mean = guarded_numbers(CHANNELS, 3, CUDA_OPS_FLOAT64),
           *var = guarded_numbers(CHANNELS, 4, CUDA_OPS_FLOAT64);
    double old_mean[CHANNELS], old_var[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) {
        old_mean[c] = get(running_mean, c, dtype);
        old_var[c] = get(running_var, c, dtype);
    }
    CHECK_OK(cuda_ops_batch_norm_update_cpu(running_mean, running_var, mean, var, CHANNELS, 0, 0.1, dtype));
    for (int c = 0; c < CHANNELS; c++)
        CHECK_NEAR(running_mean, c, old_mean[c], 0, dtype); /* no values, no change */
    CHECK_OK(cuda_ops_batch_norm_update_cpu(running_mean, running_var, mean, var, CHANNELS, COUNT, 0.1, dtype));
    for (int c = 0; c < CHANNELS; c++) {
        CHECK_NEAR(running_mean, c, 0.9 * old_mean[c] + 0.1 * mean[c], rounding(dtype), dtype);
        CHECK_NEAR(running_var, c, 0.9 * old_var[c] + 0.1 * var[c] * COUNT / (COUNT - 1), rounding(dtype), dtype);
    }
    guarded_free(running_mean, CHANNELS, dtype);
    guarded_free(running_var, CHANNELS, dtype);
    guarded_free(mean, CHANNELS, CUDA_OPS_FLOAT64);
    guarded_free(var, CHANNELS, CUDA_OPS_FLOAT64);
}

/* The last step of bfloat16 as it lies, with coefficients of float32. */
static void check_bfloat16(sizes s)
{
    const cuda_ops_dtype dtype = CUDA_OPS_BFLOAT16, computed = CUDA_OPS_FLOAT32;
    const int64_t count = s.outer * s.channels * s.inner;
    void *input = guarded_numbers(count, 1, dtype), *output = guarded_new(count, dtype);
    void *weight = guarded_numbers(s.channels, 3, computed), *mean = guarded_numbers(s.channels, 5, computed);
    void *variance = guarded_numbers(s.channels, 6, computed);
    for (int64_t c = 0; c < s.channels; c++)
        set(variance, c, fabs(get(variance, c, computed)) + 0.5, computed);
    const int64_t bytes = cuda_ops_batch_norm_workspace_cpu(s.outer, s.channels, s.inner);
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(s.outer, s.channels, s.inner);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    CHECK_OK(cuda_ops_batch_norm_prepare_inference_cpu(workspace, weight, NULL, mean, variance, s.outer, s.channels,
                                                       s.inner, EPS, computed));
    IN_TWO_PIECES(
        rows, begin, end,
        cuda_ops_batch_norm_normalize_cpu(output, workspace, input, s.outer, s.channels, s.inner, begin, end, dtype));
    for (int64_t c = 0; c < s.channels; c++)
        for (int64_t o = 0; o < s.outer; o++)
            for (int64_t i = 0; i < s.inner; i++) {
                const int64_t e = element(s, o, c, i);
                const double rstd = 1 / sqrt(get(variance, c, computed) + EPS);
                CHECK_NEAR(output, e, (get(input, e, dtype) - get(mean, c, computed)) * rstd * get(weight, c, computed),
                           rounding(dtype), dtype);
            }
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);
    guarded_free(input, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(weight, s.channels, computed);
    guarded_free(mean, s.channels, computed);
    guarded_free(variance, s.channels, computed);
}

int main(void)
{
    /* inner = 1 is channels_last; sizes that no vector divides; a channel of one value for all it takes part in */
    const sizes all[] = {{2, 3, 5}, {1, 1, 33}, {33, 1, 1}, {7, 37, 1}, {4, 5, 196}, {300, 3, 1}, {64, 2, 49}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(all) / sizeof(all[0]); s++)
            for (int flags = 0; flags < 4; flags++)
                check_batch_norm(all[s], flags & 1, flags & 2, 0, dtype);
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            for (int with_residual = 0; with_residual < 2; with_residual++)
                check_act(all[k], with_residual, dtype);
        check_batch_norm(all[4], true, true, 1000, dtype);
        check_batch_norm(all[5], true, true, 1000, dtype);
        check_update(dtype);
    }
    for (size_t s = 0; s < sizeof(all) / sizeof(all[0]); s++)
        check_bfloat16(all[s]);
    CHECK_STATUS(cuda_ops_batch_norm_normalize_cpu(NULL, NULL, NULL, 1, 1, 1, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_batch_norm_moments_cpu(NULL, NULL, 1, 1, 1, 0, 1, (cuda_ops_dtype)99),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
