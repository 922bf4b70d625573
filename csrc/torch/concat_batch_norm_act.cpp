// concat_batch_norm_act for PyTorch: batch_norm_act of what tensors are one behind the other along the channels, each
// read where it is. Where the kernels do not take the tensors (the CPU, channels that are not innermost in memory or no
// whole vectors of 16 bytes) they are concatenated, and batch_norm_act does the rest.
//
// A DenseNet normalises each feature in every later layer. Left to autograd, its gradient would be a sum of as many
// tensors, an addition for each. So concat_batch_norm_act hands its tensors on, as aliases that lead back to it: a
// layer that takes the aliases that the one before handed on is the only one that uses them, and the gradient of an
// alias is all that later layers have to add, which backward's kernel takes in. Their moments are handed on likewise.
#include "cuda_ops/concat_batch_norm_act.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "autograd.h"
#include "batch_norm.h"
#include "checks.h"
#include "empty.h"
#include "running_statistics.h"

namespace cuda_ops
{

static const char *const CONCAT_NORM = "concat_batch_norm_act";
static const char *const CHANNEL_OF_TENSORS = "channel of tensors";

using OptionalTensor = std::optional<Tensor>;
using Activation = std::optional<std::string_view>;

static void check_no_gradient(const OptionalTensor &running_mean, const OptionalTensor &running_var)
{
    for (const OptionalTensor &statistics : {running_mean, running_var})
        TORCH_CHECK(!statistics || !statistics->requires_grad(), CONCAT_NORM,
                    ": not differentiable with respect to running statistics");
}

// The tensors as the kernels see them: [rows, channels] each.
struct NormSources {
    at::MemoryFormat format = at::MemoryFormat::Contiguous;
    std::vector<Tensor> tensors;
    std::vector<cuda_ops_norm_source> sources;
    int64_t rows = 1, channels = 0;
    cuda_ops_dtype dtype = CUDA_OPS_FLOAT32;
    bool are_rows = true; // channels are innermost in all of them

    explicit NormSources(at::TensorList given)
    {
        TORCH_CHECK(!given.empty(), CONCAT_NORM, ": expected tensors to have elements, got none");
        const Tensor &first = given[0];
        dtype = check_dtype(CONCAT_NORM, "tensors[0]", first);
        TORCH_CHECK(first.dim() >= 2, CONCAT_NORM, ": expected tensors[0] to have at least 2 dimensions, got shape ",
                    first.sizes());
        format = first.suggest_memory_format();
        are_rows = first.dim() == 2 || format != at::MemoryFormat::Contiguous;
        for (int64_t d = 0; d < first.dim(); d++)
            rows *= d == 1 ? 1 : first.size(d);
        for (size_t i = 0; i < given.size(); i++) {
            const std::string name = "tensors[" + std::to_string(i) + "]";
            check_like(CONCAT_NORM, name.c_str(), given[i], "tensors[0]", first);
            bool fits = given[i].dim() == first.dim();
            for (int64_t d = 0; fits && d < first.dim(); d++)
                fits = d == 1 || given[i].size(d) == first.size(d);
            TORCH_CHECK(fits, CONCAT_NORM, ": expected ", name, " to have the shape ", first.sizes(),
                        " but along dimension 1, got ", given[i].sizes());
            channels += given[i].size(1);
            are_rows = are_rows && given[i].suggest_memory_format() == format;
        }
    }

    // Whether the kernels take them; the device is set.
    bool lay_out([[maybe_unused]] at::TensorList given)
    {
#ifdef CUDA_OPS_WITH_CUDA
        if (!are_rows || !given[0].is_cuda() || rows * channels == 0)
            return false;
        for (const Tensor &tensor : given) {
            tensors.push_back(resolved(tensor).contiguous(format));
            sources.push_back({tensors.back().const_data_ptr(), tensor.size(1), nullptr, nullptr, nullptr, 0, nullptr});
        }
        return cuda_ops_concat_batch_norm_act_supports_cuda(sources.data(), static_cast<int64_t>(sources.size()), rows,
                                                            dtype);
#else
        return false;
#endif
    }

    int64_t count() const
    {
        return static_cast<int64_t>(sources.size());
    }
    // Of all channels, laid out as the sources are.
    Tensor new_output(const Tensor &like) const
    {
        at::DimVector sizes(like.sizes());
        sizes[1] = channels;
        return empty(sizes, like.options().memory_format(format));
    }
};

static Tensor concatenated(at::TensorList tensors)
{
    return tensors.size() == 1 ? tensors[0] : at::cat(tensors, 1);
}

static Tensor or_undefined(const OptionalTensor &tensor)
{
    return tensor ? *tensor : Tensor();
}

static OptionalTensor or_none(const Tensor &tensor)
{
    return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Mean and variance of a tensor's channels, [2, channels] of float64.
static Tensor batch_norm_moments(const Tensor &input)
{
    const char *const op = "batch_norm_moments";
    [[maybe_unused]] const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    TORCH_CHECK(input.dim() >= 2, op, ": expected input to have at least 2 dimensions, got shape ", input.sizes());
    int64_t values = 1;
    for (int64_t d = 0; d < input.dim(); d++)
        values *= d == 1 ? 1 : input.size(d);
    TORCH_CHECK_VALUE(values != 1, op, ": Expected more than 1 value per channel when training, got input size ",
                      input.sizes());
    const at::MemoryFormat format = input.suggest_memory_format();
    if (!input.is_cuda() || input.numel() == 0 || input.numel() == input.size(1)) {
        static const auto forward = registered_op<std::tuple<Tensor, Tensor, Tensor>(
            const Tensor &, const OptionalTensor &, const OptionalTensor &, double)>(
            "cuda_ops::batch_norm_forward_training");
        const auto [output, mean, variance] = forward.call(input, std::nullopt, std::nullopt, 1e-5);
        return at::stack({mean, variance});
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(format);
    const int64_t channels = x.size(1);
    const bool innermost = format != at::MemoryFormat::Contiguous;
    const int64_t outer = innermost ? x.numel() / channels : x.size(0), inner = x.numel() / channels / outer;
    Tensor moments = empty({2, channels}, x.options().dtype(at::kDouble));
#ifdef CUDA_OPS_WITH_CUDA
    const Tensor workspace = empty_bytes(cuda_ops_batch_norm_workspace_cuda(outer, channels, inner), x);
    CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_forward_training_cuda(
                            nullptr, moments.data_ptr<double>(), moments.data_ptr<double>() + channels,
                            workspace.data_ptr(), nullptr, x.const_data_ptr(), nullptr, nullptr, outer, channels, inner,
                            1e-5, dtype, CUDA_OPS_FLOAT32, current_stream(op)));
#else
    (void)inner;
#endif
    return moments;
}

static std::tuple<Tensor, Tensor, Tensor>
concat_batch_norm_act_forward_training(at::TensorList tensors, at::TensorList moments, const OptionalTensor &weight,
                                       const OptionalTensor &bias, const OptionalTensor &running_mean,
                                       const OptionalTensor &running_var, const OptionalTensor &num_batches_tracked,
                                       Activation activation, double momentum, double eps)
{
    NormSources all(tensors);
    const Tensor &first = tensors[0];
    [[maybe_unused]] const auto epilogue = batch_norm_epilogue(CONCAT_NORM, activation);
    TORCH_CHECK(moments.empty() || moments.size() == tensors.size(), CONCAT_NORM,
                ": expected moments to be none, or those of each of the ", tensors.size(), " tensors, got ",
                moments.size());
    for (size_t i = 0; i < moments.size(); i++)
        TORCH_CHECK(moments[i].scalar_type() == at::kDouble && moments[i].dim() == 2 && moments[i].size(0) == 2 &&
                        moments[i].size(1) == tensors[i].size(1) && moments[i].device() == first.device(),
                    CONCAT_NORM, ": expected moments[", i, "] to be those of tensors[", i, "], got ",
                    moments[i].toString(), " of shape ", moments[i].sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(first));
    const Parameters parameters(CONCAT_NORM, resolved(weight), resolved(bias), first, all.channels, CHANNEL_OF_TENSORS);
    for (const OptionalTensor &statistic : {running_mean, running_var})
        if (statistic)
            check_channel_values(CONCAT_NORM, "running statistics", *statistic, first, all.channels,
                                 CHANNEL_OF_TENSORS);
    check_no_gradient(running_mean, running_var);
    if (moments.empty() || all.rows == 1 || !all.lay_out(tensors)) {
        const Tensor x = concatenated(tensors);
        if (running_mean || running_var) {
            static const auto forward = registered_op<std::tuple<Tensor, Tensor, Tensor>(
                const Tensor &, const OptionalTensor &, const OptionalTensor &, const OptionalTensor &, const Tensor &,
                const Tensor &, const OptionalTensor &, Activation, double, double)>(
                "cuda_ops::batch_norm_act_forward_tracking");
            return forward.call(x, weight, bias, std::nullopt, required(CONCAT_NORM, "running_mean", running_mean),
                                required(CONCAT_NORM, "running_var", running_var), num_batches_tracked, activation,
                                momentum, eps);
        }
        static const auto forward = registered_op<std::tuple<Tensor, Tensor, Tensor>(
            const Tensor &, const OptionalTensor &, const OptionalTensor &, const OptionalTensor &, Activation,
            double)>("cuda_ops::batch_norm_act_forward_training");
        return forward.call(x, weight, bias, std::nullopt, activation, eps);
    }
    const RunningStatistics running(CONCAT_NORM, running_mean, running_var, num_batches_tracked, momentum, first,
                                    all.channels, CHANNEL_OF_TENSORS);
    std::vector<Tensor> dense_moments;
    for (size_t i = 0; i < moments.size(); i++) {
        dense_moments.push_back(resolved(moments[i]).contiguous());
        const auto *const values = dense_moments.back().const_data_ptr<double>();
        all.sources[i].mean = values;
        all.sources[i].variance = values + all.sources[i].channels;
    }
    Tensor output = all.new_output(first);
    const auto statistics = first.options().dtype(at::kDouble);
    Tensor mean = empty({all.channels}, statistics), variance = empty({all.channels}, statistics);
    CUDA_OPS_LAUNCH(CONCAT_NORM,
                    cuda_ops_concat_batch_norm_act_forward_cuda(
                        output.data_ptr(), mean.data_ptr<double>(), variance.data_ptr<double>(), all.sources.data(),
                        all.count(), &running.statistics, parameters.weight_data(), parameters.bias_data(), &epilogue,
                        all.rows, eps, all.dtype, parameters.dtype, CUDA_OPS_FLOAT64, current_stream(CONCAT_NORM)));
    running.finish();
    return {output, mean, variance};
}

static Tensor concat_batch_norm_act_forward_inference(at::TensorList tensors, const OptionalTensor &weight,
                                                      const OptionalTensor &bias, const Tensor &running_mean,
                                                      const Tensor &running_var, Activation activation, double eps)
{
    NormSources all(tensors);
    const Tensor &first = tensors[0];
    [[maybe_unused]] const auto epilogue = batch_norm_epilogue(CONCAT_NORM, activation);
    const c10::OptionalDeviceGuard guard(at::device_of(first));
    const Parameters parameters(CONCAT_NORM, weight, bias, first, all.channels, CHANNEL_OF_TENSORS);
    const cuda_ops_dtype statistics_dtype =
        check_channel_values(CONCAT_NORM, "running_mean", running_mean, first, all.channels, CHANNEL_OF_TENSORS);
    check_channel_values(CONCAT_NORM, "running_var", running_var, first, all.channels, CHANNEL_OF_TENSORS);
    check_like(CONCAT_NORM, "running_var", running_var, "running_mean", running_mean);
    check_no_gradient(running_mean, running_var);
    if (!all.lay_out(tensors)) {
        static const auto forward =
            registered_op<Tensor(const Tensor &, const OptionalTensor &, const OptionalTensor &, const OptionalTensor &,
                                 const Tensor &, const Tensor &, Activation, double)>(
                "cuda_ops::batch_norm_act_forward_inference");
        return forward.call(concatenated(tensors), weight, bias, std::nullopt, running_mean, running_var, activation,
                            eps);
    }
    const Tensor mean = running_mean.contiguous(), variance = running_var.contiguous();
    const auto *means = static_cast<const char *>(mean.const_data_ptr());
    const auto *variances = static_cast<const char *>(variance.const_data_ptr());
    for (cuda_ops_norm_source &source : all.sources) {
        source.mean = means, source.variance = variances;
        means += source.channels * mean.element_size();
        variances += source.channels * mean.element_size();
    }
    Tensor output = all.new_output(first);
    (void)statistics_dtype; // not used in a build without CUDA
    CUDA_OPS_LAUNCH(CONCAT_NORM, cuda_ops_concat_batch_norm_act_forward_cuda(
                                     output.data_ptr(), nullptr, nullptr, all.sources.data(), all.count(), nullptr,
                                     parameters.weight_data(), parameters.bias_data(), &epilogue, all.rows, eps,
                                     all.dtype, parameters.dtype, statistics_dtype, current_stream(CONCAT_NORM)));
    return output;
}

// The pitch, in elements, of rows of channels that lie evenly in memory; 0 if they do not.
static int64_t row_pitch(const Tensor &tensor)
{
    const int64_t last = tensor.dim() == 2 ? 0 : tensor.dim() - 1, pitch = tensor.stride(last);
    if (tensor.stride(1) != 1)
        return 0;
    int64_t expected = pitch * tensor.size(last);
    for (int64_t d = last - 1; d >= 0; d--) {
        if (d == 1)
            continue;
        if (tensor.stride(d) != expected)
            return 0;
        expected *= tensor.size(d);
    }
    return pitch;
}

static bool is_aligned(const Tensor &tensor)
{
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// grads: what is to be added to each gradient; without elements where there is nothing. mean and variance: in training
// forward's, else the running statistics. A gradient that is not wanted is empty.
static std::tuple<std::vector<Tensor>, Tensor, Tensor>
concat_batch_norm_act_backward(const Tensor &grad_output, at::TensorList tensors, at::TensorList grads,
                               const OptionalTensor &weight, const OptionalTensor &bias, const Tensor &mean,
                               const Tensor &variance, bool training, Activation activation, double eps,
                               c10::List<bool> wanted, bool wants_parameters)
{
    NormSources all(tensors);
    const Tensor &first = tensors[0];
    [[maybe_unused]] const auto epilogue = batch_norm_epilogue(CONCAT_NORM, activation);
    TORCH_CHECK(wanted.size() == tensors.size() && grads.size() == tensors.size(), CONCAT_NORM,
                ": expected wanted and grads to have an element for each of the ", tensors.size(), " tensors, got ",
                wanted.size(), " and ", grads.size());
    check_like(CONCAT_NORM, "grad_output", grad_output, "tensors[0]", first);
    at::DimVector sizes(first.sizes());
    sizes[1] = all.channels;
    TORCH_CHECK(grad_output.sizes() == sizes, CONCAT_NORM, ": expected grad_output to have the shape ",
                at::IntArrayRef(sizes), ", got ", grad_output.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(first));
    std::vector<Tensor> others, results;
    bool wants_any = false;
    for (size_t i = 0; i < tensors.size(); i++) {
        others.push_back(wanted.get(i) && grads[i].numel() > 0 ? grads[i] : Tensor());
        if (others[i].defined()) {
            const std::string name = "grads[" + std::to_string(i) + "]";
            check_like(CONCAT_NORM, name.c_str(), others[i], "tensors[0]", first);
            TORCH_CHECK(others[i].sizes() == tensors[i].sizes(), CONCAT_NORM, ": expected ", name,
                        " to have the shape ", tensors[i].sizes(), ", got ", others[i].sizes());
        }
        wants_any = wants_any || wanted.get(i);
    }
    const Parameters parameters(CONCAT_NORM, weight, bias, first, all.channels, CHANNEL_OF_TENSORS);
    bool fits = all.lay_out(tensors);
    for (size_t i = 0; fits && i < tensors.size(); i++) {
        results.push_back(wanted.get(i) ? empty(tensors[i].sizes(), first.options().memory_format(all.format))
                                        : empty({0}, first.options()));
        if (wanted.get(i))
            all.sources[i].grad_input = results[i].data_ptr();
        if (!others[i].defined())
            continue;
        const auto vector = static_cast<int64_t>(16 / first.element_size());
        if (row_pitch(others[i]) % vector != 0 || row_pitch(others[i]) == 0 || !is_aligned(others[i]))
            others[i] = others[i].clone(all.format);
        all.sources[i].grad = others[i].const_data_ptr();
        all.sources[i].grad_pitch = row_pitch(others[i]);
    }
#ifdef CUDA_OPS_WITH_CUDA
    fits = fits && cuda_ops_concat_batch_norm_act_supports_cuda(all.sources.data(), all.count(), all.rows, all.dtype);
#endif
    if (!fits) {
        static const auto backward = registered_op<std::tuple<Tensor, Tensor, Tensor, Tensor>(
            const Tensor &, const Tensor &, const OptionalTensor &, const OptionalTensor &, const OptionalTensor &,
            const Tensor &, const Tensor &, bool, Activation, double, std::array<bool, 4>)>(
            "cuda_ops::batch_norm_act_backward");
        const auto [grad, grad_weight, grad_bias, none] =
            backward.call(grad_output, concatenated(tensors), weight, bias, std::nullopt, mean, variance, training,
                          activation, eps, {wants_any, wants_parameters, wants_parameters, false});
        results.clear();
        int64_t begin = 0;
        for (size_t i = 0; i < tensors.size(); i++) {
            const int64_t channels = tensors[i].size(1);
            if (!wanted.get(i))
                results.push_back(empty({0}, first.options()));
            else if (others[i].defined())
                results.push_back(grad.narrow(1, begin, channels) + others[i]);
            else if (channels == all.channels)
                results.push_back(grad);
            else
                results.push_back(grad.narrow(1, begin, channels).clone(all.format));
            begin += channels;
        }
        return {results, grad_weight, grad_bias};
    }
    cuda_ops_dtype statistics_dtype = CUDA_OPS_FLOAT64;
    for (const Tensor *statistic : {&mean, &variance}) {
        TORCH_CHECK(statistic->dim() == 1 && statistic->size(0) == all.channels &&
                        statistic->device() == first.device() &&
                        statistic->scalar_type() == (training ? at::kDouble : mean.scalar_type()),
                    CONCAT_NORM, ": expected mean and variance to be those that forward had, got ",
                    statistic->toString(), " of shape ", statistic->sizes());
        if (!training)
            statistics_dtype =
                check_channel_values(CONCAT_NORM, "mean", *statistic, first, all.channels, CHANNEL_OF_TENSORS);
    }
    Tensor g = grad_output.contiguous(all.format);
    if (!is_aligned(g))
        g = g.clone(all.format);
    const Tensor m = mean.contiguous(), v = variance.contiguous();
    const int64_t count = wants_parameters ? all.channels : 0;
    const auto options = parameters.weight.defined() ? parameters.weight.options()
                         : parameters.bias.defined() ? parameters.bias.options()
                                                     : first.options();
    Tensor grad_weight = empty({count}, options), grad_bias = empty({count}, options);
    const cuda_ops_dtype parameter_dtype = check_dtype(CONCAT_NORM, "weight", grad_weight);
    (void)statistics_dtype, (void)parameter_dtype; // not used in a build without CUDA
#ifdef CUDA_OPS_WITH_CUDA
    const Tensor workspace =
        empty_bytes(cuda_ops_concat_batch_norm_act_workspace_cuda(all.rows, all.channels, all.dtype), first);
    CUDA_OPS_LAUNCH(CONCAT_NORM,
                    cuda_ops_concat_batch_norm_act_backward_cuda(
                        wants_parameters ? grad_weight.data_ptr() : nullptr,
                        wants_parameters ? grad_bias.data_ptr() : nullptr, workspace.data_ptr(), g.const_data_ptr(),
                        all.sources.data(), all.count(), parameters.weight_data(), parameters.bias_data(),
                        m.const_data_ptr(), v.const_data_ptr(), &epilogue, all.rows, eps, training, all.dtype,
                        parameter_dtype, statistics_dtype, current_stream(CONCAT_NORM)));
#endif
    return {results, grad_weight, grad_bias};
}

namespace
{

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Edges: the tensors', weight's and bias's. Gradients that come in: that of output, and of the aliases of those tensors
// that require one, in their order. `read` is what forward has read: the tensors, or their concatenation.
struct ConcatBatchNormActBackward : public Node {
    std::vector<SavedVariable> read;
    SavedVariable weight, bias, mean, variance;
    std::vector<c10::SymInt> channels; // of each tensor
    std::vector<int64_t> alias;        // which of the gradients that come in, or -1
    bool training = false;
    std::optional<std::string> activation;
    double eps = 0;

    std::string name() const override
    {
        return "ConcatBatchNormActBackward";
    }

    void release_variables() override
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable &tensor : read)
            tensor.reset_data();
        for (SavedVariable *const saved : {&weight, &bias, &mean, &variance})
            saved->reset_data();
    }

    variable_list apply(variable_list &&grads) override
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const size_t count = channels.size();
        variable_list results(count + 2), others(count);
        std::vector<bool> wanted(count);
        for (size_t i = 0; i < count; i++) {
            wanted[i] = task_should_compute_output(i);
            if (alias[i] >= 0)
                others[i] = grads[static_cast<size_t>(alias[i])];
        }
        const Tensor &grad = grads[0];
        if (!grad.defined()) {
            std::copy(others.begin(), others.end(), results.begin());
            return results;
        }
        const bool wants_parameters = task_should_compute_output(count) || task_should_compute_output(count + 1);
        std::vector<Tensor> inputs;
        for (const SavedVariable &tensor : read)
            inputs.push_back(tensor.unpack());
        const Tensor w = weight.unpack(), b = bias.unpack(), m = mean.unpack(), v = variance.unpack();
        const Activation name = activation ? Activation(*activation) : std::nullopt;
        Tensor whole; // the gradient of the concatenation, where that is what there is
        if (is_differentiated_further(grads)) {
            static const auto gradients = registered_op<std::tuple<Tensor, Tensor, Tensor, Tensor>(
                const Tensor &, const Tensor &, const OptionalTensor &, const OptionalTensor &, const OptionalTensor &,
                const Tensor &, const Tensor &, bool, Activation, double, std::array<bool, 4>)>(
                "cuda_ops::batch_norm_act_gradients");
            const auto [of_input, of_weight, of_bias, none] =
                gradients.call(grad, concatenated(inputs), or_none(w), or_none(b), std::nullopt, m, v, training, name,
                               eps, {true, wants_parameters, wants_parameters, false});
            whole = of_input, results[count] = of_weight, results[count + 1] = of_bias;
        } else {
            static const auto backward =
                registered_op<decltype(concat_batch_norm_act_backward)>("cuda_ops::concat_batch_norm_act_backward");
            const bool is_whole = inputs.size() != count;
            const Tensor nothing = empty({0}, grad.options());
            std::vector<Tensor> added;
            c10::List<bool> wants;
            for (size_t i = 0; i < inputs.size(); i++) {
                added.push_back(!is_whole && others[i].defined() ? others[i] : nothing);
                wants.push_back(is_whole ? std::find(wanted.begin(), wanted.end(), true) != wanted.end() : wanted[i]);
            }
            auto [of_inputs, of_weight, of_bias] = backward.call(grad, inputs, added, or_none(w), or_none(b), m, v,
                                                                 training, name, eps, wants, wants_parameters);
            results[count] = of_weight, results[count + 1] = of_bias;
            if (is_whole)
                whole = of_inputs[0];
            else
                std::copy(of_inputs.begin(), of_inputs.end(), results.begin());
        }
        if (whole.defined()) {
            c10::SymInt begin = 0;
            for (size_t i = 0; i < count; i++) {
                if (wanted[i]) {
                    const Tensor mine = whole.narrow_symint(1, begin, channels[i]);
                    results[i] = others[i].defined() ? mine + others[i] : mine;
                }
                begin = begin + channels[i];
            }
        }
        for (size_t i = 0; i < results.size(); i++)
            if (!task_should_compute_output(i))
                results[i] = Tensor();
        return results;
    }
};

} // namespace

// output; the tensors handed on (none where no gradient is recorded); and their moments (none where the kernels do not
// take the tensors, or not in training), of which those of the first tensors may be given.
static std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>>
concat_batch_norm_act(at::TensorList tensors, at::TensorList moments, const OptionalTensor &weight,
                      const OptionalTensor &bias, const OptionalTensor &running_mean, const OptionalTensor &running_var,
                      const OptionalTensor &num_batches_tracked, Activation activation, bool training, double momentum,
                      double eps)
{
    static const auto forward_training = registered_op<decltype(concat_batch_norm_act_forward_training)>(
        "cuda_ops::concat_batch_norm_act_forward_training");
    static const auto forward_inference = registered_op<decltype(concat_batch_norm_act_forward_inference)>(
        "cuda_ops::concat_batch_norm_act_forward_inference");
    static const auto moments_of = registered_op<decltype(batch_norm_moments)>("cuda_ops::batch_norm_moments");
    NormSources all(tensors);
    TORCH_CHECK_VALUE(eps > 0, CONCAT_NORM, ": expected eps to be positive, got ", eps);
    check_no_gradient(running_mean, running_var);
    TORCH_CHECK(moments.size() <= tensors.size(), CONCAT_NORM, ": expected moments of the first of the ",
                tensors.size(), " tensors, got ", moments.size());
    std::vector<Tensor> inputs(tensors.begin(), tensors.end());
    for (const OptionalTensor &parameter : {weight, bias})
        if (parameter)
            inputs.push_back(*parameter);
    bool has_tangent = false, requires_grad = false;
    for (const Tensor &input : inputs) {
        has_tangent = has_tangent || input._fw_grad(0).defined();
        requires_grad = requires_grad || input.requires_grad();
    }
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent, CONCAT_NORM, ": forward mode is not supported");
    const c10::OptionalDeviceGuard device(at::device_of(tensors[0]));
    const bool in_place = !(training && all.rows == 1) && all.lay_out(tensors);
    std::vector<Tensor> read(tensors.begin(), tensors.end()), known, aliases;
    if (!in_place) // recorded, for second derivatives
        read = {concatenated(tensors)};
    Tensor output, mean, variance;
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        if (training) {
            if (in_place)
                known.assign(moments.begin(), moments.end());
            for (size_t i = known.size(); in_place && i < tensors.size(); i++)
                known.push_back(moments_of.call(tensors[i]));
            std::tie(output, mean, variance) = forward_training.call(
                read, known, weight, bias, running_mean, running_var, num_batches_tracked, activation, momentum, eps);
        } else {
            mean = required(CONCAT_NORM, "running_mean", running_mean);
            variance = required(CONCAT_NORM, "running_var", running_var);
            output = forward_inference.call(read, weight, bias, mean, variance, activation, eps);
        }
    }
    if (!requires_grad || !at::GradMode::is_enabled())
        return {output, aliases, known};
    const std::shared_ptr<ConcatBatchNormActBackward> node(new ConcatBatchNormActBackward, torch::autograd::deleteNode);
    torch::autograd::edge_list edges;
    for (const Tensor &tensor : tensors) {
        edges.push_back(torch::autograd::impl::gradient_edge(tensor));
        node->channels.push_back(tensor.sym_size(1));
    }
    for (const Tensor &tensor : read)
        node->read.emplace_back(tensor, false);
    for (const OptionalTensor &parameter : {weight, bias})
        edges.push_back(parameter ? torch::autograd::impl::gradient_edge(*parameter) : torch::autograd::Edge());
    node->weight = SavedVariable(or_undefined(weight), false);
    node->bias = SavedVariable(or_undefined(bias), false);
    node->mean = SavedVariable(mean, false);
    node->variance = SavedVariable(variance, false);
    node->training = training;
    if (activation)
        node->activation = std::string(*activation);
    node->eps = eps;
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(output, node);
    int64_t number = 1;
    for (const Tensor &tensor : tensors) {
        const bool differs = tensor.requires_grad();
        node->alias.push_back(differs ? number++ : -1);
        aliases.push_back(differs ? tensor.detach() : tensor);
        if (differs)
            torch::autograd::set_history(aliases.back(), node);
    }
    return {output, aliases, known};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("batch_norm_moments(Tensor input) -> (Tensor moments)");
    library.def("concat_batch_norm_act_forward_training(Tensor[] tensors, Tensor[] moments, Tensor? weight, "
                "Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
                "str? activation, float momentum, float eps) -> (Tensor output, Tensor mean, Tensor variance)");
    library.def("concat_batch_norm_act_forward_inference(Tensor[] tensors, Tensor? weight, Tensor? bias, "
                "Tensor running_mean, Tensor running_var, str? activation, float eps) -> (Tensor output)");
    library.def("concat_batch_norm_act_backward(Tensor grad_output, Tensor[] tensors, Tensor[] grads, Tensor? weight, "
                "Tensor? bias, Tensor mean, Tensor variance, bool training, str? activation, float eps, bool[] wanted, "
                "bool wants_parameters) -> (Tensor[] grad_tensors, Tensor grad_weight, Tensor grad_bias)");
    CUDA_OPS_IMPLEMENT(library, "batch_norm_moments", cuda_ops::batch_norm_moments);
    CUDA_OPS_IMPLEMENT(library, "concat_batch_norm_act_forward_training",
                       cuda_ops::concat_batch_norm_act_forward_training);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "concat_batch_norm_act_forward_training");
    CUDA_OPS_IMPLEMENT(library, "concat_batch_norm_act_forward_inference",
                       cuda_ops::concat_batch_norm_act_forward_inference);
    CUDA_OPS_IMPLEMENT(library, "concat_batch_norm_act_backward", cuda_ops::concat_batch_norm_act_backward);
    // Records its gradients itself, whose aliases a kernel of the dispatcher's autograd keys must not return.
    library.def("concat_batch_norm_act(Tensor[] tensors, Tensor[] moments, Tensor? weight, Tensor? bias, "
                "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, str? activation, "
                "bool training, float momentum, float eps) -> (Tensor output, Tensor[] passed, Tensor[] moments)",
                cuda_ops::concat_batch_norm_act);
    cuda_ops::register_kernels_of_all_ops(library, "concat_batch_norm_act");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "concat_batch_norm_act");
}
