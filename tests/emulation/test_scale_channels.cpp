// scale_channels and its backward: channels or pixels innermost, all gates and dtypes, addresses that are not aligned,
// and either gradient alone.
#include "cases.h"
#include "cuda_ops/scale_channels.h"

using namespace emulation;

static double opened(double scale, int gate)
{
    if (gate == CUDA_OPS_CHANNEL_GATE_SIGMOID)
        return 1 / (1 + exp(-scale));
    return gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID ? fmin(fmax(scale + 3, 0), 6) / 6 : scale;
}

static double slope(double scale, int gate)
{
    if (gate == CUDA_OPS_CHANNEL_GATE_SIGMOID)
        return opened(scale, gate) * (1 - opened(scale, gate));
    return gate == CUDA_OPS_CHANNEL_GATE_HARDSIGMOID ? (scale > -3 && scale < 3 ? 1.0 / 6 : 0) : 1;
}

static void scale_channels(int64_t number)
{
    const cuda_ops_dtype type = DTYPES[random_below(4)];
    const cuda_ops_channel_gate gate = (cuda_ops_channel_gate)random_below(3);
    const int64_t inner = one_in(3) ? 1 : one_in(3) ? 8 * random_size(300) : random_size(300);
    const int64_t count = one_in(3) ? random_size(20) : random_size(40000 / inner + 1);
    const int64_t outer = random_size(60000 / (inner * count) + 1);
    const int64_t all = outer * count * inner, scales = outer * inner;
    const Array input = Array(all, type).random(), scale = Array(scales, type).random();
    const Array grad = Array(all, type).random();
    const Array output(all, type), grad_input(all, type), grad_scale(scales, type);
    describe("case %lld: %lld x %lld x %lld, gate %d, dtype %d", (long long)number, (long long)outer, (long long)count,
             (long long)inner, gate, type);
    expect_success(cuda_ops_scale_channels_forward_cuda(output.data, input.data, scale.data, outer, count, inner, gate,
                                                        type, nullptr));
    const bool wants_scale = !one_in(4), wants_input = !wants_scale || !one_in(4);
    void *const workspace = device_memory((size_t)cuda_ops_scale_channels_workspace_cuda(outer, count, inner, type), 0);
    expect_success(cuda_ops_scale_channels_backward_cuda(
        wants_input ? grad_input.data : nullptr, wants_scale ? grad_scale.data : nullptr, workspace, grad.data,
        wants_scale ? input.data : nullptr, scale.data, outer, count, inner, gate, type, nullptr));
    std::vector<double> sums((size_t)scales), sizes((size_t)scales);
    const double inside = type == CUDA_OPS_FLOAT64 ? 1e-14 : 2e-6;
    for (int64_t i = 0; i < all; i++) {
        const int64_t at = i / (count * inner) * inner + i % inner;
        const double factor = opened(scale[at], gate);
        expect_near("output", i, output[i], input[i] * factor,
                    (rounding_of(type) + inside) * fabs(input[i] * factor) + 1e-7 * fabs(input[i]) * (gate > 0));
        if (wants_input)
            expect_near("grad_input", i, grad_input[i], grad[i] * factor,
                        (rounding_of(type) + inside) * fabs(grad[i] * factor) + 1e-7 * fabs(grad[i]) * (gate > 0));
        sums[(size_t)at] += grad[i] * input[i];
        sizes[(size_t)at] += fabs(grad[i] * input[i]);
    }
    for (int64_t i = 0; i < scales && wants_scale; i++) {
        const double expected = sums[(size_t)i] * slope(scale[i], gate);
        expect_near("grad_scale", i, grad_scale[i], expected,
                    rounding_of(type) * fabs(expected) + 20 * inside * sizes[(size_t)i]);
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "scale_channels", scale_channels);
}
