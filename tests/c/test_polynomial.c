#include "cuda_ops/polynomial.h"

#include "check.h"

static void check_range(int64_t count, int64_t begin, int64_t end, int64_t terms, cuda_ops_dtype dtype)
{
    double coefficients[CUDA_OPS_POLYNOMIAL_MAX];
    for (int64_t k = 0; k < terms; k++)
        coefficients[k] = number((uint64_t)k) / (double)(1 << (k < 30 ? k : 30)); /* so that no power runs away */
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_polynomial_forward_cpu(output, input, begin, end, coefficients, terms, dtype));
    CHECK_OK(cuda_ops_polynomial_backward_cpu(grad_input, grad_output, input, begin, end, coefficients, terms, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double x = get(input, i, dtype), g = get(grad_output, i, dtype);
        double value = 0, slope = 0, power = 1, magnitude = 0;
        for (int64_t k = 0; k < terms; k++) {
            value += coefficients[k] * power;
            slope += k + 1 < terms ? (double)(k + 1) * coefficients[k + 1] * power : 0;
            magnitude += fabs((double)(k + 1) * coefficients[k] * power);
            power *= x;
        }
        if (begin <= i && i < end) {
            const double tolerance = rounding(dtype) * (1 + magnitude);
            CHECK_NEAR(output, i, value, tolerance, dtype);
            CHECK_NEAR(grad_input, i, g * slope, 4 * tolerance, dtype);
        } else {
            CHECK_UNWRITTEN(output, i, dtype);
            CHECK_UNWRITTEN(grad_input, i, dtype);
        }
    }
    guarded_free(input, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(grad_input, count, dtype);
}

int main(void)
{
    const double one = 1;
    FOR_CPU_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 31, 33, 1025}, terms[] = {1, 2, 3, 7, CUDA_OPS_POLYNOMIAL_MAX};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (size_t t = 0; t < sizeof(terms) / sizeof(terms[0]); t++)
                check_range(sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, terms[t], dtype);
        check_range(5, 2, 2, 3, dtype);
    }
    CHECK_STATUS(cuda_ops_polynomial_forward_cpu(NULL, NULL, 0, 1, &one, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_polynomial_backward_cpu(NULL, NULL, NULL, 0, 1, &one, 1, CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_polynomial_forward_cpu(NULL, NULL, 0, 0, &one, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_polynomial_forward_cpu(NULL, NULL, 0, 0, &one, CUDA_OPS_POLYNOMIAL_MAX + 1, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
