// conv2d's depthwise path, all passes, dtypes, formats, filters and strides, against the sums as they stand; workspaces
// begin as NaN.
#include "conv2d_sums.h"

using namespace emulation;

static void depthwise(int64_t number)
{
    cuda_ops_conv2d_sizes s = {};
    static const int64_t FILTERS[] = {3, 5, 7};
    const bool usual = !one_in(5);
    const int64_t multiplier = one_in(4) ? random_in(2, 3) : 1, most = one_in(3) ? 26 : 9;
    s.kernel_height = s.kernel_width = FILTERS[random_below(3)];
    if (!usual)
        s.kernel_width = random_in(1, 4);
    s.stride_height = s.stride_width = random_in(1, 2);
    s.dilation_height = s.dilation_width = usual ? 1 : random_in(1, 2);
    s.batch = one_in(3) ? random_in(1, 12) : random_in(1, 2);
    s.in_channels = s.groups = one_in(3) ? random_in(2, 90) : random_in(1, 5) * 8;
    s.out_channels = s.in_channels * multiplier;
    const int64_t reach_y = s.dilation_height * (s.kernel_height - 1),
                  reach_x = s.dilation_width * (s.kernel_width - 1);
    const int64_t paddings_y = one_in(2) ? reach_y : random_in(0, reach_y + 3);
    const int64_t paddings_x = one_in(2) ? reach_x : random_in(0, reach_x + 3);
    const int64_t least_y = reach_y >= paddings_y ? reach_y + 1 - paddings_y : 1;
    const int64_t least_x = reach_x >= paddings_x ? reach_x + 1 - paddings_x : 1;
    s.in_height = random_in(least_y, least_y + most);
    s.in_width = random_in(least_x, least_x + most + 8);
    s.padding_top = paddings_y / 2;
    s.padding_left = one_in(2) ? paddings_x / 2 : random_in(0, paddings_x);
    s.out_height = (s.in_height + paddings_y - reach_y - 1) / s.stride_height + 1;
    s.out_width = (s.in_width + paddings_x - reach_x - 1) / s.stride_width + 1;
    s.input_channels_last = one_in(2), s.output_channels_last = one_in(4) ? one_in(2) : s.input_channels_last;
    static const int OFTEN[] = {0, 2, 3}; // of DTYPES, whose second one is float64
    const cuda_ops_dtype dtype = DTYPES[one_in(8) ? 1 : OFTEN[random_below(3)]];
    const cuda_ops_conv2d_pass pass = (cuda_ops_conv2d_pass)random_below(3);
    const int64_t C = s.in_channels, K = s.out_channels, N = s.batch, taps = s.kernel_height * s.kernel_width;
    const ConvSizes sizes(s);
    const Array input = Array(sizes.of[1], dtype).random(), weight = Array(sizes.of[2], dtype).random();
    const Array output = Array(sizes.of[0], dtype).random(), bias = Array(K, dtype).random();
    const Array result(sizes.of[pass], dtype);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    bool finite = true;
    if (pass != CUDA_OPS_CONV2D_BACKWARD_INPUT && one_in(3))
        for (int i = 0; i < 3; i++, finite = false)
            set(input.data, random_in(0, sizes.of[1] - 1), INFINITY, dtype);
    if (pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && one_in(3))
        set(output.data, random_in(0, sizes.of[0] - 1), INFINITY, dtype);
    for (int64_t i = 0; i < sizes.of[2]; i++) // an infinity times 0 would be NaN
        if (weight[i] == 0)
            set(weight.data, i, 1, dtype);
    if (pass == CUDA_OPS_CONV2D_FORWARD && finite && dtype != CUDA_OPS_FLOAT64 && one_in(2))
        s.activation = (int)random_in(CUDA_OPS_CONV2D_RELU, CUDA_OPS_CONV2D_SILU);
    describe(
        "case %lld: pass %d, dtype %d, %lld x %lld -> %lld, %lld x %lld, padding %lld of %lld, %lld of %lld, filter "
        "%lld x %lld, stride %lld, dilation %lld, channels_last %d %d, activation %d",
        (long long)number, pass, dtype, (long long)N, (long long)C, (long long)K, (long long)s.in_height,
        (long long)s.in_width, (long long)s.padding_top, (long long)paddings_y, (long long)s.padding_left,
        (long long)paddings_x, (long long)s.kernel_height, (long long)s.kernel_width, (long long)s.stride_width,
        (long long)s.dilation_width, s.input_channels_last, s.output_channels_last, s.activation);

    const ConvOperands operands = {input, weight, output, with_bias ? &bias : nullptr, result};
    ConvCall call = call_of(pass, s, operands);
    const Answer supported = conv2d_depthwise_supports(call, current_device());
    if (!supported)
        fail("not supported: %s", supported.why_not);
    run(call, conv2d_depthwise_workspace, conv2d_depthwise);

    const ConvSums expected = sums_of(pass, s, operands);
    const double rounding = 4 * (dtype == CUDA_OPS_FLOAT64 ? rounding_of(dtype) : rounding_of(CUDA_OPS_FLOAT32));
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        expect_near("result", i, result[i], activated(expected.values[(size_t)i], s.activation),
                    1.5 * rounding * (double)(taps + N) * expected.magnitudes[(size_t)i] +
                        rounding_of(dtype) * fabs(expected.values[(size_t)i]) + 1e-7);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "depthwise", depthwise);
}
