// conv2d's Winograd path, all passes, formats and tiles, against the sums as they stand. The product between its
// transforms is the GEMM's, for which a loop stands here; workspaces begin as NaN.
#include "conv2d_sums.h"
#include "gemm/paths.h"

using namespace emulation;

static int64_t products;

extern "C" int64_t cuda_ops_gemm_workspace_cuda(const cuda_ops_gemm_problem *, int)
{
    return 0;
}

double gemm_simt_microseconds(const cuda_ops_gemm_problem &, GemmDevice)
{
    return 1;
}

double conv2d_simt_microseconds(const ConvCall &, ConvDevice)
{
    return 1;
}

extern "C" cuda_ops_status cuda_ops_gemm_cuda(void *d, const void *a, const void *b, const void *bias, void *,
                                              const cuda_ops_gemm_problem *problem, int, cuda_ops_stream)
{
    const cuda_ops_gemm_problem &p = *problem;
    if (bias || p.m % 4 || p.n % 4 || p.lda % 4 || p.ldb % 4 || p.ldd % 4)
        fail("a GEMM of %lld x %lld with a bias, or not in whole vectors", (long long)p.m, (long long)p.n);
    for (int64_t i = 0; i < p.batch; i++)
        for (int64_t row = 0; row < p.m; row++)
            for (int64_t column = 0; column < p.n; column++) {
                double sum = 0;
                for (int64_t k = 0; k < p.k; k++)
                    sum += (double)((
                               const float *)a)[i * p.stride_a + (p.transpose_a ? k * p.lda + row : row * p.lda + k)] *
                           (double)((const float *)
                                        b)[i * p.stride_b + (p.transpose_b ? column * p.ldb + k : k * p.ldb + column)];
                ((float *)d)[i * p.stride_d + row * p.ldd + column] = (float)sum;
            }
    products++;
    return CUDA_OPS_SUCCESS;
}

static void winograd(int64_t number)
{
    cuda_ops_conv2d_sizes s = {};
    const int64_t paddings_y = random_in(0, 5), paddings_x = random_in(0, 5);
    s.batch = random_in(1, 3);
    s.groups = one_in(3) ? random_in(2, 4) : 1;
    s.stride_height = s.stride_width = s.dilation_height = s.dilation_width = 1;
    s.kernel_height = s.kernel_width = 3;
    s.in_channels = one_in(3) ? random_in(1, 45) : random_in(1, 8);
    s.out_channels = one_in(3) ? random_in(1, 45) : random_in(1, 8);
    if (s.groups > 1)
        s.in_channels = s.groups * 4 * random_in(1, 5), s.out_channels = s.groups * 4 * random_in(1, 5);
    s.in_height = random_in(paddings_y < 2 ? 3 - paddings_y : 1, 14);
    s.in_width = random_in(paddings_x < 2 ? 3 - paddings_x : 1, 18);
    s.padding_top = random_in(0, paddings_y);
    s.padding_left = random_in(0, paddings_x);
    s.out_height = s.in_height + paddings_y - 2;
    s.out_width = s.in_width + paddings_x - 2;
    s.input_channels_last = one_in(2), s.weight_channels_last = one_in(2), s.output_channels_last = one_in(2);
    s.winograd = one_in(2) ? 2 : 4;
    const cuda_ops_conv2d_pass pass = (cuda_ops_conv2d_pass)random_below(3);
    const int64_t C = s.in_channels, K = s.out_channels, N = s.batch;
    const ConvSizes sizes(s);
    const Array input = Array(sizes.of[1], CUDA_OPS_FLOAT32).random(),
                weight = Array(sizes.of[2], CUDA_OPS_FLOAT32).random();
    const Array output = Array(sizes.of[0], CUDA_OPS_FLOAT32).random(), bias = Array(K, CUDA_OPS_FLOAT32).random();
    const Array result(sizes.of[pass], CUDA_OPS_FLOAT32);
    const bool with_bias = pass == CUDA_OPS_CONV2D_FORWARD && one_in(2);
    describe("case %lld: pass %d, F(%lld), %lld x %lld -> %lld of %lld groups, %lld x %lld, padding %lld of %lld, %lld "
             "of %lld, "
             "channels_last %d %d %d",
             (long long)number, pass, (long long)s.winograd, (long long)N, (long long)C, (long long)K,
             (long long)s.groups, (long long)s.in_height, (long long)s.in_width, (long long)s.padding_top,
             (long long)paddings_y, (long long)s.padding_left, (long long)paddings_x, s.input_channels_last,
             s.weight_channels_last, s.output_channels_last);

    const ConvOperands operands = {input, weight, output, with_bias ? &bias : nullptr, result};
    ConvCall call = call_of(pass, s, operands);
    const Answer supported = conv2d_winograd_supports(call, current_device());
    if (!supported)
        fail("not supported: %s", supported.why_not);
    run(call, conv2d_winograd_workspace, conv2d_winograd);

    const ConvSums expected = sums_of(pass, s, operands);
    double largest = 0;
    for (const double magnitude : expected.magnitudes)
        largest = magnitude > largest ? magnitude : largest;
    // An element's error is that of its whole tile.
    for (int64_t i = 0; i < sizes.of[pass]; i++)
        expect_near("result", i, result[i], expected.values[(size_t)i], 1e-6 * largest + 1e-6);
}

int main(int argc, char **argv)
{
    const int status = run_cases(argc, argv, "winograd", winograd);
    printf("winograd: %lld products\n", (long long)products);
    return status;
}
