// linear_relu for PyTorch: relu(input * weight^T + bias) over any leading shape, and its gradients in one op, since
// they come from one launch.
#include "cuda_ops/linear_relu.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "empty.h"
#include "linear.h"
#include "parameters.h"
#include "vmap.h"

namespace cuda_ops
{

// The leading dimensions are flattened: the kernels see rows.
struct LinearReluSizes {
    int64_t rows, in_features, out_features;
};

static LinearReluSizes check_sizes(const char *op, const Tensor &input, const Tensor &weight)
{
    check_parameter(op, "weight", weight, input);
    check_dim(op, "weight", weight, 2, 2);
    TORCH_CHECK(input.dim() >= 1, op, ": expected input to have at least 1 dimension, got a scalar");
    TORCH_CHECK(input.size(-1) == weight.size(1), op,
                ": expected the last dimension of input to be the in_features of weight, ", weight.size(1),
                " (weight has shape ", weight.sizes(), "), got input of shape ", input.sizes());
    return {rows_of(input), weight.size(1), weight.size(0)};
}

#ifdef CUDA_OPS_WITH_CUDA
// Workspace for the path that the launcher chooses; most need none.
static Tensor linear_relu_workspace(decltype(cuda_ops_linear_relu_forward_workspace_cuda) query, LinearReluSizes size,
                                    cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype, const Tensor &like)
{
    const int64_t bytes = query(size.rows, size.in_features, size.out_features, at::globalContext().allowTF32CuBLAS(),
                                dtype, parameter_dtype);
    return bytes > 0 ? empty({bytes}, like.options().dtype(at::kByte)) : Tensor();
}
#endif

static Tensor linear_relu_forward(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias)
{
    const char *const op = "linear_relu";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const LinearReluSizes size = check_sizes(op, input, weight);
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "weight", weight);
    if (bias) {
        check_like(op, "bias", *bias, "weight", weight);
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": expected bias to have shape [",
                    weight.size(0), "], the out_features of weight, got ", bias->sizes());
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(), w = weight.contiguous(), b = bias ? bias->contiguous() : Tensor();
    const void *const bias_data = bias ? b.const_data_ptr() : nullptr;
    at::DimVector sizes(x.sizes());
    sizes.back() = size.out_features;
    Tensor output = empty(sizes, x.options());
    if (output.numel() == 0)
        return output;
    if (has_half_product(x)) { // float32 parameters are rounded
        const Tensor weight_of_type = w.to(x.scalar_type()), bias_of_type = bias ? b.to(x.scalar_type()) : Tensor();
        half_product(op, output.view({size.rows, size.out_features}), x.view({size.rows, size.in_features}),
                     weight_of_type.t(), bias ? bias_of_type.const_data_ptr() : nullptr, /*relu=*/true);
        return output;
    }
    if (is_cpu_half(x))
        return in_float32(linear_relu_forward, x, w, bias).to(x.scalar_type());
    if (x.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace =
            linear_relu_workspace(cuda_ops_linear_relu_forward_workspace_cuda, size, dtype, parameter_dtype, x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_linear_relu_forward_cuda(
                                output.data_ptr(), x.const_data_ptr(), w.const_data_ptr(), bias_data,
                                workspace.defined() ? workspace.data_ptr() : nullptr, size.rows, size.in_features,
                                size.out_features, at::globalContext().allowTF32CuBLAS(), dtype, parameter_dtype,
                                current_stream(op)));
    } else {
        parallel_blocks(op, size.rows, size.out_features, size.in_features,
                        [&](cuda_ops_linear_block block, void *workspace) {
                            return cuda_ops_linear_relu_forward_cpu(output.data_ptr(), x.const_data_ptr(),
                                                                    w.const_data_ptr(), bias_data, workspace, size.rows,
                                                                    size.in_features, size.out_features, block, dtype);
                        });
    }
    (void)parameter_dtype;
    return output;
}

// On the CPU: the masked gradient, then linear's own kernels.
static void backward_cpu(const char *op, const Tensor &grad_input, const Tensor &grad_weight, const Tensor &grad_bias,
                         const Tensor &g, const Tensor &y, const Tensor &x, const Tensor &w, LinearReluSizes size,
                         cuda_ops_dtype dtype)
{
    const Tensor masked = empty(g.sizes(), g.options());
    parallel_ranges(op, g.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
        return cuda_ops_linear_relu_mask_cpu(masked.data_ptr(), g.const_data_ptr(), y.const_data_ptr(), begin, end,
                                             dtype);
    });
    if (grad_input.defined() && grad_input.numel() > 0)
        parallel_blocks(
            op, size.rows, size.in_features, size.out_features, [&](cuda_ops_linear_block block, void *workspace) {
                return cuda_ops_linear_backward_input_cpu(grad_input.data_ptr(), masked.const_data_ptr(),
                                                          w.const_data_ptr(), workspace, size.rows, size.in_features,
                                                          size.out_features, block, dtype);
            });
    if (grad_weight.defined() && grad_weight.numel() > 0)
        parallel_blocks(
            op, size.out_features, size.in_features, size.rows, [&](cuda_ops_linear_block block, void *workspace) {
                return cuda_ops_linear_backward_weight_cpu(grad_weight.data_ptr(), masked.const_data_ptr(),
                                                           x.const_data_ptr(), workspace, size.rows, size.in_features,
                                                           size.out_features, block, dtype);
            });
    if (grad_bias.defined())
        parallel_ranges(op, size.out_features,
                        std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, size.rows)),
                        [&](int64_t begin, int64_t end) {
                            return cuda_ops_linear_backward_bias_cpu(grad_bias.data_ptr(), masked.const_data_ptr(),
                                                                     size.rows, size.out_features, begin, end, dtype);
                        });
}

// The gradients of input, weight and bias that are `wanted`; the others are tensors without elements.
static std::tuple<Tensor, Tensor, Tensor> linear_relu_backward(const Tensor &grad_output, const Tensor &output,
                                                               const Tensor &input, const Tensor &weight,
                                                               bool with_input, bool with_weight, bool with_bias)
{
    const char *const op = "linear_relu_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_like(op, "output", output, "grad_output", grad_output);
    check_like(op, "input", input, "grad_output", grad_output);
    check_same_shape(op, "output", output, "grad_output", grad_output);
    const LinearReluSizes size = check_sizes(op, input, weight);
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "weight", weight);
    TORCH_CHECK(grad_output.dim() == input.dim() && grad_output.size(-1) == size.out_features &&
                    grad_output.sizes().slice(0, input.dim() - 1) == input.sizes().slice(0, input.dim() - 1),
                op, ": expected grad_output to have the leading shape of input and the out_features of weight, got ",
                "grad_output of shape ", grad_output.sizes(), ", input of shape ", input.sizes(),
                " and weight of shape ", weight.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(), y = output.contiguous(), x = input.contiguous();
    const Tensor w = weight.contiguous();
    if (has_half_product(x)) {
        using Product = Tensor(const Tensor &, const Tensor &);
        static const auto backward_input = registered_op<Product>("cuda_ops::linear_backward_input");
        static const auto backward_half_weight = registered_op<Product>("cuda_ops::linear_backward_weight");
        static const auto backward_float32_weight = registered_op<Product>("cuda_ops::linear_backward_float32_weight");
        const auto &backward_weight = is_half(parameter_dtype) ? backward_half_weight : backward_float32_weight;
        static const auto backward_bias = registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_bias");
        const Tensor masked = empty(g.sizes(), g.options());
        parallel_elements(op, g.numel(), dtype, cuda_ops_linear_relu_mask_cpu, writes(masked), reads(g), reads(y));
        return {with_input ? backward_input.call(masked, w.to(x.scalar_type())) : empty({0}, x.options()),
                with_weight ? backward_weight.call(masked, x) : empty({0}, w.options()),
                with_bias ? backward_bias.call(masked).to(w.scalar_type()) : empty({0}, w.options())};
    }
    if (is_cpu_half(x)) {
        const auto [to_input, to_weight, to_bias] =
            in_float32(linear_relu_backward, g, y, x, w, with_input, with_weight, with_bias);
        return {to_input.to(x.scalar_type()), to_weight.to(w.scalar_type()), to_bias.to(w.scalar_type())};
    }
    Tensor grad_input = with_input ? empty(x.sizes(), x.options()) : empty({0}, x.options());
    Tensor grad_weight = with_weight ? empty(w.sizes(), w.options()) : empty({0}, w.options());
    Tensor grad_bias = with_bias ? empty({size.out_features}, w.options()) : empty({0}, w.options());
    if (x.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace =
            linear_relu_workspace(cuda_ops_linear_relu_backward_workspace_cuda, size, dtype, parameter_dtype, x);
#endif
        CUDA_OPS_LAUNCH(
            op,
            cuda_ops_linear_relu_backward_cuda(
                with_input ? grad_input.data_ptr() : nullptr, with_weight ? grad_weight.data_ptr() : nullptr,
                with_bias ? grad_bias.data_ptr() : nullptr, g.const_data_ptr(), y.const_data_ptr(), x.const_data_ptr(),
                w.const_data_ptr(), workspace.defined() ? workspace.data_ptr() : nullptr, size.rows, size.in_features,
                size.out_features, at::globalContext().allowTF32CuBLAS(), dtype, parameter_dtype, current_stream(op)));
    } else {
        backward_cpu(op, with_input ? grad_input : Tensor(), with_weight ? grad_weight : Tensor(),
                     with_bias ? grad_bias : Tensor(), g, y, x, w, size, dtype);
    }
    (void)parameter_dtype;
    return {grad_input, grad_weight, grad_bias};
}

// The wanted gradients of input, weight and bias: of the fused op, or, where they are differentiated further, composed
// of linear's and relu's ops.
static std::vector<Tensor> linear_relu_gradients(const Tensor &grad_output, const Tensor &output, const Tensor &input,
                                                 const Tensor &weight, std::array<bool, 3> wanted)
{
    using Product = Tensor(const Tensor &, const Tensor &);
    std::vector<Tensor> grads;
    if (!is_differentiated_further({grad_output, output, input, weight})) {
        static const auto fused = registered_op<decltype(linear_relu_backward)>("cuda_ops::linear_relu_backward");
        auto [grad_input, grad_weight, grad_bias] =
            fused.call(grad_output, output, input, weight, wanted[0], wanted[1], wanted[2]);
        if (wanted[0])
            grads.push_back(std::move(grad_input));
        if (wanted[1])
            grads.push_back(std::move(grad_weight));
        if (wanted[2])
            grads.push_back(std::move(grad_bias));
        return grads;
    }
    static const auto relu_backward = registered_op<Product>("cuda_ops::relu_backward");
    static const auto backward_input = registered_op<Product>("cuda_ops::linear_backward_input");
    static const auto backward_weight = registered_op<Product>("cuda_ops::linear_backward_weight");
    static const auto backward_bias = registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_bias");
    const Tensor masked = relu_backward.call(grad_output, output);
    if (wanted[0])
        grads.push_back(backward_input.call(masked, weight.to(input.scalar_type())));
    if (wanted[1])
        grads.push_back(backward_weight.call(masked, input).to(weight.scalar_type()));
    if (wanted[2])
        grads.push_back(backward_bias.call(masked).to(weight.scalar_type()));
    return grads;
}

// output's tangent from that of one argument; the other arguments are its factors.
static Tensor linear_relu_tangent(const std::optional<Tensor> &input, const std::optional<Tensor> &weight,
                                  const std::optional<Tensor> &bias, const Tensor &output)
{
    static const auto relu_backward = registered_op<Tensor(const Tensor &, const Tensor &)>("cuda_ops::relu_backward");
    static const auto linear = registered_op<Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &)>(
        "cuda_ops::linear_forward");
    const char *const op = "linear_relu_tangent";
    const at::ScalarType dtype = output.scalar_type();
    const auto product = [&] {
        return linear.call(required(op, "input", input), required(op, "weight", weight).to(dtype), std::nullopt);
    };
    return relu_backward.call(bias ? bias->to(dtype).expand_as(output) : product(), output);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("linear_relu_gradients(Tensor grad_output, Tensor output, Tensor input, Tensor weight, bool[3] wanted) "
                "-> Tensor[]",
                cuda_ops::linear_relu_gradients);
    library.def("linear_relu_tangent(Tensor? input, Tensor? weight, Tensor? bias, Tensor output) -> Tensor",
                cuda_ops::linear_relu_tangent);
    library.def("linear_relu_forward(Tensor input, Tensor weight, Tensor? bias) -> (Tensor output)");
    library.def("linear_relu_backward(Tensor grad_output, Tensor output, Tensor input, Tensor weight, bool with_input, "
                "bool with_weight, bool with_bias) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
    CUDA_OPS_IMPLEMENT(library, "linear_relu_forward", cuda_ops::linear_relu_forward);
    CUDA_OPS_VMAP(library, "linear_relu_forward", "input[1]");
    CUDA_OPS_IMPLEMENT(library, "linear_relu_backward", cuda_ops::linear_relu_backward);
    CUDA_OPS_AUTOCAST(library, "linear_relu_forward", INPUT_ONLY);
    // relu's derivative follows from the output; weight is also saved for its shape and dtype.
    CUDA_OPS_DERIVATIVES(library, "linear_relu_forward",
                         {"input, weight, bias: linear_relu_gradients(grad_output, output, input, weight, wanted)",
                          "output <- linear_relu_tangent(tangent_input, weight, none, output)",
                          "output <- linear_relu_tangent(input, tangent_weight, none, output)",
                          "output <- linear_relu_tangent(none, none, tangent_bias, output)"});
}
