// conv2d's padded path by mma.sync, and mma alone where it takes the call: all passes, groups, formats, strides and
// dilations, against the sums as they stand. Some elements are infinite or NaN, which the padding must keep where they
// belong; workspaces begin as NaN. TMA, which sm90 and sm90_halo need, is not emulated.
#include "conv2d_sums.h"

using namespace emulation;

static const Answer NOT_HERE = {"is not emulated"};
Answer conv2d_sm90_supports(const ConvCall &, ConvDevice)
{
    return NOT_HERE;
}
size_t conv2d_sm90_workspace(const ConvCall &, ConvDevice)
{
    return 0;
}
cuda_ops_status conv2d_sm90(const ConvCall &, ConvDevice)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}
double conv2d_sm90_microseconds(const ConvCall &, ConvDevice)
{
    return 0;
}
Answer conv2d_sm90_halo_supports(const ConvCall &, ConvDevice)
{
    return NOT_HERE;
}
Answer conv2d_sm90_halo_is_fast(const ConvCall &, ConvDevice)
{
    return NOT_HERE;
}
size_t conv2d_sm90_halo_workspace(const ConvCall &, ConvDevice)
{
    return 0;
}
cuda_ops_status conv2d_sm90_halo(const ConvCall &, ConvDevice)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}
Answer conv2d_winograd_supports(const ConvCall &, ConvDevice)
{
    return NOT_HERE;
}
Answer conv2d_winograd_is_fast(const ConvCall &, ConvDevice)
{
    return NOT_HERE;
}
double conv2d_winograd_microseconds(const ConvCall &, ConvDevice)
{
    return 0;
}
double conv2d_simt_microseconds(const ConvCall &, ConvDevice)
{
    return 1e9;
}
static int64_t padded_calls, mma_calls, grouped_calls;

// One element in twenty of some arrays.
static void spoil(const Array &array)
{
    if (!one_in(4))
        return;
    for (int64_t i = 0; i < array.count; i++)
        if (one_in(20))
            set(array.data, i, one_in(2) ? NAN : one_in(2) ? INFINITY : -INFINITY, array.dtype);
}

static void padded(int64_t number)
{
    static constexpr cuda_ops_dtype KINDS[] = {CUDA_OPS_BFLOAT16, CUDA_OPS_FLOAT16, CUDA_OPS_FLOAT32};
    const cuda_ops_dtype dtype = KINDS[random_below(3)];
    cuda_ops_conv2d_sizes s = {};
    s.batch = random_in(1, 3);
    s.groups = one_in(2) ? 1 : random_in(2, 5);
    s.in_channels = s.groups * random_size(20), s.out_channels = s.groups * random_size(20);
    // Groups of whole vectors are grouped's and mma's.
    const int64_t vector = dtype == CUDA_OPS_FLOAT32 ? 4 : 8;
    const bool whole = s.groups > 1 && !one_in(3);
    if (whole)
        s.in_channels = s.groups * vector * random_in(1, 5), s.out_channels = s.groups * vector * random_in(1, 5);
    s.kernel_height = random_in(1, 3), s.kernel_width = random_in(1, 4);
    s.stride_height = random_in(1, 3), s.stride_width = random_in(1, 2);
    s.dilation_height = random_in(1, 2), s.dilation_width = random_in(1, 3);
    s.padding_top = random_in(0, 3), s.padding_left = random_in(0, 2);
    s.out_height = random_in(1, 5), s.out_width = random_in(1, 9);
    const int64_t reach_y = (s.out_height - 1) * s.stride_height + (s.kernel_height - 1) * s.dilation_height + 1;
    const int64_t reach_x = (s.out_width - 1) * s.stride_width + (s.kernel_width - 1) * s.dilation_width + 1;
    // What the last output reads, but for some padding after it, or a little more.
    s.in_height = reach_y - s.padding_top + random_in(-2, s.stride_height - 1);
    s.in_width = reach_x - s.padding_left + random_in(-1, s.stride_width - 1);
    s.in_height = s.in_height < 1 ? 1 : s.in_height, s.in_width = s.in_width < 1 ? 1 : s.in_width;
    s.input_channels_last = whole || one_in(2), s.weight_channels_last = one_in(2);
    s.output_channels_last = whole || one_in(2);
    s.allow_tf32 = 1;
    const cuda_ops_conv2d_pass pass = (cuda_ops_conv2d_pass)random_below(3);
    const int64_t C = s.in_channels, K = s.out_channels, N = s.batch, c = C / s.groups, k = K / s.groups;
    const int64_t taps = s.kernel_height * s.kernel_width;
    const ConvSizes sizes(s);
    // Only images that are copied may begin anywhere.
    const bool any_address = !all_aligned;
    all_aligned =
        !any_address || (c % vector == 0 && (s.input_channels_last || C == 1 || s.in_height * s.in_width == 1));
    const Array input = Array(sizes.of[1], dtype).random();
    all_aligned =
        !any_address || (k % vector == 0 && (s.output_channels_last || K == 1 || s.out_height * s.out_width == 1));
    const Array output = Array(sizes.of[0], dtype).random();
    all_aligned = true;
    const Array weight = Array(sizes.of[2], dtype).random(), result(sizes.of[pass], dtype);
    const Array bias = Array(K, dtype).random();
    // What is beside an image is zero, and multiplied: the other factor is spoilt only where nothing is.
    const bool inside = s.padding_top == 0 && s.padding_left == 0 && reach_y <= s.in_height && reach_x <= s.in_width;
    const bool one_tap = taps == 1 && s.stride_height == 1 && s.stride_width == 1;
    spoil(pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? output : input);
    if (inside && (one_tap || pass != CUDA_OPS_CONV2D_BACKWARD_INPUT))
        spoil(pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? output : weight);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    describe("case %lld: dtype %d, pass %d, %lld x %lld -> %lld of %lld groups, %lld x %lld -> %lld x %lld, "
             "%lld x %lld, stride %lld, %lld, padding %lld, %lld, dilation %lld, %lld, channels_last %d %d %d",
             (long long)number, dtype, pass, (long long)N, (long long)C, (long long)K, (long long)s.groups,
             (long long)s.in_height, (long long)s.in_width, (long long)s.out_height, (long long)s.out_width,
             (long long)s.kernel_height, (long long)s.kernel_width, (long long)s.stride_height,
             (long long)s.stride_width, (long long)s.padding_top, (long long)s.padding_left,
             (long long)s.dilation_height, (long long)s.dilation_width, s.input_channels_last, s.weight_channels_last,
             s.output_channels_last);
    const ConvOperands operands = {input, weight, output, with_bias ? &bias : nullptr, result};
    ConvCall call = call_of(pass, s, operands);
    const ConvDevice device = current_device();
    const bool pads = conv2d_padded_supports(call, device), by_mma = !pads && conv2d_mma_supports(call, device);
    const bool odd = (pass != CUDA_OPS_CONV2D_BACKWARD_INPUT && c % vector != 0) ||
                     (pass != CUDA_OPS_CONV2D_FORWARD && k % vector != 0);
    const bool is_matrix = taps == 1 && s.groups == 1 && s.stride_height == 1 && s.stride_width == 1 &&
                           s.padding_top == 0 && s.padding_left == 0 && s.out_height == s.in_height &&
                           s.out_width == s.in_width;
    if (pads != (odd && !is_matrix))
        fail("padded %s", pads ? "takes it" : conv2d_padded_supports(call, device).why_not);
    if (!pads && !by_mma)
        return;
    const ConvSums expected = sums_of(pass, s, operands);
    const auto check = [&](const char *path) {
        // The inputs are exact in TF32 too.
        for (int64_t i = 0; i < sizes.of[pass]; i++)
            expect_near(path, i, result[i], expected.values[(size_t)i],
                        rounding_of(dtype) * fabs(expected.values[(size_t)i]) + 1e-5 * expected.magnitudes[(size_t)i] +
                            1e-6);
    };
    run(call, pads ? conv2d_padded_workspace : conv2d_mma_workspace, pads ? conv2d_padded : conv2d_mma);
    (pads ? padded_calls : mma_calls)++;
    check(pads ? "result of padded" : "result of mma");
    if (!conv2d_grouped_supports(call, device))
        return;
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        set(result.data, i, NAN, dtype);
    run(call, conv2d_grouped_workspace, conv2d_grouped);
    grouped_calls++;
    check("result of grouped");
    if (dtype != CUDA_OPS_FLOAT32)
        return;
    call.sizes.allow_tf32 = 0; // multiply-adds
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        set(result.data, i, NAN, dtype);
    run(call, conv2d_grouped_workspace, conv2d_grouped);
    check("result of grouped in float32");
}

int main(int argc, char **argv)
{
    const int status = run_cases(argc, argv, "conv2d_padded", padded);
    printf("conv2d_padded: %lld calls padded, %lld by mma, %lld by grouped\n", (long long)padded_calls,
           (long long)mma_calls, (long long)grouped_calls);
    return status;
}
