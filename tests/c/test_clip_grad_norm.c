#include "cuda_ops/clip_grad_norm.h"

#include "check.h"

static double sum_of(const void *grad, int64_t begin, int64_t end, double norm_type, cuda_ops_dtype dtype)
{
    double sum = 0;
    for (int64_t i = begin; i < end; i++) {
        const double x = fabs(get(grad, i, dtype));
        sum = norm_type == INFINITY ? fmax(sum, x) : sum + pow(x, norm_type);
    }
    return sum;
}

static void check_norm(int64_t count, double norm_type, cuda_ops_dtype dtype)
{
    void *grad = guarded_numbers(count, 1, dtype);
    double partials[2];
    for (int p = 0; p < 2; p++) {
        const int64_t begin = p * (count / 3), end = p ? count : count / 3;
        CHECK_OK(cuda_ops_grad_norm_partial_cpu(&partials[p], grad, norm_type, begin, end, dtype));
        const double expected = sum_of(grad, begin, end, norm_type, dtype);
        CHECK(fabs(partials[p] - expected) <= rounding(dtype) * (1 + expected), "%g for %g", partials[p], expected);
    }
    const double all = sum_of(grad, 0, count, norm_type, dtype);
    const double expected = norm_type == INFINITY ? all : pow(all, 1 / norm_type);
    const double norm = cuda_ops_grad_norm_cpu(partials, 2, norm_type);
    CHECK(fabs(norm - expected) <= rounding(dtype) * (1 + expected), "%g for %g", norm, expected);
    set(grad, count - 1, NAN, dtype);
    CHECK_OK(cuda_ops_grad_norm_partial_cpu(&partials[1], grad, norm_type, count / 3, count, dtype));
    CHECK(isnan(cuda_ops_grad_norm_cpu(partials, 2, norm_type)), "a NaN is lost");
    guarded_free(grad, count, dtype);
}

static void check_scaling(int64_t count, int64_t begin, int64_t end, double factor, cuda_ops_dtype dtype)
{
    void *grad = guarded_numbers(count, 1, dtype);
    CHECK_OK(cuda_ops_clip_grad_cpu(grad, factor, begin, end, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double before = number(1000003 + (uint64_t)i);
        CHECK_NEAR(grad, i, begin <= i && i < end ? before * factor : before, rounding(dtype), dtype);
    }
    guarded_free(grad, count, dtype);
}

int main(void)
{
    const double types[] = {1, 2, INFINITY, 3, 0.5};
    const int64_t sizes[] = {1, 17, 1025, 5000};
    FOR_CPU_DTYPES(dtype)
    {
        for (int s = 0; s < 4; s++) {
            for (int t = 0; t < 5; t++)
                check_norm(sizes[s], types[t], dtype);
            check_scaling(sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, 0.75, dtype);
        }
    }
    CHECK(cuda_ops_clip_factor_cpu(2, 1) == 1 / (2 + 1e-6), "above the limit");
    CHECK(cuda_ops_clip_factor_cpu(0, 1) == 1, "below it");
    CHECK(isnan(cuda_ops_clip_factor_cpu(NAN, 1)), "NaN");
    double partial;
    CHECK_STATUS(cuda_ops_grad_norm_partial_cpu(&partial, NULL, 2, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_clip_grad_cpu(NULL, 1, 0, 1, CUDA_OPS_BFLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
