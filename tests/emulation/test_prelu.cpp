// prelu and its backward, where channels are innermost, one, or between.
#include "cases.h"
#include "cuda_ops/prelu.h"

using namespace emulation;

static void prelu(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const int64_t channels = one_in(4) ? 1 : random_size(150), inner = one_in(2) ? 1 : random_size(90);
    const int64_t outer = random_size(20000 / (channels * inner) + 1), count = outer * channels * inner;
    const Array input = Array(count, dtype).random(), weight = Array(channels, dtype).random(), output(count, dtype);
    const Array grad_output = Array(count, dtype).random(), grad_input(count, dtype), grad_weight(channels, dtype);
    describe("case %lld: %lld, %lld, %lld of dtype %d", (long long)number, (long long)outer, (long long)channels,
             (long long)inner, dtype);
    expect_success(
        cuda_ops_prelu_forward_cuda(output.data, input.data, weight.data, outer, channels, inner, dtype, nullptr));
    void *const workspace = device_memory((size_t)cuda_ops_prelu_workspace_cuda(outer, channels, inner, dtype), 0);
    expect_success(cuda_ops_prelu_backward_cuda(grad_input.data, grad_weight.data, workspace, grad_output.data,
                                                input.data, weight.data, outer, channels, inner, dtype, nullptr));
    std::vector<double> sums((size_t)channels), sizes((size_t)channels);
    for (int64_t i = 0; i < count; i++) {
        const int64_t c = i / inner % channels;
        const double x = input[i], g = grad_output[i], y = x > 0 ? x : x * weight[c], d = x > 0 ? g : g * weight[c];
        expect_near("output", i, output[i], y, rounding_of(dtype) * fabs(y));
        expect_near("grad_input", i, grad_input[i], d, rounding_of(dtype) * fabs(d));
        if (!(x > 0))
            sums[(size_t)c] += x * g, sizes[(size_t)c] += fabs(x * g);
    }
    for (int64_t c = 0; c < channels; c++)
        expect_near("grad_weight", c, grad_weight[c], sums[(size_t)c],
                    rounding_of(dtype) * fabs(sums[(size_t)c]) + 2e-6 * sizes[(size_t)c]);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "prelu", prelu);
}
