// conv2d's few_channels path, all passes, dtypes, formats and strides, against the sums as they stand; workspaces begin
// as NaN. An infinity stays where it is: nothing that fills up a tile is multiplied by it.
#include "conv2d_sums.h"

Answer conv2d_im2col_supports(const ConvCall &, ConvDevice)
{
    return no("it is not here");
}

using namespace emulation;

static void few_channels(int64_t number)
{
    cuda_ops_conv2d_sizes s = {};
    static const int64_t FILTERS[] = {3, 7};
    s.kernel_height = s.kernel_width = FILTERS[random_below(2)];
    if (one_in(3))
        s.kernel_height = random_in(1, 5), s.kernel_width = random_in(1, 5);
    s.stride_height = s.stride_width = one_in(3) ? 1 : 2;
    s.dilation_height = s.dilation_width = 1;
    s.groups = 1, s.batch = random_in(1, 3);
    s.in_channels = one_in(2) ? 3 : random_in(1, 4),
    s.out_channels = one_in(2) ? 8 * random_in(1, 5) : random_in(2, 70);
    const int64_t reach_y = s.kernel_height - 1, reach_x = s.kernel_width - 1, most = one_in(6) ? 150 : 40;
    const int64_t paddings_y = one_in(2) ? reach_y : random_in(0, reach_y + 3);
    const int64_t paddings_x = one_in(2) ? reach_x : random_in(0, reach_x + 3);
    const int64_t least_y = reach_y >= paddings_y ? reach_y + 1 - paddings_y : 1;
    const int64_t least_x = reach_x >= paddings_x ? reach_x + 1 - paddings_x : 1;
    s.in_height = random_in(least_y, least_y + most / 2), s.in_width = random_in(least_x, least_x + most);
    s.padding_top = paddings_y / 2, s.padding_left = one_in(2) ? paddings_x / 2 : random_in(0, paddings_x);
    s.out_height = (s.in_height + paddings_y - reach_y - 1) / s.stride_height + 1;
    s.out_width = (s.in_width + paddings_x - reach_x - 1) / s.stride_width + 1;
    s.input_channels_last = one_in(2), s.output_channels_last = one_in(4) ? one_in(2) : s.input_channels_last;
    s.weight_channels_last = one_in(2);
    static const cuda_ops_dtype OFTEN[] = {CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT16, CUDA_OPS_BFLOAT16};
    const cuda_ops_dtype dtype = OFTEN[random_below(4)];
    s.allow_tf32 = dtype == CUDA_OPS_FLOAT32 && one_in(3);
    const cuda_ops_conv2d_pass pass =
        one_in(2) ? CUDA_OPS_CONV2D_BACKWARD_INPUT : (cuda_ops_conv2d_pass)random_below(3);
    const ConvSizes sizes(s);
    const Array input = Array(sizes.of[1], dtype).random(), weight = Array(sizes.of[2], dtype).random();
    const Array output = Array(sizes.of[0], dtype).random(), bias = Array(s.out_channels, dtype).random();
    const Array result(sizes.of[pass], dtype);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    bool finite = true;
    if (pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && one_in(3))
        set(output.data, random_in(0, sizes.of[0] - 1), INFINITY, dtype);
    else if (one_in(3))
        set(input.data, random_in(0, sizes.of[1] - 1), INFINITY, dtype), finite = false;
    for (int64_t i = 0; i < sizes.of[2]; i++) // an infinity times 0 would be NaN
        if (weight[i] == 0)
            set(weight.data, i, 1, dtype);
    if (pass == CUDA_OPS_CONV2D_FORWARD && finite && one_in(2))
        s.activation = (int)random_in(CUDA_OPS_CONV2D_RELU, CUDA_OPS_CONV2D_SILU);
    describe("case %lld: pass %d, dtype %d, TF32 %d, %lld x %lld -> %lld, %lld x %lld, padding %lld of %lld, %lld of "
             "%lld, filter %lld x %lld, stride %lld, channels_last %d %d %d, activation %d",
             (long long)number, pass, dtype, s.allow_tf32, (long long)s.batch, (long long)s.in_channels,
             (long long)s.out_channels, (long long)s.in_height, (long long)s.in_width, (long long)s.padding_top,
             (long long)paddings_y, (long long)s.padding_left, (long long)paddings_x, (long long)s.kernel_height,
             (long long)s.kernel_width, (long long)s.stride_width, s.input_channels_last, s.output_channels_last,
             s.weight_channels_last, s.activation);

    const ConvOperands operands = {input, weight, output, with_bias ? &bias : nullptr, result};
    ConvCall call = call_of(pass, s, operands);
    const Answer supported = conv2d_few_channels_supports(call, current_device());
    if (!supported) {
        // Four channels' large patches of pairs may not fit.
        if (s.in_channels * s.kernel_height * s.kernel_width <= 3 * 49)
            fail("not supported: %s", supported.why_not);
        return;
    }
    run(call, conv2d_few_channels_workspace, conv2d_few_channels);

    const ConvSums expected = sums_of(pass, s, operands);
    const double rounding = 4 * rounding_of(CUDA_OPS_FLOAT32), factors = s.allow_tf32 ? 0x1p-10 : 0;
    const double terms = (double)(s.batch + s.out_channels + s.in_channels * s.kernel_height * s.kernel_width);
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        expect_near("result", i, result[i], activated(expected.values[(size_t)i], s.activation),
                    1.5 * (rounding * terms + factors) * expected.magnitudes[(size_t)i] +
                        rounding_of(dtype) * fabs(expected.values[(size_t)i]) + 1e-7);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "few_channels", few_channels);
}
