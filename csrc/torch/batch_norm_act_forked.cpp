// batch_norm_act whose output two take, as a residual block's does: its branch and its sum. Left to autograd, the sum
// of their gradients would be an addition of its own. So the op returns the output twice, the second an alias that
// leads back to it too, and backward's first pass adds up the gradients of both.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "autograd.h"
#include "checks.h"

namespace cuda_ops
{

static const char *const FORKED_NORM = "batch_norm_act_forked";

namespace
{

using ForkedTensor = std::optional<Tensor>; // that need not be there
using ForkedActivation = std::optional<std::string_view>;
using ForkedGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

ForkedTensor tensor_or_none(const Tensor &tensor)
{
    return tensor.defined() ? ForkedTensor(tensor) : std::nullopt;
}

// Edges: those of input, weight, bias and residual. Gradients that come in: those of output and of its alias.
struct BatchNormActForkedBackward : public torch::autograd::Node {
    torch::autograd::SavedVariable input, weight, bias, residual, mean, variance;
    bool training = false;
    std::optional<std::string> activation;
    double eps = 0;

    std::string name() const override
    {
        return "BatchNormActForkedBackward";
    }

    void release_variables() override
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (torch::autograd::SavedVariable *const saved : {&input, &weight, &bias, &residual, &mean, &variance})
            saved->reset_data();
    }

    torch::autograd::variable_list apply(torch::autograd::variable_list &&grads) override
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        torch::autograd::variable_list results(4);
        if (!grads[0].defined() && !grads[1].defined())
            return results;
        const Tensor x = input.unpack(), w = weight.unpack(), b = bias.unpack(), r = residual.unpack();
        const Tensor m = mean.unpack(), v = variance.unpack();
        const ForkedActivation function = activation ? ForkedActivation(*activation) : std::nullopt;
        const std::array<bool, 4> wanted = {task_should_compute_output(0), task_should_compute_output(1),
                                            task_should_compute_output(2), task_should_compute_output(3)};
        const bool both = grads[0].defined() && grads[1].defined();
        const Tensor &one = grads[0].defined() ? grads[0] : grads[1];
        if (is_differentiated_further(grads)) {
            static const auto gradients = registered_op<ForkedGradients(
                const Tensor &, const Tensor &, const ForkedTensor &, const ForkedTensor &, const ForkedTensor &,
                const Tensor &, const Tensor &, bool, ForkedActivation, double, std::array<bool, 4>)>(
                "cuda_ops::batch_norm_act_gradients");
            std::tie(results[0], results[1], results[2], results[3]) =
                gradients.call(both ? grads[0] + grads[1] : one, x, tensor_or_none(w), tensor_or_none(b),
                               tensor_or_none(r), m, v, training, function, eps, wanted);
        } else if (both) {
            static const auto backward =
                registered_op<ForkedGradients(const Tensor &, const Tensor &, const Tensor &, const ForkedTensor &,
                                              const ForkedTensor &, const ForkedTensor &, const Tensor &,
                                              const Tensor &, bool, ForkedActivation, double, std::array<bool, 4>)>(
                    "cuda_ops::batch_norm_act_backward_of_two");
            std::tie(results[0], results[1], results[2], results[3]) =
                backward.call(grads[0], grads[1], x, tensor_or_none(w), tensor_or_none(b), tensor_or_none(r), m, v,
                              training, function, eps, wanted);
        } else {
            static const auto backward = registered_op<ForkedGradients(
                const Tensor &, const Tensor &, const ForkedTensor &, const ForkedTensor &, const ForkedTensor &,
                const Tensor &, const Tensor &, bool, ForkedActivation, double, std::array<bool, 4>)>(
                "cuda_ops::batch_norm_act_backward");
            std::tie(results[0], results[1], results[2], results[3]) = backward.call(
                one, x, tensor_or_none(w), tensor_or_none(b), tensor_or_none(r), m, v, training, function, eps, wanted);
        }
        for (size_t i = 0; i < results.size(); i++)
            if (!wanted[i])
                results[i] = Tensor();
        return results;
    }
};

} // namespace

// output, and its alias (none where no gradient is recorded).
static std::tuple<Tensor, std::vector<Tensor>>
batch_norm_act_forked(const Tensor &input, const ForkedTensor &weight, const ForkedTensor &bias,
                      const ForkedTensor &residual, const ForkedTensor &running_mean, const ForkedTensor &running_var,
                      const ForkedTensor &num_batches_tracked, ForkedActivation activation, bool training,
                      double momentum, double eps)
{
    TORCH_CHECK_VALUE(eps > 0, FORKED_NORM, ": expected eps to be positive, got ", eps);
    TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(), FORKED_NORM,
                      ": running_mean and running_var must either both be None or neither be None");
    TORCH_CHECK(training || running_mean, FORKED_NORM, ": running_mean must be defined in evaluation mode");
    bool requires_grad = false, has_tangent = false;
    for (const ForkedTensor &tensor : {ForkedTensor(input), weight, bias, residual})
        if (tensor) {
            requires_grad = requires_grad || tensor->requires_grad();
            has_tangent = has_tangent || tensor->_fw_grad(0).defined();
        }
    for (const ForkedTensor &statistics : {running_mean, running_var})
        TORCH_CHECK(!statistics || !statistics->requires_grad(), FORKED_NORM,
                    ": not differentiable with respect to running statistics");
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent, FORKED_NORM, ": forward mode is not supported");
    const c10::OptionalDeviceGuard device(at::device_of(input));
    Tensor output, mean, variance;
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        if (training && running_mean) {
            static const auto forward = registered_op<std::tuple<Tensor, Tensor, Tensor>(
                const Tensor &, const ForkedTensor &, const ForkedTensor &, const ForkedTensor &, const Tensor &,
                const Tensor &, const ForkedTensor &, ForkedActivation, double, double)>(
                "cuda_ops::batch_norm_act_forward_tracking");
            std::tie(output, mean, variance) = forward.call(input, weight, bias, residual, *running_mean, *running_var,
                                                            num_batches_tracked, activation, momentum, eps);
        } else if (training) {
            static const auto forward = registered_op<std::tuple<Tensor, Tensor, Tensor>(
                const Tensor &, const ForkedTensor &, const ForkedTensor &, const ForkedTensor &, ForkedActivation,
                double)>("cuda_ops::batch_norm_act_forward_training");
            std::tie(output, mean, variance) = forward.call(input, weight, bias, residual, activation, eps);
        } else {
            static const auto forward =
                registered_op<Tensor(const Tensor &, const ForkedTensor &, const ForkedTensor &, const ForkedTensor &,
                                     const Tensor &, const Tensor &, ForkedActivation, double)>(
                    "cuda_ops::batch_norm_act_forward_inference");
            mean = *running_mean, variance = *running_var;
            output = forward.call(input, weight, bias, residual, mean, variance, activation, eps);
        }
    }
    if (!requires_grad || !at::GradMode::is_enabled())
        return {output, std::vector<Tensor>()};
    const std::shared_ptr<BatchNormActForkedBackward> node(new BatchNormActForkedBackward, torch::autograd::deleteNode);
    torch::autograd::edge_list edges;
    for (const ForkedTensor &tensor : {ForkedTensor(input), weight, bias, residual})
        edges.push_back(tensor ? torch::autograd::impl::gradient_edge(*tensor) : torch::autograd::Edge());
    node->input = torch::autograd::SavedVariable(input, false);
    node->weight = torch::autograd::SavedVariable(weight.value_or(Tensor()), false);
    node->bias = torch::autograd::SavedVariable(bias.value_or(Tensor()), false);
    node->residual = torch::autograd::SavedVariable(residual.value_or(Tensor()), false);
    node->mean = torch::autograd::SavedVariable(mean, false);
    node->variance = torch::autograd::SavedVariable(variance, false);
    node->training = training;
    if (activation)
        node->activation = std::string(*activation);
    node->eps = eps;
    node->set_next_edges(std::move(edges));
    Tensor alias = output.detach();
    torch::autograd::set_history(output, node);
    torch::autograd::set_history(alias, node);
    return {output, std::vector<Tensor>{alias}};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    // Records its gradients itself, as concat_batch_norm_act does.
    library.def("batch_norm_act_forked(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
                "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, str? activation, "
                "bool training, float momentum, float eps) -> (Tensor output, Tensor[] alias)",
                cuda_ops::batch_norm_act_forked);
    cuda_ops::register_kernels_of_all_ops(library, "batch_norm_act_forked");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "batch_norm_act_forked");
}
