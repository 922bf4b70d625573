// conv2d's depthwise path, all passes, dtypes, formats, filters and strides, against the sums as they stand; workspaces
// begin as NaN.
#include "cases.h"
#include "conv2d/paths.h"

using namespace emulation;

static int64_t at4(int64_t channels, int64_t height, int64_t width, int last, int64_t n, int64_t c, int64_t y,
                   int64_t x)
{
    return last ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
}

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
    const int64_t sizes[] = {N * K * s.out_height * s.out_width, N * C * s.in_height * s.in_width, K * taps};
    const Array input = Array(sizes[1], dtype).random(), weight = Array(sizes[2], dtype).random();
    const Array output = Array(sizes[0], dtype).random(), bias = Array(K, dtype).random();
    const Array result(sizes[pass], dtype);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    if (pass != CUDA_OPS_CONV2D_BACKWARD_INPUT && one_in(3))
        for (int i = 0; i < 3; i++)
            set(input.data, random_in(0, sizes[1] - 1), INFINITY, dtype);
    if (pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && one_in(3))
        set(output.data, random_in(0, sizes[0] - 1), INFINITY, dtype);
    for (int64_t i = 0; i < sizes[2]; i++) // an infinity times 0 would be NaN
        if (weight[i] == 0)
            set(weight.data, i, 1, dtype);
    describe(
        "case %lld: pass %d, dtype %d, %lld x %lld -> %lld, %lld x %lld, padding %lld of %lld, %lld of %lld, filter "
        "%lld x %lld, stride %lld, dilation %lld, channels_last %d %d",
        (long long)number, pass, dtype, (long long)N, (long long)C, (long long)K, (long long)s.in_height,
        (long long)s.in_width, (long long)s.padding_top, (long long)paddings_y, (long long)s.padding_left,
        (long long)paddings_x, (long long)s.kernel_height, (long long)s.kernel_width, (long long)s.stride_width,
        (long long)s.dilation_width, s.input_channels_last, s.output_channels_last);

    ConvCall call = {pass,
                     result.data,
                     pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? nullptr : input.data,
                     pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? nullptr : weight.data,
                     pass == CUDA_OPS_CONV2D_FORWARD ? nullptr : output.data,
                     with_bias ? bias.data : nullptr,
                     nullptr,
                     s,
                     dtype,
                     nullptr};
    const ConvDevice device = current_device();
    if (!conv2d_depthwise_supports(call, device))
        fail("not supported: %s", conv2d_depthwise_supports(call, device).why_not);
    const size_t bytes = conv2d_depthwise_workspace(call, device);
    call.workspace = device_memory(bytes, 0);
    memset(call.workspace, 0xff, bytes);
    expect_success(conv2d_depthwise(call, device));

    std::vector<double> expected((size_t)sizes[pass]), magnitudes((size_t)sizes[pass]);
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t y = 0; y < s.out_height; y++)
                for (int64_t x = 0; x < s.out_width; x++) {
                    const int64_t o = at4(K, s.out_height, s.out_width, s.output_channels_last, n, k, y, x);
                    if (with_bias) {
                        expected[(size_t)o] += bias[k];
                        magnitudes[(size_t)o] += fabs(bias[k]);
                    }
                    for (int64_t tap = 0; tap < taps; tap++) {
                        const int64_t iy =
                            y * s.stride_height + tap / s.kernel_width * s.dilation_height - s.padding_top;
                        const int64_t ix =
                            x * s.stride_width + tap % s.kernel_width * s.dilation_width - s.padding_left;
                        if (iy < 0 || iy >= s.in_height || ix < 0 || ix >= s.in_width)
                            continue;
                        const int64_t i =
                            at4(C, s.in_height, s.in_width, s.input_channels_last, n, k / multiplier, iy, ix);
                        const int64_t w = k * taps + tap;
                        const int64_t to = pass == CUDA_OPS_CONV2D_FORWARD          ? o
                                           : pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? i
                                                                                    : w;
                        const double value = (pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? 1 : weight[w]) *
                                             (pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? 1 : input[i]) *
                                             (pass == CUDA_OPS_CONV2D_FORWARD ? 1 : output[o]);
                        expected[(size_t)to] += value;
                        magnitudes[(size_t)to] += fabs(value);
                    }
                }
    const double rounding = 4 * (dtype == CUDA_OPS_FLOAT64 ? rounding_of(dtype) : rounding_of(CUDA_OPS_FLOAT32));
    for (int64_t i = 0; i < sizes[pass]; i++)
        expect_near("result", i, result[i], expected[(size_t)i],
                    rounding * (double)(taps + N) * magnitudes[(size_t)i] +
                        rounding_of(dtype) * fabs(expected[(size_t)i]) + 1e-7);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "depthwise", depthwise);
}
