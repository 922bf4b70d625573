// linear for PyTorch: output = input * weight^T + bias over any leading shape, and its three gradients, each an op of
// its own, so that a gradient that nobody needs costs nothing and each can be differentiated again.
#include "cuda_ops/linear.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "gemm.h"
#include "linear.h"
#include "rounded_parameters.h"
#include "vmap.h"

namespace cuda_ops
{

// The leading dimensions are one: all that the kernels know are rows.
struct LinearSizes {
    int64_t rows, in_features, out_features;
};

// The rows of `tensor` (input or grad_output), whose last dimension must be `expected`, weight's `features`.
static int64_t check_rows(const char *op, const char *argument, const Tensor &tensor, const char *features,
                          int64_t expected, const Tensor &weight)
{
    TORCH_CHECK(tensor.dim() >= 1, op, ": expected ", argument, " to have at least 1 dimension, got a scalar");
    TORCH_CHECK(tensor.size(-1) == expected, op, ": expected the last dimension of ", argument, " to be the ", features,
                " of weight, ", expected, " (weight has shape ", weight.sizes(), "), got ", argument, " of shape ",
                tensor.sizes());
    return rows_of(tensor);
}

static void check_same_rows(const char *op, const Tensor &grad_output, const Tensor &input)
{
    TORCH_CHECK(grad_output.dim() >= 1 && input.dim() == grad_output.dim() &&
                    grad_output.sizes().slice(0, input.dim() - 1) == input.sizes().slice(0, input.dim() - 1),
                op, ": expected grad_output to have the leading shape of input, got grad_output of shape ",
                grad_output.sizes(), " and input of shape ", input.sizes());
}

static Tensor empty_with_last(const Tensor &tensor, int64_t last)
{
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes.back() = last;
    return at::empty(sizes, tensor.options());
}

#ifdef CUDA_OPS_WITH_CUDA
static Tensor workspace_of(int64_t bytes, const Tensor &tensor)
{
    return at::empty({bytes}, tensor.options().dtype(at::kByte));
}

static cuda_ops_status forward_cuda(const Tensor &output, const Tensor &x, const Tensor &w, const void *bias,
                                    LinearSizes size, cuda_ops_dtype dtype)
{
    return gemm_cuda("linear", output, x.const_data_ptr(), w.const_data_ptr(), bias,
                     dense_problem(size.rows, size.out_features, size.in_features, false, true, dtype));
}

static cuda_ops_status forward_untransposed_cuda(const Tensor &output, const Tensor &x, const Tensor &w,
                                                 const void *bias, LinearSizes size, cuda_ops_dtype dtype)
{
    return gemm_cuda("linear_untransposed", output, x.const_data_ptr(), w.const_data_ptr(), bias,
                     dense_problem(size.rows, size.out_features, size.in_features, false, false, dtype));
}

static cuda_ops_status backward_input_cuda(const Tensor &grad_input, const Tensor &g, const Tensor &w, LinearSizes size,
                                           cuda_ops_dtype dtype)
{
    return gemm_cuda("linear_backward_input", grad_input, g.const_data_ptr(), w.const_data_ptr(), nullptr,
                     dense_problem(size.rows, size.in_features, size.out_features, false, false, dtype));
}

static cuda_ops_status backward_weight_cuda(const Tensor &grad_weight, const Tensor &g, const Tensor &x,
                                            LinearSizes size, cuda_ops_dtype dtype)
{
    cuda_ops_gemm_problem problem = dense_problem(size.out_features, size.in_features, size.rows, true, false, dtype);
    if (grad_weight.scalar_type() == at::kFloat)
        problem.output_dtype = CUDA_OPS_FLOAT32;
    return gemm_cuda("linear_backward_weight", grad_weight, g.const_data_ptr(), x.const_data_ptr(), nullptr, problem);
}

static cuda_ops_status backward_bias_cuda(const Tensor &grad_bias, const Tensor &g, int64_t rows, cuda_ops_dtype dtype)
{
    const Tensor workspace = workspace_of(cuda_ops_linear_backward_bias_workspace_cuda(rows, g.size(-1), dtype), g);
    return cuda_ops_linear_backward_bias_cuda(
        grad_bias.data_ptr(), g.const_data_ptr(), workspace.data_ptr(), rows, g.size(-1), dtype,
        grad_bias.scalar_type() == at::kFloat ? CUDA_OPS_FLOAT32 : dtype, current_stream("linear_backward_bias"));
}
#endif

static Tensor linear_forward(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias)
{
    const cuda_ops_dtype dtype = check_dtype("linear", "input", input);
    check_like("linear", "weight", weight, "input", input);
    check_dim("linear", "weight", weight, 2, 2);
    const int64_t rows = check_rows("linear", "input", input, "in_features", weight.size(1), weight);
    if (bias) {
        check_like("linear", "bias", *bias, "input", input);
        const bool is_number = bias->dim() == 0 || (bias->dim() == 1 && bias->size(0) == 1);
        TORCH_CHECK(is_number || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
                    "linear: expected bias to have shape [", weight.size(0), "], the out_features of weight, got ",
                    bias->sizes());
    }
    const LinearSizes size{rows, weight.size(1), weight.size(0)};
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(), w = weight.contiguous();
    const Tensor b = bias ? bias->expand(weight.size(0)).contiguous() : Tensor(); // one number is for all features
    const void *const bias_data = bias ? b.const_data_ptr() : nullptr;
    Tensor output = empty_with_last(x, size.out_features);
    if (output.numel() == 0)
        return output;
    if (has_half_product(x)) {
        half_product("linear", output.view({rows, size.out_features}), x.view({rows, size.in_features}), w.t(),
                     bias_data);
        return output;
    }
    if (x.is_cpu() && dtype == CUDA_OPS_BFLOAT16) {
        const Tensor sums = bfloat16_product("linear", x.view({rows, size.in_features}), w.t());
        if (bias)
            sums.add_(b);
        return output.copy_(sums.view(output.sizes()));
    }
    if (is_cpu_half(x))
        return in_float32(linear_forward, x, w, bias).to(x.scalar_type());
    if (x.is_cuda())
        CUDA_OPS_LAUNCH("linear", forward_cuda(output, x, w, bias_data, size, dtype));
    else
        parallel_blocks("linear", size.rows, size.out_features, size.in_features,
                        [&](cuda_ops_linear_block block, void *workspace) {
                            return cuda_ops_linear_forward_cpu(output.data_ptr(), x.const_data_ptr(),
                                                               w.const_data_ptr(), bias_data, workspace, size.rows,
                                                               size.in_features, size.out_features, block, dtype);
                        });
    return output;
}

// input * weight + bias: of a weight that lies as (in_features, out_features).
static Tensor linear_untransposed_forward(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias)
{
    const char *const op = "linear_untransposed";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_like(op, "weight", weight, "input", input);
    check_dim(op, "weight", weight, 2, 2);
    const LinearSizes size{check_rows(op, "input", input, "in_features", weight.size(0), weight), weight.size(0),
                           weight.size(1)};
    if (bias) {
        check_like(op, "bias", *bias, "input", input);
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == size.out_features, op, ": expected bias to have shape [",
                    size.out_features, "], the out_features of weight, got ", bias->sizes());
    }
    if (!input.is_cuda())
        return linear_forward(input, weight.t(), bias);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(), w = weight.contiguous(), b = bias ? bias->contiguous() : Tensor();
    [[maybe_unused]] const void *const bias_data = bias ? b.const_data_ptr() : nullptr;
    const Tensor output = empty_with_last(x, size.out_features);
    (void)dtype;
    if (output.numel() > 0)
        CUDA_OPS_LAUNCH(op, forward_untransposed_cuda(output, x, w, bias_data, size, dtype));
    return output;
}

static Tensor linear_backward_input(const Tensor &grad_output, const Tensor &weight)
{
    const char *const op = "linear_backward_input";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_like(op, "weight", weight, "grad_output", grad_output);
    check_dim(op, "weight", weight, 2, 2);
    const int64_t rows = check_rows(op, "grad_output", grad_output, "out_features", weight.size(0), weight);
    const LinearSizes size{rows, weight.size(1), weight.size(0)};
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(), w = weight.contiguous();
    Tensor grad_input = empty_with_last(g, size.in_features);
    if (grad_input.numel() == 0)
        return grad_input;
    if (has_half_product(g)) {
        half_product(op, grad_input.view({rows, size.in_features}), g.view({rows, size.out_features}), w);
        return grad_input;
    }
    if (g.is_cpu() && dtype == CUDA_OPS_BFLOAT16)
        return grad_input.copy_(bfloat16_product(op, g.view({rows, size.out_features}), w).view(grad_input.sizes()));
    if (is_cpu_half(g))
        return in_float32(linear_backward_input, g, w).to(g.scalar_type());
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, backward_input_cuda(grad_input, g, w, size, dtype));
    else
        parallel_blocks(
            op, size.rows, size.in_features, size.out_features, [&](cuda_ops_linear_block block, void *workspace) {
                return cuda_ops_linear_backward_input_cpu(grad_input.data_ptr(), g.const_data_ptr(), w.const_data_ptr(),
                                                          workspace, size.rows, size.in_features, size.out_features,
                                                          block, dtype);
            });
    return grad_input;
}

// With `to_float32` the products of halves are left as they are summed, in float32.
static Tensor weight_gradient(const Tensor &grad_output, const Tensor &input, bool to_float32)
{
    const char *const op = "linear_backward_weight";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_like(op, "input", input, "grad_output", grad_output);
    check_same_rows(op, grad_output, input);
    const LinearSizes size{rows_of(input), input.size(-1), grad_output.size(-1)};
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(), x = input.contiguous();
    Tensor grad_weight = at::empty({size.out_features, size.in_features},
                                   to_float32 && is_half(dtype) ? g.options().dtype(at::kFloat) : g.options());
    if (grad_weight.numel() == 0)
        return grad_weight;
    if (has_half_product(g)) {
        half_product(op, grad_weight, g.view({size.rows, size.out_features}).t(),
                     x.view({size.rows, size.in_features}));
        return grad_weight;
    }
    if (g.is_cpu() && dtype == CUDA_OPS_BFLOAT16 && !to_float32)
        return grad_weight.copy_(
            bfloat16_product(op, g.view({size.rows, size.out_features}).t(), x.view({size.rows, size.in_features})));
    if (is_cpu_half(g))
        return in_float32(weight_gradient, g, x, false).to(grad_weight.scalar_type());
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, backward_weight_cuda(grad_weight, g, x, size, dtype));
    else
        parallel_blocks(
            op, size.out_features, size.in_features, size.rows, [&](cuda_ops_linear_block block, void *workspace) {
                return cuda_ops_linear_backward_weight_cpu(grad_weight.data_ptr(), g.const_data_ptr(),
                                                           x.const_data_ptr(), workspace, size.rows, size.in_features,
                                                           size.out_features, block, dtype);
            });
    return grad_weight;
}

static Tensor linear_backward_weight(const Tensor &grad_output, const Tensor &input)
{
    return weight_gradient(grad_output, input, false);
}

// For a float32 weight that was rounded to halves for the product.
static Tensor linear_backward_float32_weight(const Tensor &grad_output, const Tensor &input)
{
    return weight_gradient(grad_output, input, true);
}

// With `to_float32` the sums of halves are left as they are made, in float32.
static Tensor bias_gradient(const Tensor &grad_output, bool to_float32)
{
    const char *const op = "linear_backward_bias";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    TORCH_CHECK(grad_output.dim() >= 1, op, ": expected grad_output to have at least 1 dimension, got a scalar");
    const int64_t rows = rows_of(grad_output), out_features = grad_output.size(-1);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous();
    Tensor grad_bias =
        at::empty({out_features}, to_float32 && is_half(dtype) ? g.options().dtype(at::kFloat) : g.options());
    if (out_features == 0)
        return grad_bias;
    if (is_cpu_half(g))
        return in_float32(bias_gradient, g, false).to(grad_bias.scalar_type());
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, backward_bias_cuda(grad_bias, g, rows, dtype));
    else
        parallel_ranges(op, out_features, std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(1, rows)),
                        [&](int64_t begin, int64_t end) {
                            return cuda_ops_linear_backward_bias_cpu(grad_bias.data_ptr(), g.const_data_ptr(), rows,
                                                                     out_features, begin, end, dtype);
                        });
    return grad_bias;
}

static Tensor linear_backward_bias(const Tensor &grad_output)
{
    return bias_gradient(grad_output, false);
}

// For a float32 bias that was rounded to halves.
static Tensor linear_backward_float32_bias(const Tensor &grad_output)
{
    return bias_gradient(grad_output, true);
}

// linear of an input in a half by float32 parameters, as autocast computes it; `rounded`: weight in that half. Apart from
// casts the gradients of the parameters would be rounded, and cast back. untransposed: weight lies as (in_features,
// out_features).
static std::tuple<Tensor, Tensor> linear_rounded_forward(const Tensor &input, const Tensor &weight,
                                                         const std::optional<Tensor> &bias, bool untransposed)
{
    const char *const op = "linear_rounded";
    check_dtype(op, "input", input);
    TORCH_CHECK(is_half(input.scalar_type()), op, ": expected input to be float16 or bfloat16, got ",
                c10::getDtypeNames(input.scalar_type()).first);
    for (const Tensor *const parameter : {&weight, bias ? &*bias : nullptr})
        TORCH_CHECK(!parameter || parameter->scalar_type() == at::kFloat, op, ": expected ",
                    parameter == &weight ? "weight" : "bias", " to be float32, got ",
                    c10::getDtypeNames(parameter->scalar_type()).first);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    Tensor rounded = weight.is_contiguous() ? autocast_parameter(weight, input.scalar_type()) : Tensor();
    if (!rounded.defined())
        rounded = weight.to(input.scalar_type(), false, false, at::MemoryFormat::Contiguous);
#ifdef CUDA_OPS_WITH_CUDA
    if (input.is_cuda() && weight.dim() == 2 && input.numel() > 0 && weight.numel() > 0) {
        const int64_t features = weight.size(untransposed ? 0 : 1), outputs = weight.size(untransposed ? 1 : 0);
        const int64_t rows = check_rows(op, "input", input, "in_features", features, weight);
        check_same_device(op, "weight", weight, "input", input);
        TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == outputs && bias->device() == input.device()), op,
                    ": expected bias to have shape [", outputs, "], the out_features of weight, got ", bias->sizes());
        const Tensor x = input.contiguous(), b = bias ? bias->contiguous() : Tensor();
        const Tensor output = empty_with_last(x, outputs);
        cuda_ops_gemm_problem problem =
            dense_problem(rows, outputs, features, false, !untransposed, check_dtype(op, "input", x));
        problem.bias_dtype = CUDA_OPS_FLOAT32; // which the kernels take as it is
        CUDA_OPS_LAUNCH(op, gemm_cuda(op, output, x.const_data_ptr(), rounded.const_data_ptr(),
                                      bias ? b.const_data_ptr() : nullptr, problem));
        return {output, rounded};
    }
#endif
    const std::optional<Tensor> b = bias ? std::optional(bias->to(input.scalar_type())) : std::nullopt;
    return {untransposed ? linear_untransposed_forward(input, rounded, b) : linear_forward(input, rounded, b), rounded};
}

static std::vector<Tensor> linear_rounded_gradients(const Tensor &grad_output, const Tensor &input,
                                                    const Tensor &weight, const Tensor &rounded, bool untransposed,
                                                    std::array<bool, 3> wanted)
{
    using Product = Tensor(const Tensor &, const Tensor &);
    using Forward = Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &);
    static const auto forward = registered_op<Forward>("cuda_ops::linear_forward");
    static const auto backward_input = registered_op<Product>("cuda_ops::linear_backward_input");
    static const auto backward_weight = registered_op<Product>("cuda_ops::linear_backward_weight");
    static const auto backward_float32_weight = registered_op<Product>("cuda_ops::linear_backward_float32_weight");
    static const auto backward_bias = registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_bias");
    static const auto backward_float32_bias =
        registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_float32_bias");
    const bool further = is_differentiated_further({grad_output, input, weight});
    const Tensor w = further ? weight.to(input.scalar_type()) : rounded;
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(untransposed ? forward.call(grad_output, w, std::nullopt)
                                     : backward_input.call(grad_output, w));
    if (wanted[1]) {
        const Tensor &rows = untransposed ? input : grad_output, &columns = untransposed ? grad_output : input;
        grads.push_back(further ? backward_weight.call(rows, columns).to(at::kFloat)
                                : backward_float32_weight.call(rows, columns));
    }
    if (wanted[2])
        grads.push_back(further ? backward_bias.call(grad_output).to(at::kFloat)
                                : backward_float32_bias.call(grad_output));
    return grads;
}

// What output changes by where weight changes by `tangent`.
static Tensor linear_rounded_tangent(const Tensor &input, const Tensor &tangent, bool untransposed)
{
    using Forward = Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &);
    static const auto forward = registered_op<Forward>("cuda_ops::linear_forward");
    return forward.call(input, (untransposed ? tangent.t() : tangent).to(input.scalar_type()), std::nullopt);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("linear_forward(Tensor input, Tensor weight, Tensor? bias) -> (Tensor output)");
    library.def("linear_backward_input(Tensor grad_output, Tensor weight) -> (Tensor grad_input)");
    library.def("linear_backward_weight(Tensor grad_output, Tensor input) -> (Tensor grad_weight)");
    library.def("linear_backward_float32_weight(Tensor grad_output, Tensor input) -> (Tensor grad_weight)");
    library.def("linear_backward_bias(Tensor grad_output) -> (Tensor grad_bias)");
    library.def("linear_backward_float32_bias(Tensor grad_output) -> (Tensor grad_bias)");
    CUDA_OPS_IMPLEMENT(library, "linear_forward", cuda_ops::linear_forward);
    CUDA_OPS_VMAP(library, "linear_forward", "input[1]");
    CUDA_OPS_IMPLEMENT(library, "linear_backward_input", cuda_ops::linear_backward_input);
    CUDA_OPS_VMAP(library, "linear_backward_input", "grad_output[1]");
    CUDA_OPS_IMPLEMENT(library, "linear_backward_weight", cuda_ops::linear_backward_weight);
    CUDA_OPS_IMPLEMENT(library, "linear_backward_float32_weight", cuda_ops::linear_backward_float32_weight);
    CUDA_OPS_IMPLEMENT(library, "linear_backward_bias", cuda_ops::linear_backward_bias);
    CUDA_OPS_IMPLEMENT(library, "linear_backward_float32_bias", cuda_ops::linear_backward_float32_bias);
    CUDA_OPS_AUTOCAST(library, "linear_forward", LOWER_PRECISION);
    // Of transformers' Conv1D (cuda_ops/conversion/layers.py), whose weight is (in_features, out_features).
    library.def("linear_untransposed_forward(Tensor input, Tensor weight, Tensor? bias) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "linear_untransposed_forward", cuda_ops::linear_untransposed_forward);
    CUDA_OPS_AUTOCAST(library, "linear_untransposed_forward", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(library, "linear_untransposed_forward",
                         {"input: linear_forward(grad_output, weight, none)",
                          "weight: linear_backward_weight(input, grad_output)",
                          "bias: linear_backward_bias(grad_output)",
                          "output <- linear_untransposed_forward(tangent_input, weight, none)",
                          "output <- linear_untransposed_forward(input, tangent_weight, none)",
                          "output <- aten::expand(tangent_bias, output.size, false)"});
    // For layers under autocast (cuda_ops/conversion/layers.py).
    library.def("linear_rounded_forward(Tensor input, Tensor weight, Tensor? bias, bool untransposed)"
                " -> (Tensor output, Tensor rounded)");
    library.def("linear_rounded_gradients(Tensor grad_output, Tensor input, Tensor weight, Tensor rounded, "
                "bool untransposed, bool[3] wanted) -> Tensor[]",
                cuda_ops::linear_rounded_gradients);
    library.def("linear_rounded_tangent(Tensor input, Tensor tangent, bool untransposed) -> Tensor",
                cuda_ops::linear_rounded_tangent);
    CUDA_OPS_IMPLEMENT(library, "linear_rounded_forward", cuda_ops::linear_rounded_forward);
    CUDA_OPS_DERIVATIVES(library, "linear_rounded_forward",
                         {"input, weight, bias: linear_rounded_gradients(grad_output, input, weight, rounded, "
                          "untransposed, wanted)",
                          "output <- linear_rounded_tangent(tangent_input, weight, untransposed)",
                          "output <- linear_rounded_tangent(input, tangent_weight, untransposed)",
                          "output <- expand_rows(tangent_bias, output.size, output.dtype)"});
    // The three products are each other's derivatives: output is linear in input and in weight, grad_input in
    // grad_output and in weight, grad_weight in grad_output and in input.
    CUDA_OPS_DERIVATIVES(
        library, "linear_forward",
        {"input: linear_backward_input(grad_output, weight)", "weight: linear_backward_weight(grad_output, input)",
         "bias: linear_backward_bias(grad_output)", "output <- linear_forward(tangent_input, weight, none)",
         "output <- linear_forward(input, tangent_weight, none)",
         "output <- aten::expand(tangent_bias, output.size, false)"});
    CUDA_OPS_DERIVATIVES(library, "linear_backward_input",
                         {"grad_output: linear_forward(grad_grad_input, weight, none)",
                          "weight: linear_backward_weight(grad_output, grad_grad_input)",
                          "grad_input <- linear_backward_input(tangent_grad_output, weight)",
                          "grad_input <- linear_backward_input(grad_output, tangent_weight)"});
    CUDA_OPS_DERIVATIVES(library, "linear_backward_weight",
                         {"grad_output: linear_forward(input, grad_grad_weight, none)",
                          "input: linear_backward_input(grad_output, grad_grad_weight)",
                          "grad_weight <- linear_backward_weight(tangent_grad_output, input)",
                          "grad_weight <- linear_backward_weight(grad_output, tangent_input)"});
    CUDA_OPS_DERIVATIVES(library, "linear_backward_bias",
                         {"grad_output: aten::expand(grad_grad_bias, grad_output.size, false)",
                          "grad_bias <- linear_backward_bias(tangent_grad_output)"});
}
