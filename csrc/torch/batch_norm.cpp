// batch_norm for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/batch_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "checks.h"

namespace cuda_ops
{

// A tensor as the kernels see it, [outer, channels, inner]. Contiguous and channels_last tensors are taken as they
// are, others are made contiguous; outputs and gradients have the same memory format.
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

    Tensor empty_like(const Tensor &input) const
    {
        return at::empty(input.sizes(), input.options(), format);
    }
};

static void check_input(const char *op, const Tensor &input)
{
    TORCH_CHECK(input.dim() >= 2, op, ": expected input to have at least 2 dimensions, got shape ", input.sizes());
}

// A value for each channel: of the dtype of input, or float32 beside an input in half precision.
static cuda_ops_dtype check_channel_values(const char *op, const char *argument, const Tensor &tensor,
                                           const Tensor &input)
{
    check_same_device(op, argument, tensor, "input", input);
    TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == input.size(1), op, ": expected ", argument,
                " to have one element for each channel of input, ", input.size(1), ", got shape ", tensor.sizes());
    const bool half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
    if (!half || tensor.scalar_type() != at::kFloat)
        check_like(op, argument, tensor, "input", input);
    return check_dtype(op, argument, tensor);
}

// weight or bias, contiguous; undefined if it is not given.
struct Parameters {
    Tensor weight, bias;
    cuda_ops_dtype dtype = CUDA_OPS_FLOAT32;

    Parameters(const char *op, const std::optional<Tensor> &given_weight, const std::optional<Tensor> &given_bias,
               const Tensor &input)
    {
        if (given_weight) {
            dtype = check_channel_values(op, "weight", *given_weight, input);
            weight = given_weight->contiguous();
        }
        if (given_bias) {
            dtype = check_channel_values(op, "bias", *given_bias, input);
            if (given_weight)
                check_like(op, "bias", *given_bias, "weight", *given_weight);
            bias = given_bias->contiguous();
        }
    }

    const void *weight_data() const
    {
        return weight.defined() ? weight.const_data_ptr() : nullptr;
    }
    const void *bias_data() const
    {
        return bias.defined() ? bias.const_data_ptr() : nullptr;
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
    return at::empty({bytes}, input.options().dtype(at::kByte));
}

// Grains for the CPU's steps: how many blocks or rows are worth a thread.
static int64_t grain_of(const Layout &l, int64_t pieces)
{
    return std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, l.outer * l.channels * l.inner / pieces));
}

static void normalize_cpu(const char *op, const Tensor &output, const Tensor &workspace, const Tensor &x,
                          const Layout &l, cuda_ops_dtype dtype)
{
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(l.outer, l.channels, l.inner);
    parallel_ranges(op, rows, grain_of(l, rows), [&](int64_t begin, int64_t end) {
        return cuda_ops_batch_norm_normalize_cpu(output.data_ptr(), workspace.const_data_ptr(), x.const_data_ptr(),
                                                 l.outer, l.channels, l.inner, begin, end, dtype);
    });
}

static std::tuple<Tensor, Tensor, Tensor> batch_norm_forward_training(const Tensor &input,
                                                                      const std::optional<Tensor> &weight,
                                                                      const std::optional<Tensor> &bias, double eps)
{
    const char *const op = "batch_norm";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_input(op, input);
    const Parameters parameters(op, weight, bias, input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Layout l(input);
    const Tensor x = input.contiguous(l.format);
    Tensor output = l.empty_like(x);
    const auto statistics = x.options().dtype(at::kDouble);
    if (x.numel() == 0)
        return {output, at::zeros({l.channels}, statistics), at::zeros({l.channels}, statistics)};
    Tensor mean = at::empty({l.channels}, statistics), variance = at::empty({l.channels}, statistics);
    const Tensor workspace = make_workspace(x, l);
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_batch_norm_forward_training_cuda(
                            output.data_ptr(), mean.data_ptr<double>(), variance.data_ptr<double>(),
                            workspace.data_ptr(), x.const_data_ptr(), parameters.weight_data(), parameters.bias_data(),
                            l.outer, l.channels, l.inner, eps, dtype, parameters.dtype, current_stream(op)));
        return {output, mean, variance};
    }
    const int64_t blocks = cuda_ops_batch_norm_blocks_cpu(l.outer, l.channels, l.inner);
    parallel_ranges(op, blocks, grain_of(l, blocks), [&](int64_t begin, int64_t end) {
        return cuda_ops_batch_norm_moments_cpu(workspace.data_ptr(), x.const_data_ptr(), l.outer, l.channels, l.inner,
                                               begin, end, dtype);
    });
    check_status(op, cuda_ops_batch_norm_prepare_training_cpu(
                         mean.data_ptr<double>(), variance.data_ptr<double>(), workspace.data_ptr(),
                         parameters.weight_data(), parameters.bias_data(), l.outer, l.channels, l.inner, eps, dtype));
    normalize_cpu(op, output, workspace, x, l, dtype);
    return {output, mean, variance};
}

static Tensor batch_norm_forward_inference(const Tensor &input, const std::optional<Tensor> &weight,
                                           const std::optional<Tensor> &bias, const Tensor &running_mean,
                                           const Tensor &running_var, double eps)
{
    const char *const op = "batch_norm";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_input(op, input);
    const Parameters parameters(op, weight, bias, input);
    const cuda_ops_dtype statistics_dtype = check_channel_values(op, "running_mean", running_mean, input);
    check_channel_values(op, "running_var", running_var, input);
    check_like(op, "running_var", running_var, "running_mean", running_mean);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Layout l(input);
    const Tensor x = input.contiguous(l.format);
    const Tensor mean = running_mean.contiguous(), variance = running_var.contiguous();
    Tensor output = l.empty_like(x);
    if (x.numel() == 0)
        return output;
    const Tensor workspace = make_workspace(x, l);
    (void)statistics_dtype; // not used in a build without CUDA
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_batch_norm_forward_inference_cuda(
                            output.data_ptr(), workspace.data_ptr(), x.const_data_ptr(), parameters.weight_data(),
                            parameters.bias_data(), mean.const_data_ptr(), variance.const_data_ptr(), l.outer,
                            l.channels, l.inner, eps, dtype, parameters.dtype, statistics_dtype, current_stream(op)));
        return output;
    }
    check_status(op, cuda_ops_batch_norm_prepare_inference_cpu(
                         workspace.data_ptr(), parameters.weight_data(), parameters.bias_data(), mean.const_data_ptr(),
                         variance.const_data_ptr(), l.outer, l.channels, l.inner, eps, dtype));
    normalize_cpu(op, output, workspace, x, l, dtype);
    return output;
}

// mean and variance: in training those that forward returned, else the running statistics. A result that is not asked
// for is returned empty; the others of grad_weight and grad_bias are of `parameter_dtype`.
static std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor &grad_output, const Tensor &input,
                                                              const std::optional<Tensor> &weight, const Tensor &mean,
                                                              const Tensor &variance, bool training, double eps,
                                                              at::ScalarType parameter_type, bool needs_grad_input,
                                                              bool needs_grad_parameters)
{
    const char *const op = "batch_norm_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_input(op, input);
    check_like(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    const Parameters parameters(op, weight, std::nullopt, input);
    TORCH_CHECK(!weight || weight->scalar_type() == parameter_type, op, ": expected parameter_dtype to be that of ",
                "weight, ", weight ? weight->scalar_type() : parameter_type, ", got ", parameter_type);
    cuda_ops_dtype statistics_dtype = CUDA_OPS_FLOAT64;
    if (training) {
        for (const Tensor *statistic : {&mean, &variance})
            TORCH_CHECK(statistic->scalar_type() == at::kDouble && statistic->dim() == 1 &&
                            statistic->size(0) == input.size(1) && statistic->device() == input.device(),
                        op, ": expected mean and variance to be those that forward returned, got ",
                        statistic->toString(), " of shape ", statistic->sizes());
    } else {
        statistics_dtype = check_channel_values(op, "mean", mean, input);
        check_channel_values(op, "variance", variance, input);
        check_like(op, "variance", variance, "mean", mean);
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Layout l(input);
    const Tensor x = input.contiguous(l.format), g = grad_output.contiguous(l.format);
    const Tensor m = mean.contiguous(), v = variance.contiguous();
    const auto parameter_options = x.options().dtype(parameter_type);
    Tensor grad_input = needs_grad_input ? l.empty_like(x) : at::empty({0}, x.options());
    const int64_t parameter_count = needs_grad_parameters ? l.channels : 0;
    if (x.numel() == 0)
        return {grad_input, at::zeros({parameter_count}, parameter_options),
                at::zeros({parameter_count}, parameter_options)};
    Tensor grad_weight = at::empty({parameter_count}, parameter_options);
    Tensor grad_bias = at::empty({parameter_count}, parameter_options);
    const Tensor workspace = make_workspace(x, l);
    void *const grad_weight_data = needs_grad_parameters ? grad_weight.data_ptr() : nullptr;
    void *const grad_bias_data = needs_grad_parameters ? grad_bias.data_ptr() : nullptr;
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "grad_weight", grad_weight);
    (void)statistics_dtype; // not used in a build without CUDA
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_backward_cuda(
                                needs_grad_input ? grad_input.data_ptr() : nullptr, grad_weight_data, grad_bias_data,
                                workspace.data_ptr(), g.const_data_ptr(), x.const_data_ptr(), parameters.weight_data(),
                                m.const_data_ptr(), v.const_data_ptr(), l.outer, l.channels, l.inner, eps, training,
                                dtype, parameter_dtype, statistics_dtype, current_stream(op)));
        return {grad_input, grad_weight, grad_bias};
    }
    TORCH_CHECK(parameter_dtype == dtype, op, ": expected parameter_dtype to be that of input on the CPU, got ",
                parameter_type);
    if (training || needs_grad_parameters) {
        const int64_t blocks = cuda_ops_batch_norm_blocks_cpu(l.outer, l.channels, l.inner);
        parallel_ranges(op, blocks, grain_of(l, blocks), [&](int64_t begin, int64_t end) {
            return cuda_ops_batch_norm_sums_cpu(workspace.data_ptr(), g.const_data_ptr(), x.const_data_ptr(),
                                                m.const_data_ptr(), l.outer, l.channels, l.inner, training, begin, end,
                                                dtype);
        });
    }
    check_status(op, cuda_ops_batch_norm_prepare_backward_cpu(
                         grad_weight_data, grad_bias_data, workspace.data_ptr(), parameters.weight_data(),
                         m.const_data_ptr(), v.const_data_ptr(), l.outer, l.channels, l.inner, eps, training, dtype));
    if (!needs_grad_input)
        return {grad_input, grad_weight, grad_bias};
    const int64_t rows = cuda_ops_batch_norm_rows_cpu(l.outer, l.channels, l.inner);
    parallel_ranges(op, rows, grain_of(l, rows), [&](int64_t begin, int64_t end) {
        return cuda_ops_batch_norm_grad_input_cpu(grad_input.data_ptr(), workspace.const_data_ptr(), g.const_data_ptr(),
                                                  x.const_data_ptr(), l.outer, l.channels, l.inner, training, begin,
                                                  end, dtype);
    });
    return {grad_input, grad_weight, grad_bias};
}

// Running statistics that are not contiguous are updated in a copy.
static void batch_norm_update(Tensor &running_mean, Tensor &running_var, const Tensor &mean, const Tensor &variance,
                              double momentum, int64_t count)
{
    const char *const op = "batch_norm_update";
    const cuda_ops_dtype dtype = check_dtype(op, "running_mean", running_mean);
    check_dim(op, "running_mean", running_mean, 1, 1);
    check_like(op, "running_var", running_var, "running_mean", running_mean);
    check_same_shape(op, "running_var", running_var, "running_mean", running_mean);
    for (const Tensor *statistic : {&mean, &variance}) {
        check_same_device(op, "mean and variance", *statistic, "running_mean", running_mean);
        check_same_shape(op, "mean and variance", *statistic, "running_mean", running_mean);
        TORCH_CHECK(statistic->scalar_type() == at::kDouble, op, ": expected mean and variance to be float64, got ",
                    statistic->toString());
    }
    const c10::OptionalDeviceGuard guard(at::device_of(running_mean));
    const Tensor m = dense(mean), v = dense(variance);
    const Tensor new_mean = dense(running_mean), new_var = dense(running_var);
    if (count == 0 || m.numel() == 0)
        return;
    if (new_mean.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_update_cuda(new_mean.data_ptr(), new_var.data_ptr(),
                                                            m.const_data_ptr<double>(), v.const_data_ptr<double>(),
                                                            m.numel(), count, momentum, dtype, current_stream(op)));
    else
        check_status(op,
                     cuda_ops_batch_norm_update_cpu(new_mean.data_ptr(), new_var.data_ptr(), m.const_data_ptr<double>(),
                                                    v.const_data_ptr<double>(), m.numel(), count, momentum, dtype));
    if (!new_mean.is_same(running_mean))
        running_mean.copy_(new_mean);
    if (!new_var.is_same(running_var))
        running_var.copy_(new_var);
    // What saved the old values for its backward is to notice.
    running_mean.unsafeGetTensorImpl()->bump_version();
    running_var.unsafeGetTensorImpl()->bump_version();
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("batch_norm_forward_training(Tensor input, Tensor? weight, Tensor? bias, float eps)"
                " -> (Tensor output, Tensor mean, Tensor variance)");
    library.def("batch_norm_forward_inference(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
                "Tensor running_var, float eps) -> Tensor");
    library.def("batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor variance, "
                "bool training, float eps, ScalarType parameter_dtype, bool needs_grad_input, "
                "bool needs_grad_parameters) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
    library.def("batch_norm_update(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor variance, "
                "float momentum, SymInt count) -> ()");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_forward_training", cuda_ops::batch_norm_forward_training);
    CUDA_OPS_IMPLEMENT(library, "batch_norm_forward_inference", cuda_ops::batch_norm_forward_inference);
    CUDA_OPS_IMPLEMENT(library, "batch_norm_backward", cuda_ops::batch_norm_backward);
    CUDA_OPS_IMPLEMENT(library, "batch_norm_update", cuda_ops::batch_norm_update);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "batch_norm_update");
}
