#include "cuda_ops/softmax.h"

#include "check.h"

static void check_range(int64_t outer, int64_t cols, int64_t inner, int64_t begin, int64_t end, double scale,
                        cuda_ops_dtype dtype)
{
    const int64_t count = outer * cols * inner;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    for (int64_t i = 0; i < count; i++)
        set(input, i, scale * get(input, i, dtype), dtype);
    CHECK_OK(cuda_ops_softmax_forward_cpu(output, input, cols, inner, begin, end, dtype));
    CHECK_OK(cuda_ops_softmax_backward_cpu(grad_input, grad_output, output, 0.5, cols, inner, begin, end, dtype));
    for (int64_t column = 0; column < outer * inner; column++) {
        const int64_t first = column / inner * cols * inner + column % inner;
        double largest = -INFINITY, sum = 0, sum_grads = 0;
        for (int64_t c = 0; c < cols; c++)
            largest = fmax(largest, get(input, first + c * inner, dtype));
        for (int64_t c = 0; c < cols; c++)
            sum += exp(get(input, first + c * inner, dtype) - largest);
        for (int64_t c = 0; c < cols; c++)
            sum_grads +=
                get(grad_output, first + c * inner, dtype) * exp(get(input, first + c * inner, dtype) - largest) / sum;
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = first + c * inner;
            if (column < begin || end <= column) {
                CHECK_UNWRITTEN(output, i, dtype);
                CHECK_UNWRITTEN(grad_input, i, dtype);
                continue;
            }
            const double expected = exp(get(input, i, dtype) - largest) / sum;
            CHECK_NEAR(output, i, expected, rounding(dtype), dtype);
            CHECK_NEAR(grad_input, i, expected * (get(grad_output, i, dtype) - sum_grads) * 0.5,
                       rounding(dtype) * (1 + fabs(sum_grads)), dtype);
        }
    }
    guarded_free(input, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(grad_input, count, dtype);
}

/* Columns with a NaN or an infinity, or of -infinity alone, are NaN; a single -infinity is nothing special. */
static void check_nonfinite(int64_t inner, cuda_ops_dtype dtype)
{
    enum { COLS = 19 };
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int b = 0; b < 4; b++) {
        void *x = guarded_numbers(COLS * inner, 1, dtype);
        for (int64_t c = 0; c < COLS; c++)
            if (b == 3 || c == 11)
                set(x, c * inner, b == 3 ? -INFINITY : bad[b], dtype);
        CHECK_OK(cuda_ops_softmax_forward_cpu(x, x, COLS, inner, 0, inner, dtype));
        for (int64_t c = 0; c < COLS; c++) {
            const double value = get(x, c * inner, dtype);
            if (b == 2)
                CHECK(c == 11 ? value == 0 : value > 0, "-infinity gives %g", value);
            else
                CHECK(isnan(value), "%d gives %g", b, value);
        }
        guarded_free(x, COLS * inner, dtype);
    }
}

int main(void)
{
    const int64_t sizes[][3] = {{1, 1, 1}, {3, 10, 1}, {5, 33, 1}, {2, 1025, 1}, {2, 5, 7}, {1, 3, 65}, {3, 17, 16}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            const int64_t columns = sizes[s][0] * sizes[s][2];
            check_range(sizes[s][0], sizes[s][1], sizes[s][2], 0, columns, 1, dtype);
            check_range(sizes[s][0], sizes[s][1], sizes[s][2], columns / 3, columns - columns / 3, 50, dtype);
            check_range(sizes[s][0], sizes[s][1], sizes[s][2], columns / 2, columns / 2, 1, dtype);
        }
        check_nonfinite(1, dtype);
        check_nonfinite(5, dtype);
    }
    CHECK_STATUS(cuda_ops_softmax_forward_cpu(NULL, NULL, 1, 1, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_softmax_backward_cpu(NULL, NULL, NULL, 1, 1, 1, 0, 1, CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
