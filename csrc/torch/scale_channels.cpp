// scale_channels for PyTorch: checks, allocation and the choice of backend; derivatives of the gradients, of PyTorch's
// ops.
#include "cuda_ops/scale_channels.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"

namespace cuda_ops
{

using OptionalName = std::optional<std::string_view>;

static cuda_ops_channel_gate channel_gate_of(const char *op, OptionalName activation)
{
    if (!activation)
        return CUDA_OPS_CHANNEL_GATE_NONE;
    if (*activation == "sigmoid")
        return CUDA_OPS_CHANNEL_GATE_SIGMOID;
    TORCH_CHECK_VALUE(*activation == "hardsigmoid", op,
                      ": expected activation to be 'sigmoid', 'hardsigmoid' or None, got '", *activation, "'");
    return CUDA_OPS_CHANNEL_GATE_HARDSIGMOID;
}

// How the kernels see images: [outer, count, inner], in their own strides or contiguous ones.
struct ScaledChannels {
    int64_t outer = 0, count = 0, inner = 1;
    bool as_they_are = true;

    ScaledChannels(const char *op, const Tensor &input, const Tensor &scale)
    {
        check_like(op, "scale", scale, "input", input);
        bool fits = input.dim() >= 2 && scale.dim() >= 2 && scale.size(0) == input.size(0) &&
                    scale.size(1) == input.size(1) && (scale.dim() == 2 || scale.dim() == input.dim());
        for (int64_t d = 2; fits && d < scale.dim(); d++)
            fits = scale.size(d) == 1;
        TORCH_CHECK(fits, op, ": expected scale to have one element for each channel of each image of input, ",
                    input.sizes(), ", got shape ", scale.sizes());
        const int64_t images = input.size(0), channels = input.size(1), all = input.numel();
        if (all == 0)
            return;
        const bool images_outermost = images == 1 || input.stride(0) == all / images;
        if (channels > 1 && input.stride(1) == 1 && images_outermost && input.is_non_overlapping_and_dense()) {
            outer = images, inner = channels, count = all / (images * channels);
            return;
        }
        as_they_are = input.is_contiguous();
        outer = images * channels, count = all / outer;
    }

    Tensor lay_out(const Tensor &tensor) const
    {
        return as_they_are ? tensor : tensor.contiguous();
    }
};

static Tensor scale_channels_forward(const Tensor &input, const Tensor &scale, OptionalName activation)
{
    const char *const op = "scale_channels";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const cuda_ops_channel_gate gate = channel_gate_of(op, activation);
    const ScaledChannels shape(op, input, scale);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = shape.lay_out(input), s = scale.contiguous();
    Tensor output = empty_strided(x.sizes(), x.strides(), x.options());
    if (x.numel() == 0)
        return output;
    if (x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_scale_channels_forward_cuda(output.data_ptr(), x.const_data_ptr(),
                                                                 s.const_data_ptr(), shape.outer, shape.count,
                                                                 shape.inner, gate, dtype, current_stream(op)));
        return output;
    }
    const bool stored = dtype == CUDA_OPS_BFLOAT16; // as the kernel takes it
    const Tensor to = stored ? output : float32_like(output), from = stored ? x : widened(x), factors = widened(s);
    const int64_t units = cuda_ops_scale_channels_units_cpu(shape.outer, shape.inner);
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / x.numel());
    parallel_ranges(op, units, grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_scale_channels_forward_cpu(to.data_ptr(), from.const_data_ptr(), factors.const_data_ptr(),
                                                   shape.count, shape.inner, gate, begin, end,
                                                   dtype == CUDA_OPS_FLOAT16 ? CUDA_OPS_FLOAT32 : dtype);
    });
    round_back(output, to);
    return output;
}

// Those that are not wanted have no elements.
static std::tuple<Tensor, Tensor> scale_channels_backward(const Tensor &grad_output, const Tensor &input,
                                                          const Tensor &scale, OptionalName activation,
                                                          std::array<bool, 2> wanted)
{
    const char *const op = "scale_channels_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const cuda_ops_channel_gate gate = channel_gate_of(op, activation);
    check_like(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    const ScaledChannels shape(op, input, scale);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = shape.lay_out(input), s = scale.contiguous();
    const Tensor g = dense_like(grad_output, x);
    Tensor grad_input = wanted[0] ? empty_strided(x.sizes(), x.strides(), x.options()) : empty({0}, x.options());
    Tensor grad_scale = wanted[1] ? empty(scale.sizes(), s.options()) : empty({0}, s.options());
    if (x.numel() == 0)
        return {grad_input, grad_scale.zero_()};
    const auto data = [](const Tensor &tensor, bool is_wanted) { return is_wanted ? tensor.data_ptr() : nullptr; };
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(
            wanted[1] ? cuda_ops_scale_channels_workspace_cuda(shape.outer, shape.count, shape.inner, dtype) : 0, x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_scale_channels_backward_cuda(
                                data(grad_input, wanted[0]), data(grad_scale, wanted[1]), workspace.data_ptr(),
                                g.const_data_ptr(), x.const_data_ptr(), s.const_data_ptr(), shape.outer, shape.count,
                                shape.inner, gate, dtype, current_stream(op)));
        return {grad_input, grad_scale};
    }
    const bool stored = dtype == CUDA_OPS_BFLOAT16;
    const Tensor to = stored ? grad_input : float32_like(grad_input), to_scale = float32_like(grad_scale);
    const Tensor from = stored ? g : widened(g), images = stored ? x : widened(x), factors = widened(s);
    const int64_t units = cuda_ops_scale_channels_units_cpu(shape.outer, shape.inner);
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / x.numel());
    parallel_ranges(op, units, grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_scale_channels_backward_cpu(data(to, wanted[0]), data(to_scale, wanted[1]),
                                                    from.const_data_ptr(), images.const_data_ptr(),
                                                    factors.const_data_ptr(), shape.count, shape.inner, gate, begin,
                                                    end, dtype == CUDA_OPS_FLOAT16 ? CUDA_OPS_FLOAT32 : dtype);
    });
    round_back(grad_input, to);
    round_back(grad_scale, to_scale);
    return {grad_input, grad_scale};
}

// ---- Derivatives of the gradients -----------------------------------------------------------------------------------

// As it is multiplied with input: with its dimensions.
static Tensor channel_factor(const Tensor &scale, const Tensor &input)
{
    TORCH_CHECK(input.dim() >= 2 && scale.dim() >= 2,
                "scale_channels: expected input and scale to have a batch and channels, got ", input.dim(), " and ",
                scale.dim(), " dimensions");
    c10::SymDimVector sizes(static_cast<size_t>(input.dim()), 1);
    sizes[0] = scale.sym_size(0), sizes[1] = scale.sym_size(1);
    return scale.view_symint(sizes);
}

static Tensor opened_channel_gate(const Tensor &scale, OptionalName activation)
{
    switch (channel_gate_of("scale_channels", activation)) {
    case CUDA_OPS_CHANNEL_GATE_SIGMOID:
        return at::sigmoid(scale);
    case CUDA_OPS_CHANNEL_GATE_HARDSIGMOID:
        return at::clamp(scale + 3, 0, 6) / 6;
    default:
        return scale;
    }
}

static Tensor times_channel_slope(const Tensor &grad, const Tensor &scale, OptionalName activation)
{
    switch (channel_gate_of("scale_channels", activation)) {
    case CUDA_OPS_CHANNEL_GATE_SIGMOID: {
        const Tensor share = at::sigmoid(scale);
        return grad * share * (1 - share);
    }
    case CUDA_OPS_CHANNEL_GATE_HARDSIGMOID:
        return at::where((scale > -3).logical_and(scale < 3), grad / 6, 0);
    default:
        return grad;
    }
}

// Products with images, summed over the pixels, in the shape of scale.
static Tensor channel_pixel_sum(const Tensor &products, const Tensor &scale)
{
    std::vector<int64_t> pixels;
    for (int64_t d = 2; d < products.dim(); d++)
        pixels.push_back(d);
    return (pixels.empty() ? products : products.sum(pixels)).reshape_symint(scale.sym_sizes());
}

// The wanted gradients of input and scale: of the kernel, or, where they are differentiated further, composed.
static std::vector<Tensor> scale_channels_gradients(const Tensor &grad_output, const Tensor &input, const Tensor &scale,
                                                    OptionalName activation, std::array<bool, 2> wanted)
{
    std::vector<Tensor> grads;
    if (is_differentiated_further({grad_output, input, scale})) {
        if (wanted[0])
            grads.push_back(grad_output * channel_factor(opened_channel_gate(scale, activation), grad_output));
        if (wanted[1])
            grads.push_back(times_channel_slope(channel_pixel_sum(grad_output * input, scale), scale, activation));
        return grads;
    }
    static const auto fused = registered_op<decltype(scale_channels_backward)>("cuda_ops::scale_channels_backward");
    const auto [grad_input, grad_scale] = fused.call(grad_output, input, scale, activation, wanted);
    if (wanted[0])
        grads.push_back(grad_input);
    if (wanted[1])
        grads.push_back(grad_scale);
    return grads;
}

static Tensor scale_channels_tangent(const std::optional<Tensor> &tangent_input,
                                     const std::optional<Tensor> &tangent_scale, const Tensor &input,
                                     const Tensor &scale, OptionalName activation)
{
    Tensor tangent = at::zeros_like(input);
    if (tangent_input)
        tangent = tangent + *tangent_input * channel_factor(opened_channel_gate(scale, activation), input);
    if (tangent_scale)
        tangent = tangent + input * channel_factor(times_channel_slope(*tangent_scale, scale, activation), input);
    return tangent;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("scale_channels_forward(Tensor input, Tensor scale, str? activation) -> (Tensor output)");
    library.def("scale_channels_backward(Tensor grad_output, Tensor input, Tensor scale, str? activation, "
                "bool[2] wanted) -> (Tensor grad_input, Tensor grad_scale)");
    library.def("scale_channels_gradients(Tensor grad_output, Tensor input, Tensor scale, str? activation, "
                "bool[2] wanted) -> Tensor[]",
                cuda_ops::scale_channels_gradients);
    library.def("scale_channels_tangent(Tensor? tangent_input, Tensor? tangent_scale, Tensor input, Tensor scale, "
                "str? activation) -> (Tensor tangent_output)",
                cuda_ops::scale_channels_tangent);
    CUDA_OPS_IMPLEMENT(library, "scale_channels_forward", cuda_ops::scale_channels_forward);
    CUDA_OPS_IMPLEMENT(library, "scale_channels_backward", cuda_ops::scale_channels_backward);
    CUDA_OPS_VMAP(library, "scale_channels_forward", "input*, scale*");
    CUDA_OPS_DERIVATIVES(library, "scale_channels_forward",
                         {"input, scale: scale_channels_gradients(grad_output, input, scale, activation, wanted)",
                          "output <- scale_channels_tangent(tangent_input, tangent_scale, input, scale, activation)"});
}
