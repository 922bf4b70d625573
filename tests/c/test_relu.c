#include "cuda_ops/relu.h"

#include "cuda_ops/halves_cpu.h"

#include "check.h"

static void check_range(int64_t count, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    set(input, count / 2, 0, dtype); /* where the two sides meet, the gradient is 0 */
    CHECK_OK(cuda_ops_relu_forward_cpu(output, input, begin, end, dtype));
    CHECK_OK(cuda_ops_relu_backward_cpu(grad_input, grad_output, output, begin, end, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double x = get(input, i, dtype), g = get(grad_output, i, dtype);
        if (begin <= i && i < end) {
            CHECK_NEAR(output, i, x > 0 ? x : 0, 0, dtype);
            CHECK_NEAR(grad_input, i, x > 0 ? g : 0, 0, dtype);
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

/* Enough elements that the compiler's vectors see the NaN, and the tail another one. */
static void check_nan(cuda_ops_dtype dtype)
{
    enum { COUNT = 37 };
    void *x = guarded_numbers(COUNT, 1, dtype), *g = guarded_numbers(COUNT, 2, dtype);
    const double first = get(g, 3, dtype), last = get(g, COUNT - 1, dtype);
    set(x, 3, NAN, dtype);
    set(x, COUNT - 1, NAN, dtype);
    CHECK_OK(cuda_ops_relu_forward_cpu(x, x, 0, COUNT, dtype));
    CHECK(isnan(get(x, 3, dtype)) && isnan(get(x, COUNT - 1, dtype)), "NaN was dropped");
    CHECK_OK(cuda_ops_relu_backward_cpu(g, g, x, 0, COUNT, dtype));
    CHECK_NEAR(g, 3, first, 0, dtype);
    CHECK_NEAR(g, COUNT - 1, last, 0, dtype);
    guarded_free(x, COUNT, dtype);
    guarded_free(g, COUNT, dtype);
}

/* All of them, by what they are as floats. */
static void check_halves(cuda_ops_dtype dtype)
{
    enum { COUNT = 65536 };
    static uint16_t x[COUNT], y[COUNT], g[COUNT], dx[COUNT];
    static float wide[COUNT];
    for (int i = 0; i < COUNT; i++) {
        x[i] = (uint16_t)i;
        g[i] = (uint16_t)(i * 31 + 7);
    }
    CHECK_OK(cuda_ops_widen_cpu(wide, x, COUNT, dtype));
    CHECK_OK(cuda_ops_relu_forward_cpu(y, x, 0, COUNT, dtype));
    CHECK_OK(cuda_ops_relu_backward_cpu(dx, g, x, 0, COUNT, dtype));
    for (int i = 0; i < COUNT; i++) {
        CHECK(y[i] == (wide[i] <= 0 ? 0 : x[i]), "relu of 0x%04x is 0x%04x", (unsigned)i, (unsigned)y[i]);
        CHECK(dx[i] == (wide[i] <= 0 ? 0 : g[i]), "its gradient at 0x%04x is 0x%04x", (unsigned)i, (unsigned)dx[i]);
    }
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
        check_nan(dtype);
    }
    check_halves(CUDA_OPS_FLOAT16);
    check_halves(CUDA_OPS_BFLOAT16);
    CHECK_STATUS(cuda_ops_relu_forward_cpu(NULL, NULL, 0, 1, (cuda_ops_dtype)4), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_relu_backward_cpu(NULL, NULL, NULL, 0, 1, (cuda_ops_dtype)4), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
