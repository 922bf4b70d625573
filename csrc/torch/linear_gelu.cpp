// linear_gelu for PyTorch: gelu(input * weight^T + bias) over any leading shape, with or without the preactivation that
// the gradient is computed from, and gelu's own gradient, with that of the bias; linear.cpp has the other two.
#include "cuda_ops/linear_gelu.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "cuda_ops/activation.h"
#include "elements.h"
#include "empty.h"
#include "gemm.h"
#include "linear.h"

namespace cuda_ops
{

static cuda_ops_gelu check_approximate(const char *op, std::string_view approximate)
{
    TORCH_CHECK(approximate == "none" || approximate == "tanh", op,
                ": expected approximate to be 'none' or 'tanh', got '", approximate, "'");
    return approximate == "tanh" ? CUDA_OPS_GELU_TANH : CUDA_OPS_GELU_EXACT;
}

#ifdef CUDA_OPS_WITH_CUDA
static cuda_ops_status forward_cuda(const Tensor &output, const Tensor &preactivation, const Tensor &x, const Tensor &w,
                                    const void *bias, int64_t rows, cuda_ops_gelu gelu, cuda_ops_dtype dtype)
{
    const char *const op = "linear_gelu";
    const bool allow_tf32 = at::globalContext().allowTF32CuBLAS();
    const int path = forced_gemm_path(op);
    const int64_t bytes = cuda_ops_linear_gelu_forward_workspace_cuda(
        rows, w.size(1), w.size(0), preactivation.defined(), gelu, allow_tf32, path, dtype);
    const Tensor workspace = at::empty({bytes}, x.options().dtype(at::kByte));
    const cuda_ops_status status = cuda_ops_linear_gelu_forward_cuda(
        output.data_ptr(), preactivation.defined() ? preactivation.data_ptr() : nullptr, x.const_data_ptr(),
        w.const_data_ptr(), bias, workspace.data_ptr(), rows, w.size(1), w.size(0), gelu, allow_tf32, path, dtype,
        current_stream(op));
    check_forced_gemm(op, path, status, output, dense_problem(rows, w.size(0), w.size(1), false, true, dtype));
    return status;
}

static cuda_ops_status backward_cuda(const Tensor &grad_preactivation, const Tensor &grad_bias, const Tensor &g,
                                     const Tensor &z, bool with_bias, cuda_ops_gelu gelu, cuda_ops_dtype dtype)
{
    const int64_t rows = rows_of(z), columns = z.size(-1);
    const int64_t bytes = with_bias ? cuda_ops_linear_gelu_backward_workspace_cuda(rows, columns, dtype) : 0;
    const Tensor workspace = empty({bytes}, z.options().dtype(at::kByte));
    return cuda_ops_linear_gelu_backward_cuda(grad_preactivation.data_ptr(), with_bias ? grad_bias.data_ptr() : nullptr,
                                              g.const_data_ptr(), z.const_data_ptr(), workspace.data_ptr(), rows,
                                              columns, gelu, dtype, dtype, current_stream("linear_gelu_backward"));
}

static cuda_ops_status backward_linear_cuda(const Tensor &grad_preactivation, const Tensor &grad_bias, const Tensor &g,
                                            const Tensor &w, const Tensor &z, bool with_bias, cuda_ops_gelu gelu,
                                            cuda_ops_dtype dtype)
{
    const char *const op = "gelu_linear_backward";
    const bool allow_tf32 = at::globalContext().allowTF32CuBLAS();
    const int path = forced_gemm_path(op);
    const int64_t rows = rows_of(z), features = w.size(1), out_features = w.size(0);
    const int64_t bytes =
        cuda_ops_gelu_linear_backward_workspace_cuda(rows, features, out_features, allow_tf32, path, dtype);
    const Tensor workspace = at::empty({bytes}, z.options().dtype(at::kByte));
    const cuda_ops_status status = cuda_ops_gelu_linear_backward_cuda(
        grad_preactivation.data_ptr(), with_bias ? grad_bias.data_ptr() : nullptr, g.const_data_ptr(),
        w.const_data_ptr(), z.const_data_ptr(), workspace.data_ptr(), rows, features, out_features, gelu, allow_tf32,
        path, dtype, is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype, current_stream(op));
    check_forced_gemm(op, path, status, grad_preactivation,
                      dense_problem(rows, features, out_features, false, false, dtype));
    return status;
}
#endif

static cuda_ops_activation activation_of(cuda_ops_gelu gelu)
{
    return gelu == CUDA_OPS_GELU_TANH ? CUDA_OPS_ACTIVATION_GELU_TANH : CUDA_OPS_ACTIVATION_GELU;
}

// The preactivation is a tensor without elements unless it is asked for.
static std::tuple<Tensor, Tensor> linear_gelu_forward(const Tensor &input, const Tensor &weight,
                                                      const std::optional<Tensor> &bias, std::string_view approximate,
                                                      bool with_preactivation)
{
    const char *const op = "linear_gelu";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const cuda_ops_gelu gelu = check_approximate(op, approximate);
    check_like(op, "weight", weight, "input", input);
    check_dim(op, "weight", weight, 2, 2);
    TORCH_CHECK(input.dim() >= 1, op, ": expected input to have at least 1 dimension, got a scalar");
    TORCH_CHECK(input.size(-1) == weight.size(1), op,
                ": expected the last dimension of input to be the in_features of weight, ", weight.size(1),
                " (weight has shape ", weight.sizes(), "), got input of shape ", input.sizes());
    if (bias) {
        check_like(op, "bias", *bias, "input", input);
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": expected bias to have shape [",
                    weight.size(0), "], the out_features of weight, got ", bias->sizes());
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(), w = weight.contiguous(), b = bias ? bias->contiguous() : Tensor();
    const void *const bias_data = bias ? b.const_data_ptr() : nullptr;
    const int64_t rows = rows_of(x), in_features = weight.size(1), out_features = weight.size(0);
    at::DimVector sizes(x.sizes());
    sizes.back() = out_features;
    Tensor output = empty(sizes, x.options());
    Tensor preactivation = with_preactivation ? empty(sizes, x.options()) : empty({0}, x.options());
    if (output.numel() == 0)
        return {output, preactivation};
    if (has_half_product(x) && dtype == CUDA_OPS_BFLOAT16) {
        const Tensor sums = with_preactivation ? preactivation : output;
        half_product(op, sums.view({rows, out_features}), x.view({rows, in_features}), w.t(), bias_data);
        parallel_stored_elements(
            op, output.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_activation_forward_cpu(to, from, begin, end, activation_of(gelu), 0, 0, type);
            },
            writes(output), reads(sums));
        return {output, preactivation};
    }
    if (has_half_product(x)) {
        const Tensor sums = empty({rows, out_features}, x.options().dtype(at::kFloat)), wide_bias = widened(b);
        half_product(op, sums, x.view({rows, in_features}), w.t(), bias ? wide_bias.const_data_ptr() : nullptr);
        parallel_elements(
            op, output.numel(), dtype,
            [&](void *to, void *before, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                if (before)
                    std::copy_n(static_cast<const float *>(from) + begin, end - begin,
                                static_cast<float *>(before) + begin);
                return cuda_ops_activation_forward_cpu(to, from, begin, end, activation_of(gelu), 0, 0, type);
            },
            writes(output), writes(with_preactivation ? preactivation : Tensor()), reads(sums));
        return {output, preactivation};
    }
    if (is_cpu_half(x)) {
        const auto [result, before] = in_float32(linear_gelu_forward, x, w, bias, approximate, with_preactivation);
        return {result.to(x.scalar_type()), before.to(x.scalar_type())};
    }
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, forward_cuda(output, with_preactivation ? preactivation : Tensor(), x, w, bias_data, rows,
                                         gelu, dtype));
    else
        parallel_blocks(op, rows, out_features, in_features, [&](cuda_ops_linear_block block, void *workspace) {
            return cuda_ops_linear_gelu_forward_cpu(
                output.data_ptr(), with_preactivation ? preactivation.data_ptr() : nullptr, x.const_data_ptr(),
                w.const_data_ptr(), bias_data, workspace, rows, in_features, out_features, block, gelu, dtype);
        });
    return {output, preactivation};
}

// grad_bias is a tensor without elements unless it is asked for.
static std::tuple<Tensor, Tensor> linear_gelu_backward(const Tensor &grad_output, const Tensor &preactivation,
                                                       std::string_view approximate, bool with_bias)
{
    const char *const op = "linear_gelu_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "preactivation", preactivation);
    const cuda_ops_gelu gelu = check_approximate(op, approximate);
    check_like(op, "grad_output", grad_output, "preactivation", preactivation);
    check_same_shape(op, "grad_output", grad_output, "preactivation", preactivation);
    TORCH_CHECK(preactivation.dim() >= 1, op, ": expected preactivation to have at least 1 dimension, got a scalar");
    const c10::OptionalDeviceGuard guard(at::device_of(preactivation));
    const Tensor g = grad_output.contiguous(), z = preactivation.contiguous();
    const int64_t rows = rows_of(z), out_features = z.size(-1);
    Tensor grad_preactivation = empty(z.sizes(), z.options());
    Tensor grad_bias = empty({with_bias ? out_features : 0}, z.options());
    if (z.is_cpu() && dtype == CUDA_OPS_BFLOAT16) {
        static const auto backward_bias = registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_bias");
        parallel_stored_elements(
            op, z.numel(), dtype,
            [&](void *to, const void *grad, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_activation_backward_cpu(to, grad, from, begin, end, activation_of(gelu), 0, 0, type);
            },
            writes(grad_preactivation), reads(g), reads(z));
        return {grad_preactivation, with_bias ? backward_bias.call(grad_preactivation) : grad_bias};
    }
    if (is_cpu_half(z)) {
        const auto [to_preactivation, to_bias] = in_float32(linear_gelu_backward, g, z, approximate, with_bias);
        return {to_preactivation.to(z.scalar_type()), to_bias.to(z.scalar_type())};
    }
    if (z.is_cuda()) {
        CUDA_OPS_LAUNCH(op, backward_cuda(grad_preactivation, grad_bias, g, z, with_bias, gelu, dtype));
        return {grad_preactivation, grad_bias};
    }
    parallel_ranges(op, z.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
        return cuda_ops_linear_gelu_backward_cpu(grad_preactivation.data_ptr(), g.const_data_ptr(), z.const_data_ptr(),
                                                 begin, end, gelu, dtype);
    });
    if (with_bias)
        parallel_ranges(op, out_features, std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, rows)),
                        [&](int64_t begin, int64_t end) {
                            return cuda_ops_linear_backward_bias_cpu(grad_bias.data_ptr(),
                                                                     grad_preactivation.const_data_ptr(), rows,
                                                                     out_features, begin, end, dtype);
                        });
    return {grad_preactivation, grad_bias};
}

// The gradient through linear(gelu(preactivation), weight): that of linear's input, and gelu's. grad_bias is as it was
// summed, of halves in float32.
static std::tuple<Tensor, Tensor> gelu_linear_backward(const Tensor &grad_output, const Tensor &weight,
                                                       const Tensor &preactivation, std::string_view approximate,
                                                       bool with_bias)
{
    const char *const op = "gelu_linear_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "preactivation", preactivation);
    const cuda_ops_gelu gelu = check_approximate(op, approximate);
    check_like(op, "grad_output", grad_output, "preactivation", preactivation);
    check_like(op, "weight", weight, "preactivation", preactivation);
    check_dim(op, "weight", weight, 2, 2);
    TORCH_CHECK(preactivation.dim() >= 1 && preactivation.size(-1) == weight.size(1), op,
                ": expected the last dimension of preactivation to be the in_features of weight, ", weight.size(1),
                ", got preactivation of shape ", preactivation.sizes());
    at::DimVector sizes(preactivation.sizes());
    sizes.back() = weight.size(0);
    TORCH_CHECK(grad_output.sizes() == at::IntArrayRef(sizes), op, ": expected grad_output to have shape ", sizes,
                ", got ", grad_output.sizes());
    const at::ScalarType bias_type = is_half(dtype) ? at::kFloat : preactivation.scalar_type();
#ifdef CUDA_OPS_WITH_CUDA
    if (preactivation.is_cuda()) {
        const c10::OptionalDeviceGuard guard(at::device_of(preactivation));
        const Tensor g = grad_output.contiguous(), w = weight.contiguous(), z = preactivation.contiguous();
        Tensor grad_preactivation = empty(z.sizes(), z.options());
        Tensor grad_bias = empty({with_bias ? z.size(-1) : 0}, z.options().dtype(bias_type));
        CUDA_OPS_LAUNCH(op, backward_linear_cuda(grad_preactivation, grad_bias, g, w, z, with_bias, gelu, dtype));
        return {grad_preactivation, grad_bias};
    }
#endif
    (void)gelu;
    static const auto backward_input =
        registered_op<Tensor(const Tensor &, const Tensor &)>("cuda_ops::linear_backward_input");
    const auto [grad_preactivation, grad_bias] =
        linear_gelu_backward(backward_input.call(grad_output, weight), preactivation, approximate, with_bias);
    return {grad_preactivation, grad_bias.to(bias_type)};
}

// The op with the preactivation where a derivative is wanted, which asks for it.
static Tensor linear_gelu(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                          std::string_view approximate)
{
    static const auto op = registered_op<decltype(linear_gelu_forward)>("cuda_ops::linear_gelu_forward");
    bool with_preactivation = false;
    for (const Tensor &tensor : {input, weight, bias.value_or(Tensor())})
        with_preactivation |= tensor.defined() &&
                              ((tensor.requires_grad() && at::GradMode::is_enabled()) || tensor._fw_grad(0).defined());
    return std::get<0>(op.call(input, weight, bias, approximate, with_preactivation));
}

// Those of input, weight and bias that are wanted, of ops that are differentiable. grad_preactivation comes in a double
// backward alone: forward returns the preactivation so that what backward saves of it is part of the graph.
static std::vector<Tensor> linear_gelu_gradients(const std::optional<Tensor> &grad_output,
                                                 const std::optional<Tensor> &grad_preactivation,
                                                 const std::optional<Tensor> &input,
                                                 const std::optional<Tensor> &weight, const Tensor &preactivation,
                                                 std::string_view approximate, std::array<bool, 3> wanted)
{
    static const auto gelu = registered_op<decltype(linear_gelu_backward)>("cuda_ops::linear_gelu_backward");
    using Product = Tensor(const Tensor &, const Tensor &);
    static const auto backward_input = registered_op<Product>("cuda_ops::linear_backward_input");
    static const auto backward_weight = registered_op<Product>("cuda_ops::linear_backward_weight");
    static const auto backward_bias = registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_bias");
    const char *const op = "linear_gelu_gradients";
    // The sum for the bias comes with the pass over the gradient, but where that is not all of it.
    const bool with_bias = wanted[2] && !grad_preactivation;
    Tensor grad, grad_bias;
    if (grad_output)
        std::tie(grad, grad_bias) = gelu.call(*grad_output, preactivation, approximate, with_bias);
    else
        required(op, "grad_output or grad_preactivation", grad_preactivation);
    if (grad_preactivation)
        grad = grad.defined() ? grad + *grad_preactivation : *grad_preactivation;
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(backward_input.call(grad, required(op, "weight", weight)));
    if (wanted[1])
        grads.push_back(backward_weight.call(grad, required(op, "input", input)));
    if (wanted[2])
        grads.push_back(with_bias ? grad_bias : backward_bias.call(grad));
    return grads;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("linear_gelu_forward(Tensor input, Tensor weight, Tensor? bias, str approximate, "
                "bool with_preactivation) -> (Tensor output, Tensor preactivation)");
    library.def("linear_gelu_backward(Tensor grad_output, Tensor preactivation, str approximate, bool with_bias) "
                "-> (Tensor grad_preactivation, Tensor grad_bias)");
    library.def("gelu_linear_backward(Tensor grad_output, Tensor weight, Tensor preactivation, str approximate, "
                "bool with_bias) -> (Tensor grad_preactivation, Tensor grad_bias)");
    library.def("linear_gelu(Tensor input, Tensor weight, Tensor? bias, str approximate) -> (Tensor output)",
                cuda_ops::linear_gelu);
    library.def("linear_gelu_gradients(Tensor? grad_output, Tensor? grad_preactivation, Tensor? input, "
                "Tensor? weight, Tensor preactivation, str approximate, bool[3] wanted) -> Tensor[]",
                cuda_ops::linear_gelu_gradients);
    // Of PyTorch's own and other differentiable ops, by cuda_ops/ops/linear_gelu.py.
    library.def("linear_gelu_tangents(Tensor? input, Tensor? weight, Tensor? bias, Tensor preactivation, "
                "str approximate) -> (Tensor output, Tensor preactivation)");
    library.def("linear_gelu_backward_gradients(Tensor? grad_grad_preactivation, Tensor? grad_grad_bias, "
                "Tensor grad_output, Tensor preactivation, str approximate, bool[2] wanted) -> Tensor[]");
    library.def("linear_gelu_backward_preactivation(Tensor tangent, Tensor grad_output, Tensor preactivation, "
                "str approximate, bool with_bias) -> (Tensor grad_preactivation, Tensor grad_bias)");
    CUDA_OPS_IMPLEMENT(library, "linear_gelu_forward", cuda_ops::linear_gelu_forward);
    CUDA_OPS_IMPLEMENT(library, "linear_gelu_backward", cuda_ops::linear_gelu_backward);
    CUDA_OPS_IMPLEMENT(library, "gelu_linear_backward", cuda_ops::gelu_linear_backward);
    cuda_ops::register_kernels_of_all_ops(library, "linear_gelu");
    CUDA_OPS_AUTOCAST(library, "linear_gelu", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(
        library, "linear_gelu_forward",
        {"input, weight, bias: linear_gelu_gradients(grad_output, grad_preactivation, input if weight, "
         "weight if input, preactivation, approximate, wanted)",
         "output, preactivation <- linear_gelu_tangents(tangent_input, weight, none, preactivation, approximate)",
         "output, preactivation <- linear_gelu_tangents(input, tangent_weight, none, preactivation, approximate)",
         "output, preactivation <- linear_gelu_tangents(none, none, tangent_bias, preactivation, approximate)"});
    CUDA_OPS_DERIVATIVES(
        library, "linear_gelu_backward",
        {"grad_output, preactivation: linear_gelu_backward_gradients(grad_grad_preactivation, grad_grad_bias, "
         "grad_output, preactivation, approximate, wanted)",
         "grad_preactivation, grad_bias <- linear_gelu_backward(tangent_grad_output, preactivation, approximate, "
         "with_bias)",
         "grad_preactivation, grad_bias <- linear_gelu_backward_preactivation(tangent_preactivation, grad_output, "
         "preactivation, approximate, with_bias)"});
}
