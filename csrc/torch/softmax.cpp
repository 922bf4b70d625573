// softmax for PyTorch: checks, allocation and the choice of backend. Its gradient, times a number, is masked_softmax's
// too.
#include "cuda_ops/softmax.h"

#include <ATen/TensorOperators.h>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "softmax_shape.h"
#include "vmap.h"

namespace cuda_ops
{

static Tensor softmax_forward(const Tensor &input, int64_t dim)
{
    const char *op = "softmax";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const SoftmaxShape shape = softmax_shape(op, input, dim);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous();
    Tensor output = empty(x.sizes(), x.options());
    if (x.numel() == 0)
        return output;
    if (x.is_cuda()) {
        const Tensor workspace = workspace_if_any(x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_softmax_workspace_cuda(
                                                         0, shape.outer, shape.cols, shape.inner, dtype)));
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_softmax_forward_cuda(output.data_ptr(), pointer_to(workspace), x.const_data_ptr(),
                                                      shape.outer, shape.cols, shape.inner, dtype, current_stream(op)));
    } else {
        parallel_columns(
            op, shape, dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_softmax_forward_cpu(to, from, shape.cols, shape.inner, begin, end, type);
            },
            writes(output, shape.row()), reads(x, shape.row()));
    }
    return output;
}

static Tensor softmax_gradient(const char *op, const Tensor &grad_output, const Tensor &output, int64_t dim,
                               double scale)
{
    const cuda_ops_dtype dtype = check_dtype(op, "output", output);
    check_like(op, "grad_output", grad_output, "output", output);
    check_same_shape(op, "grad_output", grad_output, "output", output);
    const SoftmaxShape shape = softmax_shape(op, output, dim);
    const c10::OptionalDeviceGuard guard(at::device_of(output));
    const Tensor y = output.contiguous(), g = grad_output.contiguous();
    Tensor grad_input = empty(y.sizes(), y.options());
    if (y.numel() == 0)
        return grad_input;
    if (y.is_cuda()) {
        const Tensor workspace = workspace_if_any(y, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_softmax_workspace_cuda(
                                                         1, shape.outer, shape.cols, shape.inner, dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_softmax_backward_cuda(grad_input.data_ptr(), pointer_to(workspace),
                                                           g.const_data_ptr(), y.const_data_ptr(), scale, shape.outer,
                                                           shape.cols, shape.inner, dtype, current_stream(op)));
    } else {
        parallel_columns(
            op, shape, dtype,
            [&](void *to, const void *grad, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_softmax_backward_cpu(to, grad, from, scale, shape.cols, shape.inner, begin, end, type);
            },
            writes(grad_input, shape.row()), reads(g, shape.row()), reads(y, shape.row()));
    }
    return grad_input;
}

static Tensor softmax_backward(const Tensor &grad_output, const Tensor &output, int64_t dim)
{
    return softmax_gradient("softmax_backward", grad_output, output, dim, 1);
}

static Tensor masked_softmax_backward(const Tensor &grad_output, const Tensor &output, double scale)
{
    return softmax_gradient("masked_softmax_backward", grad_output, output, -1, scale);
}

// The derivatives of the gradient by output, of PyTorch's ops, which are differentiable further: transposed, and times
// a tangent.
static Tensor scaled_backward_output(const Tensor &grad, const Tensor &grad_output, const Tensor &output, int64_t dim,
                                     double scale)
{
    // grad * (grad_output - mean) - grad_output * grad_mean, where the means are weighted by output; and of each row
    // mean * grad_mean more, which softmax's own gradient takes off again: output is softmax's, whose rows sum to 1. So
    // it is a product of what deviates: of means that are large the terms would be beyond float16's range, or all that
    // cancels.
    const at::ScalarType type = at::isReducedFloatingType(output.scalar_type()) ? at::kFloat : output.scalar_type();
    const Tensor first = grad.to(type), second = grad_output.to(type), weights = output.to(type);
    const Tensor mean = (second * weights).sum(dim, /*keepdim=*/true);
    const Tensor grad_mean = (first * weights).sum(dim, /*keepdim=*/true);
    return (scale * (first - grad_mean) * (second - mean)).to(output.scalar_type());
}

static Tensor softmax_backward_output(const Tensor &grad, const Tensor &grad_output, const Tensor &output, int64_t dim)
{
    return scaled_backward_output(grad, grad_output, output, dim, 1);
}

static Tensor softmax_backward_tangent(const Tensor &tangent, const Tensor &grad_output, const Tensor &output,
                                       int64_t dim)
{
    return tangent * (grad_output - (grad_output * output).sum(dim, /*keepdim=*/true)) -
           output * (grad_output * tangent).sum(dim, /*keepdim=*/true);
}

static Tensor masked_softmax_backward_output(const Tensor &grad, const Tensor &grad_output, const Tensor &output,
                                             double scale)
{
    return scaled_backward_output(grad, grad_output, output, -1, scale);
}

static Tensor masked_softmax_backward_tangent(const Tensor &tangent, const Tensor &grad_output, const Tensor &output,
                                              double scale)
{
    return softmax_backward_tangent(tangent, grad_output, output, -1) * scale;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("softmax_forward(Tensor input, int dim) -> (Tensor output)");
    library.def("softmax_backward(Tensor grad_output, Tensor output, int dim) -> (Tensor grad_input)");
    library.def("softmax_backward_output(Tensor grad, Tensor grad_output, Tensor output, int dim) -> Tensor",
                cuda_ops::softmax_backward_output);
    library.def("softmax_backward_tangent(Tensor tangent, Tensor grad_output, Tensor output, int dim) -> Tensor",
                cuda_ops::softmax_backward_tangent);
    CUDA_OPS_IMPLEMENT(library, "softmax_forward", cuda_ops::softmax_forward);
    CUDA_OPS_VMAP(library, "softmax_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "softmax_backward", cuda_ops::softmax_backward);
    CUDA_OPS_VMAP(library, "softmax_backward", "grad_output[1], output, dim");
    CUDA_OPS_AUTOCAST(library, "softmax_forward", FLOAT32_ON_CUDA);
    // The matrix of derivatives, diag(output) - output * output^T, is its own transpose.
    CUDA_OPS_DERIVATIVES(library, "softmax_forward",
                         {"input: softmax_backward(grad_output, output, dim)",
                          "output <- softmax_backward(tangent_input, output, dim)"});
    CUDA_OPS_DERIVATIVES(library, "softmax_backward",
                         {"grad_output: softmax_backward(grad_grad_input, output, dim)",
                          "output: softmax_backward_output(grad_grad_input, grad_output, output, dim)",
                          "grad_input <- softmax_backward(tangent_grad_output, output, dim)",
                          "grad_input <- softmax_backward_tangent(tangent_output, grad_output, output, dim)"});

    library.def("masked_softmax_backward(Tensor grad_output, Tensor output, float scale) -> (Tensor grad_input)");
    library.def("masked_softmax_backward_output(Tensor grad, Tensor grad_output, Tensor output, float scale) -> Tensor",
                cuda_ops::masked_softmax_backward_output);
    library.def(
        "masked_softmax_backward_tangent(Tensor tangent, Tensor grad_output, Tensor output, float scale) -> Tensor",
        cuda_ops::masked_softmax_backward_tangent);
    CUDA_OPS_IMPLEMENT(library, "masked_softmax_backward", cuda_ops::masked_softmax_backward);
    CUDA_OPS_DERIVATIVES(library, "masked_softmax_backward",
                         {"grad_output: masked_softmax_backward(grad_grad_input, output, scale)",
                          "output: masked_softmax_backward_output(grad_grad_input, grad_output, output, scale)",
                          "grad_input <- masked_softmax_backward(tangent_grad_output, output, scale)",
                          "grad_input <- masked_softmax_backward_tangent(tangent_output, grad_output, output, scale)"});
}
