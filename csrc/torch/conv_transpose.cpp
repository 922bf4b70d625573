// conv_transpose1d and conv_transpose2d for PyTorch: the gradient of a convolution for its input, as a layer. Forward is
// conv2d's backward_input, and its gradients are conv2d's forward, which takes the same parameters, and backward_weight,
// in which input and grad_output change places.
#include <algorithm>

#include "autograd.h"
#include "conv1d.h"
#include "vmap.h"

namespace cuda_ops
{

using at::IntArrayRef;

// Checks a call, and returns the size of its output. padding and dilation are those of the convolution, which reads all
// of the output but for less than a stride at the end of an axis: output_padding.
static at::DimVector transposed_size(const char *op, size_t axes, const Tensor &input, const Tensor &weight,
                                     const std::optional<Tensor> &bias, const Conv2dParameters &parameters,
                                     IntArrayRef output_padding)
{
    check_dtype(op, "input", input);
    check_like(op, "weight", weight, "input", input);
    TORCH_CHECK(input.dim() == static_cast<int64_t>(axes) + 2, op, ": expected input to have ", axes + 2,
                " dimensions, or ", axes + 1, " without a batch, got shape ", input.sizes());
    TORCH_CHECK(weight.dim() == static_cast<int64_t>(axes) + 2, op, ": expected weight to have ", axes + 2,
                " dimensions, got shape ", weight.sizes());
    check_conv2d_parameters(op, axes, parameters);
    TORCH_CHECK(output_padding.size() == axes, op, ": expected output_padding to have ", axes,
                axes == 1 ? " value" : " values", ", got ", output_padding);
    const int64_t groups = parameters.groups;
    TORCH_CHECK(weight.size(0) >= groups && weight.size(0) % groups == 0, op,
                ": expected weight to have a positive multiple of groups=", groups,
                " input channels in dimension 0, got shape ", weight.sizes());
    TORCH_CHECK(weight.numel() > 0, op, ": expected weight to have output channels and a kernel, got shape ",
                weight.sizes());
    TORCH_CHECK(input.size(1) == weight.size(0), op, ": expected input to have ", weight.size(0),
                " channels in dimension 1, for weight of shape ", weight.sizes(), ", got shape ", input.sizes());
    const int64_t channels = weight.size(1) * groups;
    if (bias) {
        check_like(op, "bias", *bias, "input", input);
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == channels, op, ": expected bias to have shape [", channels,
                    "], one value for each output channel of weight, got ", bias->sizes());
    }
    at::DimVector size{input.size(0), channels};
    for (size_t axis = 0; axis < axes; axis++) {
        const int64_t from = input.size(static_cast<int64_t>(axis) + 2);
        const int64_t taps = weight.size(static_cast<int64_t>(axis) + 2), stride = parameters.stride[axis];
        TORCH_CHECK(from > 0, op, ": expected input to have no empty dimension but the batch, got shape ",
                    input.sizes());
        TORCH_CHECK(0 <= output_padding[axis] && output_padding[axis] < stride, op,
                    ": expected output_padding to be zero or more and less than stride, ", parameters.stride, ", got ",
                    output_padding);
        check_conv2d_limit(op, axes, from);
        check_conv2d_limit(op, axes, taps);
        check_conv2d_limit(op, axes, from > 1 ? stride : 1);
        size.push_back((from - 1) * stride + (taps - 1) * parameters.dilation[axis] + 1 - parameters.padding[2 * axis] -
                       parameters.padding[2 * axis + 1] + output_padding[axis]);
    }
    TORCH_CHECK(std::all_of(size.begin() + 2, size.end(), [](int64_t length) { return length > 0; }), op,
                ": expected padding to leave something of the output, got an output of ", size);
    return size;
}

static Tensor contiguous_bias(const std::optional<Tensor> &bias)
{
    return bias ? bias->contiguous() : Tensor();
}

static Tensor conv_transpose2d(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                               IntArrayRef stride, IntArrayRef padding, IntArrayRef output_padding,
                               IntArrayRef dilation, int64_t groups)
{
    const char *const op = "conv_transpose2d";
    const Conv2dParameters parameters{stride, padding, dilation, groups};
    const at::DimVector size = transposed_size(op, 2, input, weight, bias, parameters, output_padding);
    const bool channels_last = is_channels_last(input) || is_channels_last(weight);
    return conv2d_backward_input(op, input, weight, size, channels_last, parameters, contiguous_bias(bias));
}

static Tensor conv_transpose1d(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                               IntArrayRef stride, IntArrayRef padding, IntArrayRef output_padding,
                               IntArrayRef dilation, int64_t groups)
{
    const char *const op = "conv_transpose1d";
    const Conv2dParameters parameters{stride, padding, dilation, groups};
    const at::DimVector size = transposed_size(op, 1, input, weight, bias, parameters, output_padding);
    const Tensor x = as_image(input), w = as_image(weight);
    const bool channels_last = is_channels_last(x) || is_channels_last(w);
    return conv2d_backward_input(op, x, w, as_image(size), channels_last, ImageParameters(parameters),
                                 contiguous_bias(bias))
        .squeeze(2);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("conv_transpose1d_forward(Tensor input, Tensor weight, Tensor? bias, SymInt[1] stride, SymInt[2] "
                "padding, SymInt[1] output_padding, SymInt[1] dilation, SymInt groups) -> (Tensor output)");
    library.def("conv_transpose2d_forward(Tensor input, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[4] "
                "padding, SymInt[2] output_padding, SymInt[2] dilation, SymInt groups) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "conv_transpose1d_forward", cuda_ops::conv_transpose1d);
    CUDA_OPS_VMAP(library, "conv_transpose1d_forward", "input[3]*");
    CUDA_OPS_IMPLEMENT(library, "conv_transpose2d_forward", cuda_ops::conv_transpose2d);
    CUDA_OPS_VMAP(library, "conv_transpose2d_forward", "input[4]*");
    CUDA_OPS_AUTOCAST(library, "conv_transpose1d_forward", LOWER_PRECISION);
    CUDA_OPS_AUTOCAST(library, "conv_transpose2d_forward", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(
        library, "conv_transpose1d_forward",
        {"input: conv1d_forward(grad_output, weight, none, stride, padding, dilation, groups)",
         "weight: conv1d_backward_weight(input, grad_output, weight.size, weight.channels_last_1d, stride, padding, "
         "dilation, groups)",
         "bias: conv2d_backward_bias(grad_output, bias.size)",
         "output <- conv_transpose1d_forward(tangent_input, weight, none, stride, padding, output_padding, dilation, "
         "groups)",
         "output <- conv_transpose1d_forward(input, tangent_weight, none, stride, padding, output_padding, dilation, "
         "groups)",
         "output <- expand_channels(tangent_bias, output.size, none)"});
    CUDA_OPS_DERIVATIVES(
        library, "conv_transpose2d_forward",
        {"input: conv2d_forward(grad_output, weight, none, stride, padding, dilation, groups)",
         "weight: conv2d_backward_weight(input, grad_output, weight.size, weight.channels_last, stride, padding, "
         "dilation, groups)",
         "bias: conv2d_backward_bias(grad_output, bias.size)",
         "output <- conv_transpose2d_forward(tangent_input, weight, none, stride, padding, output_padding, dilation, "
         "groups)",
         "output <- conv_transpose2d_forward(input, tangent_weight, none, stride, padding, output_padding, dilation, "
         "groups)",
         "output <- expand_channels(tangent_bias, output.size, none)"});
}
