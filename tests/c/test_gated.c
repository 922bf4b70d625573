#include "cuda_ops/gated.h"

#include "check.h"

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The function of the gate and its slope, by the C library. */
static double gate_of(cuda_ops_gate function, double x, double *slope)
{
    if (function == CUDA_OPS_GATE_SILU) {
        *slope = sigmoid(x) * (1 + x * sigmoid(-x));
        return x * sigmoid(x);
    }
    if (function == CUDA_OPS_GATE_GELU) {
        const double below = 0.5 * erfc(-x * 0.70710678118654752440);
        *slope = below + x * exp(-0.5 * x * x) * 0.39894228040143267794;
        return x * below;
    }
    const double z = 1.59576912160573071176 * x + 0.07135481627260024627 * x * x * x, s = sigmoid(z);
    *slope = s + x * s * (1 - s) * (1.59576912160573071176 + 3 * 0.07135481627260024627 * x * x);
    return x * s;
}

/* halves: gate and value lie in one array, row by row. */
static void check_gated(int64_t rows, int64_t cols, bool halves, cuda_ops_gate function, cuda_ops_dtype dtype)
{
    const int64_t count = rows * cols, stride = halves ? 2 * cols : cols, size = rows * stride;
    const size_t offset = (size_t)cols * size_of(dtype);
    char *gate = guarded_numbers(size, 1, dtype), *value = halves ? gate + offset : guarded_numbers(size, 2, dtype);
    char *grad_gate = guarded_new(size, dtype), *grad_value = halves ? grad_gate + offset : guarded_new(size, dtype);
    void *output = guarded_new(count, dtype), *grad_output = guarded_numbers(count, 3, dtype);
    IN_TWO_PIECES(count, begin, end,
                  cuda_ops_gated_forward_cpu(output, gate, value, cols, stride, begin, end, function, dtype));
    IN_TWO_PIECES(count, begin, end,
                  cuda_ops_gated_backward_cpu(grad_gate, grad_value, grad_output, gate, value, cols, stride, begin, end,
                                              function, dtype));
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = i / cols * stride + i % cols;
        double slope;
        const double f = gate_of(function, get(gate, at, dtype), &slope), g = get(grad_output, i, dtype);
        CHECK_NEAR(output, i, f * get(value, at, dtype), rounding(dtype), dtype);
        CHECK_NEAR(grad_gate, at, g * get(value, at, dtype) * slope, rounding(dtype), dtype);
        CHECK_NEAR(grad_value, at, g * f, rounding(dtype), dtype);
    }
    guarded_free(gate, size, dtype);
    guarded_free(grad_gate, size, dtype);
    if (!halves) {
        guarded_free(value, size, dtype);
        guarded_free(grad_value, size, dtype);
    }
    guarded_free(output, count, dtype);
    guarded_free(grad_output, count, dtype);
}

int main(void)
{
    FOR_STORED_DTYPES(dtype)
    {
        for (cuda_ops_gate function = CUDA_OPS_GATE_SILU; function <= CUDA_OPS_GATE_GELU_TANH; function++) {
            const int64_t sizes[] = {1, 7, 33};
            for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
                check_gated(1, sizes[s], false, function, dtype);
                check_gated(5, sizes[s], true, function, dtype);
            }
        }
        CHECK_OK(cuda_ops_gated_forward_cpu(NULL, NULL, NULL, 0, 0, 0, 0, CUDA_OPS_GATE_SILU, dtype));
        const double one = 1;
        double out;
        CHECK_STATUS(cuda_ops_gated_forward_cpu(&out, &one, &one, 1, 1, 0, 1, (cuda_ops_gate)9, dtype),
                     CUDA_OPS_INVALID_ARGUMENT);
    }
    CHECK_STATUS(cuda_ops_gated_forward_cpu(NULL, NULL, NULL, 1, 1, 0, 1, CUDA_OPS_GATE_SILU, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
