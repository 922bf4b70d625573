// window_attention and its backward: windows around those of a tile, shifted, in grids, with and without a bias and its
// gradient, heads of whole vectors and not; against the C11 kernels, of the same numbers in double.
#include "cases.h"
#include "cuda_ops/window_attention.h"

using namespace emulation;

static std::vector<double> doubles(const Array &array)
{
    std::vector<double> values((size_t)array.count);
    for (int64_t i = 0; i < array.count; i++)
        values[(size_t)i] = array[i];
    return values;
}

static void expect_alike(const char *what, const Array &actual, const std::vector<double> &expected, double tolerance)
{
    double square = 0;
    for (const double value : expected)
        square += value * value;
    const double size = expected.empty() ? 0 : sqrt(square / (double)expected.size());
    for (int64_t i = 0; i < actual.count; i++)
        expect_near(what, i, actual[i], expected[(size_t)i], tolerance * (fabs(expected[(size_t)i]) + size) + 1e-6);
}

static void window_attention(int64_t number)
{
    const cuda_ops_dtype dtype = one_in(4) ? DTYPES[random_below(2)] : DTYPES[2 + random_below(2)];
    cuda_ops_windows w = {};
    w.window_height = random_in(1, one_in(3) ? 9 : 8), w.window_width = random_in(1, one_in(3) ? 9 : 8);
    w.grid = one_in(3);
    w.shift_y = w.grid || one_in(3) ? 0 : random_in(0, w.window_height - 1);
    w.shift_x = w.grid || one_in(3) ? 0 : random_in(0, w.window_width - 1);
    w.images = random_in(1, 2), w.heads = random_in(1, 3);
    w.height = w.window_height * random_in(1, 3), w.width = w.window_width * random_in(1, 3);
    w.head_dim = one_in(3) ? random_in(1, 70) : 8 * random_in(1, 8);
    w.scale = 0.25 * (double)random_in(1, 4) / sqrt((double)w.head_dim);
    const int64_t pixels = w.images * w.height * w.width, channels = w.heads * w.head_dim;
    const int64_t positions = cuda_ops_window_positions(&w), squares = w.heads * positions * positions;
    const cuda_ops_dtype wide = dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32;
    const Array qkv = Array(3 * pixels * channels, dtype).random(), grad = Array(pixels * channels, dtype).random();
    const Array bias = Array(squares, wide).random(), output(pixels * channels, dtype);
    const Array grad_qkv(3 * pixels * channels, dtype), grad_bias(squares, wide);
    const bool has_bias = !one_in(4), wants_bias = has_bias && !one_in(4);
    describe("case %lld: %lld images of %lld x %lld, windows of %lld x %lld, shift %lld, %lld, grid %d, %lld heads of "
             "%lld, dtype %d, bias %d, %d",
             (long long)number, (long long)w.images, (long long)w.height, (long long)w.width,
             (long long)w.window_height, (long long)w.window_width, (long long)w.shift_y, (long long)w.shift_x, w.grid,
             (long long)w.heads, (long long)w.head_dim, dtype, has_bias, wants_bias);
    const void *const b = has_bias ? bias.data : nullptr;
    expect_success(cuda_ops_window_attention_forward_cuda(output.data, qkv.data, b, &w, dtype, nullptr));
    void *const workspace = device_memory((size_t)cuda_ops_window_attention_workspace_cuda(&w, wants_bias, dtype), 0);
    expect_success(cuda_ops_window_attention_backward_cuda(grad_qkv.data, wants_bias ? grad_bias.data : nullptr,
                                                           workspace, grad.data, qkv.data, b, &w, dtype, nullptr));
    const std::vector<double> exact_qkv = doubles(qkv), exact_bias = doubles(bias), exact_grad = doubles(grad);
    std::vector<double> expected((size_t)output.count), of_qkv((size_t)grad_qkv.count), of_bias((size_t)squares);
    const double *const eb = has_bias ? exact_bias.data() : nullptr;
    expect_success(cuda_ops_window_attention_forward_cpu(expected.data(), exact_qkv.data(), eb, &w, 0,
                                                         cuda_ops_window_count(&w) * w.heads, CUDA_OPS_FLOAT64));
    expect_success(cuda_ops_window_attention_backward_cpu(of_qkv.data(), of_bias.data(), exact_grad.data(),
                                                          exact_qkv.data(), eb, &w, 1, 0, w.heads, CUDA_OPS_FLOAT64));
    // Sums over as many positions and elements, of weights that are rounded.
    const double tolerance =
        60 * rounding_of(dtype) / (dtype == CUDA_OPS_BFLOAT16 || dtype == CUDA_OPS_FLOAT16 ? 8 : 1);
    expect_alike("output", output, expected, tolerance);
    expect_alike("grad_qkv", grad_qkv, of_qkv, tolerance);
    if (wants_bias)
        expect_alike("grad_bias", grad_bias, of_bias, tolerance);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "window_attention", window_attention);
}
