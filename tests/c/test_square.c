#include "cuda_ops/square.h"

#include "check.h"

/* Elements [begin, end) of `count`, forward and backward; the others must not be touched. */
static void check_range(int64_t count, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    CHECK_OK(cuda_ops_square_forward_cpu(output, input, begin, end, dtype));
    CHECK_OK(cuda_ops_square_backward_cpu(grad_input, grad_output, input, begin, end, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double x = get(input, i, dtype), g = get(grad_output, i, dtype);
        if (begin <= i && i < end) {
            CHECK_NEAR(output, i, x * x, rounding(dtype), dtype);
            CHECK_NEAR(grad_input, i, 2 * x * g, rounding(dtype), dtype);
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

static void check_in_place(cuda_ops_dtype dtype)
{
    enum { COUNT = 67 };
    void *x = guarded_numbers(COUNT, 3, dtype), *g = guarded_numbers(COUNT, 4, dtype);
    CHECK_OK(cuda_ops_square_backward_cpu(g, g, x, 0, COUNT, dtype));
    CHECK_OK(cuda_ops_square_forward_cpu(x, x, 0, COUNT, dtype));
    for (int64_t i = 0; i < COUNT; i++) {
        const double before = number(3 * 1000003 + (uint64_t)i);
        CHECK_NEAR(x, i, before * before, rounding(dtype), dtype);
        CHECK_NEAR(g, i, 2 * before * number(4 * 1000003 + (uint64_t)i), rounding(dtype), dtype);
    }
    guarded_free(x, COUNT, dtype);
    guarded_free(g, COUNT, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 3, 31, 33, 1025};
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            check_range(sizes[s], 0, sizes[s], dtype);
            check_range(sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, dtype);
            check_range(sizes[s], sizes[s] / 2, sizes[s] / 2, dtype);
        }
        check_in_place(dtype);
        CHECK_OK(cuda_ops_square_forward_cpu(NULL, NULL, 0, 0, dtype));
        CHECK_OK(cuda_ops_square_backward_cpu(NULL, NULL, NULL, 0, 0, dtype));
    }
    CHECK_STATUS(cuda_ops_square_forward_cpu(NULL, NULL, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_square_backward_cpu(NULL, NULL, NULL, 0, 1, CUDA_OPS_BFLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
