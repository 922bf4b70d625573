#include "cuda_ops/adam.h"

#include "check.h"

/* Three steps over [begin, end) beside the same in double. The first gradients are 0 at some elements, so that a
 * maximum of squares lies behind. */
static void check_steps(int64_t count, int64_t begin, int64_t end, double grad_scale, cuda_ops_adam_options o,
                        cuda_ops_dtype dtype)
{
    void *param = guarded_numbers(count, 1, dtype), *grad = guarded_new(count, dtype);
    void *first = guarded_new(count, dtype), *second = guarded_new(count, dtype), *largest = guarded_new(count, dtype);
    double *expected = malloc((size_t)count * sizeof(double)), *m = calloc((size_t)count, sizeof(double));
    double *v = calloc((size_t)count, sizeof(double)), *top = calloc((size_t)count, sizeof(double));
    CHECK(expected != NULL && m != NULL && v != NULL && top != NULL, "out of memory");
    for (int64_t i = 0; i < count; i++) {
        expected[i] = get(param, i, dtype);
        if (begin <= i && i < end) {
            set(first, i, 0, dtype);
            set(second, i, 0, dtype);
            set(largest, i, 0, dtype);
        }
    }
    for (int step = 1; step <= 3; step++) {
        for (int64_t i = 0; i < count; i++)
            set(grad, i, number((uint64_t)(step * count + i)) * (step == 2 && i % 3 == 0 ? 0.125 : 1), dtype);
        CHECK_OK(cuda_ops_adam_cpu(param, grad, first, second, o.amsgrad ? largest : NULL, step, grad_scale, &o, begin,
                                   end, dtype));
        for (int64_t i = 0; i < count; i++) {
            const double given = number((uint64_t)(step * count + i)) * (step == 2 && i % 3 == 0 ? 0.125 : 1);
            if (i < begin || end <= i) {
                CHECK(get(grad, i, dtype) == given, "a gradient outside was changed");
                CHECK_NEAR(param, i, expected[i], 0, dtype);
                CHECK_UNWRITTEN(first, i, dtype);
                CHECK_UNWRITTEN(second, i, dtype);
                CHECK_UNWRITTEN(largest, i, dtype);
                continue;
            }
            CHECK_NEAR(grad, i, given / grad_scale, grad_scale == 1 ? 0 : rounding(dtype), dtype);
            double g = given / grad_scale * (o.maximize ? -1 : 1);
            if (o.decoupled)
                expected[i] -= o.lr * o.weight_decay * expected[i];
            else
                g += o.weight_decay * expected[i];
            m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
            v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
            top[i] = fmax(top[i], v[i]);
            const double square = o.amsgrad ? top[i] : v[i];
            const double denominator = sqrt(square) / sqrt(1 - pow(o.beta2, step)) + o.eps;
            expected[i] -= o.lr / (1 - pow(o.beta1, step)) * m[i] / denominator;
            CHECK_NEAR(first, i, m[i], rounding(dtype), dtype);
            CHECK_NEAR(second, i, v[i], rounding(dtype), dtype);
            if (o.amsgrad)
                CHECK_NEAR(largest, i, top[i], rounding(dtype), dtype);
            CHECK_NEAR(param, i, expected[i], rounding(dtype), dtype);
        }
    }
    free(expected);
    free(m);
    free(v);
    free(top);
    void *const arrays[] = {param, grad, first, second, largest};
    for (size_t a = 0; a < sizeof(arrays) / sizeof(arrays[0]); a++)
        guarded_free(arrays[a], count, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 31, 33, 1025};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            for (int flags = 0; flags < 32; flags++) {
                const cuda_ops_adam_options options = {
                    .lr = 0.125,
                    .beta1 = flags & 1 ? 0.9 : 0.25, /* the average is taken from either end */
                    .beta2 = 0.99,
                    .eps = 1e-3,
                    .weight_decay = flags & 2 ? 0.1 : 0,
                    .amsgrad = (flags & 4) != 0,
                    .decoupled = (flags & 8) != 0,
                    .maximize = (flags & 16) != 0,
                };
                check_steps(sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, flags % 3 == 0 ? 3 : 1, options, dtype);
            }
        }
    }
    const cuda_ops_adam_options plain = {.lr = 1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
    check_steps(5, 2, 2, 1, plain, CUDA_OPS_FLOAT32);
    CHECK_STATUS(cuda_ops_adam_cpu(NULL, NULL, NULL, NULL, NULL, 1, 1, &plain, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
