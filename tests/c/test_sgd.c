#include "cuda_ops/sgd.h"

#include "check.h"

/* Three steps over [begin, end), so that the buffer is written first and read later, beside the same in double. */
static void check_steps(int64_t count, int64_t begin, int64_t end, cuda_ops_sgd_options o, cuda_ops_dtype dtype)
{
    void *param = guarded_numbers(count, 1, dtype), *grad = guarded_new(count, dtype);
    void *buffer = guarded_new(count, dtype); /* NaN: the first step must not read it */
    double *expected = malloc((size_t)count * sizeof(double)), *velocity = calloc((size_t)count, sizeof(double));
    CHECK(expected != NULL && velocity != NULL, "out of memory");
    for (int64_t i = 0; i < count; i++)
        expected[i] = get(param, i, dtype);
    for (int step = 0; step < 3; step++) {
        for (int64_t i = 0; i < count; i++)
            set(grad, i, number((uint64_t)(step * count + i)), dtype);
        CHECK_OK(cuda_ops_sgd_cpu(param, grad, o.momentum != 0 ? buffer : NULL, step == 0, &o, begin, end, dtype));
        for (int64_t i = 0; i < count; i++) {
            double given[1];
            set(given, 0, number((uint64_t)(step * count + i)), dtype);
            CHECK(get(grad, i, dtype) == get(given, 0, dtype), "the gradient was changed");
            if (i < begin || end <= i) {
                CHECK_NEAR(param, i, expected[i], 0, dtype);
                CHECK_UNWRITTEN(buffer, i, dtype);
                continue;
            }
            double g = get(grad, i, dtype) * (o.maximize ? -1 : 1);
            g += o.weight_decay * expected[i];
            if (o.momentum != 0) {
                velocity[i] = step == 0 ? g : o.momentum * velocity[i] + (1 - o.dampening) * g;
                CHECK_NEAR(buffer, i, velocity[i], rounding(dtype), dtype);
                g = o.nesterov ? g + o.momentum * velocity[i] : velocity[i];
            }
            expected[i] -= o.lr * g;
            CHECK_NEAR(param, i, expected[i], rounding(dtype), dtype);
            if (dtype == CUDA_OPS_BFLOAT16) { /* each step from what the one before was rounded to */
                expected[i] = get(param, i, dtype);
                velocity[i] = o.momentum != 0 ? get(buffer, i, dtype) : 0;
            }
        }
    }
    free(expected);
    free(velocity);
    guarded_free(param, count, dtype);
    guarded_free(grad, count, dtype);
    guarded_free(buffer, count, dtype);
}

int main(void)
{
    FOR_STORED_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 31, 33, 1025};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            for (int flags = 0; flags < 32; flags++) {
                const cuda_ops_sgd_options options = {
                    .lr = 0.125,
                    .momentum = flags & 1 ? 0.9 : 0,
                    .dampening = (flags & 3) == 3 && !(flags & 8) ? 0.25 : 0,
                    .weight_decay = flags & 4 ? 0.01 : 0,
                    .nesterov = (flags & 9) == 9,
                    .maximize = (flags & 16) != 0,
                };
                check_steps(sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, options, dtype);
            }
        }
    }
    const cuda_ops_sgd_options plain = {.lr = 1};
    check_steps(5, 2, 2, plain, CUDA_OPS_FLOAT32);
    CHECK_STATUS(cuda_ops_sgd_cpu(NULL, NULL, NULL, 1, &plain, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
