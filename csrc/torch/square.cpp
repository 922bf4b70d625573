// square for PyTorch: checks, allocation and the choice of backend. The template of an op's glue.
#include "cuda_ops/square.h"

#include <ATen/ops/empty_like.h>

#include "autograd.h"
#include "checks.h"
#include "halves.h"
#include "vmap.h"

namespace cuda_ops
{

static Tensor square_forward(const Tensor &input)
{
    const cuda_ops_dtype dtype = check_dtype("square", "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    Tensor output = at::empty_like(x);
    if (x.numel() == 0)
        return output;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH("square", cuda_ops_square_forward_cuda(output.data_ptr(), x.const_data_ptr(), x.numel(), dtype,
                                                               current_stream("square")));
    else
        parallel_elements("square", x.numel(), dtype, cuda_ops_square_forward_cpu, writes(output), reads(x));
    return output;
}

static Tensor square_backward(const Tensor &grad_output, const Tensor &input)
{
    const cuda_ops_dtype dtype = check_dtype("square_backward", "input", input);
    check_like("square_backward", "grad_output", grad_output, "input", input);
    check_same_shape("square_backward", "grad_output", grad_output, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    const Tensor g = dense_like(grad_output, x);
    Tensor grad_input = at::empty_like(x);
    if (x.numel() == 0)
        return grad_input;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH("square_backward",
                        cuda_ops_square_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(), x.const_data_ptr(),
                                                      x.numel(), dtype, current_stream("square_backward")));
    else
        parallel_elements("square_backward", x.numel(), dtype, cuda_ops_square_backward_cpu, writes(grad_input),
                          reads(g), reads(x));
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("square_forward(Tensor input) -> (Tensor output)");
    library.def("square_backward(Tensor grad_output, Tensor input) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "square_forward", cuda_ops::square_forward);
    CUDA_OPS_VMAP(library, "square_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "square_backward", cuda_ops::square_backward);
    CUDA_OPS_VMAP(library, "square_backward", "grad_output, input");
    CUDA_OPS_DERIVATIVES(
        library, "square_forward",
        {"input: square_backward(grad_output, input)", "output <- square_backward(tangent_input, input)"});
    // 2 * input * grad_output is linear in each of its factors: its gradients are the same product again.
    CUDA_OPS_DERIVATIVES(library, "square_backward",
                         {"grad_output: square_backward(grad_grad_input, input)",
                          "input: square_backward(grad_grad_input, grad_output)",
                          "grad_input <- square_backward(tangent_grad_output, input)",
                          "grad_input <- square_backward(grad_output, tangent_input)"});
}
