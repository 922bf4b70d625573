// excitation for PyTorch: checks, allocation and the choice of backend. Its derivatives are composed of other ops by
// cuda_ops/ops/excitation.py.
#include "cuda_ops/excitation.h"

#include <optional>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "cuda_ops/activation.h"
#include "elements.h"
#include "empty.h"
#include "linear.h"
#include "parameters.h"

namespace cuda_ops
{

static cuda_ops_excitation_activation excitation_activation_of(const char *op, std::string_view activation)
{
    if (activation == "relu")
        return CUDA_OPS_EXCITATION_RELU;
    if (activation == "silu")
        return CUDA_OPS_EXCITATION_SILU;
    TORCH_CHECK_VALUE(activation == "hardswish", op, ": expected activation to be 'relu', 'silu' or 'hardswish', got '",
                      activation, "'");
    return CUDA_OPS_EXCITATION_HARDSWISH;
}

// Whether all dimensions from `first` on are 1.
static bool has_ones_from(const Tensor &tensor, int64_t first)
{
    for (int64_t d = first; d < tensor.dim(); d++)
        if (tensor.size(d) != 1)
            return false;
    return tensor.dim() >= first;
}

static void check_excitation_product(const char *op, const char *weight_name, const Tensor &weight,
                                     const char *bias_name, const std::optional<Tensor> &bias, const Tensor &input,
                                     int64_t depth)
{
    check_parameter(op, weight_name, weight, input);
    TORCH_CHECK(has_ones_from(weight, 2) && weight.size(1) == depth, op, ": expected ", weight_name,
                " to be of a convolution of one pixel, of shape [*, ", depth, "], got ", weight.sizes());
    if (!bias)
        return;
    check_like(op, bias_name, *bias, weight_name, weight);
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": expected ", bias_name, " to have shape [",
                weight.size(0), "], got ", bias->sizes());
}

// Two products of halves, with what is between them rounded, as in linear.
static Tensor excitation_of_halves(const char *op, const Tensor &input, const Tensor &weight1,
                                   const std::optional<Tensor> &bias1, const Tensor &weight2,
                                   const std::optional<Tensor> &bias2, cuda_ops_excitation_activation activation,
                                   cuda_ops_dtype dtype)
{
    const int64_t images = input.size(0), channels = input.size(1), squeezed = weight1.size(0);
    const Tensor x = input.contiguous(), w1 = weight1.contiguous(), w2 = weight2.contiguous();
    const Tensor b1 = bias1 ? bias1->contiguous() : Tensor(), b2 = bias2 ? bias2->contiguous() : Tensor();
    const auto data = [](const Tensor &tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
    const Tensor hidden = empty({images, squeezed}, x.options());
    half_product(op, hidden, x.view({images, channels}), w1.view({squeezed, channels}).t(), data(b1),
                 /*relu=*/activation == CUDA_OPS_EXCITATION_RELU);
    if (activation != CUDA_OPS_EXCITATION_RELU)
        parallel_stored_elements(
            op, hidden.numel(), dtype,
            [&](void *to, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_activation_forward_cpu(
                    to, to, begin, end,
                    activation == CUDA_OPS_EXCITATION_SILU ? CUDA_OPS_ACTIVATION_SILU : CUDA_OPS_ACTIVATION_HARDSWISH,
                    0, 0, type);
            },
            updates(hidden));
    std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
    sizes[1] = weight2.size(0);
    const Tensor output = empty(sizes, x.options());
    half_product(op, output.view({images, sizes[1]}), hidden, w2.view({sizes[1], squeezed}).t(), data(b2));
    return output;
}

static Tensor excitation_forward(const Tensor &input, const Tensor &weight1, const std::optional<Tensor> &bias1,
                                 const Tensor &weight2, const std::optional<Tensor> &bias2, std::string_view activation)
{
    const char *const op = "excitation";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    cuda_ops_excitation call{};
    call.activation = excitation_activation_of(op, activation);
    TORCH_CHECK(has_ones_from(input, 2), op, ": expected input to be images of one pixel, got shape ", input.sizes());
    check_excitation_product(op, "weight1", weight1, "bias1", bias1, input, input.size(1));
    check_excitation_product(op, "weight2", weight2, "bias2", bias2, input, weight1.size(0));
    check_like(op, "weight2", weight2, "weight1", weight1);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    if (has_half_product(input) && weight1.scalar_type() == input.scalar_type())
        return excitation_of_halves(op, input, weight1, bias1, weight2, bias2, excitation_activation_of(op, activation),
                                    dtype);
    // The CPU's kernel takes one dtype.
    const bool on_cpu = input.is_cpu();
    const at::ScalarType type = on_cpu && is_half(dtype) ? at::kFloat : input.scalar_type();
    const auto laid_out = [&](const Tensor &tensor) {
        const Tensor dense = tensor.contiguous();
        return on_cpu ? dense.to(type) : dense;
    };
    const auto or_none = [&](const std::optional<Tensor> &tensor) { return tensor ? laid_out(*tensor) : Tensor(); };
    const auto data = [](const Tensor &tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
    const Tensor x = laid_out(input), w1 = laid_out(weight1), w2 = laid_out(weight2);
    const Tensor b1 = or_none(bias1), b2 = or_none(bias2);
    call.input = data(x), call.weight1 = data(w1), call.bias1 = data(b1), call.weight2 = data(w2),
    call.bias2 = data(b2);
    call.images = input.size(0), call.channels = input.size(1);
    call.squeezed = weight1.size(0), call.outputs = weight2.size(0);
    std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
    sizes[1] = call.outputs;
    Tensor output = empty(sizes, x.options());
    const Tensor hidden = empty({call.images, call.squeezed}, x.options());
    if (output.numel() > 0 && input.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_excitation_forward_cuda(output.data_ptr(), hidden.data_ptr(), &call,
                                                             check_dtype(op, "weight1", weight1), dtype,
                                                             current_stream(op)));
    else if (output.numel() > 0) {
        const int64_t products = call.squeezed * (call.channels + call.outputs);
        parallel_ranges(op, call.images, std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(products, 1)),
                        [&](int64_t begin, int64_t end) {
                            return cuda_ops_excitation_forward_cpu(
                                output.data_ptr(), hidden.data_ptr(), &call, begin, end,
                                type == at::kDouble ? CUDA_OPS_FLOAT64 : CUDA_OPS_FLOAT32);
                        });
    }
    return on_cpu ? output.to(input.scalar_type()) : output;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("excitation_forward(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, "
                "str activation) -> (Tensor output)");
    library.def("excitation_gradients(Tensor grad_output, Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, "
                "Tensor? bias2, str activation, bool[5] wanted) -> Tensor[]");
    library.def("excitation_tangent(Tensor? tangent_input, Tensor? tangent_weight1, Tensor? tangent_bias1, "
                "Tensor? tangent_weight2, Tensor? tangent_bias2, Tensor input, Tensor weight1, Tensor? bias1, "
                "Tensor weight2, Tensor? bias2, str activation) -> (Tensor tangent_output)");
    CUDA_OPS_IMPLEMENT(library, "excitation_forward", cuda_ops::excitation_forward);
    CUDA_OPS_AUTOCAST(library, "excitation_forward", INPUT_ONLY);
    CUDA_OPS_DERIVATIVES(
        library, "excitation_forward",
        {"input, weight1, bias1, weight2, bias2: excitation_gradients(grad_output, input, weight1, bias1, weight2, "
         "bias2, activation, wanted)",
         "output <- excitation_tangent(tangent_input, tangent_weight1, tangent_bias1, tangent_weight2, tangent_bias2, "
         "input, weight1, bias1, weight2, bias2, activation)"});
}
