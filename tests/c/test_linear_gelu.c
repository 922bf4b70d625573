#include "cuda_ops/linear_gelu.h"

#include "check.h"

static double gelu(double x, cuda_ops_gelu kind)
{
    if (kind == CUDA_OPS_GELU_TANH)
        return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    return 0.5 * x * erfc(-x / sqrt(2.0));
}

/* A central difference of fourth order: off by some 1e-12, which both dtypes' bounds allow for. */
static double slope(double x, cuda_ops_gelu kind)
{
    const double h = 1e-3;
    return (8 * (gelu(x + h, kind) - gelu(x - h, kind)) - (gelu(x + 2 * h, kind) - gelu(x - 2 * h, kind))) / (12 * h);
}

/* Two blocks of rows, without the first `margin` columns, which must stay unwritten; with and without the
 * preactivation, whose bits make no difference to the output. */
static void check_forward(int64_t rows, int64_t in, int64_t out, bool with_bias, int64_t margin, cuda_ops_gelu kind,
                          cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(rows * in, 1, dtype), *weight = guarded_numbers(out * in, 2, dtype);
    void *bias = guarded_numbers(out, 3, dtype), *output = guarded_new(rows * out, dtype);
    void *alone = guarded_new(rows * out, dtype), *preactivation = guarded_new(rows * out, dtype);
    const int64_t bytes = cuda_ops_linear_workspace_cpu();
    void *workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64 + 64);
    CHECK(workspace != NULL, "out of memory");
    const cuda_ops_linear_block blocks[2] = {{0, rows / 2, margin, out}, {rows / 2, rows, margin, out}};
    for (int b = 0; b < 2; b++) {
        CHECK_OK(cuda_ops_linear_gelu_forward_cpu(output, preactivation, input, weight, with_bias ? bias : NULL,
                                                  workspace, rows, in, out, blocks[b], kind, dtype));
        CHECK_OK(cuda_ops_linear_gelu_forward_cpu(alone, NULL, input, weight, with_bias ? bias : NULL, workspace, rows,
                                                  in, out, blocks[b], kind, dtype));
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < out; j++) {
            const int64_t at = i * out + j;
            if (j < margin) {
                CHECK_UNWRITTEN(output, at, dtype);
                CHECK_UNWRITTEN(preactivation, at, dtype);
                continue;
            }
            double expected = with_bias ? get(bias, j, dtype) : 0, magnitude = 1;
            for (int64_t p = 0; p < in; p++) {
                const double term = get(input, i * in + p, dtype) * get(weight, j * in + p, dtype);
                expected += term;
                magnitude += fabs(term);
            }
            CHECK_NEAR(preactivation, at, expected, rounding(dtype) * magnitude, dtype);
            CHECK_NEAR(output, at, gelu(expected, kind), 4 * rounding(dtype) * magnitude, dtype);
            CHECK_NEAR(alone, at, get(output, at, dtype), 0, dtype);
        }
    free(workspace);
    guarded_free(input, rows * in, dtype);
    guarded_free(weight, out * in, dtype);
    guarded_free(bias, out, dtype);
    guarded_free(output, rows * out, dtype);
    guarded_free(alone, rows * out, dtype);
    guarded_free(preactivation, rows * out, dtype);
}

static void check_backward(int64_t count, int64_t begin, cuda_ops_gelu kind, cuda_ops_dtype dtype)
{
    void *grad_output = guarded_numbers(count, 1, dtype), *preactivation = guarded_numbers(count, 2, dtype);
    void *gradient = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_linear_gelu_backward_cpu(gradient, grad_output, preactivation, begin, count, kind, dtype));
    for (int64_t i = 0; i < count; i++) {
        if (i < begin) {
            CHECK_UNWRITTEN(gradient, i, dtype);
            continue;
        }
        const double g = get(grad_output, i, dtype), x = get(preactivation, i, dtype);
        CHECK_NEAR(gradient, i, g * slope(x, kind), (8 * rounding(dtype) + 1e-11) * (fabs(g) + 1), dtype);
    }
    guarded_free(grad_output, count, dtype);
    guarded_free(preactivation, count, dtype);
    guarded_free(gradient, count, dtype);
}

int main(void)
{
    /* One element, no tile divides them, a layer in small, more rows than one block, no sum, nothing. */
    const int64_t all[][3] = {{1, 1, 1},     {35, 79, 19}, {64, 128, 10}, {5, 200, 128},
                              {700, 3, 300}, {3, 0, 4},    {0, 3, 4}};
    FOR_CPU_DTYPES(dtype)
    {
        for (int kind = CUDA_OPS_GELU_EXACT; kind <= CUDA_OPS_GELU_TANH; kind++) {
            for (size_t s = 0; s < sizeof(all) / sizeof(all[0]); s++)
                for (int64_t margin = 0; margin < 2; margin++)
                    check_forward(all[s][0], all[s][1], all[s][2], margin == 0, margin < all[s][2] ? margin : 0,
                                  (cuda_ops_gelu)kind, dtype);
            check_backward(0, 0, (cuda_ops_gelu)kind, dtype);
            check_backward(1, 0, (cuda_ops_gelu)kind, dtype);
            check_backward(1000, 33, (cuda_ops_gelu)kind, dtype);
        }
    }
    const cuda_ops_linear_block block = {0, 1, 0, 1};
    CHECK_STATUS(cuda_ops_linear_gelu_forward_cpu(NULL, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, block,
                                                  CUDA_OPS_GELU_EXACT, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_linear_gelu_backward_cpu(NULL, NULL, NULL, 0, 1, CUDA_OPS_GELU_TANH, CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_linear_gelu_backward_cpu(NULL, NULL, NULL, 0, 1, (cuda_ops_gelu)2, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
