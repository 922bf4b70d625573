#include "cuda_ops/cross_entropy.h"

#include "check.h"

enum { IGNORED = -7 };

typedef struct problem {
    int64_t outer, classes, inner;
    bool by_probabilities, weighted;
    double smoothing;
} problem;

/* How much a class counts in a column, as the header says; `target` is the column's. */
static double share(const problem *p, int64_t target, double probability, double weight, int64_t c)
{
    const double hit = p->by_probabilities ? probability : (double)(c == target);
    return weight * (hit * (1 - p->smoothing) + p->smoothing / (double)p->classes);
}

static void check_loss(problem p, cuda_ops_dtype dtype)
{
    const int64_t columns = p.outer * p.inner, count = columns * p.classes;
    const int64_t begin = columns / 3, end = columns - columns / 4;
    void *input = guarded_numbers(count, 1, dtype), *weights = guarded_numbers(p.classes, 2, dtype);
    void *probabilities = guarded_numbers(count, 3, dtype), *grad_output = guarded_numbers(columns, 4, dtype);
    void *losses = guarded_new(columns, dtype), *grad_input = guarded_new(count, dtype);
    void *statistics = guarded_new(3 * columns, dtype), *again = guarded_new(3 * columns, dtype);
    void *total_weight = guarded_new(1, dtype);
    int64_t *target = guarded_new_i64(columns);
    for (int64_t i = 0; i < count; i++)
        set(probabilities, i, fabs(get(probabilities, i, dtype)), dtype);
    for (int64_t c = 0; c < p.classes; c++)
        set(weights, c, fabs(get(weights, c, dtype)), dtype);
    for (int64_t i = 0; i < columns; i++)
        target[i] = i % 5 == 1 ? IGNORED : i * 7 % p.classes;
    set(total_weight, 0, 4, dtype);
    const int64_t *t = p.by_probabilities ? NULL : target;
    const void *q = p.by_probabilities ? probabilities : NULL, *w = p.weighted ? weights : NULL;

    double partial[2] = {NAN, NAN}, sum = 0, total = 0;
    CHECK_OK(cuda_ops_cross_entropy_forward_cpu(losses, NULL, statistics, input, t, q, w, columns, p.classes, p.inner,
                                                begin, end, IGNORED, p.smoothing, dtype));
    CHECK_OK(cuda_ops_cross_entropy_forward_cpu(NULL, partial, again, input, t, q, w, columns, p.classes, p.inner,
                                                begin, end, IGNORED, p.smoothing, dtype));
    for (int reduction = 0; reduction < 3; reduction++) {
        for (int64_t i = 0; i < count; i++)
            set(grad_input, i, NAN, dtype);
        CHECK_OK(cuda_ops_cross_entropy_backward_cpu(grad_input, grad_output, input, t, q, w, statistics, total_weight,
                                                     columns, p.classes, p.inner, begin, end, IGNORED, p.smoothing,
                                                     (cuda_ops_reduction)reduction, dtype));
        for (int64_t column = 0; column < columns; column++) {
            const int64_t first = column / p.inner * p.classes * p.inner + column % p.inner;
            const bool ignored = !p.by_probabilities && target[column] == IGNORED;
            double largest = -INFINITY, exponentials = 0, loss = 0, shares = 0;
            for (int64_t c = 0; c < p.classes; c++)
                largest = fmax(largest, get(input, first + c * p.inner, dtype));
            for (int64_t c = 0; c < p.classes; c++)
                exponentials += exp(get(input, first + c * p.inner, dtype) - largest);
            const double lse = largest + log(exponentials);
            for (int64_t c = 0; c < p.classes && !ignored; c++) {
                const double qc = share(&p, target[column], get(probabilities, first + c * p.inner, dtype),
                                        p.weighted ? get(weights, c, dtype) : 1, c);
                loss += qc * (lse - get(input, first + c * p.inner, dtype));
                shares += qc;
            }
            if (column < begin || end <= column) {
                CHECK_UNWRITTEN(losses, column, dtype);
                for (int64_t c = 0; c < p.classes; c++)
                    CHECK_UNWRITTEN(grad_input, first + c * p.inner, dtype);
                for (int row = 0; row < 3; row++)
                    CHECK_UNWRITTEN(statistics, row * columns + column, dtype);
                continue;
            }
            const double tolerance = rounding(dtype) * (1 + shares * (double)p.classes);
            CHECK_NEAR(losses, column, loss, tolerance, dtype);
            if (reduction == 0) {
                sum += loss;
                total += ignored ? 0 : p.by_probabilities || !p.weighted ? 1 : get(weights, target[column], dtype);
            }
            double g = get(grad_output, reduction == CUDA_OPS_REDUCTION_NONE ? column : 0, dtype);
            if (reduction == CUDA_OPS_REDUCTION_MEAN)
                g /= 4;
            for (int64_t c = 0; c < p.classes; c++) {
                const int64_t i = first + c * p.inner;
                const double qc = ignored ? 0
                                          : share(&p, target[column], get(probabilities, i, dtype),
                                                  p.weighted ? get(weights, c, dtype) : 1, c);
                CHECK_NEAR(grad_input, i, g * (exp(get(input, i, dtype) - lse) * shares - qc), tolerance, dtype);
            }
        }
    }
    CHECK(fabs(partial[0] - sum) <= rounding(dtype) * (double)(count + 1), "sum %g, expected %g", partial[0], sum);
    CHECK(fabs(partial[1] - total) <= rounding(dtype) * (double)(count + 1), "weight %g, expected %g", partial[1],
          total);
    guarded_free(input, count, dtype);
    guarded_free(weights, p.classes, dtype);
    guarded_free(probabilities, count, dtype);
    guarded_free(grad_output, columns, dtype);
    guarded_free(losses, columns, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(statistics, 3 * columns, dtype);
    guarded_free(again, 3 * columns, dtype);
    guarded_free(total_weight, 1, dtype);
    guarded_free_i64(target, columns);
}

/* A class index outside of the classes: the loss is NaN, the gradient zero, and nothing is read there. */
static void check_bad_index(cuda_ops_dtype dtype)
{
    enum { CLASSES = 5 };
    const int64_t bad[] = {-1, CLASSES, INT64_MIN, INT64_MAX};
    for (size_t b = 0; b < sizeof(bad) / sizeof(bad[0]); b++) {
        void *input = guarded_numbers(CLASSES, 1, dtype), *loss = guarded_new(1, dtype), *one = guarded_new(1, dtype);
        void *weights = guarded_numbers(CLASSES, 2, dtype), *grad_input = guarded_new(CLASSES, dtype);
        void *statistics = guarded_new(3, dtype);
        set(one, 0, 1, dtype);
        CHECK_OK(cuda_ops_cross_entropy_forward_cpu(loss, NULL, statistics, input, &bad[b], NULL, weights, 1, CLASSES,
                                                    1, 0, 1, IGNORED, 0, dtype));
        CHECK(isnan(get(loss, 0, dtype)), "loss %g", get(loss, 0, dtype));
        CHECK_OK(cuda_ops_cross_entropy_backward_cpu(grad_input, one, input, &bad[b], NULL, weights, statistics, one, 1,
                                                     CLASSES, 1, 0, 1, IGNORED, 0, CUDA_OPS_REDUCTION_SUM, dtype));
        for (int64_t c = 0; c < CLASSES; c++)
            CHECK_NEAR(grad_input, c, 0, 0, dtype);
        guarded_free(input, CLASSES, dtype);
        guarded_free(loss, 1, dtype);
        guarded_free(one, 1, dtype);
        guarded_free(weights, CLASSES, dtype);
        guarded_free(grad_input, CLASSES, dtype);
        guarded_free(statistics, 3, dtype);
    }
}

int main(void)
{
    const int64_t sizes[][3] = {{1, 1, 1}, {7, 10, 1}, {65, 3, 1}, {3, 5, 11}, {2, 133, 1}, {1, 33, 8}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (int flags = 0; flags < 8; flags++)
                check_loss(
                    (problem){sizes[s][0], sizes[s][1], sizes[s][2], flags & 1, (flags & 2) != 0, flags & 4 ? 0.25 : 0},
                    dtype);
        check_bad_index(dtype);
    }
    int64_t target = 0;
    CHECK_STATUS(cuda_ops_cross_entropy_forward_cpu(NULL, NULL, NULL, NULL, &target, NULL, NULL, 1, 1, 1, 0, 1, IGNORED,
                                                    0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
