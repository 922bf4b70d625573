// log_softmax for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/log_softmax.h"

#include <ATen/TensorOperators.h>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "softmax_shape.h"
#include "vmap.h"

namespace cuda_ops
{

static Tensor log_softmax_forward(const Tensor &input, int64_t dim)
{
    const char *op = "log_softmax";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const SoftmaxShape shape = softmax_shape(op, input, dim);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous();
    Tensor output = empty(x.sizes(), x.options());
    if (x.numel() == 0)
        return output;
    if (x.is_cuda()) {
        const Tensor workspace = workspace_if_any(x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_log_softmax_workspace_cuda(
                                                         0, shape.outer, shape.cols, shape.inner, dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_log_softmax_forward_cuda(output.data_ptr(), pointer_to(workspace),
                                                              x.const_data_ptr(), shape.outer, shape.cols, shape.inner,
                                                              dtype, current_stream(op)));
    } else {
        parallel_columns(
            op, shape, dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_log_softmax_forward_cpu(to, from, shape.cols, shape.inner, begin, end, type);
            },
            writes(output, shape.row()), reads(x, shape.row()));
    }
    return output;
}

static Tensor log_softmax_backward(const Tensor &grad_output, const Tensor &output, int64_t dim)
{
    const char *op = "log_softmax_backward";
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
        const Tensor workspace = workspace_if_any(y, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_log_softmax_workspace_cuda(
                                                         1, shape.outer, shape.cols, shape.inner, dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_log_softmax_backward_cuda(grad_input.data_ptr(), pointer_to(workspace),
                                                               g.const_data_ptr(), y.const_data_ptr(), shape.outer,
                                                               shape.cols, shape.inner, dtype, current_stream(op)));
    } else {
        parallel_columns(
            op, shape, dtype,
            [&](void *to, const void *grad, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_log_softmax_backward_cpu(to, grad, from, shape.cols, shape.inner, begin, end, type);
            },
            writes(grad_input, shape.row()), reads(g, shape.row()), reads(y, shape.row()));
    }
    return grad_input;
}

// The derivative of output by input times `tangent`, which is also that of grad_input by grad_output, transposed; of
// PyTorch's ops, which are differentiable further.
static Tensor log_softmax_tangent(const Tensor &tangent, const Tensor &output, int64_t dim)
{
    return tangent - (tangent * output.exp()).sum(dim, /*keepdim=*/true);
}

// The derivative of grad_input by output times `tangent`: elementwise, so that it serves backward and forward.
static Tensor log_softmax_backward_output(const Tensor &tangent, const Tensor &grad_output, const Tensor &output,
                                          int64_t dim)
{
    return -(tangent * output.exp()) * grad_output.sum(dim, /*keepdim=*/true);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("log_softmax_forward(Tensor input, int dim) -> (Tensor output)");
    library.def("log_softmax_backward(Tensor grad_output, Tensor output, int dim) -> (Tensor grad_input)");
    library.def("log_softmax_tangent(Tensor tangent, Tensor output, int dim) -> Tensor", cuda_ops::log_softmax_tangent);
    library.def("log_softmax_backward_output(Tensor tangent, Tensor grad_output, Tensor output, int dim) -> Tensor",
                cuda_ops::log_softmax_backward_output);
    CUDA_OPS_IMPLEMENT(library, "log_softmax_forward", cuda_ops::log_softmax_forward);
    CUDA_OPS_VMAP(library, "log_softmax_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "log_softmax_backward", cuda_ops::log_softmax_backward);
    CUDA_OPS_VMAP(library, "log_softmax_backward", "grad_output[1], output, dim");
    CUDA_OPS_AUTOCAST(library, "log_softmax_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_DERIVATIVES(library, "log_softmax_forward",
                         {"input: log_softmax_backward(grad_output, output, dim)",
                          "output <- log_softmax_tangent(tangent_input, output, dim)"});
    CUDA_OPS_DERIVATIVES(library, "log_softmax_backward",
                         {"grad_output: log_softmax_tangent(grad_grad_input, output, dim)",
                          "output: log_softmax_backward_output(grad_grad_input, grad_output, output, dim)",
                          "grad_input <- log_softmax_backward(tangent_grad_output, output, dim)",
                          "grad_input <- log_softmax_backward_output(tangent_output, grad_output, output, dim)"});
}
