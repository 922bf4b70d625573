#include "cuda_ops/activation.h"

#include "check.h"

static double share(double x)
{
    return 1 / (1 + exp(-x));
}

/* The function, or its slope by the input, from libm. */
static double expected(cuda_ops_activation function, bool is_slope, double x, double first, double second)
{
    const double a = 1.59576912160573071176, b = 0.07135481627260024627, z = x * (a + b * x * x);
    const double t = tanh(log1p(exp(x))), inner = fmin(fmax(x + 3, 0), 6);
    switch (function) {
    case CUDA_OPS_ACTIVATION_GELU:
        return is_slope ? 0.5 * erfc(-x * sqrt(0.5)) + x * exp(-0.5 * x * x) / sqrt(2 * acos(-1))
                        : 0.5 * x * erfc(-x * sqrt(0.5));
    case CUDA_OPS_ACTIVATION_GELU_TANH:
        return is_slope ? share(z) + x * share(z) * share(-z) * (a + 3 * b * x * x) : x * share(z);
    case CUDA_OPS_ACTIVATION_SILU:
        return is_slope ? share(x) * (1 + x * share(-x)) : x * share(x);
    case CUDA_OPS_ACTIVATION_SIGMOID:
        return is_slope ? share(x) * share(-x) : share(x);
    case CUDA_OPS_ACTIVATION_TANH:
        return is_slope ? 1 - tanh(x) * tanh(x) : tanh(x);
    case CUDA_OPS_ACTIVATION_ELU:
    case CUDA_OPS_ACTIVATION_ELU_OUTPUT:
        return is_slope ? (x > 0 ? 1 : first * exp(x)) : (x > 0 ? x : first * expm1(x));
    case CUDA_OPS_ACTIVATION_LEAKY_RELU:
        return is_slope ? (x > 0 ? 1 : first) : x * (x > 0 ? 1 : first);
    case CUDA_OPS_ACTIVATION_SOFTPLUS:
        if (first * x > second)
            return is_slope ? 1 : x;
        return is_slope ? share(first * x) : log1p(exp(first * x)) / first;
    case CUDA_OPS_ACTIVATION_HARDTANH:
        return is_slope ? (x > first && x < second ? 1 : 0) : fmin(fmax(x, first), second);
    case CUDA_OPS_ACTIVATION_HARDSIGMOID:
        return is_slope ? (x > -3 && x < 3 ? 1.0 / 6 : 0) : inner / 6;
    case CUDA_OPS_ACTIVATION_HARDSWISH:
        return is_slope ? (x <= -3 ? 0 : x < 3 ? x / 3 + 0.5 : 1) : x * inner / 6;
    case CUDA_OPS_ACTIVATION_MISH:
        return is_slope ? t + x * (1 - t * t) * share(x) : x * t;
    }
    return NAN;
}

static bool takes_output(cuda_ops_activation function)
{
    return function == CUDA_OPS_ACTIVATION_SIGMOID || function == CUDA_OPS_ACTIVATION_TANH ||
           function == CUDA_OPS_ACTIVATION_ELU_OUTPUT || function == CUDA_OPS_ACTIVATION_HARDTANH;
}

static void check_range(cuda_ops_activation function, double first, double second, int64_t count, int64_t begin,
                        int64_t end, cuda_ops_dtype dtype)
{
    const cuda_ops_activation forward = function == CUDA_OPS_ACTIVATION_ELU_OUTPUT ? CUDA_OPS_ACTIVATION_ELU : function;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(count, 2, dtype);
    void *output = guarded_new(count, dtype), *grad_input = guarded_new(count, dtype);
    for (int64_t i = 0; i < count; i++) /* in [-6, 6), beyond all corners */
        set(input, i, 3 * get(input, i, dtype), dtype);
    CHECK_OK(cuda_ops_activation_forward_cpu(output, input, begin, end, forward, first, second, dtype));
    const void *saved = takes_output(function) ? output : input;
    /* Slopes of an output that was rounded, such as 1 - y^2. */
    const double slope_rounding = rounding(dtype) * (saved == output && dtype == CUDA_OPS_BFLOAT16 ? 4 : 1);
    CHECK_OK(
        cuda_ops_activation_backward_cpu(grad_input, grad_output, saved, begin, end, function, first, second, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double x = get(input, i, dtype), g = get(grad_output, i, dtype);
        if (begin <= i && i < end) {
            CHECK_NEAR(output, i, expected(function, false, x, first, second), rounding(dtype), dtype);
            CHECK_NEAR(grad_input, i, g * expected(function, true, x, first, second), slope_rounding, dtype);
        } else {
            CHECK_UNWRITTEN(output, i, dtype);
            CHECK_UNWRITTEN(grad_input, i, dtype);
        }
    }
    /* In place: over the input, and over the gradient. */
    if (!takes_output(function)) {
        CHECK_OK(cuda_ops_activation_backward_cpu(grad_output, grad_output, input, begin, end, function, first, second,
                                                  dtype));
        CHECK_OK(cuda_ops_activation_forward_cpu(input, input, begin, end, forward, first, second, dtype));
        for (int64_t i = begin; i < end; i++) {
            CHECK_NEAR(input, i, get(output, i, dtype), 0, dtype);
            CHECK_NEAR(grad_output, i, get(grad_input, i, dtype), 0, dtype);
        }
    }
    guarded_free(input, count, dtype);
    guarded_free(grad_output, count, dtype);
    guarded_free(output, count, dtype);
    guarded_free(grad_input, count, dtype);
}

/* Enough elements that the compiler's vectors see the NaN, and the tail another one. */
static void check_nan(cuda_ops_activation function, double first, double second, cuda_ops_dtype dtype)
{
    enum { COUNT = 37 };
    void *x = guarded_numbers(COUNT, 1, dtype);
    set(x, 3, NAN, dtype);
    set(x, COUNT - 1, NAN, dtype);
    CHECK_OK(cuda_ops_activation_forward_cpu(x, x, 0, COUNT, function, first, second, dtype));
    CHECK(isnan(get(x, 3, dtype)) && isnan(get(x, COUNT - 1, dtype)), "NaN was dropped");
    guarded_free(x, COUNT, dtype);
}

int main(void)
{
    static const double parameters[][2] = {
        [CUDA_OPS_ACTIVATION_ELU] = {1.75, 0},        [CUDA_OPS_ACTIVATION_LEAKY_RELU] = {-0.25, 0},
        [CUDA_OPS_ACTIVATION_SOFTPLUS] = {1.5, 5.5},  [CUDA_OPS_ACTIVATION_HARDTANH] = {-1.25, 2.5},
        [CUDA_OPS_ACTIVATION_ELU_OUTPUT] = {0.75, 0},
    };
    FOR_STORED_DTYPES(dtype)
    {
        for (cuda_ops_activation function = 0; function <= CUDA_OPS_ACTIVATION_ELU_OUTPUT; function++) {
            const double first = parameters[function][0], second = parameters[function][1];
            const int64_t sizes[] = {1, 3, 31, 33, 1025};
            for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
                check_range(function, first, second, sizes[s], 0, sizes[s], dtype);
                check_range(function, first, second, sizes[s], sizes[s] / 3, sizes[s] - sizes[s] / 4, dtype);
                check_range(function, first, second, sizes[s], sizes[s] / 2, sizes[s] / 2, dtype);
            }
            if (function != CUDA_OPS_ACTIVATION_ELU_OUTPUT)
                check_nan(function, first, second, dtype);
        }
        CHECK_STATUS(cuda_ops_activation_forward_cpu(NULL, NULL, 0, 1, CUDA_OPS_ACTIVATION_ELU_OUTPUT, 1, 0, dtype),
                     CUDA_OPS_INVALID_ARGUMENT);
        CHECK_STATUS(cuda_ops_activation_backward_cpu(NULL, NULL, NULL, 0, 1, (cuda_ops_activation)99, 1, 0, dtype),
                     CUDA_OPS_INVALID_ARGUMENT);
    }
    CHECK_STATUS(cuda_ops_activation_forward_cpu(NULL, NULL, 0, 1, CUDA_OPS_ACTIVATION_GELU, 0, 0, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(
        cuda_ops_activation_backward_cpu(NULL, NULL, NULL, 0, 1, CUDA_OPS_ACTIVATION_GELU, 0, 0, CUDA_OPS_FLOAT16),
        CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
