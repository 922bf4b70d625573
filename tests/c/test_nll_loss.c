#include "cuda_ops/nll_loss.h"

#include "check.h"

enum { IGNORED = -100 };

static void check_loss(int64_t outer, int64_t classes, int64_t inner, bool weighted, cuda_ops_dtype dtype)
{
    const int64_t columns = outer * inner, count = columns * classes, begin = columns / 3, end = columns - columns / 4;
    void *input = guarded_numbers(count, 1, dtype), *weight = guarded_numbers(classes, 2, dtype);
    void *losses = guarded_new(columns, dtype), *grad_output = guarded_numbers(columns, 3, dtype);
    void *grad_input = guarded_new(count, dtype), *total_weight = guarded_new(1, dtype);
    int64_t *target = guarded_new_i64(columns);
    for (int64_t i = 0; i < columns; i++)
        target[i] = i % 5 == 1 ? IGNORED : i * 7 % classes;
    if (columns > 8)
        target[columns / 2] = classes; /* outside: NaN, and never an address */
    const void *w = weighted ? weight : NULL;

    double partial[2] = {NAN, NAN}, sum = 0, weights = 0;
    CHECK_OK(cuda_ops_nll_loss_forward_cpu(losses, NULL, input, target, w, classes, inner, begin, end, IGNORED, dtype));
    CHECK_OK(
        cuda_ops_nll_loss_forward_cpu(NULL, partial, input, target, w, classes, inner, begin, end, IGNORED, dtype));
    set(total_weight, 0, 4, dtype);
    for (int reduction = 0; reduction < 3; reduction++) {
        for (int64_t i = 0; i < count; i++)
            set(grad_input, i, NAN, dtype);
        CHECK_OK(cuda_ops_nll_loss_backward_cpu(grad_input, grad_output, target, w, total_weight, classes, inner, begin,
                                                end, IGNORED, (cuda_ops_reduction)reduction, dtype));
        for (int64_t column = 0; column < columns; column++) {
            const int64_t first = column / inner * classes * inner + column % inner, class = target[column];
            const bool inside = begin <= column && column < end, counts = class >= 0 && class < classes;
            const double q = !counts ? 0 : weighted ? get(weight, class, dtype) : 1;
            if (!inside) {
                CHECK_UNWRITTEN(losses, column, dtype);
            } else if (class == classes) {
                CHECK(isnan(get(losses, column, dtype)), "a bad class index has the loss NaN");
            } else {
                CHECK_NEAR(losses, column, counts ? -q * get(input, first + class * inner, dtype) : 0, rounding(dtype),
                           dtype);
            }
            if (inside && reduction == 0) {
                sum += class == classes ? NAN : counts ? -q * get(input, first + class * inner, dtype) : 0;
                weights += q;
            }
            for (int64_t c = 0; c < classes; c++) {
                if (!inside) {
                    CHECK_UNWRITTEN(grad_input, first + c * inner, dtype);
                    continue;
                }
                double g = get(grad_output, reduction == CUDA_OPS_REDUCTION_NONE ? column : 0, dtype);
                if (reduction == CUDA_OPS_REDUCTION_MEAN)
                    g /= 4;
                CHECK_NEAR(grad_input, first + c * inner, counts && c == class ? -q * g : 0, rounding(dtype), dtype);
            }
        }
    }
    CHECK(isnan(sum) ? isnan(partial[0]) : fabs(partial[0] - sum) <= rounding(dtype) * (double)columns,
          "sum of losses %g, expected %g", partial[0], sum);
    CHECK(fabs(partial[1] - weights) <= rounding(dtype) * (double)columns, "weights %g, expected %g", partial[1],
          weights);
    guarded_free(input, count, dtype);
    guarded_free(weight, classes, dtype);
    guarded_free(losses, columns, dtype);
    guarded_free(grad_output, columns, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(total_weight, 1, dtype);
    guarded_free_i64(target, columns);
}

int main(void)
{
    const int64_t sizes[][3] = {{1, 1, 1}, {7, 10, 1}, {65, 3, 1}, {3, 5, 11}, {1, 33, 8}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (int weighted = 0; weighted < 2; weighted++)
                check_loss(sizes[s][0], sizes[s][1], sizes[s][2], weighted, dtype);
    }
    CHECK_STATUS(cuda_ops_nll_loss_forward_cpu(NULL, NULL, NULL, NULL, NULL, 1, 1, 0, 1, IGNORED, (cuda_ops_dtype)99),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
