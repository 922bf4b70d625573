// conv2d by way of columns in memory, all passes, kernels, strides, paddings, dilations and orders of the weight,
// against the sums as they stand. The product of the columns is the GEMM's, for which a loop stands here; workspaces
// begin as NaN.
#include "conv2d_sums.h"
#include "gemm/paths.h"

using namespace emulation;

extern "C" int64_t cuda_ops_gemm_workspace_cuda(const cuda_ops_gemm_problem *, int)
{
    return 0;
}

int gemm_path_on(const cuda_ops_gemm_problem &, GemmDevice, int)
{
    return GEMM_SIMT;
}

double conv2d_im2col_microseconds(const ConvCall &, ConvDevice)
{
    return 1;
}

double conv2d_simt_expected_microseconds(const ConvCall &, ConvDevice)
{
    return 1;
}

extern "C" cuda_ops_status cuda_ops_gemm_cuda(void *d, const void *a, const void *b, const void *bias, void *,
                                              const cuda_ops_gemm_problem *problem, int, cuda_ops_stream)
{
    const cuda_ops_gemm_problem &p = *problem;
    for (int64_t row = 0; row < p.m; row++)
        for (int64_t column = 0; column < p.n; column++) {
            double sum = bias ? ((const float *)bias)[column] : 0;
            for (int64_t k = 0; k < p.k; k++)
                sum += get(a, p.transpose_a ? k * p.lda + row : row * p.lda + k, p.dtype) *
                       get(b, p.transpose_b ? column * p.ldb + k : k * p.ldb + column, p.dtype);
            ((float *)d)[row * p.ldd + column] = (float)sum;
        }
    return CUDA_OPS_SUCCESS;
}

// A kernel, stride, dilation and padding of one axis, and an input that they leave an output of.
static void draw_axis(int64_t &in, int64_t &out, int64_t &kernel, int64_t &stride, int64_t &dilation, int64_t &padding)
{
    kernel = random_in(1, 4), stride = random_in(1, 3), dilation = random_in(1, 2), padding = random_in(0, 3);
    const int64_t after = random_in(0, 3), extent = (kernel - 1) * dilation + 1;
    in = random_in(extent > padding + after ? extent - padding - after : 1, 12);
    out = (in + padding + after - extent) / stride + 1;
}

static void im2col(int64_t number)
{
    cuda_ops_conv2d_sizes s = {};
    s.batch = random_in(1, 3);
    s.groups = 1;
    s.in_channels = one_in(2) ? 4 * random_in(1, 6) : random_in(1, 20);
    s.out_channels = random_in(1, 12);
    draw_axis(s.in_height, s.out_height, s.kernel_height, s.stride_height, s.dilation_height, s.padding_top);
    draw_axis(s.in_width, s.out_width, s.kernel_width, s.stride_width, s.dilation_width, s.padding_left);
    s.input_channels_last = s.output_channels_last = 1;
    s.weight_channels_last = one_in(2);
    const cuda_ops_conv2d_pass pass = (cuda_ops_conv2d_pass)random_below(3);
    // 16 bits: the gradient of the input alone.
    const cuda_ops_dtype dtype = pass != CUDA_OPS_CONV2D_BACKWARD_INPUT || one_in(2) ? CUDA_OPS_FLOAT32
                                 : one_in(2)                                         ? CUDA_OPS_FLOAT16
                                                                                     : CUDA_OPS_BFLOAT16;
    const int64_t C = s.in_channels, K = s.out_channels, N = s.batch;
    const ConvSizes sizes(s);
    const Array input = Array(sizes.of[1], dtype).random(), weight = Array(sizes.of[2], dtype).random();
    const Array output = Array(sizes.of[0], dtype).random(), bias = Array(K, dtype).random();
    const Array result(sizes.of[pass], dtype);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    describe("case %lld: pass %d, %lld x %lld x %lld x %lld -> %lld, kernel %lld x %lld, stride %lld, %lld, padding "
             "%lld, %lld, dilation %lld, %lld, weight channels_last %d, dtype %d",
             (long long)number, pass, (long long)N, (long long)C, (long long)s.in_height, (long long)s.in_width,
             (long long)K, (long long)s.kernel_height, (long long)s.kernel_width, (long long)s.stride_height,
             (long long)s.stride_width, (long long)s.padding_top, (long long)s.padding_left,
             (long long)s.dilation_height, (long long)s.dilation_width, s.weight_channels_last, dtype);

    const ConvOperands operands = {input, weight, output, with_bias ? &bias : nullptr, result};
    ConvCall call = call_of(pass, s, operands);
    const Answer supported = conv2d_im2col_supports(call, current_device());
    if (!supported)
        fail("not supported: %s", supported.why_not);
    run(call, conv2d_im2col_workspace, conv2d_im2col);

    const ConvSums expected = sums_of(pass, s, operands);
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        expect_near("result", i, result[i], expected.values[(size_t)i],
                    1e-3 + rounding_of(dtype) * fabs(expected.values[(size_t)i]));
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "im2col", im2col);
}
