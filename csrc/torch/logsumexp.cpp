// logsumexp for PyTorch: checks, allocation and the choice of backend. Dimensions that do not follow each other are moved to
// the end first.
#include "cuda_ops/logsumexp.h"

#include <ATen/TensorOperators.h>

#include <limits>
#include <vector>

#include "autograd.h"
#include "empty.h"
#include "loss.h"
#include "softmax_shape.h"
#include "vmap.h"

namespace cuda_ops
{

// The dimensions that are summed over, counted from the front; all of them if none is named, as in PyTorch.
static std::vector<bool> logsumexp_dims(const char *op, const Tensor &input, at::IntArrayRef dim)
{
    const int64_t dims = input.dim(), bound = std::max<int64_t>(dims, 1);
    std::vector<bool> reduced(bound, dim.empty());
    for (const int64_t d : dim) {
        TORCH_CHECK_INDEX(-bound <= d && d < bound, op, ": expected dim to be in [", -bound, ", ", bound - 1,
                          "] for an input of shape ", input.sizes(), ", got ", d);
        const int64_t wrapped = d < 0 ? d + bound : d;
        TORCH_CHECK(!reduced[wrapped], op, ": expected dim to name each dimension once, got ", dim);
        reduced[wrapped] = true;
    }
    reduced.resize(dims);
    return reduced;
}

// The input as [outer, cols, inner], and where its dimensions then are.
struct LogSumExpShape {
    SoftmaxShape shape;
    at::DimVector order, sizes; // of the output
    bool moved = false;

    LogSumExpShape(const Tensor &input, const std::vector<bool> &reduced, bool keepdim)
    {
        const int64_t dims = input.dim();
        int64_t first = dims, last = -1, count = 0;
        for (int64_t d = 0; d < dims; d++) {
            if (!reduced[d]) {
                order.push_back(d);
                sizes.push_back(input.size(d));
                continue;
            }
            if (keepdim)
                sizes.push_back(1);
            first = std::min(first, d);
            last = d;
            count++;
        }
        moved = count > 0 && last - first + 1 != count;
        for (int64_t d = 0; d < dims; d++) {
            if (reduced[d])
                order.push_back(d);
            int64_t &size = reduced[d] ? shape.cols : moved || d < first ? shape.outer : shape.inner;
            size *= input.size(d);
        }
    }
};

static Tensor logsumexp_forward(const Tensor &input, at::IntArrayRef dim, bool keepdim)
{
    const char *op = "logsumexp";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const LogSumExpShape as(input, logsumexp_dims(op, input, dim), keepdim);
    const SoftmaxShape &shape = as.shape;
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = as.moved ? input.permute(as.order).contiguous() : input.contiguous();
    Tensor output = empty(as.sizes, x.options());
    if (output.numel() == 0)
        return output;
    if (x.numel() == 0)
        return output.fill_(-std::numeric_limits<double>::infinity());
    if (x.is_cuda()) {
        const Tensor workspace = empty_workspace(x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_logsumexp_workspace_cuda(
                                                        shape.outer, shape.cols, shape.inner, dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_logsumexp_forward_cuda(output.data_ptr(), workspace.data_ptr(), x.const_data_ptr(),
                                                            shape.outer, shape.cols, shape.inner, dtype,
                                                            current_stream(op)));
        return output;
    }
    parallel_columns(
        op, shape, dtype,
        [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_logsumexp_forward_cpu(to, from, shape.cols, shape.inner, begin, end, type);
        },
        writes(output, shape.inner), reads(x, shape.row()));
    return output;
}

static Tensor logsumexp_backward(const Tensor &grad_output, const Tensor &input, const Tensor &output,
                                 at::IntArrayRef dim, bool keepdim)
{
    const char *op = "logsumexp_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const LogSumExpShape as(input, logsumexp_dims(op, input, dim), keepdim);
    const SoftmaxShape &shape = as.shape;
    for (const auto &[name, tensor] : {std::pair("grad_output", &grad_output), std::pair("output", &output)}) {
        check_like(op, name, *tensor, "input", input);
        TORCH_CHECK(tensor->sizes() == at::IntArrayRef(as.sizes), op, ": expected ", name,
                    " to have the shape of the output, ", at::IntArrayRef(as.sizes), ", got ", tensor->sizes());
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = as.moved ? input.permute(as.order).contiguous() : input.contiguous();
    const Tensor g = grad_output.contiguous(), y = output.contiguous();
    Tensor grad_input = empty(x.sizes(), x.options());
    if (x.numel() > 0) {
        if (x.is_cuda())
            CUDA_OPS_LAUNCH(op, cuda_ops_logsumexp_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                                 x.const_data_ptr(), y.const_data_ptr(), shape.outer,
                                                                 shape.cols, shape.inner, dtype, current_stream(op)));
        else
            parallel_columns(
                op, shape, dtype,
                [&](void *to, const void *grad, const void *from, const void *sum, int64_t begin, int64_t end,
                    cuda_ops_dtype type) {
                    return cuda_ops_logsumexp_backward_cpu(to, grad, from, sum, shape.cols, shape.inner, begin, end,
                                                           type);
                },
                writes(grad_input, shape.row()), reads(g, shape.inner), reads(x, shape.row()), reads(y, shape.inner));
    }
    if (!as.moved)
        return grad_input;
    at::DimVector back(as.order.size());
    for (size_t d = 0; d < as.order.size(); d++)
        back[as.order[d]] = static_cast<int64_t>(d);
    return grad_input.permute(back).contiguous();
}

// Derivatives of the derivatives, composed of backward, grad_output exp(input - output), by way of the dispatcher.

static Tensor call_logsumexp_backward(const Tensor &grad_output, const Tensor &input, const Tensor &output,
                                      at::IntArrayRef dim, bool keepdim)
{
    static const auto op = registered_op<Tensor(const Tensor &, const Tensor &, const Tensor &, at::IntArrayRef, bool)>(
        "cuda_ops::logsumexp_backward");
    return op.call(grad_output, input, output, dim, keepdim);
}

// The sum of `tangent` exp(input - output): the output's change with input, and the gradient of grad_output.
static Tensor logsumexp_tangent(const Tensor &tangent, const Tensor &input, const Tensor &output, at::IntArrayRef dim,
                                bool keepdim)
{
    if (input.dim() == 0)
        return tangent * call_logsumexp_backward(at::ones_like(output), input, output, dim, keepdim);
    return (tangent * call_logsumexp_backward(at::ones_like(output), input, output, dim, keepdim)).sum(dim, keepdim);
}

static Tensor logsumexp_backward_input(const Tensor &grad, const Tensor &grad_output, const Tensor &input,
                                       const Tensor &output, at::IntArrayRef dim, bool keepdim)
{
    return grad * call_logsumexp_backward(grad_output, input, output, dim, keepdim);
}

static Tensor logsumexp_backward_output(const Tensor &grad, const Tensor &grad_output, const Tensor &input,
                                        const Tensor &output, at::IntArrayRef dim, bool keepdim)
{
    return -grad_output * logsumexp_tangent(grad, input, output, dim, keepdim);
}

static Tensor logsumexp_backward_tangent_output(const Tensor &tangent, const Tensor &grad_output, const Tensor &input,
                                                const Tensor &output, at::IntArrayRef dim, bool keepdim)
{
    return call_logsumexp_backward(-tangent * grad_output, input, output, dim, keepdim);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("logsumexp_forward(Tensor input, int[1] dim, bool keepdim) -> (Tensor output)");
    library.def("logsumexp_backward(Tensor grad_output, Tensor input, Tensor output, int[1] dim, bool keepdim) -> "
                "(Tensor grad_input)");
    library.def("logsumexp_tangent(Tensor tangent, Tensor input, Tensor output, int[1] dim, bool keepdim) -> Tensor",
                cuda_ops::logsumexp_tangent);
    library.def("logsumexp_backward_input(Tensor grad, Tensor grad_output, Tensor input, Tensor output, int[1] dim, "
                "bool keepdim) -> Tensor",
                cuda_ops::logsumexp_backward_input);
    library.def("logsumexp_backward_output(Tensor grad, Tensor grad_output, Tensor input, Tensor output, int[1] dim, "
                "bool keepdim) -> Tensor",
                cuda_ops::logsumexp_backward_output);
    library.def("logsumexp_backward_tangent_output(Tensor tangent, Tensor grad_output, Tensor input, Tensor output, "
                "int[1] dim, bool keepdim) -> Tensor",
                cuda_ops::logsumexp_backward_tangent_output);
    CUDA_OPS_IMPLEMENT(library, "logsumexp_forward", cuda_ops::logsumexp_forward);
    CUDA_OPS_VMAP(library, "logsumexp_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "logsumexp_backward", cuda_ops::logsumexp_backward);
    CUDA_OPS_AUTOCAST(library, "logsumexp_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_DERIVATIVES(library, "logsumexp_forward",
                         {"input: logsumexp_backward(grad_output, input, output, dim, keepdim)",
                          "output <- logsumexp_tangent(tangent_input, input, output, dim, keepdim)"});
    CUDA_OPS_DERIVATIVES(
        library, "logsumexp_backward",
        {"grad_output: logsumexp_tangent(grad_grad_input, input, output, dim, keepdim)",
         "input: logsumexp_backward_input(grad_grad_input, grad_output, input, output, dim, keepdim)",
         "output: logsumexp_backward_output(grad_grad_input, grad_output, input, output, dim, keepdim)",
         "grad_input <- logsumexp_backward(tangent_grad_output, input, output, dim, keepdim)",
         "grad_input <- logsumexp_backward_input(tangent_input, grad_output, input, output, dim, keepdim)",
         "grad_input <- logsumexp_backward_tangent_output(tangent_output, grad_output, input, output, dim, keepdim)"});
}
