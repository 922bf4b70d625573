// group_norm and instance_norm for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/group_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "autograd.h"
#include "checks.h"
#include "cpu_workspace.h"
#include "elements.h"
#include "empty.h"
#include "running_statistics.h"
#include "vmap.h"

namespace cuda_ops
{

namespace
{

using OptionalTensor = std::optional<Tensor>;

const char *const GROUP_NORM_CHANNEL = "channel of input"; // in messages

// A tensor as the kernels see it. Contiguous and channels_last tensors are used as they are, others are made contiguous;
// outputs and gradients have the same memory format. num_groups 0: as many as channels, which instance_norm's backward
// says.
struct GroupNormLayout {
    at::MemoryFormat format;
    cuda_ops_group_norm_sizes sizes{0, 0, 1, 1, 0};

    GroupNormLayout(const char *op, const Tensor &input, int64_t num_groups) : format(input.suggest_memory_format())
    {
        TORCH_CHECK(input.dim() >= 2, op, ": expected input to have at least 2 dimensions, got shape ", input.sizes());
        sizes.images = input.size(0), sizes.channels = input.size(1);
        TORCH_CHECK(num_groups >= 0 && (num_groups == 0 || sizes.channels % num_groups == 0), op,
                    ": expected num_groups to be positive and to divide the channels of input, ", sizes.channels,
                    ", got ", num_groups);
        sizes.groups = num_groups > 0 ? num_groups : sizes.channels;
        for (int64_t d = 2; d < input.dim(); d++)
            sizes.inner *= input.size(d);
        sizes.channels_last = format != at::MemoryFormat::Contiguous;
    }

    Tensor new_like(const Tensor &input) const
    {
        return empty(input.sizes(), input.options().memory_format(format));
    }
    // Units of the CPU that share a run of memory: those of an image where groups lie beside each other, else one.
    int64_t units_per_row(int64_t units) const
    {
        return sizes.channels_last ? std::max<int64_t>(1, units / sizes.images) : 1;
    }
    // Units of the CPU that a thread takes at least.
    int64_t grain(int64_t units) const
    {
        const int64_t elements = sizes.images * sizes.channels * sizes.inner;
        return std::max<int64_t>(1,
                                 ELEMENTWISE_GRAIN / 4 / std::max<int64_t>(1, elements / std::max<int64_t>(1, units)));
    }
};

// weight and bias, contiguous; undefined if not given.
struct GroupNormParameters {
    Tensor weight, bias;
    cuda_ops_dtype dtype;

    GroupNormParameters(const char *op, const OptionalTensor &given_weight, const OptionalTensor &given_bias,
                        const Tensor &input)
        : dtype(check_dtype(op, "input", input))
    {
        const auto check = [&](const char *name, const Tensor &tensor) {
            dtype = check_channel_values(op, name, tensor, input, input.size(1), GROUP_NORM_CHANNEL);
            return tensor.contiguous();
        };
        if (given_weight)
            weight = check("weight", *given_weight);
        if (given_bias)
            bias = check("bias", *given_bias);
        if (given_weight && given_bias)
            check_like(op, "bias", *given_bias, "weight", *given_weight);
    }
};

const void *group_norm_data(const Tensor &tensor)
{
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

std::tuple<Tensor, Tensor, Tensor> group_norm(const char *op, const Tensor &input, int64_t num_groups,
                                              const OptionalTensor &weight, const OptionalTensor &bias, double eps)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const GroupNormLayout l(op, input, num_groups);
    const GroupNormParameters parameters(op, weight, bias, input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(l.format);
    Tensor output = l.new_like(x);
    const auto statistics = x.options().dtype(at::kDouble);
    if (x.numel() == 0)
        return {output, at::zeros({l.sizes.images, l.sizes.groups}, statistics),
                at::zeros({l.sizes.images, l.sizes.groups}, statistics)};
    Tensor mean = empty({l.sizes.images, l.sizes.groups}, statistics);
    Tensor variance = empty({l.sizes.images, l.sizes.groups}, statistics);
    [[maybe_unused]] const void *const weight_data = group_norm_data(parameters.weight), *const bias_data =
                                                                                             group_norm_data(
                                                                                                 parameters.bias);
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(cuda_ops_group_norm_workspace_cuda(l.sizes, /*backward=*/0, dtype), x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_group_norm_forward_cuda(output.data_ptr(), mean.data_ptr<double>(),
                                                             variance.data_ptr<double>(), workspace.data_ptr(),
                                                             x.const_data_ptr(), weight_data, bias_data, l.sizes, eps,
                                                             dtype, parameters.dtype, current_stream(op)));
        return {output, mean, variance};
    }
    const int64_t units = cuda_ops_group_norm_units_cpu(l.sizes);
    const int64_t per_row = l.units_per_row(units), row = x.numel() / (units / per_row);
    const Tensor w = widened(parameters.weight), b = widened(parameters.bias);
    parallel_stored_rows(
        op, units, per_row, l.grain(units), dtype,
        [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_group_norm_forward_cpu(to, mean.data_ptr<double>(), variance.data_ptr<double>(), from,
                                                   group_norm_data(w), group_norm_data(b), l.sizes, eps, begin, end,
                                                   type);
        },
        writes(output, row), reads(x, row));
    return {output, mean, variance};
}

} // namespace

static std::tuple<Tensor, Tensor, Tensor> group_norm_forward(const Tensor &input, int64_t num_groups,
                                                             const OptionalTensor &weight, const OptionalTensor &bias,
                                                             double eps)
{
    TORCH_CHECK(num_groups > 0, "group_norm: expected num_groups to be positive, got ", num_groups);
    return group_norm("group_norm", input, num_groups, weight, bias, eps);
}

static std::tuple<Tensor, Tensor, Tensor> instance_norm_forward(const Tensor &input, const OptionalTensor &weight,
                                                                const OptionalTensor &bias, double eps)
{
    return group_norm("instance_norm", input, 0, weight, bias, eps);
}

// What is not wanted is returned empty. grad_weight and grad_bias are of the dtype of weight, or else of bias, or else
// of input.
static std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor &grad_output, const Tensor &input,
                                                              int64_t num_groups, const OptionalTensor &weight,
                                                              const Tensor &mean, const Tensor &variance, double eps,
                                                              std::optional<at::ScalarType> bias_type,
                                                              std::array<bool, 3> wanted)
{
    const char *const op = "group_norm_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const GroupNormLayout l(op, input, num_groups);
    check_like(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    const GroupNormParameters parameters(op, weight, std::nullopt, input);
    for (const Tensor *statistic : {&mean, &variance})
        TORCH_CHECK(statistic->scalar_type() == at::kDouble && statistic->dim() == 2 &&
                        statistic->size(0) == l.sizes.images && statistic->size(1) == l.sizes.groups &&
                        statistic->device() == input.device(),
                    op, ": expected mean and variance to be those that forward returned, got ", statistic->toString(),
                    " of shape ", statistic->sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(l.format), g = grad_output.contiguous(l.format);
    const Tensor m = mean.contiguous(), v = variance.contiguous();
    const auto options = x.options().dtype(weight ? weight->scalar_type() : bias_type.value_or(input.scalar_type()));
    Tensor grad_input = wanted[0] ? l.new_like(x) : empty({0}, x.options());
    Tensor grads[2];
    for (int which = 0; which < 2; which++) {
        const int64_t count = wanted[1 + which] ? l.sizes.channels : 0;
        grads[which] = x.numel() == 0 ? at::zeros({count}, options) : empty({count}, options);
    }
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "grad_weight", grads[0]);
    if (x.numel() == 0)
        return {grad_input, grads[0], grads[1]};
    [[maybe_unused]] void *const grad_input_data = wanted[0] ? grad_input.data_ptr() : nullptr;
    [[maybe_unused]] void *const grad_weight_data = wanted[1] ? grads[0].data_ptr() : nullptr;
    [[maybe_unused]] void *const grad_bias_data = wanted[2] ? grads[1].data_ptr() : nullptr;
    [[maybe_unused]] const void *const weight_data = group_norm_data(parameters.weight);
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(cuda_ops_group_norm_workspace_cuda(l.sizes, /*backward=*/1, dtype), x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_group_norm_backward_cuda(
                                grad_input_data, grad_weight_data, grad_bias_data, workspace.data_ptr(),
                                g.const_data_ptr(), x.const_data_ptr(), weight_data, m.const_data_ptr<double>(),
                                v.const_data_ptr<double>(), l.sizes, eps, dtype, parameter_dtype, current_stream(op)));
        return {grad_input, grads[0], grads[1]};
    }
    TORCH_CHECK(parameter_dtype == dtype || is_half(dtype), op,
                ": expected bias_dtype to be that of input on the CPU, got ",
                c10::toString(options.dtype().toScalarType()));
    void *const workspace = thread_workspace(cuda_ops_group_norm_workspace_cpu(l.sizes));
    const int64_t units = cuda_ops_group_norm_units_cpu(l.sizes);
    const int64_t per_row = l.units_per_row(units), row = x.numel() / (units / per_row);
    const Tensor w = widened(parameters.weight);
    parallel_stored_rows(
        op, units, per_row, l.grain(units), dtype,
        [&](void *to, const void *grad, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_group_norm_backward_cpu(to, workspace, grad, from, group_norm_data(w),
                                                    m.const_data_ptr<double>(), v.const_data_ptr<double>(), l.sizes,
                                                    eps, begin, end, type);
        },
        writes(wanted[0] ? grad_input : Tensor(), row), reads(g, row), reads(x, row));
    if (wanted[1] || wanted[2])
        parallel_elements(
            op, l.sizes.channels, is_half(dtype) && parameter_dtype == CUDA_OPS_FLOAT32 ? CUDA_OPS_FLOAT32 : dtype,
            [&](void *to_weight, void *to_bias, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_group_norm_backward_sums_cpu(to_weight, to_bias, workspace, l.sizes, begin, end, type);
            },
            writes(wanted[1] ? grads[0] : Tensor()), writes(wanted[2] ? grads[1] : Tensor()));
    return {grad_input, grads[0], grads[1]};
}

// mean and variance: of forward; count: of the values that they are of.
static void instance_norm_update_(const Tensor &running_mean, const Tensor &running_var, const Tensor &mean,
                                  const Tensor &variance, int64_t count, double momentum)
{
    const char *const op = "instance_norm";
    for (const Tensor *statistic : {&mean, &variance})
        TORCH_CHECK(statistic->scalar_type() == at::kDouble && statistic->dim() == 2 &&
                        statistic->sizes() == mean.sizes() && statistic->device() == mean.device(),
                    op, ": expected mean and variance to be those that forward returned, got ", statistic->toString(),
                    " of shape ", statistic->sizes());
    TORCH_CHECK_VALUE(count > 1, op, ": expected more than one value for each channel of an image, got ", count);
    const std::pair<const char *, const Tensor *> running[] = {{"running_mean", &running_mean},
                                                               {"running_var", &running_var}};
    for (const auto &[name, tensor] : running) {
        check_same_device(op, name, *tensor, "input", mean);
        TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == mean.size(1), op, ": expected ", name,
                    " to have one element for each ", GROUP_NORM_CHANNEL, ", ", mean.size(1), ", got shape ",
                    tensor->sizes());
        TORCH_CHECK(!tensor->requires_grad(), op, ": not differentiable with respect to ", name);
    }
    const cuda_ops_dtype dtype = check_dtype(op, "running_mean", running_mean);
    check_like(op, "running_var", running_var, "running_mean", running_mean);
    const c10::OptionalDeviceGuard guard(at::device_of(mean));
    const Tensor m = mean.contiguous(), v = variance.contiguous();
    const Tensor to_mean = dense(running_mean), to_variance = dense(running_var);
    if (mean.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_instance_norm_update_cuda(to_mean.data_ptr(), to_variance.data_ptr(),
                                                               m.const_data_ptr<double>(), v.const_data_ptr<double>(),
                                                               m.size(0), m.size(1), count, momentum, dtype,
                                                               current_stream(op)));
    else {
        const Tensor new_mean = widened(to_mean), new_variance = widened(to_variance);
        check_status(op, cuda_ops_instance_norm_update_cpu(new_mean.data_ptr(), new_variance.data_ptr(),
                                                           m.const_data_ptr<double>(), v.const_data_ptr<double>(),
                                                           m.size(0), m.size(1), count, momentum,
                                                           is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype));
        round_back(to_mean, new_mean);
        round_back(to_variance, new_variance);
    }
    for (const auto &[updated, given] : {std::pair{to_mean, running_mean}, std::pair{to_variance, running_var}}) {
        if (!updated.is_same(given))
            given.copy_(updated);
        given.unsafeGetTensorImpl()->bump_version(); // so that autograd notices
    }
}

// What output changes by where input changes by `tangent`: the normalised value's derivative is symmetric, and so the
// gradient's kernel without weight.
static Tensor group_norm_tangent(const Tensor &tangent, const Tensor &input, int64_t num_groups,
                                 const OptionalTensor &weight, const Tensor &mean, const Tensor &variance, double eps)
{
    using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, const Tensor &, int64_t, const OptionalTensor &,
                                                        const Tensor &, const Tensor &, double,
                                                        std::optional<at::ScalarType>, std::array<bool, 3>);
    static const auto op = registered_op<Backward>("cuda_ops::group_norm_backward");
    const Tensor change = std::get<0>(
        op.call(tangent, input, num_groups, std::nullopt, mean, variance, eps, std::nullopt, {true, false, false}));
    if (!weight)
        return change;
    c10::SymDimVector shape(input.dim(), 1);
    shape[1] = input.sym_size(1);
    return (change * weight->view_symint(shape)).to(input.scalar_type());
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("group_norm_forward(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps)"
                " -> (Tensor output, Tensor mean, Tensor variance)");
    library.def("instance_norm_forward(Tensor input, Tensor? weight, Tensor? bias, float eps)"
                " -> (Tensor output, Tensor mean, Tensor variance)");
    // num_groups 0: as many as channels.
    library.def("group_norm_backward(Tensor grad_output, Tensor input, int num_groups, Tensor? weight, Tensor mean, "
                "Tensor variance, float eps, ScalarType? bias_dtype, bool[3] wanted)"
                " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
    library.def("instance_norm_update_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor variance, "
                "SymInt count, float momentum) -> ()");
    library.def("group_norm_tangent(Tensor tangent, Tensor input, int num_groups, Tensor? weight, Tensor mean, "
                "Tensor variance, float eps) -> Tensor",
                cuda_ops::group_norm_tangent);
    // cuda_ops/ops/group_norm.py composes these of PyTorch's operations.
    library.def("group_norm_backward_gradients(Tensor? grad_grad_input, Tensor? grad_grad_weight, "
                "Tensor? grad_grad_bias, Tensor grad_output, Tensor input, int num_groups, Tensor? weight, float eps, "
                "bool[3] wanted) -> Tensor[]");
    library.def("group_norm_backward_tangents(Tensor? tangent_grad_output, Tensor? tangent_input, "
                "Tensor? tangent_weight, Tensor grad_output, Tensor input, int num_groups, Tensor? weight, float eps, "
                "ScalarType? bias_dtype, bool[3] wanted)"
                " -> (Tensor tangent_grad_input, Tensor tangent_grad_weight, Tensor tangent_grad_bias)");
    CUDA_OPS_IMPLEMENT(library, "group_norm_forward", cuda_ops::group_norm_forward);
    CUDA_OPS_VMAP(library, "group_norm_forward", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "instance_norm_forward", cuda_ops::instance_norm_forward);
    CUDA_OPS_VMAP(library, "instance_norm_forward", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "group_norm_backward", cuda_ops::group_norm_backward);
    CUDA_OPS_IMPLEMENT(library, "instance_norm_update_", cuda_ops::instance_norm_update_);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "instance_norm_update_");
    // As PyTorch's, of which instance_norm is in none of autocast's lists.
    CUDA_OPS_AUTOCAST(library, "group_norm_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_DERIVATIVES(
        library, "group_norm_forward",
        {"input, weight, bias: group_norm_backward(grad_output, input, num_groups, weight, mean, variance, eps, "
         "bias.dtype, wanted)",
         "output <- group_norm_tangent(tangent_input, input, num_groups, weight, mean, variance, eps)",
         "output <- group_norm_forward(input, num_groups, tangent_weight, none, eps)",
         "output <- expand_channels(tangent_bias, output.size, output.dtype)"});
    CUDA_OPS_DERIVATIVES(
        library, "instance_norm_forward",
        {"input, weight, bias: group_norm_backward(grad_output, input, 0, weight, mean, variance, eps, bias.dtype, "
         "wanted)",
         "output <- group_norm_tangent(tangent_input, input, 0, weight, mean, variance, eps)",
         "output <- instance_norm_forward(input, tangent_weight, none, eps)",
         "output <- expand_channels(tangent_bias, output.size, output.dtype)"});
    // mean and variance are of no influence on the derivatives, which compute them anew of input.
    CUDA_OPS_DERIVATIVES(
        library, "group_norm_backward",
        {"grad_output, input, weight: group_norm_backward_gradients(grad_grad_input, grad_grad_weight, grad_grad_bias, "
         "grad_output, input, num_groups, weight, eps, wanted)",
         "grad_input, grad_weight, grad_bias <- group_norm_backward_tangents(tangent_grad_output, tangent_input, "
         "tangent_weight, grad_output, input, num_groups, weight, eps, bias_dtype, wanted)"});
}
