#include "cuda_ops/scale_channels.h"

#include <math.h>

#include "check.h"

static double opened(double scale, cuda_ops_channel_gate gate)
{
    if (gate == CUDA_OPS_CHANNEL_GATE_SIGMOID)
        return 1 / (1 + exp(-scale));
    return gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID ? fmin(fmax(scale + 3, 0), 6) / 6 : scale;
}

static double slope(double scale, cuda_ops_channel_gate gate)
{
    if (gate == CUDA_OPS_CHANNEL_GATE_SIGMOID)
        return opened(scale, gate) * (1 - opened(scale, gate));
    return gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID ? (scale > -3 && scale < 3 ? 1.0 / 6 : 0) : 1;
}

/* Units [begin, end) of the chunks of 256 channels that images have; the others must not be touched. */
static void check_units(int64_t outer, int64_t count, int64_t inner, cuda_ops_channel_gate gate, int64_t begin,
                        int64_t end, cuda_ops_dtype dtype)
{
    const int64_t all = outer * count * inner, scales = outer * inner, chunks = (inner + 255) / 256;
    CHECK(cuda_ops_scale_channels_units_cpu(outer, inner) == outer * chunks, "units of %lld images", (long long)outer);
    void *input = guarded_numbers(all, 1, dtype), *grad = guarded_numbers(all, 2, dtype);
    const cuda_ops_dtype computed = computed_dtype(dtype);
    void *scale = guarded_numbers(scales, 3, computed), *output = guarded_new(all, dtype);
    void *grad_input = guarded_new(all, dtype), *grad_scale = guarded_new(scales, computed);
    CHECK_OK(cuda_ops_scale_channels_forward_cpu(output, input, scale, count, inner, gate, begin, end, dtype));
    CHECK_OK(cuda_ops_scale_channels_backward_cpu(grad_input, grad_scale, grad, input, scale, count, inner, gate, begin,
                                                  end, dtype));
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++) {
            const int64_t unit = o * chunks + i / 256, at = o * inner + i;
            const bool inside = begin <= unit && unit < end;
            const double factor = opened(get(scale, at, computed), gate);
            double sum = 0, size = 0;
            for (int64_t p = 0; p < count; p++) {
                const int64_t e = (o * count + p) * inner + i;
                sum += get(grad, e, dtype) * get(input, e, dtype);
                size += fabs(get(grad, e, dtype) * get(input, e, dtype));
                if (inside) {
                    CHECK_NEAR(output, e, get(input, e, dtype) * factor, 8 * rounding(dtype), dtype);
                    CHECK_NEAR(grad_input, e, get(grad, e, dtype) * factor, 8 * rounding(dtype), dtype);
                } else {
                    CHECK_UNWRITTEN(output, e, dtype);
                    CHECK_UNWRITTEN(grad_input, e, dtype);
                }
            }
            if (inside)
                CHECK_NEAR(grad_scale, at, sum * slope(get(scale, at, computed), gate),
                           16 * rounding(computed) * (1 + size), computed);
            else
                CHECK_UNWRITTEN(grad_scale, at, computed);
        }
    /* One gradient alone. */
    CHECK_OK(cuda_ops_scale_channels_backward_cpu(NULL, grad_scale, grad, input, scale, count, inner, gate, begin, end,
                                                  dtype));
    CHECK_OK(cuda_ops_scale_channels_backward_cpu(grad_input, NULL, grad, input, scale, count, inner, gate, begin, end,
                                                  dtype));
    guarded_free(input, all, dtype);
    guarded_free(grad, all, dtype);
    guarded_free(scale, scales, computed);
    guarded_free(output, all, dtype);
    guarded_free(grad_input, all, dtype);
    guarded_free(grad_scale, scales, computed);
}

int main(void)
{
    FOR_STORED_DTYPES(dtype)
    {
        for (cuda_ops_channel_gate gate = CUDA_OPS_CHANNEL_GATE_NONE; gate <= CUDA_OPS_CHANNEL_GATE_HARDSIGMOID;
             gate++) {
            check_units(1, 1, 1, gate, 0, 1, dtype);
            check_units(3, 70, 5, gate, 0, 3, dtype);
            check_units(3, 9, 300, gate, 1, 4, dtype);
            check_units(5, 300, 1, gate, 2, 5, dtype);
            check_units(2, 7, 256, gate, 1, 1, dtype);
            check_units(2, 0, 3, gate, 0, 0, dtype);
        }
    }
    CHECK_STATUS(
        cuda_ops_scale_channels_forward_cpu(NULL, NULL, NULL, 1, 1, CUDA_OPS_CHANNEL_GATE_NONE, 0, 1, CUDA_OPS_FLOAT16),
        CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_scale_channels_backward_cpu(NULL, NULL, NULL, NULL, NULL, 1, 1, CUDA_OPS_CHANNEL_GATE_NONE, 0,
                                                      1, (cuda_ops_dtype)17),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
