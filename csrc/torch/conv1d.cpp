// conv1d for PyTorch: checks of its shapes; the convolution and its gradients are conv2d's.
#include "conv1d.h"

#include "autograd.h"
#include "vmap.h"

namespace cuda_ops
{

using at::IntArrayRef;

static Tensor conv1d_forward(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups)
{
    const char *const op = "conv1d";
    const Conv2dParameters parameters{stride, padding, dilation, groups};
    check_dtype(op, "input", input);
    check_like(op, "weight", weight, "input", input);
    check_conv2d_sizes(op, input.sizes(), weight.sizes(), parameters, 1);
    const Tensor x = as_image(input), w = as_image(weight);
    const bool channels_last = is_channels_last(x) || is_channels_last(w);
    return conv2d_forward(op, x, w, bias, ImageParameters(parameters), channels_last).squeeze(2);
}

// grad_output has the shape of the output of a convolution of an input and a weight of these shapes.
static void check_grad_output_1d(const char *op, const Tensor &grad_output, IntArrayRef input, IntArrayRef weight,
                                 const Conv2dParameters &parameters)
{
    const cuda_ops_conv2d_sizes sizes = check_conv2d_sizes(op, input, weight, parameters, 1);
    const int64_t expected[] = {sizes.batch, sizes.out_channels, sizes.out_width};
    TORCH_CHECK(grad_output.sizes() == IntArrayRef(expected), op,
                ": expected grad_output to have the shape of output, ", IntArrayRef(expected), ", got ",
                grad_output.sizes());
}

static Tensor conv1d_backward_input(const Tensor &grad_output, const Tensor &weight, IntArrayRef input_size,
                                    bool channels_last, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                    int64_t groups)
{
    const char *const op = "conv1d_backward_input";
    const Conv2dParameters parameters{stride, padding, dilation, groups};
    check_dtype(op, "grad_output", grad_output);
    check_like(op, "weight", weight, "grad_output", grad_output);
    check_grad_output_1d(op, grad_output, input_size, weight.sizes(), parameters);
    return conv2d_backward_input(op, as_image(grad_output), as_image(weight), as_image(input_size), channels_last,
                                 ImageParameters(parameters))
        .squeeze(2);
}

static Tensor conv1d_backward_weight(const Tensor &grad_output, const Tensor &input, IntArrayRef weight_size,
                                     bool channels_last, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                     int64_t groups)
{
    const char *const op = "conv1d_backward_weight";
    const Conv2dParameters parameters{stride, padding, dilation, groups};
    check_dtype(op, "grad_output", grad_output);
    check_like(op, "input", input, "grad_output", grad_output);
    check_grad_output_1d(op, grad_output, input.sizes(), weight_size, parameters);
    return conv2d_backward_weight(op, as_image(grad_output), as_image(input), as_image(weight_size), channels_last,
                                  ImageParameters(parameters))
        .squeeze(2);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("conv1d_forward(Tensor input, Tensor weight, Tensor? bias, SymInt[1] stride, SymInt[2] padding, "
                "SymInt[1] dilation, SymInt groups) -> (Tensor output)");
    library.def("conv1d_backward_input(Tensor grad_output, Tensor weight, SymInt[3] input_size, bool channels_last, "
                "SymInt[1] stride, SymInt[2] padding, SymInt[1] dilation, SymInt groups) -> (Tensor grad_input)");
    library.def("conv1d_backward_weight(Tensor grad_output, Tensor input, SymInt[3] weight_size, bool channels_last, "
                "SymInt[1] stride, SymInt[2] padding, SymInt[1] dilation, SymInt groups) -> (Tensor grad_weight)");
    CUDA_OPS_IMPLEMENT(library, "conv1d_forward", cuda_ops::conv1d_forward);
    CUDA_OPS_VMAP(library, "conv1d_forward", "input[3]*");
    CUDA_OPS_IMPLEMENT(library, "conv1d_backward_input", cuda_ops::conv1d_backward_input);
    CUDA_OPS_VMAP(library, "conv1d_backward_input", "grad_output[3]*, input_size*");
    CUDA_OPS_IMPLEMENT(library, "conv1d_backward_weight", cuda_ops::conv1d_backward_weight);
    CUDA_OPS_AUTOCAST(library, "conv1d_forward", LOWER_PRECISION);
    // As conv2d's.
    CUDA_OPS_DERIVATIVES(
        library, "conv1d_forward",
        {"input: conv1d_backward_input(grad_output, weight, input.size, input.channels_last_1d, stride, padding, "
         "dilation, groups)",
         "weight: conv1d_backward_weight(grad_output, input, weight.size, weight.channels_last_1d, stride, padding, "
         "dilation, groups)",
         "bias: conv2d_backward_bias(grad_output, bias.size)",
         "output <- conv1d_forward(tangent_input, weight, none, stride, padding, dilation, groups)",
         "output <- conv1d_forward(input, tangent_weight, none, stride, padding, dilation, groups)",
         "output <- expand_channels(tangent_bias, output.size, none)"});
    CUDA_OPS_DERIVATIVES(
        library, "conv1d_backward_input",
        {"grad_output: conv1d_forward(grad_grad_input, weight, none, stride, padding, dilation, groups)",
         "weight: conv1d_backward_weight(grad_output, grad_grad_input, weight.size, weight.channels_last_1d, stride, "
         "padding, dilation, groups)",
         "grad_input <- conv1d_backward_input(tangent_grad_output, weight, input_size, channels_last, stride, padding, "
         "dilation, groups)",
         "grad_input <- conv1d_backward_input(grad_output, tangent_weight, input_size, channels_last, stride, padding, "
         "dilation, groups)"});
    CUDA_OPS_DERIVATIVES(
        library, "conv1d_backward_weight",
        {"grad_output: conv1d_forward(input, grad_grad_weight, none, stride, padding, dilation, groups)",
         "input: conv1d_backward_input(grad_output, grad_grad_weight, input.size, input.channels_last_1d, stride, "
         "padding, dilation, groups)",
         "grad_weight <- conv1d_backward_weight(tangent_grad_output, input, weight_size, channels_last, stride, "
         "padding, dilation, groups)",
         "grad_weight <- conv1d_backward_weight(grad_output, tangent_input, weight_size, channels_last, stride, "
         "padding, dilation, groups)"});
}
