#include "cuda_ops/interleave.h"

#include "check.h"

/* Rows [begin, end); the others must not be touched. */
static void check_rows(int64_t rows, int64_t cols, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    const int64_t strides[] = {cols + 3, cols}, count = rows * cols;
    const int bytes = (int)size_of(dtype);
    void *input = guarded_numbers(rows * strides[0], 1, dtype), *other = guarded_numbers(rows * strides[1], 2, dtype);
    void *output = guarded_new(2 * count, dtype), *grad = guarded_numbers(2 * count, 3, dtype);
    void *of_input = guarded_new(count, dtype), *of_other = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_interleave_forward_cpu(output, input, other, strides[0], strides[1], cols, begin, end, bytes));
    CHECK_OK(cuda_ops_interleave_backward_cpu(of_input, of_other, grad, cols, begin, end, bytes));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            const int64_t at = r * cols + c;
            if (begin <= r && r < end) {
                CHECK_NEAR(output, 2 * at, get(input, r * strides[0] + c, dtype), 0, dtype);
                CHECK_NEAR(output, 2 * at + 1, get(other, r * strides[1] + c, dtype), 0, dtype);
                CHECK_NEAR(of_input, at, get(grad, 2 * at, dtype), 0, dtype);
                CHECK_NEAR(of_other, at, get(grad, 2 * at + 1, dtype), 0, dtype);
            } else {
                CHECK_UNWRITTEN(output, 2 * at, dtype);
                CHECK_UNWRITTEN(output, 2 * at + 1, dtype);
                CHECK_UNWRITTEN(of_input, at, dtype);
                CHECK_UNWRITTEN(of_other, at, dtype);
            }
        }
    guarded_free(input, rows * strides[0], dtype);
    guarded_free(other, rows * strides[1], dtype);
    guarded_free(output, 2 * count, dtype);
    guarded_free(grad, 2 * count, dtype);
    guarded_free(of_input, count, dtype);
    guarded_free(of_other, count, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        check_rows(1, 1, 0, 1, dtype);
        check_rows(5, 33, 0, 5, dtype);
        check_rows(5, 8, 1, 4, dtype);
    }
    CHECK_STATUS(cuda_ops_interleave_forward_cpu(NULL, NULL, NULL, 1, 1, 1, 0, 1, 3), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_interleave_backward_cpu(NULL, NULL, NULL, 1, 0, 1, 3), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
