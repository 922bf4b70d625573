// layer_norm, rms_norm, both after an addition with or without dropout, and their gradients: rows of a part of a warp, of
// a block, of a cluster, and longer ones or misaligned ones, which are streamed.
#include "cases.h"
#include "cuda_ops/dropout.h"
#include "cuda_ops/layer_norm.h"

using namespace emulation;

// Outputs, and what is added, in halves beside float32.
static void rounded(int64_t number)
{
    all_aligned = true;
    const cuda_ops_dtype half = one_in(2) ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16, type = CUDA_OPS_FLOAT32;
    const bool adds = one_in(2), has_weight = !one_in(4), has_bias = !one_in(4);
    const int64_t cols = (one_in(4) ? random_in(500, 1024) : random_size(200)) * 4;
    const int64_t rows = random_size(40000 / cols + 1), count = rows * cols;
    const Array input = Array(count, adds ? half : type).random(), residual = Array(adds ? count : 0, type).random();
    const Array weight = Array(cols, type).random(), bias = Array(cols, type).random();
    const Array output(count, half), sum(adds ? count : 0, type), mean(rows, CUDA_OPS_FLOAT64), rstd(rows, type);
    const float *const w = has_weight ? (float *)weight.data : nullptr;
    describe("case %lld: rounded, %lld rows of %lld, dtype %d%s, %d resident", (long long)number, (long long)rows,
             (long long)cols, half, adds ? ", residual" : "", resident_blocks);
    if (!cuda_ops_layer_norm_rounds_cuda(rows, cols))
        fail("rows of whole vectors are refused");
    expect_success(cuda_ops_layer_norm_rounded_forward_cuda(
        output.data, adds ? (float *)sum.data : nullptr, (double *)mean.data, (float *)rstd.data, input.data,
        adds ? (float *)residual.data : nullptr, w, has_bias ? (float *)bias.data : nullptr, rows, cols, 1e-5, half,
        nullptr));
    // The same in float32 throughout, of the same sum.
    const Array &x = adds ? sum : input;
    const Array full(count, type), its_mean(rows, CUDA_OPS_FLOAT64), its_rstd(rows, type);
    expect_success(cuda_ops_layer_norm_forward_cuda(full.data, (double *)its_mean.data, its_rstd.data, x.data, w,
                                                    has_bias ? bias.data : nullptr, rows, cols, 1e-5,
                                                    CUDA_OPS_LAYER_NORM, type, type, nullptr));
    for (int64_t i = 0; i < count; i++) {
        if (adds)
            expect_near("sum", i, sum[i], input[i] + residual[i], 3e-7 * (fabs(input[i]) + fabs(residual[i])));
        expect_near("output", i, output[i], full[i], rounding_of(half) * fabs(full[i]) + 1e-6);
    }
    const bool more = one_in(2), wants_input = !one_in(5), wants_weight = !one_in(4), wants_bias = !one_in(4);
    const bool wants_addend = wants_input && adds;
    const Array grad_output = Array(count, half).random(), grad_sum = Array(count, type).random();
    const Array wide(count, type), grad_input(count, type), grad_addend(wants_addend ? count : 0, half);
    const Array grad_weight(cols, type), grad_bias(cols, type), its_input(count, type), its_weight(cols, type);
    const Array its_bias(cols, type);
    for (int64_t i = 0; i < count; i++)
        set(wide.data, i, grad_output[i], type);
    void *const workspace = device_memory((size_t)cuda_ops_layer_norm_rounded_workspace_cuda(rows, cols), 0);
    expect_success(cuda_ops_layer_norm_rounded_backward_cuda(
        wants_input ? (float *)grad_input.data : nullptr, wants_addend ? grad_addend.data : nullptr,
        wants_weight ? (float *)grad_weight.data : nullptr, wants_bias ? (float *)grad_bias.data : nullptr, workspace,
        grad_output.data, more ? (float *)grad_sum.data : nullptr, (float *)x.data, w, (double *)mean.data,
        (float *)rstd.data, rows, cols, half, nullptr));
    void *const its_workspace = device_memory((size_t)cuda_ops_layer_norm_workspace_cuda(rows, cols, type), 0);
    expect_success(cuda_ops_layer_norm_backward_cuda(its_input.data, its_weight.data, its_bias.data, nullptr,
                                                     its_workspace, wide.data, more ? grad_sum.data : nullptr, x.data,
                                                     w, (double *)mean.data, rstd.data, rows, cols, CUDA_OPS_LAYER_NORM,
                                                     type, type, nullptr));
    for (int64_t i = 0; i < count && wants_input; i++) {
        expect_near("grad_input", i, grad_input[i], its_input[i], 1e-5 * (fabs(its_input[i]) + 1));
        if (wants_addend)
            expect_near("grad_addend", i, grad_addend[i], grad_input[i],
                        rounding_of(half) * fabs(grad_input[i]) + 1e-7);
    }
    for (int64_t c = 0; c < cols; c++) {
        if (wants_weight)
            expect_near("grad_weight", c, grad_weight[c], its_weight[c], 1e-5 * (fabs(its_weight[c]) + (double)rows));
        if (wants_bias)
            expect_near("grad_bias", c, grad_bias[c], its_bias[c], 1e-5 * (fabs(its_bias[c]) + (double)rows));
    }
}

static void layer_norm(int64_t number)
{
    if (one_in(4)) {
        rounded(number);
        return;
    }
    const bool wants_mask = one_in(4); // dropout's mask is kept for backward
    all_aligned = all_aligned || wants_mask;
    const cuda_ops_dtype half_dtype = one_in(2) ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
    const cuda_ops_dtype dtype = wants_mask ? half_dtype : DTYPES[random_below(4)];
    const bool half = bytes_of(dtype) == 2, full = half && one_in(2), rms = !wants_mask && one_in(3);
    const bool adds = wants_mask || one_in(2);
    const cuda_ops_dtype parameters = full ? CUDA_OPS_FLOAT32 : dtype;
    const cuda_ops_dtype saved = dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32;
    const bool is_long = one_in(4), is_longest = is_long && one_in(3);
    const int64_t any_cols =
        is_long ? random_in(is_longest ? 16000 : 4000, (is_longest ? 20000 : 6000) * (half ? 2 : 1)) / 8 * 8 +
                      (one_in(3) ? random_in(0, 7) : 0)
                : random_size(3000);
    const int64_t cols = wants_mask ? (any_cols + 7) / 8 * 8 : any_cols;
    const int64_t rows = is_long ? random_in(1, is_longest ? 2 : 5) : random_size(40000 / cols + 1),
                  count = rows * cols;
    const double eps = 1e-5, p = adds && (wants_mask || one_in(2)) ? 0.25 : 0.0;
    const Array input = Array(count, dtype).random(), residual = Array(adds ? count : 0, dtype).random();
    const Array weight = Array(cols, parameters).random(), bias = Array(cols, parameters).random();
    const bool has_weight = !one_in(4), has_bias = !one_in(4);
    const Array output(count, dtype), sum(adds ? count : 0, dtype), mean(rows, CUDA_OPS_FLOAT64), rstd(rows, saved);
    describe("case %lld: %s, %lld rows of %lld, dtype %d, parameters %d%s, p %g, %d resident", (long long)number,
             rms ? "rms_norm" : "layer_norm", (long long)rows, (long long)cols, dtype, parameters,
             adds ? ", residual" : "", p, resident_blocks);
    const cuda_ops_norm norm = rms ? CUDA_OPS_RMS_NORM : CUDA_OPS_LAYER_NORM;
    const cuda_ops_philox_state philox = {random_below(1 << 30), 4 * random_below(1 << 20), nullptr, nullptr};
    int64_t *const state = p > 0 ? (int64_t *)device_memory(16, 0) : nullptr;
    double *const means = rms ? nullptr : (double *)mean.data;
    void *const w = has_weight ? weight.data : nullptr;
    const Array grad_output = Array(count, dtype).random(), grad_sum = Array(count, dtype).random();
    const Array grad_input(count, dtype), grad_dropped(p > 0 ? count : 0, dtype);
    const bool masked = wants_mask && cuda_ops_layer_norm_takes_mask_cuda(rows, cols, dtype);
    uint8_t *const mask = masked ? (uint8_t *)device_memory((size_t)(count / 8), 0) : nullptr;
    if (masked)
        expect_success(cuda_ops_add_layer_norm_forward_mask_cuda(
            output.data, sum.data, means, rstd.data, state, mask, input.data, residual.data, w,
            has_bias ? bias.data : nullptr, rows, cols, eps, p, philox, dtype, parameters, nullptr));
    else if (adds)
        expect_success(cuda_ops_add_layer_norm_forward_cuda(output.data, sum.data, means, rstd.data, state, input.data,
                                                            residual.data, w, has_bias ? bias.data : nullptr, rows,
                                                            cols, eps, norm, p, philox, dtype, parameters, nullptr));
    else
        expect_success(cuda_ops_layer_norm_forward_cuda(output.data, means, rstd.data, input.data, w,
                                                        has_bias ? bias.data : nullptr, rows, cols, eps, norm, dtype,
                                                        parameters, nullptr));
    const double rounding = rounding_of(dtype), inner = rounding_of(saved) * 40;
    std::vector<double> kept((size_t)count, 1.0), ones((size_t)count, 1.0);
    if (p > 0)
        expect_success(cuda_ops_dropout_cpu(kept.data(), ones.data(), 0, count, p, philox, CUDA_OPS_FLOAT64));
    const Array &x = adds ? sum : input;
    for (int64_t r = 0; r < rows; r++) {
        double m = 0, square = 0;
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = r * cols + c;
            if (adds)
                expect_near("sum", i, sum[i], input[i] * kept[(size_t)i] + residual[i],
                            rounding * (fabs(input[i]) * 2 + fabs(residual[i])));
            m += x[i] / (double)cols;
        }
        m = rms ? 0 : m;
        for (int64_t c = 0; c < cols; c++)
            square += (x[r * cols + c] - m) * (x[r * cols + c] - m) / (double)cols;
        const double scale = 1 / sqrt(square + eps);
        if (!rms)
            expect_near("mean", r, mean[r], m, inner);
        expect_near("rstd", r, rstd[r], scale, scale * inner * (square < 1e-3 ? 1000 : 1));
        for (int64_t c = 0; c < cols; c++) {
            const double xhat = (x[r * cols + c] - m) * scale, scaled = xhat * (w ? weight[c] : 1);
            const double expected = scaled + (has_bias ? bias[c] : 0);
            expect_near("output", r * cols + c, output[r * cols + c], expected,
                        rounding * fabs(expected) + inner * (fabs(scaled) + 2) * (square < 1e-3 ? 1000 : 1));
        }
    }
    // Backward, of what forward has saved.
    const bool wants_input = masked || !one_in(6), wants_weight = !one_in(4), wants_bias = !one_in(4), more = one_in(2);
    const bool wants_sums = wants_input && !masked && one_in(2);
    const Array grad_weight(cols, parameters), grad_bias(cols, parameters);
    const Array grad_input_sums(cols, parameters);
    void *const workspace = device_memory((size_t)cuda_ops_layer_norm_workspace_cuda(rows, cols, dtype), 0);
    void *const to_weight = wants_weight ? grad_weight.data : nullptr, *const to_bias =
                                                                           wants_bias ? grad_bias.data : nullptr;
    if (masked)
        expect_success(
            cuda_ops_layer_norm_backward_mask_cuda(grad_input.data, grad_dropped.data, to_weight, to_bias, workspace,
                                                   grad_output.data, more ? grad_sum.data : nullptr, x.data, w, means,
                                                   rstd.data, mask, p, rows, cols, dtype, parameters, nullptr));
    else
        expect_success(cuda_ops_layer_norm_backward_cuda(
            wants_input ? grad_input.data : nullptr, to_weight, to_bias, wants_sums ? grad_input_sums.data : nullptr,
            workspace, grad_output.data, more ? grad_sum.data : nullptr, x.data, w, means, rstd.data, rows, cols, norm,
            dtype, parameters, nullptr));
    std::vector<double> weight_sums((size_t)cols), bias_sums((size_t)cols), sizes((size_t)cols);
    for (int64_t r = 0; r < rows; r++) {
        const double m = rms ? 0 : mean[r], scale = rstd[r];
        double mean_h = 0, slope = 0;
        for (int64_t c = 0; c < cols; c++) {
            const int64_t i = r * cols + c;
            const double h = grad_output[i] * (w ? weight[c] : 1), xhat = (x[i] - m) * scale;
            mean_h += rms ? 0 : h / (double)cols;
            slope += h * xhat / (double)cols;
            weight_sums[(size_t)c] += grad_output[i] * xhat;
            bias_sums[(size_t)c] += grad_output[i];
            sizes[(size_t)c] += fabs(grad_output[i]) * (fabs(xhat) + 1);
        }
        for (int64_t c = 0; c < cols && wants_input; c++) {
            const int64_t i = r * cols + c;
            const double h = grad_output[i] * (w ? weight[c] : 1), xhat = (x[i] - m) * scale;
            const double expected = scale * (h - mean_h - xhat * slope) + (more ? grad_sum[i] : 0);
            expect_near("grad_input", i, grad_input[i], expected,
                        rounding * fabs(expected) + inner * scale * (fabs(h) + fabs(mean_h) + fabs(xhat * slope) + 2));
            if (masked)
                expect_near("grad_dropped", i, grad_dropped[i], expected * kept[(size_t)i],
                            2 * rounding * fabs(expected) +
                                2 * inner * scale * (fabs(h) + fabs(mean_h) + fabs(xhat * slope) + 2));
        }
    }
    const double rounded = rounding_of(parameters);
    for (int64_t c = 0; c < cols && wants_sums; c++) {
        double sum = 0, size = 0;
        for (int64_t r = 0; r < rows; r++) {
            sum += grad_input[r * cols + c];
            size += fabs(grad_input[r * cols + c]);
        }
        // They may be of what was rounded to grad_input.
        expect_near("grad_input_sums", c, grad_input_sums[c], sum, rounded * fabs(sum) + (rounding + inner) * size);
    }
    for (int64_t c = 0; c < cols; c++) {
        if (wants_weight)
            expect_near("grad_weight", c, grad_weight[c], weight_sums[(size_t)c],
                        rounded * fabs(weight_sums[(size_t)c]) + inner * sizes[(size_t)c]);
        if (wants_bias)
            expect_near("grad_bias", c, grad_bias[c], bias_sums[(size_t)c],
                        rounded * fabs(bias_sums[(size_t)c]) + inner * sizes[(size_t)c]);
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "layer_norm", layer_norm);
}
