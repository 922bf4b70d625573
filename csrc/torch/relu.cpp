// relu for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/relu.h"

#include <ATen/ops/empty_like.h>

#include "autograd.h"
#include "checks.h"
#include "vmap.h"

namespace cuda_ops
{

// output may be x itself.
static void launch_forward(const Tensor &output, const Tensor &x, cuda_ops_dtype dtype)
{
    if (x.numel() == 0)
        return;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH("relu", cuda_ops_relu_forward_cuda(output.data_ptr(), x.const_data_ptr(), x.numel(), dtype,
                                                           current_stream("relu")));
    else
        parallel_ranges("relu", x.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
            return cuda_ops_relu_forward_cpu(output.data_ptr(), x.const_data_ptr(), begin, end, dtype);
        });
}

static Tensor relu_forward(const Tensor &input)
{
    const cuda_ops_dtype dtype = check_dtype("relu", "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    Tensor output = at::empty_like(x);
    launch_forward(output, x, dtype);
    return output;
}

static void relu_inplace(Tensor &input)
{
    const cuda_ops_dtype dtype = check_dtype("relu", "input", input);
    check_written("relu", "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    launch_forward(x, x, dtype);
    // The tensor was not dense, or was a lazy negation: x is a copy.
    if (!x.is_same(input))
        input.copy_(x);
    // So that autograd notices where the old values were saved.
    input.unsafeGetTensorImpl()->bump_version();
}

static Tensor relu_backward(const Tensor &grad_output, const Tensor &output)
{
    const cuda_ops_dtype dtype = check_dtype("relu_backward", "output", output);
    check_like("relu_backward", "grad_output", grad_output, "output", output);
    check_same_shape("relu_backward", "grad_output", grad_output, "output", output);
    const c10::OptionalDeviceGuard guard(at::device_of(output));
    const Tensor y = dense(output);
    const Tensor g = dense_like(grad_output, y);
    Tensor grad_input = at::empty_like(y);
    if (y.numel() == 0)
        return grad_input;
    if (y.is_cuda())
        CUDA_OPS_LAUNCH("relu_backward",
                        cuda_ops_relu_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(), y.const_data_ptr(),
                                                    y.numel(), dtype, current_stream("relu_backward")));
    else
        parallel_ranges("relu_backward", y.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
            return cuda_ops_relu_backward_cpu(grad_input.data_ptr(), g.const_data_ptr(), y.const_data_ptr(), begin, end,
                                              dtype);
        });
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("relu_forward(Tensor input) -> (Tensor output)");
    library.def("relu_inplace(Tensor(a!) input) -> ()");
    library.def("relu_backward(Tensor grad_output, Tensor output) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "relu_forward", cuda_ops::relu_forward);
    CUDA_OPS_VMAP(library, "relu_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "relu_inplace", cuda_ops::relu_inplace);
    CUDA_OPS_VMAP(library, "relu_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "relu_inplace");
    CUDA_OPS_IMPLEMENT(library, "relu_backward", cuda_ops::relu_backward);
    CUDA_OPS_VMAP(library, "relu_backward", "grad_output, output");
    // From the output, so that the input may be freed or overwritten.
    CUDA_OPS_DERIVATIVES(
        library, "relu_forward",
        {"input: relu_backward(grad_output, output)", "output <- relu_backward(tangent_input, output)"});
    CUDA_OPS_DERIVATIVES(library, "relu_inplace", {"input: relu_backward(grad_output, output)"});
    // Linear in grad_output; the factor has derivative 0 wherever it has one.
    CUDA_OPS_DERIVATIVES(library, "relu_backward",
                         {"grad_output: relu_backward(grad_grad_input, output)",
                          "grad_input <- relu_backward(tangent_grad_output, output)"});
}
