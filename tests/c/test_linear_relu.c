#include "cuda_ops/linear_relu.h"

#include "check.h"

/* Two blocks of rows, without the first `margin` columns, which must stay unwritten. */
static void check_forward(int64_t rows, int64_t in, int64_t out, bool with_bias, int64_t margin, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(rows * in, 1, dtype), *weight = guarded_numbers(out * in, 2, dtype);
    void *bias = guarded_numbers(out, 3, dtype), *output = guarded_new(rows * out, dtype);
    const int64_t bytes = cuda_ops_linear_workspace_cpu();
    void *workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64 + 64);
    CHECK(workspace != NULL, "out of memory");
    const cuda_ops_linear_block blocks[2] = {{0, rows / 2, margin, out}, {rows / 2, rows, margin, out}};
    for (int b = 0; b < 2; b++)
        CHECK_OK(cuda_ops_linear_relu_forward_cpu(output, input, weight, with_bias ? bias : NULL, workspace, rows, in,
                                                  out, blocks[b], dtype));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < out; j++) {
            if (j < margin) {
                CHECK_UNWRITTEN(output, i * out + j, dtype);
                continue;
            }
            double expected = with_bias ? get(bias, j, dtype) : 0, magnitude = 1;
            for (int64_t p = 0; p < in; p++) {
                const double term = get(input, i * in + p, dtype) * get(weight, j * in + p, dtype);
                expected += term;
                magnitude += fabs(term);
            }
            CHECK_NEAR(output, i * out + j, expected > 0 ? expected : 0, rounding(dtype) * magnitude, dtype);
        }
    free(workspace);
    guarded_free(input, rows * in, dtype);
    guarded_free(weight, out * in, dtype);
    guarded_free(bias, out, dtype);
    guarded_free(output, rows * out, dtype);
}

static void check_mask(int64_t count, int64_t begin, cuda_ops_dtype dtype)
{
    void *grad_output = guarded_numbers(count, 1, dtype), *output = guarded_numbers(count, 2, dtype);
    void *masked = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_linear_relu_mask_cpu(masked, grad_output, output, begin, count, dtype));
    for (int64_t i = 0; i < count; i++) {
        if (i < begin)
            CHECK_UNWRITTEN(masked, i, dtype);
        else
            CHECK_NEAR(masked, i, get(output, i, dtype) <= 0 ? 0 : get(grad_output, i, dtype), 0, dtype);
    }
    guarded_free(grad_output, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(masked, count, dtype);
}

int main(void)
{
    /* One element, no tile divides them, a layer in small, more rows than one block, no sum, nothing. */
    const int64_t all[][3] = {{1, 1, 1},     {35, 79, 19}, {64, 128, 10}, {5, 200, 128},
                              {700, 3, 300}, {3, 0, 4},    {0, 3, 4}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(all) / sizeof(all[0]); s++)
            for (int64_t margin = 0; margin < 2; margin++)
                check_forward(all[s][0], all[s][1], all[s][2], margin == 0, margin < all[s][2] ? margin : 0, dtype);
        check_mask(0, 0, dtype);
        check_mask(1, 0, dtype);
        check_mask(100, 33, dtype);
    }
    const cuda_ops_linear_block block = {0, 1, 0, 1};
    CHECK_STATUS(cuda_ops_linear_relu_forward_cpu(NULL, NULL, NULL, NULL, NULL, 1, 1, 1, block, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_linear_relu_mask_cpu(NULL, NULL, NULL, 0, 1, CUDA_OPS_BFLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
