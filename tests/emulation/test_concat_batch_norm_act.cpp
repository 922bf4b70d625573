// concat_batch_norm_act of up to 64 sources, in training and with running statistics; gradients with and without what
// others add to them, of sources of which some want none.
#include "cases.h"
#include "cuda_ops/concat_batch_norm_act.h"

using namespace emulation;

struct Source {
    int64_t channels, begin, pitch;
    Array input, mean, variance, others, grad;
    bool wants_grad, has_others;
};

static void concat_batch_norm_act(int64_t number)
{
    all_aligned = true;
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const cuda_ops_dtype parameters = bytes_of(dtype) == 2 && one_in(2) ? CUDA_OPS_FLOAT32 : dtype;
    const int64_t vector = 16 / bytes_of(dtype), count = one_in(8) ? random_in(60, 64) : random_in(1, 7);
    const int64_t rows = 1 + random_size(count > 10 ? 40 : 400);
    const bool training = one_in(2), has_weight = !one_in(4), has_bias = !one_in(4), tracks = training && !one_in(4);
    const bool wants_parameters = !one_in(4);
    const double eps = 1e-3, momentum = 0.25;
    const cuda_ops_dtype statistics = training ? CUDA_OPS_FLOAT64 : parameters;
    std::vector<Source> sources((size_t)count);
    std::vector<cuda_ops_norm_source> given;
    int64_t channels = 0;
    for (Source &s : sources) {
        s.channels = vector * (one_in(10) ? 0 : random_size(count > 10 ? 3 : 12));
        s.begin = channels, channels += s.channels;
        s.wants_grad = !one_in(5), s.has_others = !one_in(3);
        s.pitch = s.channels + vector * random_in(0, 2);
        s.input = Array(rows * s.channels, dtype).random();
        s.others = Array(rows * s.pitch, dtype).random();
        s.grad = Array(rows * s.channels, dtype);
        s.mean = Array(s.channels, statistics).random(), s.variance = Array(s.channels, statistics);
        for (int64_t c = 0; c < s.channels; c++) {
            double mean = 0, square = 0;
            for (int64_t r = 0; r < rows; r++)
                mean += s.input[r * s.channels + c] / (double)rows;
            for (int64_t r = 0; r < rows; r++)
                square += (s.input[r * s.channels + c] - mean) * (s.input[r * s.channels + c] - mean) / (double)rows;
            if (training)
                set(s.mean.data, c, mean, statistics);
            set(s.variance.data, c, training ? square : (double)random_in(1, 40) / 8, statistics);
        }
        given.push_back({s.input.data, s.channels, s.mean.data, s.variance.data, s.has_others ? s.others.data : nullptr,
                         s.pitch, s.wants_grad ? s.grad.data : nullptr});
    }
    const Array weight = Array(channels, parameters).random(), bias = Array(channels, parameters).random();
    const Array running_mean = Array(channels, parameters).random(), running_var = Array(channels, parameters).random();
    const Array output(rows * channels, dtype), grad_output = Array(rows * channels, dtype).random();
    const Array mean(channels, CUDA_OPS_FLOAT64), variance(channels, CUDA_OPS_FLOAT64);
    const Array grad_weight(channels, parameters), grad_bias(channels, parameters);
    int64_t *const batches = (int64_t *)device_memory(8, 0);
    *batches = 41;
    std::vector<double> old_mean, old_var, factor((size_t)channels), shift((size_t)channels);
    for (int64_t c = 0; c < channels; c++)
        old_mean.push_back(running_mean[c]), old_var.push_back(running_var[c]);
    bool is_relu = one_in(2); // unless rounding would decide what it lets through
    for (const Source &s : sources)
        for (int64_t c = 0; c < s.channels; c++) {
            const int64_t at = s.begin + c;
            factor[(size_t)at] = (has_weight ? weight[at] : 1) / sqrt(s.variance[c] + eps);
            shift[(size_t)at] = (has_bias ? bias[at] : 0) - s.mean[c] * factor[(size_t)at];
            for (int64_t r = 0; r < rows; r++) {
                const double z = s.input[r * s.channels + c] * factor[(size_t)at] + shift[(size_t)at];
                if (fabs(z) < 1e-4)
                    is_relu = false;
            }
        }
    const double none = NAN;
    const cuda_ops_batch_norm_epilogue epilogue = {nullptr, CUDA_OPS_ACTIVATION_HARDTANH, is_relu ? 0 : none, none};
    const cuda_ops_running_statistics running = {tracks ? running_mean.data : nullptr,
                                                 tracks ? running_var.data : nullptr, parameters,
                                                 tracks ? batches : nullptr, momentum};
    describe("case %lld: %lld sources, %lld rows, %lld channels, dtype %d, parameters %d, training %d, relu %d",
             (long long)number, (long long)count, (long long)rows, (long long)channels, dtype, parameters, training,
             is_relu);
    const void *const w = has_weight ? weight.data : nullptr, *const b = has_bias ? bias.data : nullptr;
    if (!cuda_ops_concat_batch_norm_act_supports_cuda(given.data(), count, rows, dtype))
        fail("not supported");
    expect_success(cuda_ops_concat_batch_norm_act_forward_cuda(
        output.data, training ? (double *)mean.data : nullptr, training ? (double *)variance.data : nullptr,
        given.data(), count, &running, w, b, &epilogue, rows, eps, dtype, parameters, statistics, nullptr));
    for (const Source &s : sources)
        for (int64_t c = 0; c < s.channels && !training; c++) { // for backward, which takes them as one array
            set(running_mean.data, s.begin + c, s.mean[c], parameters);
            set(running_var.data, s.begin + c, s.variance[c], parameters);
        }
    void *const workspace =
        device_memory((size_t)cuda_ops_concat_batch_norm_act_workspace_cuda(rows, channels, dtype), 0);
    expect_success(cuda_ops_concat_batch_norm_act_backward_cuda(
        wants_parameters ? grad_weight.data : nullptr, wants_parameters ? grad_bias.data : nullptr, workspace,
        grad_output.data, given.data(), count, w, b, training ? mean.data : running_mean.data,
        training ? variance.data : running_var.data, &epilogue, rows, eps, training, dtype, parameters, statistics,
        nullptr));
    if (channels == 0)
        return;
    expect_near("batches", 0, (double)*batches, tracks ? 42 : 41, 0);
    const double rounding = rounding_of(dtype), rounded = rounding_of(parameters);
    const double sums = rounding_of(dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32) * 40;
    for (const Source &s : sources)
        for (int64_t c = 0; c < s.channels; c++) {
            const int64_t at = s.begin + c;
            const double m = s.mean[c], v = s.variance[c], rstd = 1 / sqrt(v + eps), gain = factor[(size_t)at];
            if (training)
                expect_near("mean", at, mean[at], m, 0), expect_near("variance", at, variance[at], v, 0);
            if (tracks) {
                const double new_mean = 0.75 * old_mean[(size_t)at] + 0.25 * m;
                const double new_var = 0.75 * old_var[(size_t)at] + 0.25 * v * rows / (rows - 1.0);
                // Their terms may cancel each other.
                expect_near("running_mean", at, running_mean[at], new_mean,
                            rounded * (fabs(old_mean[(size_t)at]) + fabs(m) + 0.01));
                expect_near("running_var", at, running_var[at], new_var,
                            rounded * (fabs(old_var[(size_t)at]) + v * rows / (rows - 1.0) + 0.01));
            }
            double total = 0, dot = 0, size = 0;
            std::vector<double> gated;
            for (int64_t r = 0; r < rows; r++) {
                const double x = s.input[r * s.channels + c], z = x * gain + shift[(size_t)at];
                const double g = is_relu && z < 0 ? 0 : grad_output[r * channels + at];
                gated.push_back(g);
                total += g, dot += g * (x - m) * rstd, size += fabs(g) * (fabs(x - m) * rstd + 1);
                const double expected = is_relu && z < 0 ? 0 : z;
                expect_near("output", r * channels + at, output[r * channels + at], expected,
                            rounding * (fabs(expected) + 1e-3) + sums * (fabs(z) + 1 + fabs(gain)));
            }
            if (wants_parameters) {
                expect_near("grad_weight", at, grad_weight[at], dot, rounded * fabs(dot) + sums * size * (rstd + 1));
                expect_near("grad_bias", at, grad_bias[at], total, rounded * fabs(total) + sums * size);
            }
            for (int64_t r = 0; r < rows && s.wants_grad; r++) {
                const double x = (s.input[r * s.channels + c] - m) * rstd;
                double expected = gain * gated[(size_t)r];
                if (training)
                    expected -= gain * (total + x * dot) / (double)rows;
                if (s.has_others)
                    expected += s.others[r * s.pitch + c];
                expect_near("grad", r * s.channels + c, s.grad[r * s.channels + c], expected,
                            rounding * (fabs(expected) + 1e-3) + sums * (fabs(gain) * (2 + fabs(x)) * (1 + rstd) + 2));
            }
        }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "concat_batch_norm_act", concat_batch_norm_act);
}
