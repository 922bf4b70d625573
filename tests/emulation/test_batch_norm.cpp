// batch_norm in training, its running statistics and its gradients, of planes that are whole vectors or not; and
// batch_norm_act's gradients with a residual, of one gradient of output or of two, which its first pass adds up.
#include "cases.h"
#include "cuda_ops/batch_norm.h"

using namespace emulation;

static void batch_norm(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const bool half = bytes_of(dtype) == 2, full = half && one_in(2);
    const cuda_ops_dtype parameters = full ? CUDA_OPS_FLOAT32 : dtype;
    const int64_t inner = one_in(5) ? 1 : random_size(one_in(4) ? 600 : 60);
    const int64_t outer = random_size(one_in(4) ? 2000 / inner + 2 : 5) + (inner == 1), channels = random_size(90);
    const int64_t values = outer * inner, count = values * channels;
    if (values < 2)
        return;
    const double eps = 1e-3, momentum = 0.25, middle = one_in(4) ? 100 : 0;
    const bool has_weight = !one_in(4), has_bias = !one_in(4), tracks = !one_in(4), counts = !one_in(4);
    const Array input = Array(count, dtype).random(), grad_output = Array(count, dtype).random();
    for (int64_t i = 0; i < count; i++)
        set(input.data, i, input[i] + middle, dtype);
    const Array weight = Array(channels, parameters).random(), bias = Array(channels, parameters).random();
    const Array running_mean = Array(channels, parameters).random();
    const Array running_var = Array(channels, parameters).random();
    std::vector<double> old_mean((size_t)channels), old_var((size_t)channels);
    for (int64_t c = 0; c < channels; c++)
        old_mean[(size_t)c] = running_mean[c], old_var[(size_t)c] = running_var[c];
    const Array output(count, dtype), mean(channels, CUDA_OPS_FLOAT64), variance(channels, CUDA_OPS_FLOAT64);
    const Array grad_input(count, dtype), grad_weight(channels, parameters), grad_bias(channels, parameters);
    void *const workspace = device_memory((size_t)cuda_ops_batch_norm_workspace_cuda(outer, channels, inner), 0);
    int64_t *const batches = (int64_t *)device_memory(8, 0);
    *batches = 41;
    const cuda_ops_running_statistics running = {tracks ? running_mean.data : nullptr,
                                                 tracks ? running_var.data : nullptr, parameters,
                                                 counts ? batches : nullptr, momentum};
    describe("case %lld: %lld x %lld x %lld, dtype %d, parameters %d, %d resident", (long long)number, (long long)outer,
             (long long)channels, (long long)inner, dtype, parameters, resident_blocks);
    void *const w = has_weight ? weight.data : nullptr;
    expect_success(cuda_ops_batch_norm_forward_training_cuda(
        output.data, (double *)mean.data, (double *)variance.data, workspace, &running, input.data, w,
        has_bias ? bias.data : nullptr, outer, channels, inner, eps, dtype, parameters, nullptr));
    expect_success(cuda_ops_batch_norm_backward_cuda(
        grad_input.data, grad_weight.data, grad_bias.data, workspace, grad_output.data, input.data, w, mean.data,
        variance.data, outer, channels, inner, eps, 1, dtype, parameters, CUDA_OPS_FLOAT64, nullptr));
    expect_near("batches", 0, (double)*batches, counts ? 42 : 41, 0);
    const double rounding = rounding_of(dtype), rounded = rounding_of(parameters);
    const double sums = rounding_of(dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32) * 40;
    for (int64_t c = 0; c < channels; c++) {
        const auto at = [&](int64_t i) { return (i / inner * channels + c) * inner + i % inner; };
        double m = 0, square = 0, dot = 0, total = 0, size = 0;
        for (int64_t i = 0; i < values; i++)
            m += input[at(i)] / (double)values;
        for (int64_t i = 0; i < values; i++)
            square += (input[at(i)] - m) * (input[at(i)] - m) / (double)values;
        const double rstd = 1 / sqrt(square + eps), gain = rstd * (w ? weight[c] : 1);
        expect_near("mean", c, mean[c], m, sums * (fabs(m) * (dtype == CUDA_OPS_FLOAT64 ? 1 : 0.01) + 1));
        expect_near("variance", c, variance[c], square, sums * (square + 0.01));
        if (tracks) {
            const double new_mean = 0.75 * old_mean[(size_t)c] + 0.25 * m;
            const double new_var = 0.75 * old_var[(size_t)c] + 0.25 * square * values / (values - 1.0);
            expect_near("running_mean", c, running_mean[c], new_mean, rounded * (fabs(new_mean) + 1) + sums);
            expect_near("running_var", c, running_var[c], new_var, rounded * (fabs(new_var) + 1) + sums * (square + 1));
        }
        for (int64_t i = 0; i < values; i++) {
            const double x = (input[at(i)] - m) * rstd, g = grad_output[at(i)];
            const double expected = x * (w ? weight[c] : 1) + (has_bias ? bias[c] : 0);
            expect_near("output", at(i), output[at(i)], expected,
                        rounding * (fabs(expected) + 1e-3) +
                            sums * (fabs(expected) + 1 + fabs(gain)) * (middle ? 8 : 1));
            total += g, dot += g * x, size += fabs(g) * (fabs(x) + 1);
        }
        expect_near("grad_weight", c, grad_weight[c], dot, rounded * fabs(dot) + sums * size * (rstd + 1));
        expect_near("grad_bias", c, grad_bias[c], total, rounded * fabs(total) + sums * size);
        for (int64_t i = 0; i < values; i++) {
            const double x = (input[at(i)] - m) * rstd;
            const double expected = gain * (grad_output[at(i)] - total / values - x * dot / values);
            expect_near("grad_input", at(i), grad_input[at(i)], expected,
                        rounding * (fabs(expected) + 1e-3) + sums * fabs(gain) * (2 + fabs(x)) * (1 + rstd));
        }
    }
}

// Residuals are so large that they say alone what relu lets through.
static void batch_norm_act(int64_t number)
{
    all_aligned = true;
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const int64_t vector = 16 / bytes_of(dtype), channels = vector * random_size(40);
    const int64_t rows = 2 + random_size(one_in(4) ? 3000 : 60), count = rows * channels;
    const bool has_weight = !one_in(4), has_bias = !one_in(4), training = one_in(2), adds = !one_in(4);
    const double eps = 1e-3;
    const Array input = Array(count, dtype).random(), residual = Array(count, dtype);
    const Array grad_output = Array(count, dtype).random(), added = Array(count, dtype).random();
    const Array weight = Array(channels, dtype).random(), bias = Array(channels, dtype).random();
    const cuda_ops_dtype statistics = training ? CUDA_OPS_FLOAT64 : dtype;
    const Array mean(channels, statistics), variance(channels, statistics);
    const Array grad_input(count, dtype), grad_sum(count, dtype), grad_weight(channels, dtype),
        grad_bias(channels, dtype);
    for (int64_t i = 0; i < count; i++)
        set(residual.data, i, one_in(2) ? 512 : -512, dtype);
    for (int64_t c = 0; c < channels; c++) {
        double m = 0, square = 0;
        for (int64_t r = 0; r < rows; r++)
            m += input[r * channels + c] / (double)rows;
        for (int64_t r = 0; r < rows; r++)
            square += (input[r * channels + c] - m) * (input[r * channels + c] - m) / (double)rows;
        set(mean.data, c, m, statistics);
        set(variance.data, c, square + (training ? 0 : 0.5), statistics);
    }
    const cuda_ops_batch_norm_epilogue epilogue = {residual.data, CUDA_OPS_ACTIVATION_HARDTANH, 0, (double)NAN};
    void *const workspace = device_memory((size_t)cuda_ops_batch_norm_workspace_cuda(rows, channels, 1), 0);
    void *const w = has_weight ? weight.data : nullptr, *const b = has_bias ? bias.data : nullptr;
    describe("case %lld: %lld x %lld, dtype %d, %d training, %d adds", (long long)number, (long long)rows,
             (long long)channels, dtype, training, adds);
    if (!cuda_ops_batch_norm_act_adds_gradients_cuda(rows, channels, 1, training, dtype))
        abort();
    expect_success(cuda_ops_batch_norm_act_backward_cuda(
        grad_input.data, grad_sum.data, grad_weight.data, grad_bias.data, workspace, grad_output.data,
        adds ? added.data : nullptr, input.data, w, b, mean.data, variance.data, &epilogue, rows, channels, 1, eps,
        training, dtype, dtype, statistics, nullptr));
    const double rounding = rounding_of(dtype);
    const double sums = rounding_of(dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32) * 40;
    for (int64_t c = 0; c < channels; c++) {
        const double rstd = 1 / sqrt(variance[c] + eps), gain = rstd * (w ? weight[c] : 1);
        double dot = 0, total = 0, size = 0;
        for (int64_t i = c; i < count; i += channels) {
            const double sum = residual[i] > 0 ? grad_output[i] + (adds ? added[i] : 0) : 0;
            expect_near("grad_sum", i, grad_sum[i], sum, rounding * (fabs(sum) + 1e-3));
            const double x = (input[i] - mean[c]) * rstd, g = grad_sum[i];
            total += g, dot += g * x, size += fabs(g) * (fabs(x) + 1);
        }
        expect_near("grad_weight", c, grad_weight[c], dot, rounding * fabs(dot) + sums * size * (rstd + 1));
        expect_near("grad_bias", c, grad_bias[c], total, rounding * fabs(total) + sums * size);
        for (int64_t i = c; i < count; i += channels) {
            const double x = (input[i] - mean[c]) * rstd, n = (double)rows;
            const double expected = gain * (grad_sum[i] - (training ? total / n + x * dot / n : 0));
            expect_near("grad_input", i, grad_input[i], expected,
                        rounding * (fabs(expected) + 1e-3) + sums * fabs(gain) * (2 + fabs(x)) * (1 + rstd));
        }
    }
}

static void batch_norm_or_act(int64_t number)
{
    if (one_in(3))
        batch_norm_act(number);
    else
        batch_norm(number);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "batch_norm", batch_norm_or_act);
}
