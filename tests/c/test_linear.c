#include "cuda_ops/linear.h"

#include "check.h"

typedef struct sizes {
    int64_t rows, in, out;
} sizes;

/* Element (i, j) of a sum of `depth` products of a and b, whose strides are in elements. */
static double product(const void *a, int64_t a_start, int64_t a_step, const void *b, int64_t b_start, int64_t b_step,
                      int64_t depth, double *magnitude, cuda_ops_dtype dtype)
{
    double sum = 0;
    for (int64_t p = 0; p < depth; p++) {
        const double term = get(a, a_start + p * a_step, dtype) * get(b, b_start + p * b_step, dtype);
        sum += term;
        *magnitude += fabs(term);
    }
    return sum;
}

/* All but a margin of a result, in two blocks; the margin must stay unwritten. */
static void check_linear(sizes s, bool with_bias, int64_t margin, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(s.rows * s.in, 1, dtype), *weight = guarded_numbers(s.out * s.in, 2, dtype);
    void *bias = guarded_numbers(s.out, 3, dtype), *grad_output = guarded_numbers(s.rows * s.out, 4, dtype);
    void *output = guarded_new(s.rows * s.out, dtype), *grad_input = guarded_new(s.rows * s.in, dtype);
    void *grad_weight = guarded_new(s.out * s.in, dtype), *grad_bias = guarded_new(s.out, dtype);
    const int64_t bytes = cuda_ops_linear_workspace_cpu();
    void *workspace = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64 + 64);
    CHECK(workspace != NULL, "out of memory");
    memset(workspace, 0xff, (size_t)bytes);
    const struct {
        int64_t rows, columns;
    } shapes[3] = {{s.rows, s.out}, {s.rows, s.in}, {s.out, s.in}};
    for (int which = 0; which < 3; which++) {
        const int64_t rows = shapes[which].rows, columns = shapes[which].columns;
        const int64_t last_row = rows > margin ? rows - margin : rows, first_column = columns > margin ? margin : 0;
        const cuda_ops_linear_block blocks[2] = {{0, last_row / 2, first_column, columns},
                                                 {last_row / 2, last_row, first_column, columns}};
        for (int b = 0; b < 2; b++) {
            if (which == 0)
                CHECK_OK(cuda_ops_linear_forward_cpu(output, input, weight, with_bias ? bias : NULL, workspace, s.rows,
                                                     s.in, s.out, blocks[b], dtype));
            else if (which == 1)
                CHECK_OK(cuda_ops_linear_backward_input_cpu(grad_input, grad_output, weight, workspace, s.rows, s.in,
                                                            s.out, blocks[b], dtype));
            else
                CHECK_OK(cuda_ops_linear_backward_weight_cpu(grad_weight, grad_output, input, workspace, s.rows, s.in,
                                                             s.out, blocks[b], dtype));
        }
        const void *result = which == 0 ? output : which == 1 ? grad_input : grad_weight;
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < columns; j++) {
                if (i >= last_row || j < first_column) {
                    CHECK_UNWRITTEN(result, i * columns + j, dtype);
                    continue;
                }
                double magnitude = 1, expected;
                if (which == 0)
                    expected = product(input, i * s.in, 1, weight, j * s.in, 1, s.in, &magnitude, dtype) +
                               (with_bias ? get(bias, j, dtype) : 0);
                else if (which == 1)
                    expected = product(grad_output, i * s.out, 1, weight, j, s.in, s.out, &magnitude, dtype);
                else
                    expected = product(grad_output, i, s.out, input, j, s.in, s.rows, &magnitude, dtype);
                CHECK_NEAR(result, i * columns + j, expected, rounding(dtype) * magnitude, dtype);
            }
        }
    }
    const int64_t begin = s.out / 3;
    CHECK_OK(cuda_ops_linear_backward_bias_cpu(grad_bias, grad_output, s.rows, s.out, begin, s.out, dtype));
    for (int64_t j = 0; j < s.out; j++) {
        double expected = 0;
        for (int64_t i = 0; i < s.rows; i++)
            expected += get(grad_output, i * s.out + j, dtype);
        if (j < begin)
            CHECK_UNWRITTEN(grad_bias, j, dtype);
        else
            CHECK_NEAR(grad_bias, j, expected, rounding(dtype) * (double)(1 + s.rows), dtype);
    }
    free(workspace);
    guarded_free(input, s.rows * s.in, dtype);
    guarded_free(weight, s.out * s.in, dtype);
    guarded_free(bias, s.out, dtype);
    guarded_free(grad_output, s.rows * s.out, dtype);
    guarded_free(output, s.rows * s.out, dtype);
    guarded_free(grad_input, s.rows * s.in, dtype);
    guarded_free(grad_weight, s.out * s.in, dtype);
    guarded_free(grad_bias, s.out, dtype);
}

int main(void)
{
    /* One element, no tile divides them, the two of the MNIST CNN in small, no sum, nothing. */
    const sizes all[] = {{1, 1, 1}, {35, 79, 19}, {64, 128, 10}, {5, 200, 128}, {3, 0, 4}, {0, 3, 4}, {4, 3, 0}};
    FOR_CPU_DTYPES(dtype)
    for (size_t s = 0; s < sizeof(all) / sizeof(all[0]); s++)
        for (int64_t margin = 0; margin < 4; margin += 3)
            check_linear(all[s], margin == 0, margin, dtype);
    const cuda_ops_linear_block block = {0, 1, 0, 1};
    CHECK_STATUS(cuda_ops_linear_forward_cpu(NULL, NULL, NULL, NULL, NULL, 1, 1, 1, block, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_linear_backward_bias_cpu(NULL, NULL, 1, 1, 0, 1, CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
