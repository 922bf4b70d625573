// prelu for PyTorch: checks, allocation and the choice of backend; derivatives of the gradients, of PyTorch's ops.
#include "cuda_ops/prelu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "cpu_workspace.h"
#include "empty.h"
#include "halves.h"

namespace cuda_ops
{

using OptionalTensor = std::optional<Tensor>;

// A dense tensor's memory as [outer, channels, inner]; channels are 1 where there is one weight.
struct PreluShape {
    int64_t outer = 1, channels = 1, inner = 1;

    PreluShape(const char *op, const Tensor &input, const Tensor &dense_input, const Tensor &weight)
    {
        check_like(op, "weight", weight, "input", input);
        check_dim(op, "weight", weight, 0, 1);
        channels = weight.numel();
        if (channels == 1) {
            inner = input.numel();
            return;
        }
        const int64_t expected = input.dim() > 1 ? input.size(1) : 1;
        TORCH_CHECK(channels == expected, op, ": expected weight to have 1 element or ", expected,
                    ", one for each channel of input, got ", channels);
        // Of a dense tensor a dimension's stride is the number of elements that lie inside of it.
        inner = dense_input.stride(1);
        outer = channels * inner > 0 ? input.numel() / (channels * inner) : 0;
    }
};

static Tensor prelu_forward(const Tensor &input, const Tensor &weight)
{
    const char *const op = "prelu";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    const PreluShape shape(op, input, x, weight);
    const Tensor w = weight.contiguous();
    Tensor output = empty_like_dense(x);
    if (x.numel() == 0)
        return output;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_prelu_forward_cuda(output.data_ptr(), x.const_data_ptr(), w.const_data_ptr(),
                                                        shape.outer, shape.channels, shape.inner, dtype,
                                                        current_stream(op)));
    else
        parallel_elements(
            op, x.numel(), dtype,
            [&, slopes = widened(w)](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_prelu_forward_cpu(to, from, slopes.const_data_ptr(), shape.channels, shape.inner, begin,
                                                  end, type);
            },
            writes(output), reads(x));
    return output;
}

static std::tuple<Tensor, Tensor> prelu_backward(const Tensor &grad_output, const Tensor &input, const Tensor &weight)
{
    const char *const op = "prelu_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_like(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    const PreluShape shape(op, input, x, weight);
    const Tensor w = weight.contiguous(), g = dense_like(grad_output, x);
    Tensor grad_input = empty_like_dense(x), grad_weight = empty(weight.sizes(), w.options());
    if (x.numel() == 0)
        return {grad_input, grad_weight.zero_()};
    const auto [outer, channels, inner] = std::tuple(shape.outer, shape.channels, shape.inner);
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(cuda_ops_prelu_workspace_cuda(outer, channels, inner, dtype), x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_prelu_backward_cuda(grad_input.data_ptr(), grad_weight.data_ptr(),
                                                         workspace.data_ptr(), g.const_data_ptr(), x.const_data_ptr(),
                                                         w.const_data_ptr(), outer, channels, inner, dtype,
                                                         current_stream(op)));
        return {grad_input, grad_weight};
    }
    if (is_cpu_half(x)) {
        const auto [to_input, to_weight] = in_float32(prelu_backward, g, x, w);
        return {to_input.to(x.scalar_type()), to_weight.to(w.scalar_type())};
    }
    void *const workspace = thread_workspace(cuda_ops_prelu_workspace_cpu(outer, channels, inner));
    const int64_t units = cuda_ops_prelu_units_cpu(outer, channels, inner);
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / x.numel());
    parallel_ranges(
        op, units, grain, [&, outer = outer, channels = channels, inner = inner](int64_t begin, int64_t end) {
            return cuda_ops_prelu_backward_cpu(grad_input.data_ptr(), workspace, g.const_data_ptr(), x.const_data_ptr(),
                                               w.const_data_ptr(), outer, channels, inner, begin, end, dtype);
        });
    check_status(op, cuda_ops_prelu_backward_weight_cpu(grad_weight.data_ptr(), workspace, outer, channels, inner, 0,
                                                        channels, dtype));
    return {grad_input, grad_weight};
}

// ---- Derivatives of the gradients -----------------------------------------------------------------------------------

// The weight, or what belongs to it, as it is multiplied with the input: one for each channel.
static Tensor prelu_by_channel(const Tensor &weight, const Tensor &input)
{
    if (input.dim() == 0)
        return weight.reshape({});
    std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
    if (input.dim() > 1)
        sizes[1] = -1;
    return weight.reshape(sizes);
}

// The other way round: products' sum by channel.
static Tensor prelu_weight_sum(const Tensor &products, const Tensor &weight)
{
    if (weight.sym_numel() == 1)
        return products.sum().reshape_symint(weight.sym_sizes());
    std::vector<int64_t> others;
    for (int64_t d = 0; d < products.dim(); d++)
        if (d != 1)
            others.push_back(d);
    return products.sum(others);
}

// What of the tensors depends on the weight: those elements where input is not above 0.
static Tensor prelu_below(const Tensor &tensor, const Tensor &input)
{
    return at::where(input > 0, 0, tensor);
}

static Tensor prelu_slope(const Tensor &input, const Tensor &weight)
{
    return at::where(input > 0, 1, prelu_by_channel(weight, input));
}

static std::tuple<Tensor, Tensor, Tensor> prelu_double_backward(const OptionalTensor &grad_grad_input,
                                                                const OptionalTensor &grad_grad_weight,
                                                                const Tensor &grad_output, const Tensor &input,
                                                                const Tensor &weight)
{
    Tensor by_grad = at::zeros_like(grad_output), by_input = at::zeros_like(input), by_weight = at::zeros_like(weight);
    if (grad_grad_input) {
        by_grad = by_grad + *grad_grad_input * prelu_slope(input, weight);
        by_weight = by_weight + prelu_weight_sum(prelu_below(*grad_grad_input * grad_output, input), weight);
    }
    if (grad_grad_weight) {
        const Tensor by_channel = prelu_by_channel(*grad_grad_weight, input);
        by_grad = by_grad + prelu_below(by_channel * input, input);
        by_input = by_input + prelu_below(by_channel * grad_output, input);
    }
    return {by_grad, by_input, by_weight};
}

static Tensor prelu_tangent(const OptionalTensor &tangent_input, const OptionalTensor &tangent_weight,
                            const Tensor &input, const Tensor &weight)
{
    Tensor tangent = at::zeros_like(input);
    if (tangent_input)
        tangent = tangent + *tangent_input * prelu_slope(input, weight);
    if (tangent_weight)
        tangent = tangent + prelu_below(prelu_by_channel(*tangent_weight, input) * input, input);
    return tangent;
}

static std::tuple<Tensor, Tensor> prelu_backward_tangent(const OptionalTensor &tangent_grad_output,
                                                         const OptionalTensor &tangent_input,
                                                         const OptionalTensor &tangent_weight,
                                                         const Tensor &grad_output, const Tensor &input,
                                                         const Tensor &weight)
{
    Tensor of_input = at::zeros_like(input), of_weight = at::zeros_like(weight);
    if (tangent_grad_output) {
        of_input = of_input + *tangent_grad_output * prelu_slope(input, weight);
        of_weight = of_weight + prelu_weight_sum(prelu_below(*tangent_grad_output * input, input), weight);
    }
    if (tangent_input)
        of_weight = of_weight + prelu_weight_sum(prelu_below(*tangent_input * grad_output, input), weight);
    if (tangent_weight)
        of_input = of_input + prelu_below(prelu_by_channel(*tangent_weight, input) * grad_output, input);
    return {of_input, of_weight};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("prelu_forward(Tensor input, Tensor weight) -> (Tensor output)");
    library.def("prelu_backward(Tensor grad_output, Tensor input, Tensor weight) "
                "-> (Tensor grad_input, Tensor grad_weight)");
    library.def("prelu_double_backward(Tensor? grad_grad_input, Tensor? grad_grad_weight, Tensor grad_output, "
                "Tensor input, Tensor weight) -> (Tensor, Tensor, Tensor)",
                cuda_ops::prelu_double_backward);
    library.def("prelu_tangent(Tensor? tangent_input, Tensor? tangent_weight, Tensor input, Tensor weight) -> Tensor",
                cuda_ops::prelu_tangent);
    library.def("prelu_backward_tangent(Tensor? tangent_grad_output, Tensor? tangent_input, Tensor? tangent_weight, "
                "Tensor grad_output, Tensor input, Tensor weight) -> (Tensor, Tensor)",
                cuda_ops::prelu_backward_tangent);
    CUDA_OPS_IMPLEMENT(library, "prelu_forward", cuda_ops::prelu_forward);
    CUDA_OPS_IMPLEMENT(library, "prelu_backward", cuda_ops::prelu_backward);
    CUDA_OPS_AUTOCAST(library, "prelu_forward", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(library, "prelu_forward",
                         {"input, weight: prelu_backward(grad_output, input, weight)",
                          "output <- prelu_tangent(tangent_input, tangent_weight, input, weight)"});
    CUDA_OPS_DERIVATIVES(
        library, "prelu_backward",
        {"grad_output, input, weight: prelu_double_backward(grad_grad_input, grad_grad_weight, grad_output, input, "
         "weight)",
         "grad_input, grad_weight <- prelu_backward_tangent(tangent_grad_output, tangent_input, tangent_weight, "
         "grad_output, input, weight)"});
}
