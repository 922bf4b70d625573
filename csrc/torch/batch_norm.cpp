// batch_norm and batch_norm_act for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/batch_norm.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <string_view>
#include <tuple>

#include "autograd.h"
#include "batch_norm.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"
#include "running_statistics.h"
#include "vmap.h"

namespace cuda_ops
{

// A tensor as the kernels see it, [outer, channels, inner]. Contiguous and channels_last tensors are used as they are,
// others are made contiguous; outputs and gradients have the same memory format.
struct Layout {
    at::MemoryFormat format;
    int64_t outer, channels, inner;

    explicit Layout(const Tensor &input)
        : format(input.suggest_memory_format()), outer(input.size(0)), channels(input.size(1)), inner(1)
    {
        for (int64_t d = 2; d < input.dim(); d++)
            inner *= input.size(d);
        if (format != at::MemoryFormat::Contiguous) {
            outer *= inner;
            inner = 1;
        }
    }

    Tensor new_like(const Tensor &input) const
    {
        return empty(input.sizes(), input.options().memory_format(format));
    }
};

static void check_input(const char *op, const Tensor &input)
{
    TORCH_CHECK(input.dim() >= 2, op, ": expected input to have at least 2 dimensions, got shape ", input.sizes());
}

static const char *const CHANNEL_OF_INPUT = "channel of input"; // in messages

static const void *channel_data(const Tensor &tensor)
{
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// What batch_norm_act does beyond batch_norm, with the residual in the layout of input.
struct Epilogue {
    Tensor residual;
    cuda_ops_batch_norm_epilogue given;

    Epilogue(const char *op, const std::optional<Tensor> &given_residual, std::optional<std::string_view> activation,
             const Tensor &input)
        : given(batch_norm_epilogue(op, activation))
    {
        if (!given_residual)
            return;
        check_like(op, "residual", *given_residual, "input", input);
        check_same_shape(op, "residual", *given_residual, "input", input);
        residual = *given_residual;
    }

    // Once the device is set.
    void lay_out(at::MemoryFormat format)
    {
        if (!residual.defined())
            return;
        residual = residual.contiguous(format);
        given.residual = residual.const_data_ptr();
    }

    // With the residual at another address, as float32.
    cuda_ops_batch_norm_epilogue of(const void *other) const
    {
        cuda_ops_batch_norm_epilogue result = given;
        result.residual = other;
        return result;
    }
};

static Tensor make_workspace(const Tensor &input, const Layout &l)
{
    const int64_t bytes = input.is_cuda() ?
#ifdef CUDA_OPS_WITH_CUDA
                                          cuda_ops_batch_norm_workspace_cuda(l.outer, l.channels, l.inner)
#else
                                          0
#endif
                                          : cuda_ops_batch_norm_workspace_cpu(l.outer, l.channels, l.inner);
    return empty_bytes(bytes, input);
}

// Grains for the CPU's steps: how many ranges (`count`) are worth a thread.
static int64_t grain_of(const Layout &l, int64_t ranges)
{
    return std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, l.outer * l.channels * l.inner / ranges));
}

static void normalize_cpu(const char *op, const Tensor &output, const Tensor &workspace, const Tensor &x,
                          const Layout &l, const Epilogue *epilogue, cuda_ops_dtype dtype)
{
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(l.outer, l.channels, l.inner), row = x.numel() / rows;
    const auto kernel = [&](void *to, const void *from, const void *residual, int64_t begin, int64_t end,
                            cuda_ops_dtype type) {
        if (!epilogue)
            return cuda_ops_batch_norm_normalize_cpu(to, workspace.const_data_ptr(), from, l.outer, l.channels, l.inner,
                                                     begin, end, type);
        const cuda_ops_batch_norm_epilogue given = epilogue->of(residual);
        return cuda_ops_batch_norm_act_normalize_cpu(to, workspace.const_data_ptr(), from, &given, l.outer, l.channels,
                                                     l.inner, begin, end, type);
    };
    if (!epilogue && dtype == CUDA_OPS_BFLOAT16) {
        parallel_ranges(op, rows, grain_of(l, rows), [&](int64_t begin, int64_t end) {
            return kernel(output.data_ptr(), x.const_data_ptr(), nullptr, begin, end, dtype);
        });
        return;
    }
    const Tensor residual = epilogue ? epilogue->residual : Tensor();
    parallel_rows(op, rows, 1, grain_of(l, rows), dtype, kernel, writes(output, row), reads(x, row),
                  reads(residual, row));
}

// As in PyTorch: one value has no variance.
static void check_batch(const char *op, const Tensor &input, const Layout &l)
{
    if (C10_LIKELY(l.outer * l.inner != 1))
        return;
    std::ostringstream size;
    for (const int64_t n : input.sizes())
        size << (size.tellp() == 0 ? "" : ", ") << n;
    TORCH_CHECK_VALUE(false, op, ": Expected more than 1 value per channel when training, got input size (", size.str(),
                      ")");
}

// running: the running statistics, if there are any. epilogue: NULL for batch_norm.
static std::tuple<Tensor, Tensor, Tensor>
forward_training(const char *op, const Tensor &input, const std::optional<Tensor> &weight,
                 const std::optional<Tensor> &bias, Epilogue *epilogue, const std::optional<Tensor> &running_mean,
                 const std::optional<Tensor> &running_var, const std::optional<Tensor> &num_batches_tracked,
                 double momentum, double eps)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_input(op, input);
    const Layout l(input);
    check_batch(op, input, l);
    const RunningStatistics running(op, running_mean, running_var, num_batches_tracked, momentum, input, l.channels,
                                    CHANNEL_OF_INPUT);
    const Parameters parameters(op, weight, bias, input, input.size(1), CHANNEL_OF_INPUT);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(l.format);
    Tensor output = l.new_like(x);
    const auto statistics = x.options().dtype(at::kDouble);
    if (x.numel() == 0) {
        running.count_batch();
        running.finish();
        return {output, at::zeros({l.channels}, statistics), at::zeros({l.channels}, statistics)};
    }
    if (epilogue)
        epilogue->lay_out(l.format);
    Tensor mean = empty({l.channels}, statistics), variance = empty({l.channels}, statistics);
    const Tensor workspace = make_workspace(x, l);
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_act_forward_training_cuda(
                                output.data_ptr(), mean.data_ptr<double>(), variance.data_ptr<double>(),
                                workspace.data_ptr(), &running.statistics, x.const_data_ptr(), parameters.weight_data(),
                                parameters.bias_data(), epilogue ? &epilogue->given : nullptr, l.outer, l.channels,
                                l.inner, eps, dtype, parameters.dtype, current_stream(op)));
        running.finish();
        return {output, mean, variance};
    }
    const int64_t blocks = cuda_ops_batch_norm_blocks_cpu(l.outer, l.channels, l.inner);
    const cuda_ops_dtype computed = is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype;
    const Tensor w = widened(parameters.weight), b = widened(parameters.bias);
    parallel_ranges(op, blocks, grain_of(l, blocks), [&](int64_t begin, int64_t end) {
        return cuda_ops_batch_norm_moments_cpu(workspace.data_ptr(), x.const_data_ptr(), l.outer, l.channels, l.inner,
                                               begin, end, dtype);
    });
    check_status(op, cuda_ops_batch_norm_prepare_training_cpu(mean.data_ptr<double>(), variance.data_ptr<double>(),
                                                              workspace.data_ptr(), channel_data(w), channel_data(b),
                                                              l.outer, l.channels, l.inner, eps, computed));
    normalize_cpu(op, output, workspace, x, l, epilogue, dtype);
    if (running.statistics.mean)
        running.update_cpu(op, mean.const_data_ptr<double>(), variance.const_data_ptr<double>(), l.channels,
                           l.outer * l.inner);
    running.count_batch();
    running.finish();
    return {output, mean, variance};
}

static std::tuple<Tensor, Tensor, Tensor> batch_norm_forward_training(const Tensor &input,
                                                                      const std::optional<Tensor> &weight,
                                                                      const std::optional<Tensor> &bias, double eps)
{
    return forward_training("batch_norm", input, weight, bias, nullptr, std::nullopt, std::nullopt, std::nullopt, 0.0,
                            eps);
}

static std::tuple<Tensor, Tensor, Tensor>
batch_norm_act_forward_training(const Tensor &input, const std::optional<Tensor> &weight,
                                const std::optional<Tensor> &bias, const std::optional<Tensor> &residual,
                                std::optional<std::string_view> activation, double eps)
{
    Epilogue epilogue("batch_norm_act", residual, activation, input);
    return forward_training("batch_norm_act", input, weight, bias, &epilogue, std::nullopt, std::nullopt, std::nullopt,
                            0.0, eps);
}

static std::tuple<Tensor, Tensor, Tensor>
batch_norm_forward_tracking(const Tensor &input, const std::optional<Tensor> &weight, const std::optional<Tensor> &bias,
                            const Tensor &running_mean, const Tensor &running_var,
                            const std::optional<Tensor> &num_batches_tracked, double momentum, double eps)
{
    return forward_training("batch_norm", resolved(input), resolved(weight), resolved(bias), nullptr, running_mean,
                            running_var, num_batches_tracked, momentum, eps);
}

static std::tuple<Tensor, Tensor, Tensor>
batch_norm_act_forward_tracking(const Tensor &input, const std::optional<Tensor> &weight,
                                const std::optional<Tensor> &bias, const std::optional<Tensor> &residual,
                                const Tensor &running_mean, const Tensor &running_var,
                                const std::optional<Tensor> &num_batches_tracked,
                                std::optional<std::string_view> activation, double momentum, double eps)
{
    const Tensor x = resolved(input);
    Epilogue epilogue("batch_norm_act", resolved(residual), activation, x);
    return forward_training("batch_norm_act", x, resolved(weight), resolved(bias), &epilogue, running_mean, running_var,
                            num_batches_tracked, momentum, eps);
}

static Tensor forward_inference(const char *op, const Tensor &input, const std::optional<Tensor> &weight,
                                const std::optional<Tensor> &bias, Epilogue *epilogue, const Tensor &running_mean,
                                const Tensor &running_var, double eps)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_input(op, input);
    const Parameters parameters(op, weight, bias, input, input.size(1), CHANNEL_OF_INPUT);
    const cuda_ops_dtype statistics_dtype =
        check_channel_values(op, "running_mean", running_mean, input, input.size(1), CHANNEL_OF_INPUT);
    check_channel_values(op, "running_var", running_var, input, input.size(1), CHANNEL_OF_INPUT);
    check_like(op, "running_var", running_var, "running_mean", running_mean);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Layout l(input);
    const Tensor x = input.contiguous(l.format);
    const Tensor mean = running_mean.contiguous(), variance = running_var.contiguous();
    Tensor output = l.new_like(x);
    if (x.numel() == 0)
        return output;
    if (epilogue)
        epilogue->lay_out(l.format);
    const Tensor workspace = make_workspace(x, l);
    (void)statistics_dtype; // not used in a build without CUDA
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_act_forward_inference_cuda(
                                output.data_ptr(), workspace.data_ptr(), x.const_data_ptr(), parameters.weight_data(),
                                parameters.bias_data(), mean.const_data_ptr(), variance.const_data_ptr(),
                                epilogue ? &epilogue->given : nullptr, l.outer, l.channels, l.inner, eps, dtype,
                                parameters.dtype, statistics_dtype, current_stream(op)));
        return output;
    }
    const Tensor w = widened(parameters.weight), b = widened(parameters.bias);
    const Tensor wide_mean = widened(mean), wide_variance = widened(variance);
    check_status(op, cuda_ops_batch_norm_prepare_inference_cpu(
                         workspace.data_ptr(), channel_data(w), channel_data(b), wide_mean.const_data_ptr(),
                         wide_variance.const_data_ptr(), l.outer, l.channels, l.inner, eps,
                         is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype));
    normalize_cpu(op, output, workspace, x, l, epilogue, dtype);
    return output;
}

Tensor batch_norm_act_inference(const char *op, const Tensor &input, const std::optional<Tensor> &weight,
                                const std::optional<Tensor> &bias, const Tensor &running_mean,
                                const Tensor &running_var, std::optional<std::string_view> activation, double eps)
{
    Epilogue epilogue(op, std::nullopt, activation, input);
    return forward_inference(op, input, weight, bias, activation ? &epilogue : nullptr, running_mean, running_var, eps);
}

static Tensor batch_norm_forward_inference(const Tensor &input, const std::optional<Tensor> &weight,
                                           const std::optional<Tensor> &bias, const Tensor &running_mean,
                                           const Tensor &running_var, double eps)
{
    return forward_inference("batch_norm", input, weight, bias, nullptr, running_mean, running_var, eps);
}

static Tensor batch_norm_act_forward_inference(const Tensor &input, const std::optional<Tensor> &weight,
                                               const std::optional<Tensor> &bias, const std::optional<Tensor> &residual,
                                               const Tensor &running_mean, const Tensor &running_var,
                                               std::optional<std::string_view> activation, double eps)
{
    Epilogue epilogue("batch_norm_act", residual, activation, input);
    return forward_inference("batch_norm_act", input, weight, bias, &epilogue, running_mean, running_var, eps);
}

// With running statistics instance_norm is the same.
static Tensor instance_norm_forward_inference(const Tensor &input, const std::optional<Tensor> &weight,
                                              const std::optional<Tensor> &bias, const Tensor &running_mean,
                                              const Tensor &running_var, double eps)
{
    return forward_inference("instance_norm", input, weight, bias, nullptr, running_mean, running_var, eps);
}

// Whether the kernels add one more gradient of output to the first.
static bool adds_gradients([[maybe_unused]] const Layout &l, const Tensor &x, const Tensor &grad, const Tensor &more,
                           const Epilogue *epilogue, [[maybe_unused]] bool training,
                           [[maybe_unused]] cuda_ops_dtype dtype)
{
    if (!x.is_cuda() || !epilogue || !epilogue->residual.defined())
        return false;
    for (const Tensor *const tensor : {&x, &grad, &more, &epilogue->residual})
        if (reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % 16 != 0)
            return false;
#ifdef CUDA_OPS_WITH_CUDA
    return cuda_ops_batch_norm_act_adds_gradients_cuda(l.outer, l.channels, l.inner, training, dtype) != 0;
#else
    return false;
#endif
}

// mean and variance: in training forward's, else the running statistics. A result that is not wanted is returned empty;
// grad_weight and grad_bias have the dtype of weight, or else of bias, or else of input.
// The last result is the residual's gradient, where wants_residual. added: undefined, or added to grad_output.
static std::tuple<Tensor, Tensor, Tensor, Tensor>
backward(const char *op, const Tensor &grad_output, const Tensor &input, const std::optional<Tensor> &weight,
         const std::optional<Tensor> &bias, Epilogue *epilogue, const Tensor &mean, const Tensor &variance,
         bool training, double eps, std::optional<at::ScalarType> bias_type, std::array<bool, 3> wanted,
         bool wants_residual, const Tensor &added = {})
{
    const bool needs_grad_input = wanted[0], needs_grad_parameters = wanted[1] || wanted[2];
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_input(op, input);
    check_like(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    const Parameters parameters(op, weight, bias, input, input.size(1), CHANNEL_OF_INPUT);
    const at::ScalarType parameter_type = weight ? weight->scalar_type() : bias_type.value_or(input.scalar_type());
    cuda_ops_dtype statistics_dtype = CUDA_OPS_FLOAT64;
    if (training) {
        for (const Tensor *statistic : {&mean, &variance})
            TORCH_CHECK(statistic->scalar_type() == at::kDouble && statistic->dim() == 1 &&
                            statistic->size(0) == input.size(1) && statistic->device() == input.device(),
                        op, ": expected mean and variance to be those that forward returned, got ",
                        statistic->toString(), " of shape ", statistic->sizes());
    } else {
        statistics_dtype = check_channel_values(op, "mean", mean, input, input.size(1), CHANNEL_OF_INPUT);
        check_channel_values(op, "variance", variance, input, input.size(1), CHANNEL_OF_INPUT);
        check_like(op, "variance", variance, "mean", mean);
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Layout l(input);
    const Tensor x = input.contiguous(l.format);
    Tensor g = grad_output.contiguous(l.format), more;
    if (added.defined()) {
        more = added.contiguous(l.format);
        if (!adds_gradients(l, x, g, more, epilogue, training, dtype)) {
            g = g + more;
            more.reset();
        }
    }
    const Tensor m = mean.contiguous(), v = variance.contiguous();
    const auto parameter_options = x.options().dtype(parameter_type);
    Tensor grad_input = needs_grad_input ? l.new_like(x) : empty({0}, x.options());
    Tensor grad_sum = wants_residual ? l.new_like(x) : Tensor();
    const int64_t parameter_count = needs_grad_parameters ? l.channels : 0;
    if (x.numel() == 0)
        return {grad_input, at::zeros({parameter_count}, parameter_options),
                at::zeros({parameter_count}, parameter_options), grad_sum};
    if (epilogue) {
        epilogue->lay_out(l.format);
        if (!wants_residual) // scratch: on CUDA grad_input serves
            grad_sum = needs_grad_input && x.is_cuda() ? grad_input : l.new_like(x);
    }
    Tensor grad_weight = empty({parameter_count}, parameter_options);
    Tensor grad_bias = empty({parameter_count}, parameter_options);
    const Tensor workspace = make_workspace(x, l);
    [[maybe_unused]] void *const grad_weight_data = needs_grad_parameters ? grad_weight.data_ptr() : nullptr;
    [[maybe_unused]] void *const grad_bias_data = needs_grad_parameters ? grad_bias.data_ptr() : nullptr;
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "grad_weight", grad_weight);
    (void)statistics_dtype; // not used in a build without CUDA
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_act_backward_cuda(
                                needs_grad_input ? grad_input.data_ptr() : nullptr,
                                epilogue ? grad_sum.data_ptr() : nullptr, grad_weight_data, grad_bias_data,
                                workspace.data_ptr(), g.const_data_ptr(), channel_data(more), x.const_data_ptr(),
                                parameters.weight_data(), parameters.bias_data(), m.const_data_ptr(),
                                v.const_data_ptr(), epilogue ? &epilogue->given : nullptr, l.outer, l.channels, l.inner,
                                eps, training, dtype, parameter_dtype, statistics_dtype, current_stream(op)));
        return {grad_input, grad_weight, grad_bias, grad_sum};
    }
    TORCH_CHECK(parameter_dtype == dtype || is_half(dtype), op,
                ": expected parameter_dtype to be that of input on the CPU, got ", parameter_type);
    // What comes behind the epilogue's gradient is not rounded in between.
    const Tensor wide_x = epilogue ? widened(x) : x, wide_g = epilogue ? widened(g) : g;
    const Tensor wide_m = widened(m), wide_v = widened(v);
    const Tensor w = widened(parameters.weight), b = widened(parameters.bias), to_weight = float32_like(grad_weight),
                 to_bias = float32_like(grad_bias);
    const cuda_ops_dtype computed = is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype;
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(l.outer, l.channels, l.inner), row = x.numel() / rows;
    Tensor grad = wide_g;
    if (epilogue) {
        grad = float32_like(grad_sum);
        const Tensor residual = widened(epilogue->residual);
        const cuda_ops_batch_norm_epilogue given = epilogue->of(channel_data(residual));
        check_status(op, cuda_ops_batch_norm_act_prepare_gate_cpu(
                             workspace.data_ptr(), channel_data(w), channel_data(b), wide_m.const_data_ptr(),
                             wide_v.const_data_ptr(), l.outer, l.channels, l.inner, eps, training, computed));
        parallel_ranges(op, rows, grain_of(l, rows), [&](int64_t begin, int64_t end) {
            return cuda_ops_batch_norm_act_gate_cpu(grad.data_ptr(), workspace.const_data_ptr(),
                                                    wide_g.const_data_ptr(), wide_x.const_data_ptr(), &given, l.outer,
                                                    l.channels, l.inner, begin, end, computed);
        });
        round_back(grad_sum, grad);
    }
    if (training || needs_grad_parameters) {
        const int64_t blocks = cuda_ops_batch_norm_blocks_cpu(l.outer, l.channels, l.inner);
        parallel_ranges(op, blocks, grain_of(l, blocks), [&](int64_t begin, int64_t end) {
            return cuda_ops_batch_norm_sums_cpu(workspace.data_ptr(), grad.const_data_ptr(), wide_x.const_data_ptr(),
                                                wide_m.const_data_ptr(), l.outer, l.channels, l.inner, training, begin,
                                                end, epilogue ? computed : dtype);
        });
    }
    check_status(op, cuda_ops_batch_norm_prepare_backward_cpu(needs_grad_parameters ? to_weight.data_ptr() : nullptr,
                                                              needs_grad_parameters ? to_bias.data_ptr() : nullptr,
                                                              workspace.data_ptr(), channel_data(w),
                                                              wide_m.const_data_ptr(), wide_v.const_data_ptr(), l.outer,
                                                              l.channels, l.inner, eps, training, computed));
    round_back(grad_weight, to_weight);
    round_back(grad_bias, to_bias);
    if (!needs_grad_input)
        return {grad_input, grad_weight, grad_bias, grad_sum};
    parallel_rows(
        op, rows, 1, grain_of(l, rows), dtype,
        [&](void *to, const void *grads, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_batch_norm_grad_input_cpu(to, workspace.const_data_ptr(), grads, from, l.outer, l.channels,
                                                      l.inner, training, begin, end, type);
        },
        writes(grad_input, row), reads(grad, row), reads(wide_x, row));
    return {grad_input, grad_weight, grad_bias, grad_sum};
}

static std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor &grad_output, const Tensor &input,
                                                              const std::optional<Tensor> &weight, const Tensor &mean,
                                                              const Tensor &variance, bool training, double eps,
                                                              std::optional<at::ScalarType> bias_type,
                                                              std::array<bool, 3> wanted)
{
    const auto [grad_input, grad_weight, grad_bias, none] =
        backward("batch_norm_backward", grad_output, input, weight, std::nullopt, nullptr, mean, variance, training,
                 eps, bias_type, wanted, false);
    return {grad_input, grad_weight, grad_bias};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor>
batch_norm_act_backward_of_sum(const char *op, const Tensor &grad_output, const Tensor &added, const Tensor &input,
                               const std::optional<Tensor> &weight, const std::optional<Tensor> &bias,
                               const std::optional<Tensor> &residual, const Tensor &mean, const Tensor &variance,
                               bool training, std::optional<std::string_view> activation, double eps,
                               std::array<bool, 4> wanted)
{
    Epilogue epilogue(op, residual, activation, input);
    TORCH_CHECK(!wanted[3] || residual, op, ": expected residual to be given, whose gradient is wanted");
    auto grads = backward(op, grad_output, input, weight, bias, &epilogue, mean, variance, training, eps,
                          bias ? std::make_optional(bias->scalar_type()) : std::nullopt,
                          {wanted[0], wanted[1], wanted[2]}, wanted[3], added);
    if (!wanted[3])
        std::get<3>(grads) = empty({0}, input.options());
    return grads;
}

static std::tuple<Tensor, Tensor, Tensor, Tensor>
batch_norm_act_backward(const Tensor &grad_output, const Tensor &input, const std::optional<Tensor> &weight,
                        const std::optional<Tensor> &bias, const std::optional<Tensor> &residual, const Tensor &mean,
                        const Tensor &variance, bool training, std::optional<std::string_view> activation, double eps,
                        std::array<bool, 4> wanted)
{
    return batch_norm_act_backward_of_sum("batch_norm_act_backward", grad_output, {}, input, weight, bias, residual,
                                          mean, variance, training, activation, eps, wanted);
}

// The same of the sum of two gradients.
static std::tuple<Tensor, Tensor, Tensor, Tensor>
batch_norm_act_backward_of_two(const Tensor &grad_output, const Tensor &added, const Tensor &input,
                               const std::optional<Tensor> &weight, const std::optional<Tensor> &bias,
                               const std::optional<Tensor> &residual, const Tensor &mean, const Tensor &variance,
                               bool training, std::optional<std::string_view> activation, double eps,
                               std::array<bool, 4> wanted)
{
    const char *const op = "batch_norm_act_backward_of_two";
    check_like(op, "added", added, "grad_output", grad_output);
    check_same_shape(op, "added", added, "grad_output", grad_output);
    return batch_norm_act_backward_of_sum(op, grad_output, added, input, weight, bias, residual, mean, variance,
                                          training, activation, eps, wanted);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("batch_norm_forward_training(Tensor input, Tensor? weight, Tensor? bias, float eps)"
                " -> (Tensor output, Tensor mean, Tensor variance)");
    // The same, and updates the running statistics; num_batches_tracked counts the batches.
    library.def("batch_norm_forward_tracking(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
                "Tensor(b!) running_var, Tensor(c!)? num_batches_tracked, float momentum, float eps)"
                " -> (Tensor output, Tensor mean, Tensor variance)");
    library.def("batch_norm_forward_inference(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
                "Tensor running_var, float eps) -> (Tensor output)");
    library.def("instance_norm_forward_inference(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
                "Tensor running_var, float eps) -> (Tensor output)");
    library.def("batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor variance, "
                "bool training, float eps, ScalarType? bias_dtype, bool[3] wanted)"
                " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
    // cuda_ops/ops/batch_norm.py composes these two of PyTorch's operations.
    library.def("batch_norm_backward_gradients(Tensor? grad_grad_input, Tensor? grad_grad_weight, "
                "Tensor? grad_grad_bias, Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
                "Tensor variance, bool training, float eps, bool[3] wanted) -> Tensor[]");
    library.def("batch_norm_backward_tangents(Tensor? tangent_grad_output, Tensor? tangent_input, "
                "Tensor? tangent_weight, Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
                "Tensor variance, bool training, float eps, ScalarType? bias_dtype, bool[3] wanted)"
                " -> (Tensor tangent_grad_input, Tensor tangent_grad_weight, Tensor tangent_grad_bias)");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_forward_training", cuda_ops::batch_norm_forward_training);
    CUDA_OPS_IMPLEMENT(library, "batch_norm_forward_tracking", cuda_ops::batch_norm_forward_tracking);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "batch_norm_forward_tracking");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_forward_inference", cuda_ops::batch_norm_forward_inference);
    CUDA_OPS_VMAP(library, "batch_norm_forward_inference", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "instance_norm_forward_inference", cuda_ops::instance_norm_forward_inference);
    CUDA_OPS_VMAP(library, "instance_norm_forward_inference", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_backward", cuda_ops::batch_norm_backward);
    // output's gradient includes that mean and variance depend on input. The Jacobian of a channel is symmetric, so
    // that tangents take the same op as gradients.
    const char *const gradients =
        "input, weight, bias: batch_norm_backward(grad_output, input, weight, mean, variance, "
        "true, eps, bias.dtype, wanted)";
    const char *const by_input = "output <- batch_norm_backward(tangent_input, input, weight, mean, variance, true, "
                                 "eps, bias.dtype, [true false false])";
    const char *const by_weight = "output <- batch_norm_forward_training(input, tangent_weight, none, eps)";
    const char *const by_bias = "output <- expand_channels(tangent_bias, output.size, output.dtype)";
    CUDA_OPS_DERIVATIVES(library, "batch_norm_forward_training", {gradients, by_input, by_weight, by_bias});
    CUDA_OPS_DERIVATIVES(library, "batch_norm_forward_tracking",
                         {"running_mean, running_var: not differentiable", gradients, by_input, by_weight, by_bias});
    const char *const constants = "running_mean, running_var: not differentiable";
    const char *const of_running =
        "input, weight, bias: batch_norm_backward(grad_output, input, weight, running_mean, running_var, false, eps, "
        "bias.dtype, wanted)";
    const char *const by_input_of_running =
        "output <- batch_norm_backward(tangent_input, input, weight, running_mean, running_var, false, eps, "
        "bias.dtype, [true false false])";
    const char *const by_weight_of_running =
        "output <- batch_norm_forward_inference(input, tangent_weight, none, running_mean, running_var, eps)";
    for (const char *name : {"batch_norm_forward_inference", "instance_norm_forward_inference"})
        CUDA_OPS_DERIVATIVES(library, name,
                             {constants, of_running, by_input_of_running, by_weight_of_running, by_bias});
    CUDA_OPS_DERIVATIVES(
        library, "batch_norm_backward",
        {"grad_output, input, weight: batch_norm_backward_gradients(grad_grad_input, grad_grad_weight, "
         "grad_grad_bias, grad_output, input, weight, mean, variance, training, eps, wanted)",
         "grad_input, grad_weight, grad_bias <- batch_norm_backward_tangents(tangent_grad_output, tangent_input, "
         "tangent_weight, grad_output, input, weight, mean, variance, training, eps, bias_dtype, wanted)"});

    library.def("batch_norm_act_forward_training(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
                "str? activation, float eps) -> (Tensor output, Tensor mean, Tensor variance)");
    library.def("batch_norm_act_forward_tracking(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
                "Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches_tracked, str? activation, "
                "float momentum, float eps) -> (Tensor output, Tensor mean, Tensor variance)");
    library.def("batch_norm_act_forward_inference(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
                "Tensor running_mean, Tensor running_var, str? activation, float eps) -> (Tensor output)");
    library.def("batch_norm_act_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
                "Tensor? residual, Tensor mean, Tensor variance, bool training, str? activation, float eps, "
                "bool[4] wanted) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual)");
    library.def("batch_norm_act_backward_of_two(Tensor grad_output, Tensor added, Tensor input, Tensor? weight, "
                "Tensor? bias, Tensor? residual, Tensor mean, Tensor variance, bool training, str? activation, "
                "float eps, bool[4] wanted) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, "
                "Tensor grad_residual)");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_act_backward_of_two", cuda_ops::batch_norm_act_backward_of_two);
    // cuda_ops/ops/batch_norm_act.py composes these two.
    library.def("batch_norm_act_gradients(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
                "Tensor? residual, Tensor mean, Tensor variance, bool training, str? activation, float eps, "
                "bool[4] wanted) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual)");
    library.def("batch_norm_act_tangents(Tensor? tangent_input, Tensor? tangent_weight, Tensor? tangent_bias, "
                "Tensor? tangent_residual, Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean, "
                "Tensor variance, bool training, str? activation, float eps) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_act_forward_training", cuda_ops::batch_norm_act_forward_training);
    CUDA_OPS_IMPLEMENT(library, "batch_norm_act_forward_tracking", cuda_ops::batch_norm_act_forward_tracking);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "batch_norm_act_forward_tracking");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_act_forward_inference", cuda_ops::batch_norm_act_forward_inference);
    CUDA_OPS_IMPLEMENT(library, "batch_norm_act_backward", cuda_ops::batch_norm_act_backward);
    const char *const act_gradients =
        "input, weight, bias, residual: "
        "batch_norm_act_backward(grad_output, input, weight, bias, residual, mean, variance, true, activation, eps, "
        "wanted) or "
        "batch_norm_act_gradients(grad_output, input, weight, bias, residual, mean, variance, true, activation, eps, "
        "wanted)";
    const char *const act_tangents =
        "output <- batch_norm_act_tangents(tangent_input, tangent_weight, tangent_bias, tangent_residual, input, "
        "weight, bias, residual, mean, variance, true, activation, eps)";
    CUDA_OPS_DERIVATIVES(library, "batch_norm_act_forward_training", {act_gradients, act_tangents});
    CUDA_OPS_DERIVATIVES(library, "batch_norm_act_forward_tracking",
                         {"running_mean, running_var: not differentiable", act_gradients, act_tangents});
    CUDA_OPS_DERIVATIVES(
        library, "batch_norm_act_forward_inference",
        {constants,
         "input, weight, bias, residual: "
         "batch_norm_act_backward(grad_output, input, weight, bias, residual, running_mean, running_var, false, "
         "activation, eps, wanted) or "
         "batch_norm_act_gradients(grad_output, input, weight, bias, residual, running_mean, running_var, false, "
         "activation, eps, wanted)",
         "output <- batch_norm_act_tangents(tangent_input, tangent_weight, tangent_bias, tangent_residual, input, "
         "weight, bias, residual, running_mean, running_var, false, activation, eps)"});
}
