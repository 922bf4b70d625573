// conv_bn_act for PyTorch: a convolution, the batch_norm with running statistics behind it and an activation.
//
// Where the convolution's kernel applies the activation, or there is none, batch_norm is folded into the weight and the
// bias, and its pass over the output is gone. Folding is one launch at each call, in place of the weight's cast under
// autocast: nothing is kept that could be out of date, in a CUDA graph either. Elsewhere batch_norm_act follows.
#include <algorithm>

#include "autograd.h"
#include "batch_norm.h"
#include "conv2d.h"
#include "cuda_ops/fold_batch_norm.h"
#include "empty.h"
#include "halves.h"
#include "parameters.h"
#include "running_statistics.h"

namespace cuda_ops
{

using at::IntArrayRef;

static const char *const CHANNEL_OF_OUTPUT = "output channel of weight"; // in messages

// As conv2d's kernels know it.
static cuda_ops_conv2d_activation activation_of(const char *op, std::optional<std::string_view> activation)
{
    if (!activation)
        return CUDA_OPS_CONV2D_NONE;
    if (activation == "relu")
        return CUDA_OPS_CONV2D_RELU;
    if (activation == "relu6")
        return CUDA_OPS_CONV2D_RELU6;
    if (activation == "hardswish")
        return CUDA_OPS_CONV2D_HARDSWISH;
    TORCH_CHECK_VALUE(activation == "silu", op,
                      ": expected activation to be 'relu', 'relu6', 'silu', 'hardswish' or None, got '", *activation,
                      "'");
    return CUDA_OPS_CONV2D_SILU;
}

// weight and bias of the convolution that is both, in input's dtype; the weight in the format that it has.
static std::pair<Tensor, Tensor> folded(const char *op, const Tensor &input, const Tensor &weight,
                                        const std::optional<Tensor> &bias, const std::optional<Tensor> &bn_weight,
                                        const std::optional<Tensor> &bn_bias, const Tensor &running_mean,
                                        const Tensor &running_var, double eps)
{
    // The CPU's kernel takes one dtype.
    const auto laid_out = [&](const Tensor &tensor) {
        const Tensor dense = tensor.contiguous(tensor.suggest_memory_format());
        return input.is_cpu() ? dense.to(is_half(input.scalar_type()) ? at::kFloat : input.scalar_type()) : dense;
    };
    const auto or_none = [&](const std::optional<Tensor> &tensor) { return tensor ? laid_out(*tensor) : Tensor(); };
    const auto data = [](const Tensor &tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
    const Tensor w = laid_out(weight), b = or_none(bias), norm_w = or_none(bn_weight), norm_b = or_none(bn_bias);
    const Tensor mean = laid_out(running_mean), variance = laid_out(running_var);
    const auto dtype_of = [&](const Tensor &tensor) {
        return tensor.defined() ? check_dtype(op, "weight", tensor) : CUDA_OPS_FLOAT32;
    };
    const cuda_ops_fold fold{data(w),
                             data(b),
                             data(norm_w),
                             data(norm_b),
                             data(mean),
                             data(variance),
                             w.size(0),
                             w.numel() / std::max<int64_t>(w.size(0), 1),
                             eps,
                             dtype_of(w),
                             dtype_of(norm_w.defined() ? norm_w : norm_b),
                             dtype_of(mean)};
    const at::ScalarType type = input.is_cpu() ? w.scalar_type() : input.scalar_type();
    Tensor folded_weight = empty_strided(w.sizes(), w.strides(), w.options().dtype(type));
    Tensor folded_bias = empty({w.size(0)}, w.options().dtype(type));
    if (input.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_fold_batch_norm_cuda(folded_weight.data_ptr(), folded_bias.data_ptr(), &fold,
                                                          check_dtype(op, "input", input), current_stream(op)));
        return {folded_weight, folded_bias};
    }
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(fold.count, 1));
    parallel_ranges(op, fold.channels, grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_fold_batch_norm_cpu(folded_weight.data_ptr(), folded_bias.data_ptr(), &fold, begin, end);
    });
    return {folded_weight.to(input.scalar_type()), folded_bias.to(input.scalar_type())};
}

static Tensor conv_bn_act_inference(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                                    const std::optional<Tensor> &bn_weight, const std::optional<Tensor> &bn_bias,
                                    const Tensor &running_mean, const Tensor &running_var,
                                    std::optional<std::string_view> activation, double eps, IntArrayRef stride,
                                    IntArrayRef padding, IntArrayRef dilation, int64_t groups)
{
    const char *const op = "conv_bn_act";
    const cuda_ops_conv2d_activation function = activation_of(op, activation);
    check_dtype(op, "input", input);
    const Conv2dParameters parameters{stride, padding, dilation, groups};
    const cuda_ops_conv2d_sizes sizes = check_conv2d_sizes(op, input.sizes(), weight.sizes(), parameters);
    TORCH_CHECK(input.size(1) > 0, op, ": expected input to have channels in dimension 1, got shape ", input.sizes());
    const int64_t channels = sizes.out_channels;
    check_parameter(op, "weight", weight, input);
    const auto check = [&](const char *name, const std::optional<Tensor> &tensor) {
        if (tensor)
            check_channel_values(op, name, *tensor, input, channels, CHANNEL_OF_OUTPUT);
    };
    check("bias", bias), check("bn_weight", bn_weight), check("bn_bias", bn_bias);
    check("running_mean", running_mean), check("running_var", running_var);
    if (bias)
        check_like(op, "bias", *bias, "weight", weight);
    if (bn_weight && bn_bias)
        check_like(op, "bn_bias", *bn_bias, "bn_weight", *bn_weight);
    check_like(op, "running_var", running_var, "running_mean", running_mean);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const bool channels_last = is_channels_last(input) || is_channels_last(weight);
    // Folding reads and writes the weight, as its cast does; what it saves is batch_norm's reading and writing of the
    // output.
    const int64_t written = sizes.batch * channels * sizes.out_height * sizes.out_width;
    const bool is_less = weight.scalar_type() == input.scalar_type() ? weight.numel() < written : written > 0;
    if (is_less && conv2d_applies(op, input, weight, parameters, channels_last, function)) {
        const auto [w, b] = folded(op, input, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps);
        return conv2d_forward(op, input, w, b, parameters, channels_last, function);
    }
    const at::ScalarType type = input.scalar_type();
    const std::optional<Tensor> b = bias ? std::optional<Tensor>(bias->to(type)) : bias;
    const Tensor output = conv2d_forward(op, input, weight.to(type), b, parameters, channels_last);
    return batch_norm_act_inference(op, output, bn_weight, bn_bias, running_mean, running_var, activation, eps);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("conv_bn_act_inference(Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight, Tensor? bn_bias, "
                "Tensor running_mean, Tensor running_var, str? activation, float eps, SymInt[2] stride, "
                "SymInt[4] padding, SymInt[2] dilation, SymInt groups) -> (Tensor output)");
    // cuda_ops/ops/conv_bn_act.py composes these of the ops that are fused here.
    library.def("conv_bn_act_gradients(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
                "Tensor? bn_weight, Tensor? bn_bias, Tensor running_mean, Tensor running_var, str? activation, "
                "float eps, SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups, bool[5] wanted)"
                " -> Tensor[]");
    library.def("conv_bn_act_tangent(Tensor? tangent_input, Tensor? tangent_weight, Tensor? tangent_bias, "
                "Tensor? tangent_bn_weight, Tensor? tangent_bn_bias, Tensor input, Tensor weight, Tensor? bias, "
                "Tensor? bn_weight, Tensor? bn_bias, Tensor running_mean, Tensor running_var, str? activation, "
                "float eps, SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups)"
                " -> (Tensor tangent_output)");
    CUDA_OPS_IMPLEMENT(library, "conv_bn_act_inference", cuda_ops::conv_bn_act_inference);
    CUDA_OPS_AUTOCAST(library, "conv_bn_act_inference", INPUT_ONLY);
    CUDA_OPS_DERIVATIVES(
        library, "conv_bn_act_inference",
        {"running_mean, running_var: not differentiable",
         "input, weight, bias, bn_weight, bn_bias: conv_bn_act_gradients(grad_output, input, weight, bias, bn_weight, "
         "bn_bias, running_mean, running_var, activation, eps, stride, padding, dilation, groups, wanted)",
         "output <- conv_bn_act_tangent(tangent_input, tangent_weight, tangent_bias, tangent_bn_weight, "
         "tangent_bn_bias, input, weight, bias, bn_weight, bn_bias, running_mean, running_var, activation, eps, "
         "stride, padding, dilation, groups)"});
}
