// conv2d by way of patches in device memory or in shared memory, all passes, kernels, strides, paddings and orders of
// the three tensors, against the sums as they stand. The product of patches in device memory is the GEMM's, and that of
// rectangles another path's, for which loops stand here; workspaces begin as NaN.
#include "common/common.cuh"
#include "conv2d/patches/patches.cuh"
#include "conv2d_sums.h"
#include "gemm/paths.h"

using namespace emulation;

int gemm_path_on(const cuda_ops_gemm_problem &, GemmDevice, int)
{
    return GEMM_SIMT;
}

extern "C" int64_t cuda_ops_gemm_workspace_cuda(const cuda_ops_gemm_problem *, int)
{
    return 0;
}

static double element(cuda_ops_dtype dtype, const void *array, int64_t i)
{
    return dtype == CUDA_OPS_FLOAT16 ? load_as_accumulate(((const __half *)array)[i])
                                     : load_as_accumulate(((const __nv_bfloat16 *)array)[i]);
}

extern "C" cuda_ops_status cuda_ops_gemm_cuda(void *d, const void *a, const void *b, const void *bias, void *,
                                              const cuda_ops_gemm_problem *problem, int, cuda_ops_stream)
{
    const cuda_ops_gemm_problem &p = *problem;
    for (int64_t index = 0; index < p.batch; index++)
        for (int64_t row = 0; row < p.m; row++)
            for (int64_t column = 0; column < p.n; column++) {
                double sum = bias ? element(p.dtype, bias, column) : 0;
                for (int64_t k = 0; k < p.k; k++)
                    sum +=
                        element(p.dtype, a, index * p.stride_a + (p.transpose_a ? k * p.lda + row : row * p.lda + k)) *
                        element(p.dtype, b,
                                index * p.stride_b + (p.transpose_b ? column * p.ldb + k : k * p.ldb + column));
                const int64_t to = index * p.stride_d + row * p.ldd + column;
                if (p.dtype == CUDA_OPS_FLOAT16)
                    ((__half *)d)[to] = store_from_accumulate<__half>((float)sum);
                else
                    ((__nv_bfloat16 *)d)[to] = store_from_accumulate<__nv_bfloat16>((float)sum);
            }
    return CUDA_OPS_SUCCESS;
}

extern "C" size_t cuda_ops_conv2d_workspace_cuda(cuda_ops_conv2d_pass, const cuda_ops_conv2d_sizes *, cuda_ops_dtype,
                                                 int)
{
    return 0;
}

double conv2d_microseconds(const ConvCall &, ConvDevice)
{
    return 0;
}

// Of tensors that are all channels_last, with stride 1.
extern "C" cuda_ops_status cuda_ops_conv2d_forward_cuda(void *output, const void *input, const void *weight,
                                                        const void *, const cuda_ops_conv2d_sizes *sizes, void *, int,
                                                        cuda_ops_dtype dtype, cuda_ops_stream)
{
    const cuda_ops_conv2d_sizes &s = *sizes;
    int64_t to = 0;
    for (int64_t n = 0; n < s.batch; n++)
        for (int64_t y = 0; y < s.out_height; y++)
            for (int64_t x = 0; x < s.out_width; x++)
                for (int64_t o = 0; o < s.out_channels; o++, to++) {
                    double sum = 0;
                    for (int64_t r = 0; r < s.kernel_height; r++)
                        for (int64_t q = 0; q < s.kernel_width; q++) {
                            const int64_t in_y = y + r - s.padding_top, in_x = x + q - s.padding_left;
                            if (in_y < 0 || in_y >= s.in_height || in_x < 0 || in_x >= s.in_width)
                                continue;
                            for (int64_t c = 0; c < s.in_channels; c++) {
                                const int64_t of_weight =
                                    ((o * s.kernel_height + r) * s.kernel_width + q) * s.in_channels + c;
                                const int64_t of_input =
                                    ((n * s.in_height + in_y) * s.in_width + in_x) * s.in_channels + c;
                                sum += get(input, of_input, dtype) * get(weight, of_weight, dtype);
                            }
                        }
                    set(output, to, sum, dtype);
                }
    return CUDA_OPS_SUCCESS;
}

// A kernel, stride and padding of one axis, and an input that they leave an output of; apart: a patch of its own for
// every output.
static void draw_axis(int64_t &in, int64_t &out, int64_t &kernel, int64_t &stride, int64_t &padding, bool apart)
{
    kernel = one_in(3) ? 8 * random_in(1, 2) : random_in(1, 7);
    stride = apart ? kernel + (one_in(3) ? random_in(1, 3) : 0) : random_in(1, 8);
    padding = one_in(2) ? 0 : random_in(0, kernel);
    const int64_t after = one_in(2) ? 0 : random_in(0, 3);
    in = random_in(kernel > padding + after ? kernel - padding - after : 1, 24);
    if (one_in(2))
        in = (in + 7) / 8 * 8;
    out = (in + padding + after - kernel) / stride + 1;
    if (out == 1 && one_in(2))
        stride = 1; // as good as any other
}

// Either way, whatever the choice would be.
static size_t memory_workspace(const ConvCall &call, ConvDevice)
{
    return conv2d_patches_memory_workspace(call);
}

static size_t no_workspace(const ConvCall &, ConvDevice)
{
    return 0;
}

static cuda_ops_status in_shared_memory(const ConvCall &call, ConvDevice device)
{
    return conv2d_patches_forward(call, conv2d_patches_of(call), device);
}

static void patches(int64_t number)
{
    cuda_ops_conv2d_sizes s = {};
    const cuda_ops_conv2d_pass pass = (cuda_ops_conv2d_pass)random_below(3);
    const bool is_input = pass == CUDA_OPS_CONV2D_BACKWARD_INPUT, apart = one_in(2);
    s.batch = random_in(1, 3);
    s.groups = 1;
    s.in_channels = one_in(8) ? 8 * random_in(1, 2) : random_in(1, 5);
    s.out_channels = one_in(6) ? random_in(13, 130) : random_in(1, 12);
    draw_axis(s.in_height, s.out_height, s.kernel_height, s.stride_height, s.padding_top, apart);
    draw_axis(s.in_width, s.out_width, s.kernel_width, s.stride_width, s.padding_left, apart);
    s.dilation_height = s.dilation_width = 1;
    s.input_channels_last = one_in(2);
    s.output_channels_last = one_in(4) ? !s.input_channels_last : s.input_channels_last;
    s.weight_channels_last = one_in(4) ? !s.input_channels_last : s.input_channels_last;
    const bool in_float32 = is_input && (s.kernel_height > s.stride_height && s.out_height > 1) && one_in(3);
    const cuda_ops_dtype dtype = in_float32 ? CUDA_OPS_FLOAT32 : one_in(2) ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
    const ConvSizes sizes(s);
    const Array input = Array(sizes.of[1], dtype).random(), weight = Array(sizes.of[2], dtype).random();
    const Array output = Array(sizes.of[0], dtype).random(), bias = Array(s.out_channels, dtype).random();
    if (is_input && one_in(4)) // which are nowhere but where the kernel takes them
        for (int i = 0; i < 3; i++)
            set(output.data, random_in(0, output.count - 1), i == 2 ? NAN : INFINITY, dtype);
    const Array result(sizes.of[pass], dtype);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    describe("case %lld: pass %d, %lld x %lld x %lld x %lld -> %lld, kernel %lld x %lld, stride %lld, %lld, padding "
             "%lld, %lld, channels_last %d %d %d",
             (long long)number, pass, (long long)s.batch, (long long)s.in_channels, (long long)s.in_height,
             (long long)s.in_width, (long long)s.out_channels, (long long)s.kernel_height, (long long)s.kernel_width,
             (long long)s.stride_height, (long long)s.stride_width, (long long)s.padding_top, (long long)s.padding_left,
             s.input_channels_last, s.weight_channels_last, s.output_channels_last);

    const ConvOperands operands = {input, weight, output, with_bias ? &bias : nullptr, result};
    ConvCall call = call_of(pass, s, operands);
    const Answer supported = conv2d_patches_supports(call, current_device());
    if (!supported && is_input && !apart && // stride 1, or padding beyond the kernel
        ((s.stride_height == 1 && s.stride_width == 1) ||
         s.padding_top / s.stride_height >= ceil_div(s.kernel_height, s.stride_height) ||
         s.padding_left / s.stride_width >= ceil_div(s.kernel_width, s.stride_width)))
        return;
    if (!supported)
        fail("not supported: %s", supported.why_not);
    const bool fits = pass == CUDA_OPS_CONV2D_FORWARD && conv2d_patches_forward_fits(conv2d_patches_of(call));
    if (fits && one_in(2))
        run(call, no_workspace, in_shared_memory);
    else if (!is_input && one_in(2))
        run(call, memory_workspace, conv2d_patches_in_memory);
    else
        run(call, conv2d_patches_workspace, conv2d_patches);

    const double rounding = rounding_of(dtype);
    const ConvSums expected = sums_of(pass, s, operands);
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        expect_near("result", i, result[i], expected.values[(size_t)i],
                    rounding * (1e-3 + fabs(expected.values[(size_t)i])));
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "patches", patches);
}
