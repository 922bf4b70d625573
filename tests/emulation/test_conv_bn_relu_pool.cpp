// conv_bn_relu_pool's paths in float32, one_channel and tiled, both passes, against the formulas in double. The
// gradients are checked from what forward kept, since a maximum may be another one after rounding.
#include "cases.h"
#include "conv_bn_relu_pool/paths.h"
#include "conv_bn_relu_pool/tiled_sm80/tile.cuh"

using namespace emulation;

static int64_t by_winograd;

// wgmma is not emulated.
bool wgmma_convolve_fits(const tiled_problem &)
{
    return false;
}

bool wgmma_gradient_fits(const tiled_problem &)
{
    return false;
}

cuda_ops_status wgmma_convolve_backward(float *, const float *, const float *, const tiled_problem &, cudaStream_t)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}

bool wgmma_weight_fits(const tiled_problem &)
{
    return false;
}

int64_t wgmma_weight_tiles(const tiled_problem &)
{
    return 0;
}

cuda_ops_status wgmma_weight_gradient(float4 *, const gradient_source &, const float *, const tiled_problem &, int64_t,
                                      cudaStream_t)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}

int64_t wgmma_convolve_blocks(const tiled_problem &)
{
    return 0;
}

cuda_ops_status wgmma_convolve_forward(float *, batch_moments, const window_maxima &, const float *, const float *,
                                       const tiled_problem &, cudaStream_t)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}

bool wgmma_backward_fits(const tiled_problem &)
{
    return false;
}

cuda_ops_status wgmma_backward(float *, float4 *, const gradient_source &, const float *, const float *,
                               const tiled_problem &, int64_t, cudaStream_t)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}

struct Images { // channels_last or contiguous
    int64_t channels, height, width;
    bool last;

    int64_t at(int64_t n, int64_t c, int64_t y, int64_t x) const
    {
        return last ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
    }
};

static Array floats(int64_t count)
{
    Array array(count + 8, CUDA_OPS_FLOAT32);
    while ((uintptr_t)array.data % 16)
        array = Array(count + 8, CUDA_OPS_FLOAT32);
    return array;
}

// What both paths have of sizes, and what they are checked against.
struct Block {
    int64_t N, C, K, H, W, h, w;
    Images in, out, pooled;
    std::vector<double> y, mean, variance;

    double input_at(const Array &input, int64_t n, int64_t c, int64_t y0, int64_t x0) const
    {
        return y0 < 0 || y0 >= H || x0 < 0 || x0 >= W ? 0.0 : input[in.at(n, c, y0, x0)];
    }
    void convolve(const Array &input, const Array &weight)
    {
        y.assign((size_t)(N * K * H * W), 0.0), mean.assign((size_t)K, 0.0), variance.assign((size_t)K, 0.0);
        const double count = (double)(N * H * W);
        for (int64_t k = 0; k < K; k++) {
            for (int64_t n = 0; n < N; n++)
                for (int64_t i = 0; i < H; i++)
                    for (int64_t j = 0; j < W; j++) {
                        double &sum = y[(size_t)out.at(n, k, i, j)];
                        for (int64_t c = 0; c < C; c++)
                            for (int64_t tap = 0; tap < 9; tap++)
                                sum += weight[(k * C + c) * 9 + tap] *
                                       input_at(input, n, c, i + tap / 3 - 1, j + tap % 3 - 1);
                        mean[(size_t)k] += sum / count;
                    }
            for (int64_t n = 0; n < N; n++)
                for (int64_t i = 0; i < H; i++)
                    for (int64_t j = 0; j < W; j++) {
                        const double delta = y[(size_t)out.at(n, k, i, j)] - mean[(size_t)k];
                        variance[(size_t)k] += delta * delta / count;
                    }
        }
    }
};

// Where a path says the maximum of a window was: 0 to 3, or -1.
typedef int (*Position)(uint8_t);

static int tiled_position(uint8_t byte)
{
    return byte == CUDA_OPS_POOL_INACTIVE ? -1 : byte;
}

static int one_position(uint8_t byte)
{
    return byte == 0x80 ? 0 : byte == 0x40 ? 1 : byte == 0x20 ? 2 : byte == 0x10 ? 3 : -1;
}

static void check_pooling(const Block &b, const Array &output, const std::vector<uint8_t> &argmax, Position position,
                          const Images &argmax_layout, const Array &gamma, const Array &beta, double eps)
{
    for (int64_t n = 0; n < b.N; n++)
        for (int64_t k = 0; k < b.K; k++)
            for (int64_t i = 0; i < b.h; i++)
                for (int64_t j = 0; j < b.w; j++) {
                    const double scale = gamma[k] / sqrt(b.variance[(size_t)k] + eps);
                    double best = 0.0;
                    for (int64_t e = 0; e < 4; e++)
                        best =
                            fmax(best, (b.y[(size_t)b.out.at(n, k, 2 * i + e / 2, 2 * j + e % 2)] - b.mean[(size_t)k]) *
                                               scale +
                                           beta[k]);
                    const int at = position(argmax[(size_t)argmax_layout.at(n, k, i, j)]);
                    const double taken =
                        at < 0 ? 0.0
                               : (b.y[(size_t)b.out.at(n, k, 2 * i + at / 2, 2 * j + at % 2)] - b.mean[(size_t)k]) *
                                         scale +
                                     beta[k];
                    expect_near("output", b.pooled.at(n, k, i, j), output[b.pooled.at(n, k, i, j)], best, 2e-4);
                    expect_near("value at argmax", b.pooled.at(n, k, i, j), taken, best, 2e-4);
                }
}

// The gradients, dy by the formula from the positions that forward kept.
static void check_gradients(const Block &b, const Array &input, const Array &weight, const Array &grad_output,
                            const std::vector<uint8_t> &argmax, Position position, const Images &argmax_layout,
                            const Array &gamma, double eps, const Array *grad_input, const Array &grad_weight,
                            const Array &grad_gamma, const Array &grad_beta)
{
    std::vector<double> dy((size_t)(b.N * b.K * b.H * b.W)), dx((size_t)(b.N * b.C * b.H * b.W));
    const double count = (double)(b.N * b.H * b.W);
    double largest = 0.0;
    std::vector<double> dw((size_t)(b.K * b.C * 9));
    for (int64_t k = 0; k < b.K; k++) {
        const double rstd = 1.0 / sqrt(b.variance[(size_t)k] + eps);
        double sum = 0.0, dot = 0.0;
        for (int64_t n = 0; n < b.N; n++)
            for (int64_t i = 0; i < b.h; i++)
                for (int64_t j = 0; j < b.w; j++) {
                    const int at = position(argmax[(size_t)argmax_layout.at(n, k, i, j)]);
                    if (at < 0)
                        continue;
                    const int64_t to = b.out.at(n, k, 2 * i + at / 2, 2 * j + at % 2);
                    const double dz = grad_output[b.pooled.at(n, k, i, j)];
                    dy[(size_t)to] = dz;
                    sum += dz, dot += dz * (b.y[(size_t)to] - b.mean[(size_t)k]) * rstd;
                }
        expect_near("grad_beta", k, grad_beta[k], sum, 1e-4 * (1 + fabs(sum)));
        expect_near("grad_gamma", k, grad_gamma[k], dot, 1e-3 * (1 + fabs(dot)));
        for (int64_t n = 0; n < b.N; n++)
            for (int64_t i = 0; i < b.H; i++)
                for (int64_t j = 0; j < b.W; j++) {
                    const int64_t at = b.out.at(n, k, i, j);
                    const double normalised = (b.y[(size_t)at] - b.mean[(size_t)k]) * rstd;
                    const double g = gamma[k] * rstd * (dy[(size_t)at] - sum / count - normalised * dot / count);
                    dy[(size_t)at] = g;
                    for (int64_t c = 0; c < b.C; c++)
                        for (int64_t tap = 0; tap < 9; tap++) {
                            const int64_t iy = i + tap / 3 - 1, ix = j + tap % 3 - 1;
                            if (iy < 0 || iy >= b.H || ix < 0 || ix >= b.W)
                                continue;
                            dw[(size_t)((k * b.C + c) * 9 + tap)] += g * input[b.in.at(n, c, iy, ix)];
                            dx[(size_t)b.in.at(n, c, iy, ix)] += g * weight[(k * b.C + c) * 9 + tap];
                        }
                }
    }
    for (const double g : dw)
        largest = fmax(largest, fabs(g));
    for (int64_t i = 0; i < b.K * b.C * 9; i++)
        expect_near("grad_weight", i, grad_weight[i], dw[(size_t)i], 2e-5 * largest + 1e-5);
    largest = 0.0;
    for (const double g : dx)
        largest = fmax(largest, fabs(g));
    for (int64_t i = 0; grad_input && i < b.N * b.C * b.H * b.W; i++)
        expect_near("grad_input", i, (*grad_input)[i], dx[(size_t)i], 2e-5 * largest + 1e-5);
}

static Block block_of(int64_t N, int64_t C, int64_t K, int64_t H, int64_t W, bool in_last, bool pooled_last)
{
    Block b = {N,  C,  K, H, W, H / 2, W / 2, {C, H, W, in_last}, {K, H, W, true}, {K, H / 2, W / 2, pooled_last},
               {}, {}, {}};
    return b;
}

static void tiled(int64_t number)
{
    cuda_ops_conv_bn_relu_pool_tiled_sizes s = {};
    s.batch = random_in(1, 3);
    s.in_channels = (int32_t)(8 * random_in(2, one_in(3) ? 8 : 4));
    s.out_channels = (int32_t)(8 * random_in(2, one_in(3) ? 8 : 5));
    s.height = (int32_t)random_in(2, 9), s.width = (int32_t)random_in(2, one_in(4) ? 19 : 9);
    s.output_channels_last = one_in(2);
    s.allow_winograd = 1;
    Block b = block_of(s.batch, s.in_channels, s.out_channels, s.height, s.width, true, s.output_channels_last != 0);
    const int64_t images = b.N * b.C * b.H * b.W, outputs = b.N * b.K * b.H * b.W, windows = b.N * b.K * b.h * b.w;
    describe("tiled case %lld: %lld x %lld -> %lld, %lld x %lld, channels_last %d", (long long)number, (long long)b.N,
             (long long)b.C, (long long)b.K, (long long)b.H, (long long)b.W, s.output_channels_last);
    const Array input = floats(images).random(), weight = floats(b.K * b.C * 9).random();
    const Array gamma = floats(b.K).random(), beta = floats(b.K).random(), output = floats(windows);
    const Array conv_output = floats(outputs), maximum = floats(windows);
    const Array statistics(2 * b.K, CUDA_OPS_FLOAT64);
    uint8_t *const argmax = (uint8_t *)device_memory((size_t)windows, 0);
    const size_t bytes = (size_t)conv_bn_relu_pool_tiled_workspace(&s);
    void *const workspace = device_memory(bytes, 0);
    memset(workspace, 0xff, bytes);
    cuda_ops_norm_parameters norm = {gamma.data, beta.data, CUDA_OPS_FLOAT32, 1e-5};
    const cuda_ops_running_statistics running = {};
    expect_success(conv_bn_relu_pool_tiled_forward((float *)output.data, (float *)conv_output.data, argmax,
                                                   (float *)maximum.data, (double *)statistics.data, workspace,
                                                   &running, (const float *)input.data, (const float *)weight.data,
                                                   nullptr, &norm, &s, CUDA_OPS_FLOAT32, nullptr));
    b.convolve(input, weight);
    const double scale = sqrt((double)b.C);
    for (int64_t i = 0; i < outputs; i++)
        expect_near("conv_output", i, conv_output[i], b.y[(size_t)i], 2e-5 * scale);
    for (int64_t k = 0; k < b.K; k++) {
        expect_near("mean", k, statistics[k], b.mean[(size_t)k], 1e-5 * scale);
        expect_near("variance", b.K + k, statistics[b.K + k], b.variance[(size_t)k], 1e-5 * b.variance[(size_t)k]);
    }
    const std::vector<uint8_t> where(argmax, argmax + windows);
    const Images last = {b.K, b.h, b.w, true};
    check_pooling(b, output, where, tiled_position, last, gamma, beta, norm.eps);

    const Array grad_output = floats(windows).random(), grad_input = floats(images),
                grad_weight = floats(b.K * b.C * 9);
    const Array grad_bias = floats(b.K), grad_gamma = floats(b.K), grad_beta = floats(b.K);
    memset(workspace, 0xff, bytes);
    expect_success(conv_bn_relu_pool_tiled_backward(
        (float *)grad_input.data, (float *)grad_weight.data, grad_bias.data, grad_gamma.data, grad_beta.data, workspace,
        (const float *)grad_output.data, argmax, (const float *)maximum.data, (const float *)conv_output.data,
        (const double *)statistics.data, (const float *)input.data, (const float *)weight.data, &norm, &s,
        CUDA_OPS_FLOAT32, nullptr));
    check_gradients(b, input, weight, grad_output, where, tiled_position, last, gamma, norm.eps, &grad_input,
                    grad_weight, grad_gamma, grad_beta);
    by_winograd++;
}

static void one_channel(int64_t number)
{
    cuda_ops_conv_bn_relu_pool_one_sizes s = {};
    s.batch = random_in(1, 4);
    s.channels = one_in(2) ? random_in(1, 70) : 4 * random_in(1, 12);
    s.height = (int32_t)random_in(2, 16), s.width = (int32_t)random_in(2, one_in(4) ? 40 : 16);
    if (one_in(3))
        s.height = s.width = 28;
    s.output_channels_last = one_in(2);
    s.allow_tf32 = one_in(2); // the numbers have so few bits that rounding changes nothing
    const bool last = s.output_channels_last != 0;
    Block b = block_of(s.batch, 1, s.channels, s.height, s.width, false, last);
    const int64_t images = b.N * b.H * b.W, windows = b.N * b.K * b.h * b.w;
    describe("one_channel case %lld: %lld x 1 -> %lld, %lld x %lld, channels_last %d", (long long)number,
             (long long)b.N, (long long)b.K, (long long)b.H, (long long)b.W, last);
    const Array input = Array(images, CUDA_OPS_FLOAT32).random(), weight = Array(b.K * 9, CUDA_OPS_FLOAT32).random();
    const Array gamma = Array(b.K, CUDA_OPS_FLOAT32).random(), beta = Array(b.K, CUDA_OPS_FLOAT32).random();
    const Array output(windows, CUDA_OPS_FLOAT32);
    const int64_t doubles = conv_bn_relu_pool_one_channel_statistics(b.K);
    const Array statistics(doubles, CUDA_OPS_FLOAT64);
    uint8_t *const argmax = (uint8_t *)device_memory((size_t)windows, random_phase(1));
    const size_t bytes = (size_t)conv_bn_relu_pool_one_channel_workspace(&s);
    void *const workspace = device_memory(bytes, 0);
    memset(workspace, 0xff, bytes);
    const cuda_ops_norm_parameters norm = {gamma.data, beta.data, CUDA_OPS_FLOAT32, 1e-5};
    const cuda_ops_running_statistics running = {};
    expect_success(conv_bn_relu_pool_one_channel_forward(output.data, argmax, (double *)statistics.data, workspace,
                                                         &running, input.data, weight.data, nullptr, &norm, &s,
                                                         CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT32, nullptr));
    b.convolve(input, weight);
    for (int64_t k = 0; k < b.K; k++) {
        expect_near("mean", k, statistics[k], b.mean[(size_t)k], 1e-5);
        expect_near("variance", b.K + k, statistics[b.K + k], b.variance[(size_t)k],
                    1e-5 + 1e-5 * b.variance[(size_t)k]);
    }
    const std::vector<uint8_t> where(argmax, argmax + windows);
    check_pooling(b, output, where, one_position, b.pooled, gamma, beta, norm.eps);

    const Array grad_output = Array(windows, CUDA_OPS_FLOAT32).random(), grad_weight(b.K * 9, CUDA_OPS_FLOAT32);
    const Array grad_bias(b.K, CUDA_OPS_FLOAT32), grad_gamma(b.K, CUDA_OPS_FLOAT32), grad_beta(b.K, CUDA_OPS_FLOAT32);
    memset(workspace, 0xff, bytes);
    expect_success(conv_bn_relu_pool_one_channel_backward(grad_weight.data, grad_bias.data, grad_gamma.data,
                                                          grad_beta.data, workspace, grad_output.data, argmax,
                                                          (const double *)statistics.data, input.data, weight.data,
                                                          &norm, &s, CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT32, nullptr));
    check_gradients(b, input, weight, grad_output, where, one_position, b.pooled, gamma, norm.eps, nullptr, grad_weight,
                    grad_gamma, grad_beta);
}

int main(int argc, char **argv)
{
    const int status = run_cases(argc, argv, "conv_bn_relu_pool", [](int64_t number) {
        if (number % 2)
            one_channel(number);
        else
            tiled(number);
    });
    printf("conv_bn_relu_pool: %lld by Winograd's algorithm\n", (long long)by_winograd);
    return status;
}
