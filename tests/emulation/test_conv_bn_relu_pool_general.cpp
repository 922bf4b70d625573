// The pooling of conv_bn_relu_pool's path `general`, both passes, in every type and both layouts, by vectors of channels
// where they fit and element by element where not, against the formulas in double. The gradient is checked from what
// forward kept, since a maximum may be another one after rounding.
#include "cases.h"
#include "conv_bn_relu_pool/paths.h"
#include "cuda_ops/batch_norm.h"

using namespace emulation;

// Of the whole block, whose other steps are not emulated here.
size_t cuda_ops_conv2d_workspace_cuda(cuda_ops_conv2d_pass, const cuda_ops_conv2d_sizes *, cuda_ops_dtype, int)
{
    return 0;
}
cuda_ops_status cuda_ops_conv2d_forward_cuda(void *, const void *, const void *, const void *,
                                             const cuda_ops_conv2d_sizes *, void *, int, cuda_ops_dtype,
                                             cuda_ops_stream)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}
cuda_ops_status cuda_ops_conv2d_backward_weight_cuda(void *, const void *, const void *, const cuda_ops_conv2d_sizes *,
                                                     void *, int, cuda_ops_dtype, cuda_ops_stream)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}
cuda_ops_status cuda_ops_conv2d_backward_input_cuda(void *, const void *, const void *, const cuda_ops_conv2d_sizes *,
                                                    void *, int, cuda_ops_dtype, cuda_ops_stream)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}

static int64_t by_vectors;

static cuda_ops_pool_axis random_axis()
{
    cuda_ops_pool_axis axis;
    axis.kernel = (int32_t)random_in(1, 3);
    axis.stride = (int32_t)random_in(1, 3);
    axis.padding = (int32_t)random_in(0, axis.kernel / 2);
    axis.dilation = 1;
    axis.input = (int32_t)random_in(axis.kernel, 9);
    axis.output =
        (int32_t)cuda_ops_pool_output_size(axis.input, axis.kernel, axis.stride, axis.padding, 1, random_in(0, 1));
    return axis;
}

static int64_t index_of(const cuda_ops_pool2d &pool, int64_t height, int64_t width, int64_t n, int64_t c, int64_t h,
                        int64_t w)
{
    return pool.channels_last ? ((n * height + h) * width + w) * pool.channels + c
                              : ((n * pool.channels + c) * height + h) * width + w;
}

// Room for 16 bytes more, by which it is moved to where it is wanted.
static Array array_of(int64_t count, cuda_ops_dtype dtype, bool aligned)
{
    const int64_t bytes = bytes_of(dtype);
    Array array(count + 32 / bytes, dtype);
    array.count = count;
    array.data = (char *)array.data + (16 - (uintptr_t)array.data % 16) % 16 + (aligned ? 0 : bytes);
    return array;
}

static void one_case(int64_t number)
{
    const cuda_ops_dtype dtypes[] = {CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT64, CUDA_OPS_FLOAT16, CUDA_OPS_BFLOAT16};
    const cuda_ops_dtype dtype = dtypes[number % 4];
    const int64_t channel_counts[] = {1, 3, 8, 16, 24, 40};
    cuda_ops_pool2d pool;
    pool.batch = random_in(1, 3);
    pool.channels = channel_counts[random_in(0, 5)];
    pool.height = random_axis(), pool.width = random_axis();
    pool.channels_last = random_in(0, 3) > 0;
    const bool aligned = random_in(0, 3) > 0;
    by_vectors += pool.channels_last && aligned && pool.channels % 8 == 0;
    const int64_t H = pool.height.input, W = pool.width.input, h = pool.height.output, w = pool.width.output;
    const int64_t inputs = pool.batch * pool.channels * H * W, outputs = pool.batch * pool.channels * h * w;
    Array conv = array_of(inputs, dtype, aligned).random(), output = array_of(outputs, dtype, aligned),
          maximum = array_of(outputs, dtype, aligned), grad = array_of(outputs, dtype, aligned).random(),
          grad_conv = array_of(inputs, dtype, aligned);
    Array mean(pool.channels, CUDA_OPS_FLOAT64), variance(pool.channels, CUDA_OPS_FLOAT64);
    Array gamma(pool.channels, CUDA_OPS_FLOAT32), beta(pool.channels, CUDA_OPS_FLOAT32);
    mean.random(), gamma.random(), beta.random();
    for (int64_t c = 0; c < pool.channels; c++)
        set(variance.data, c, (double)random_in(16, 256) / 64, CUDA_OPS_FLOAT64);
    const cuda_ops_norm_parameters norm = {gamma.data, beta.data, CUDA_OPS_FLOAT32, 1e-5};
    uint8_t *const argmax = (uint8_t *)device_memory((size_t)outputs, 0);
    void *const workspace = device_memory((size_t)cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(&pool), 0);
    expect_success(cuda_ops_conv_bn_relu_pool_pool_forward_cuda(output.data, argmax, maximum.data, workspace, nullptr,
                                                                conv.data, mean.data, variance.data, &norm, &pool,
                                                                dtype, CUDA_OPS_FLOAT64, nullptr));
    const double tolerance = dtype == CUDA_OPS_BFLOAT16  ? 0.06
                             : dtype == CUDA_OPS_FLOAT16 ? 0.008
                             : dtype == CUDA_OPS_FLOAT32 ? 2e-5
                                                         : 1e-12;
    std::vector<double> dz((size_t)inputs, 0.0);
    for (int64_t n = 0; n < pool.batch; n++)
        for (int64_t c = 0; c < pool.channels; c++) {
            const double scale = gamma[c] / sqrt(variance[c] + norm.eps);
            for (int64_t i = 0; i < h; i++)
                for (int64_t j = 0; j < w; j++) {
                    double best = 0.0;
                    for (int64_t a = 0; a < pool.height.kernel; a++)
                        for (int64_t b = 0; b < pool.width.kernel; b++) {
                            const int64_t y = cuda_ops_pool_start(pool.height, (int32_t)i) + a;
                            const int64_t x = cuda_ops_pool_start(pool.width, (int32_t)j) + b;
                            if (y >= 0 && y < H && x >= 0 && x < W)
                                best = fmax(best, (conv[index_of(pool, H, W, n, c, y, x)] - mean[c]) * scale + beta[c]);
                        }
                    const int64_t at = index_of(pool, h, w, n, c, i, j);
                    expect_near("output", at, output[at], best, tolerance);
                    if (argmax[at] == CUDA_OPS_POOL_INACTIVE) {
                        expect_near("inactive output", at, output[at], 0.0, 0.0);
                        continue;
                    }
                    const int64_t y = cuda_ops_pool_start(pool.height, (int32_t)i) + argmax[at] / pool.width.kernel;
                    const int64_t x = cuda_ops_pool_start(pool.width, (int32_t)j) + argmax[at] % pool.width.kernel;
                    if (y < 0 || y >= H || x < 0 || x >= W)
                        fail("argmax[%lld] lies outside", (long long)at);
                    const int64_t from = index_of(pool, H, W, n, c, y, x);
                    expect_near("maximum", at, maximum[at], conv[from], 0.0);
                    expect_near("taken", at, output[at], (conv[from] - mean[c]) * scale + beta[c], tolerance);
                    dz[(size_t)from] += grad[at];
                }
        }
    Array grad_gamma(pool.channels, CUDA_OPS_FLOAT32), grad_beta(pool.channels, CUDA_OPS_FLOAT32);
    expect_success(cuda_ops_conv_bn_relu_pool_pool_backward_cuda(
        grad_conv.data, grad_gamma.data, grad_beta.data, nullptr, workspace, grad.data, argmax, maximum.data, conv.data,
        (const double *)mean.data, (const double *)variance.data, &norm, &pool, dtype, dtype, nullptr));
    const double count = (double)(pool.batch * H * W);
    for (int64_t c = 0; c < pool.channels; c++) {
        const double rstd = 1 / sqrt(variance[c] + norm.eps);
        double sum = 0.0, dot = 0.0, size = 1.0;
        const auto all = [&](auto &&function) {
            for (int64_t n = 0; n < pool.batch; n++)
                for (int64_t y = 0; y < H; y++)
                    for (int64_t x = 0; x < W; x++)
                        function(index_of(pool, H, W, n, c, y, x));
        };
        all([&](int64_t i) {
            const double normalised = (conv[i] - mean[c]) * rstd;
            sum += dz[(size_t)i], dot += dz[(size_t)i] * normalised;
            size += fabs(dz[(size_t)i]) * (1 + fabs(normalised));
        });
        expect_near("grad_norm_bias", c, grad_beta[c], sum, 1e-6 * size);
        expect_near("grad_norm_weight", c, grad_gamma[c], dot, 1e-6 * size);
        all([&](int64_t i) {
            const double normalised = (conv[i] - mean[c]) * rstd;
            const double expected = gamma[c] * rstd * (dz[(size_t)i] - sum / count - normalised * dot / count);
            expect_near("grad_conv_output", i, grad_conv[i], expected, tolerance * (1 + fabs(expected)));
        });
    }
}

int main(int argc, char **argv)
{
    const int status = run_cases(argc, argv, "conv_bn_relu_pool_general", one_case);
    printf("conv_bn_relu_pool_general: %lld by vectors\n", (long long)by_vectors);
    return status;
}
