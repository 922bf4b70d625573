#include "cuda_ops/logsumexp.h"

#include "check.h"

static void check_columns(int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype)
{
    const int64_t count = outer * cols * inner, columns = outer * inner;
    void *input = guarded_numbers(count, 1, dtype), *output = guarded_new(columns, dtype);
    void *grad_output = guarded_numbers(columns, 2, dtype), *grad_input = guarded_new(count, dtype);
    IN_TWO_PIECES(columns, begin, end, cuda_ops_logsumexp_forward_cpu(output, input, cols, inner, begin, end, dtype));
    IN_TWO_PIECES(
        columns, begin, end,
        cuda_ops_logsumexp_backward_cpu(grad_input, grad_output, input, output, cols, inner, begin, end, dtype));
    for (int64_t column = 0; column < columns; column++) {
        const int64_t offset = column / inner * cols * inner + column % inner;
        double sum = 0;
        for (int64_t c = 0; c < cols; c++)
            sum += exp(get(input, offset + c * inner, dtype));
        CHECK_NEAR(output, column, log(sum), rounding(dtype), dtype);
        for (int64_t c = 0; c < cols; c++)
            CHECK_NEAR(grad_input, offset + c * inner,
                       get(grad_output, column, dtype) * exp(get(input, offset + c * inner, dtype)) / sum,
                       rounding(dtype), dtype);
    }
    guarded_free(input, count, dtype);
    guarded_free(output, columns, dtype);
    guarded_free(grad_output, columns, dtype);
    guarded_free(grad_input, count, dtype);
}

/* Of three columns: NaN where there is one, else the largest infinity. */
static void check_infinities(int64_t inner, cuda_ops_dtype dtype)
{
    enum { COLS = 20 };
    const double odd[3][2] = {{INFINITY, NAN}, {INFINITY, -INFINITY}, {-INFINITY, NAN}};
    void *input = guarded_new(3 * COLS, dtype), *output = guarded_new(3, dtype);
    for (int64_t column = 0; column < 3; column++)
        for (int64_t c = 0; c < COLS; c++)
            set(input, inner == 1 ? column * COLS + c : c * inner + column,
                c == 3        ? odd[column][0]
                : c == 17     ? odd[column][1]
                : column == 2 ? -INFINITY
                              : 1.0,
                dtype);
    CHECK_OK(cuda_ops_logsumexp_forward_cpu(output, input, COLS, inner, 0, 3, dtype));
    CHECK(isnan(get(output, 0, dtype)) && get(output, 1, dtype) == INFINITY && isnan(get(output, 2, dtype)), "%g %g %g",
          get(output, 0, dtype), get(output, 1, dtype), get(output, 2, dtype));
    for (int64_t i = 0; i < 3 * COLS; i++)
        set(input, i, -INFINITY, dtype);
    CHECK_OK(cuda_ops_logsumexp_forward_cpu(output, input, COLS, inner, 0, 3, dtype));
    CHECK(get(output, 1, dtype) == -INFINITY, "%g", get(output, 1, dtype));
    guarded_free(input, 3 * COLS, dtype);
    guarded_free(output, 3, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 15, 16, 33, 1100};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            check_columns(7, sizes[s], 1, dtype);
            check_columns(2, sizes[s], 3, dtype);
            check_columns(1, sizes[s], 70, dtype);
        }
        check_infinities(1, dtype);
        check_infinities(3, dtype);
        CHECK_OK(cuda_ops_logsumexp_forward_cpu(NULL, NULL, 3, 1, 0, 0, dtype));
        CHECK_OK(cuda_ops_logsumexp_backward_cpu(NULL, NULL, NULL, NULL, 3, 1, 0, 0, dtype));
    }
    CHECK_STATUS(cuda_ops_logsumexp_forward_cpu(NULL, NULL, 1, 1, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
