#include "cuda_ops/prelu.h"

#include "check.h"

static void check_prelu(int64_t outer, int64_t channels, int64_t inner, cuda_ops_dtype dtype)
{
    const int64_t count = outer * channels * inner;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *weight = guarded_numbers(channels, 3, dtype), *output = guarded_new(count, dtype);
    void *grad_input = guarded_new(count, dtype), *grad_weight = guarded_new(channels, dtype);
    const int64_t bytes = cuda_ops_prelu_workspace_cpu(outer, channels, inner);
    const int64_t units = cuda_ops_prelu_units_cpu(outer, channels, inner);
    double *workspace = guarded_bytes(bytes / 8, sizeof(double)), *expected = calloc((size_t)channels, sizeof(double));
    CHECK(expected != NULL, "out of memory");
    IN_TWO_PIECES(count, begin, end,
                  cuda_ops_prelu_forward_cpu(output, input, weight, channels, inner, begin, end, dtype));
    IN_TWO_PIECES(units, begin, end,
                  cuda_ops_prelu_backward_cpu(grad_input, workspace, grad_output, input, weight, outer, channels, inner,
                                              begin, end, dtype));
    IN_TWO_PIECES(
        channels, begin, end,
        cuda_ops_prelu_backward_weight_cpu(grad_weight, workspace, outer, channels, inner, begin, end, dtype));
    for (int64_t i = 0; i < count; i++) {
        const int64_t c = i / inner % channels;
        const double x = get(input, i, dtype), g = get(grad_output, i, dtype), w = get(weight, c, dtype);
        CHECK_NEAR(output, i, x > 0 ? x : w * x, rounding(dtype), dtype);
        CHECK_NEAR(grad_input, i, x > 0 ? g : w * g, rounding(dtype), dtype);
        expected[c] += x > 0 ? 0 : x * g;
    }
    for (int64_t c = 0; c < channels; c++)
        CHECK_NEAR(grad_weight, c, expected[c], rounding(dtype), dtype);
    free(expected);
    guarded_free_bytes(workspace, bytes / 8, sizeof(double));
    guarded_free(input, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(weight, channels, dtype);
    guarded_free(output, count, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(grad_weight, channels, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        /* One weight; rows of channels, few and more than a unit has; planes, shorter than a unit and longer. */
        check_prelu(1, 1, 1, dtype);
        check_prelu(1, 1, 9001, dtype);
        check_prelu(7, 5, 1, dtype);
        check_prelu(3000, 3, 1, dtype);
        check_prelu(2, 5000, 1, dtype);
        check_prelu(2, 3, 7, dtype);
        check_prelu(2, 3, 4097, dtype);
    }
    CHECK_OK(cuda_ops_prelu_forward_cpu(NULL, NULL, NULL, 3, 1, 0, 0, CUDA_OPS_FLOAT32));
    CHECK_STATUS(cuda_ops_prelu_forward_cpu(NULL, NULL, NULL, 3, 1, 0, 1, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
