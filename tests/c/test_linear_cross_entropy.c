#include "cuda_ops/linear_cross_entropy.h"

#include "check.h"

static double capped(double logit, double softcap)
{
    return softcap > 0 ? softcap * tanh(logit / softcap) : logit;
}

/* A chunk of rows, the first `begin` of which must stay unwritten; then what it adds to the weights' gradient. */
static void check_chunk(int64_t rows, int64_t in, int64_t classes, int64_t begin, double smoothing, double z_loss,
                        double softcap, bool scaled, cuda_ops_dtype dtype)
{
    enum { IGNORED = -100 };
    void *logits = guarded_numbers(rows * classes, 1, dtype), *before = guarded_numbers(rows * classes, 1, dtype);
    void *scale = guarded_numbers(rows, 2, dtype), *losses = guarded_new(rows, dtype);
    void *input = guarded_numbers(rows * in, 3, dtype), *bias = guarded_numbers(classes, 5, dtype);
    void *weight = guarded_numbers(classes * in, 4, dtype);
    int64_t *target = malloc(sizeof(int64_t) * (size_t)(rows + 1));
    const int64_t bytes = cuda_ops_linear_workspace_cpu();
    void *workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64 + 64);
    CHECK(target != NULL && workspace != NULL, "out of memory");
    for (int64_t i = 0; i < rows; i++)
        target[i] = i % 5 == 3 ? IGNORED : i % classes;
    double partial[2], total = 0, count = 0;
    CHECK_OK(cuda_ops_linear_cross_entropy_rows_cpu(logits, losses, partial, target, scaled ? scale : NULL, classes,
                                                    begin, rows, IGNORED, smoothing, z_loss, softcap, true, dtype));
    for (int64_t i = 0; i < rows; i++) {
        if (i < begin) {
            CHECK_UNWRITTEN(losses, i, dtype);
            for (int64_t c = 0; c < classes; c++)
                CHECK_NEAR(logits, i * classes + c, get(before, i * classes + c, dtype), 0, dtype);
            continue;
        }
        double sum = 0, loss = 0;
        for (int64_t c = 0; c < classes; c++)
            sum += exp(capped(get(before, i * classes + c, dtype), softcap));
        for (int64_t c = 0; c < classes; c++) {
            const double x = capped(get(before, i * classes + c, dtype), softcap),
                         s = scaled ? get(scale, i, dtype) : 1;
            const double q = (c == target[i] ? 1 - smoothing : 0) + smoothing / (double)classes;
            const double slope = softcap > 0 ? 1 - x / softcap * (x / softcap) : 1;
            const double p = exp(x) / sum * (1 + 2 * z_loss * log(sum));
            const double expected = target[i] == IGNORED ? 0 : s * slope * (p - q);
            loss += target[i] == IGNORED ? 0 : q * (log(sum) - x) + z_loss * log(sum) * log(sum) / (double)classes;
            CHECK_NEAR(logits, i * classes + c, expected, rounding(dtype), dtype);
        }
        CHECK_NEAR(losses, i, loss, 4 * rounding(dtype), dtype);
        total += loss;
        count += target[i] == IGNORED ? 0 : 1;
    }
    CHECK(fabs(partial[0] - total) <= 4 * rounding(dtype) * (double)rows, "%g, expected %g", partial[0], total);
    CHECK(partial[1] == count, "%g, expected %g", partial[1], count);

    /* weight and bias hold other numbers, to which the chunk is added. */
    const cuda_ops_linear_block blocks[2] = {{0, classes / 2, 0, in}, {classes / 2, classes, 0, in}};
    for (int b = 0; b < 2; b++)
        CHECK_OK(cuda_ops_linear_cross_entropy_weight_cpu(weight, bias, before, input, workspace, rows, in, classes,
                                                          blocks[b], true, dtype));
    void *weight_before = guarded_numbers(classes * in, 4, dtype), *bias_before = guarded_numbers(classes, 5, dtype);
    for (int64_t c = 0; c < classes; c++) {
        double sum = get(bias_before, c, dtype);
        for (int64_t i = 0; i < rows; i++)
            sum += get(before, i * classes + c, dtype);
        CHECK_NEAR(bias, c, sum, rounding(dtype) * (double)(1 + rows), dtype);
        for (int64_t f = 0; f < in; f++) {
            double expected = get(weight_before, c * in + f, dtype);
            for (int64_t i = 0; i < rows; i++)
                expected += get(before, i * classes + c, dtype) * get(input, i * in + f, dtype);
            CHECK_NEAR(weight, c * in + f, expected, rounding(dtype) * (double)(1 + rows), dtype);
        }
    }
    free(target);
    free(workspace);
    guarded_free(logits, rows * classes, dtype);
    guarded_free(before, rows * classes, dtype);
    guarded_free(scale, rows, dtype);
    guarded_free(losses, rows, dtype);
    guarded_free(input, rows * in, dtype);
    guarded_free(weight, classes * in, dtype);
    guarded_free(bias, classes, dtype);
    guarded_free(weight_before, classes * in, dtype);
    guarded_free(bias_before, classes, dtype);
}

static void check_scale(cuda_ops_reduction reduction, cuda_ops_dtype dtype)
{
    enum { COUNT = 37, BEGIN = 5 };
    void *input = guarded_numbers(COUNT, 1, dtype), *output = guarded_new(COUNT, dtype);
    void *scalars = guarded_new(2, dtype);
    set(scalars, 0, 3, dtype);
    set(scalars, 1, 8, dtype);
    CHECK_OK(cuda_ops_linear_cross_entropy_scale_cpu(output, input, scalars, (char *)scalars + size_of(dtype), BEGIN,
                                                     COUNT, reduction, dtype));
    for (int64_t i = 0; i < COUNT; i++) {
        const double factor = reduction == CUDA_OPS_REDUCTION_MEAN ? 3.0 / 8 : 3;
        if (i < BEGIN)
            CHECK_UNWRITTEN(output, i, dtype);
        else
            CHECK_NEAR(output, i, get(input, i, dtype) * factor, rounding(dtype), dtype);
    }
    guarded_free(input, COUNT, dtype);
    guarded_free(output, COUNT, dtype);
    guarded_free(scalars, 2, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        for (int scaled = 0; scaled < 2; scaled++) {
            check_chunk(1, 1, 1, 0, 0, 0, 0, scaled, dtype);
            check_chunk(64, 12, 10, 0, 0, 0, 0, scaled, dtype);
            check_chunk(9, 5, 17, 2, 0.1, 0, 0, scaled, dtype);
            check_chunk(7, 3, 130, 1, 0.5, 0, 0, scaled, dtype);
            check_chunk(9, 5, 17, 2, 0, 0.3, 0, scaled, dtype);
            check_chunk(9, 5, 17, 2, 0.1, 0, 0.7, scaled, dtype);
            check_chunk(7, 3, 130, 1, 0.2, 0.1, 1.5, scaled, dtype);
        }
        check_scale(CUDA_OPS_REDUCTION_MEAN, dtype);
        check_scale(CUDA_OPS_REDUCTION_SUM, dtype);
    }
    int64_t bad = 3;
    float logits[3] = {1, 2, 3}, loss = 0;
    CHECK_OK(cuda_ops_linear_cross_entropy_rows_cpu(logits, &loss, NULL, &bad, NULL, 3, 0, 1, -100, 0, 0, 0, true,
                                                    CUDA_OPS_FLOAT32));
    CHECK(isnan(loss) && logits[0] == 0 && logits[2] == 0, "a bad class index gives NaN and no gradient");
    CHECK_STATUS(cuda_ops_linear_cross_entropy_rows_cpu(NULL, NULL, NULL, NULL, NULL, 1, 0, 0, 0, 0, 0, 0, false,
                                                        CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
