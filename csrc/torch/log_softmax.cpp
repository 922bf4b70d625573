// log_softmax for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/log_softmax.h"

#include <ATen/ops/empty_like.h>

#include "checks.h"

namespace cuda_ops
{

// Input seen as [outer, cols, inner], cols being the dimension `dim`, which may count from the end. A tensor without
// dimensions is one of one element, as in PyTorch.
struct SoftmaxShape {
    int64_t outer = 1, cols = 1, inner = 1;
};

static SoftmaxShape softmax_shape(const char *op, const Tensor &input, int64_t dim)
{
    const int64_t dims = input.dim(), bound = std::max<int64_t>(dims, 1);
    TORCH_CHECK_INDEX(-bound <= dim && dim < bound, op, ": expected dim to be in [", -bound, ", ", bound - 1,
                      "] for an input of shape ", input.sizes(), ", got ", dim);
    const int64_t wrapped = dim < 0 ? dim + bound : dim;
    SoftmaxShape shape;
    for (int64_t d = 0; d < dims; d++)
        (d < wrapped ? shape.outer : d == wrapped ? shape.cols : shape.inner) *= input.size(d);
    return shape;
}

// Columns that a thread of the CPU takes at least.
static int64_t column_grain(const SoftmaxShape &shape)
{
    return std::max<int64_t>(ELEMENTWISE_GRAIN / 8 / shape.cols, 1);
}

static Tensor log_softmax_forward(const Tensor &input, int64_t dim)
{
    const char *op = "log_softmax";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const SoftmaxShape shape = softmax_shape(op, input, dim);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous();
    Tensor output = at::empty_like(x, at::MemoryFormat::Contiguous);
    if (x.numel() == 0)
        return output;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_log_softmax_forward_cuda(output.data_ptr(), x.const_data_ptr(), shape.outer,
                                                              shape.cols, shape.inner, dtype, current_stream(op)));
    else
        parallel_ranges(op, shape.outer * shape.inner, column_grain(shape), [&](int64_t begin, int64_t end) {
            return cuda_ops_log_softmax_forward_cpu(output.data_ptr(), x.const_data_ptr(), shape.cols, shape.inner,
                                                    begin, end, dtype);
        });
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
    Tensor grad_input = at::empty_like(y, at::MemoryFormat::Contiguous);
    if (y.numel() == 0)
        return grad_input;
    if (y.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_log_softmax_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                               y.const_data_ptr(), shape.outer, shape.cols, shape.inner,
                                                               dtype, current_stream(op)));
    else
        parallel_ranges(op, shape.outer * shape.inner, column_grain(shape), [&](int64_t begin, int64_t end) {
            return cuda_ops_log_softmax_backward_cpu(grad_input.data_ptr(), g.const_data_ptr(), y.const_data_ptr(),
                                                     shape.cols, shape.inner, begin, end, dtype);
        });
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("log_softmax_forward(Tensor input, int dim) -> Tensor");
    library.def("log_softmax_backward(Tensor grad_output, Tensor output, int dim) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "log_softmax_forward", cuda_ops::log_softmax_forward);
    CUDA_OPS_IMPLEMENT(library, "log_softmax_backward", cuda_ops::log_softmax_backward);
}
