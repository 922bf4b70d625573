// interleave for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/interleave.h"

#include <ATen/ops/zeros_like.h>

#include <optional>
#include <tuple>

#include "autograd.h"
#include "checks.h"
#include "empty.h"

#include "cuda_ops/concat.h"

namespace cuda_ops
{

static int64_t interleaved_dim(const char *op, const Tensor &tensor, int64_t dim)
{
    const int64_t rank = tensor.dim();
    TORCH_CHECK(rank > 0, op, ": expected input to have dimensions, got one that has none");
    TORCH_CHECK_INDEX(-rank <= dim && dim < rank, op, ": expected dim to be in [", -rank, ", ", rank - 1,
                      "] for a tensor of shape ", tensor.sizes(), ", got ", dim);
    return dim < 0 ? dim + rank : dim;
}

// Elements in front of the dimension, and behind it, in the order in which they lie in memory.
static std::pair<int64_t, int64_t> around_dim(const Tensor &tensor, int64_t dim, at::MemoryFormat format)
{
    int64_t outer = 1, inner = 1;
    for (int64_t d = 0; d < tensor.dim(); d++)
        if (d != dim) {
            const bool in_front =
                format == at::MemoryFormat::ChannelsLast ? dim == 1 || d == 0 || (dim == 3 && d == 2) : d < dim;
            (in_front ? outer : inner) *= tensor.size(d);
        }
    return {outer, inner};
}

// The stride of rows of channels that lie innermost, evenly, in a tensor of channels_last; 0 if they do not.
static int64_t stride_of_pixels(const Tensor &tensor)
{
    const int64_t stride = tensor.size(3) > 1   ? tensor.stride(3)
                           : tensor.size(2) > 1 ? tensor.stride(2)
                           : tensor.size(0) > 1 ? tensor.stride(0)
                                                : tensor.size(1);
    const bool evenly = (tensor.size(2) == 1 || tensor.stride(2) == stride * tensor.size(3)) &&
                        (tensor.size(0) == 1 || tensor.stride(0) == stride * tensor.size(3) * tensor.size(2));
    return evenly && stride >= tensor.size(1) && (tensor.size(1) == 1 || tensor.stride(1) == 1) ? stride : 0;
}

static Tensor interleave_forward(const Tensor &input, const Tensor &other, int64_t given_dim)
{
    const char *const op = "interleave";
    check_dtype(op, "input", input);
    check_like(op, "other", other, "input", input);
    check_same_shape(op, "other", other, "input", input);
    const int64_t dim = interleaved_dim(op, input, given_dim);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    at::MemoryFormat format = input.suggest_memory_format();
    if (other.suggest_memory_format() != format || format == at::MemoryFormat::ChannelsLast3d)
        format = at::MemoryFormat::Contiguous;
    at::DimVector sizes(input.sizes());
    sizes[static_cast<size_t>(dim)] *= 2;
    const Tensor output = empty(sizes, input.options().memory_format(format));
    if (output.numel() == 0)
        return output;
    const auto [outer, inner] = around_dim(input, dim, format);
    const int64_t size = input.size(dim);
    const int bytes = static_cast<int>(output.element_size());
    Tensor x = resolved(input), y = resolved(other);
    int64_t x_stride = size, y_stride = size;
    const bool are_pixels = format == at::MemoryFormat::ChannelsLast && dim == 1;
    if (const int64_t stride = are_pixels ? stride_of_pixels(x) : 0)
        x_stride = stride;
    else
        x = x.contiguous(format);
    if (const int64_t stride = are_pixels ? stride_of_pixels(y) : 0)
        y_stride = stride;
    else
        y = y.contiguous(format);
    if (inner > 1) { // runs behind each other
        const void *const inputs[] = {x.const_data_ptr(), y.const_data_ptr()};
        const int64_t ones[] = {1, 1}, runs = outer * size;
        (void)runs;
        if (output.is_cuda())
            CUDA_OPS_LAUNCH(
                op, cuda_ops_concat_cuda(output.data_ptr(), inputs, ones, 2, runs, inner, bytes, current_stream(op)));
        else
            parallel_ranges(op, output.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
                return cuda_ops_concat_cpu(output.data_ptr(), inputs, ones, 2, runs, inner, begin, end, bytes);
            });
        return output;
    }
    if (output.is_cuda())
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_interleave_forward_cuda(output.data_ptr(), x.const_data_ptr(), y.const_data_ptr(),
                                                         x_stride, y_stride, outer, size, bytes, current_stream(op)));
    else
        parallel_ranges(op, outer, std::max<int64_t>(1, ELEMENTWISE_GRAIN / size), [&](int64_t begin, int64_t end) {
            return cuda_ops_interleave_forward_cpu(output.data_ptr(), x.const_data_ptr(), y.const_data_ptr(), x_stride,
                                                   y_stride, size, begin, end, bytes);
        });
    return output;
}

static std::tuple<Tensor, Tensor> interleave_backward(const Tensor &grad, int64_t given_dim)
{
    const char *const op = "interleave_backward";
    check_dtype(op, "grad", grad);
    const int64_t dim = interleaved_dim(op, grad, given_dim);
    TORCH_CHECK(grad.size(dim) % 2 == 0, op, ": expected grad to have an even size along dim, got ", grad.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(grad));
    at::MemoryFormat format = grad.suggest_memory_format();
    if (format == at::MemoryFormat::ChannelsLast3d)
        format = at::MemoryFormat::Contiguous;
    at::DimVector sizes(grad.sizes());
    sizes[static_cast<size_t>(dim)] /= 2;
    Tensor of_input = empty(sizes, grad.options().memory_format(format));
    Tensor of_other = empty(sizes, grad.options().memory_format(format));
    if (grad.numel() == 0)
        return {of_input, of_other};
    const Tensor g = resolved(grad).contiguous(format);
    const auto [outer, inner] = around_dim(of_input, dim, format);
    const int64_t size = of_input.size(dim);
    if (inner > 1) {
        const Tensor runs = g.as_strided({outer * size, 2, inner}, {2 * inner, inner, 1});
        of_input.as_strided({outer * size, inner}, {inner, 1}).copy_(runs.select(1, 0));
        of_other.as_strided({outer * size, inner}, {inner, 1}).copy_(runs.select(1, 1));
        return {of_input, of_other};
    }
    const int bytes = static_cast<int>(g.element_size());
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op,
                        cuda_ops_interleave_backward_cuda(of_input.data_ptr(), of_other.data_ptr(), g.const_data_ptr(),
                                                          outer, size, bytes, current_stream(op)));
    else
        parallel_ranges(op, outer, std::max<int64_t>(1, ELEMENTWISE_GRAIN / size), [&](int64_t begin, int64_t end) {
            return cuda_ops_interleave_backward_cpu(of_input.data_ptr(), of_other.data_ptr(), g.const_data_ptr(), size,
                                                    begin, end, bytes);
        });
    return {of_input, of_other};
}

// Of tangents of which one may be missing.
static Tensor interleave_tangent(const std::optional<Tensor> &tangent_input, const std::optional<Tensor> &tangent_other,
                                 int64_t dim)
{
    static const auto forward = registered_op<decltype(interleave_forward)>("cuda_ops::interleave_forward");
    TORCH_CHECK(tangent_input || tangent_other, "interleave_tangent: expected a tangent, got None");
    const Tensor x = tangent_input ? *tangent_input : at::zeros_like(*tangent_other);
    return forward.call(x, tangent_other ? *tangent_other : at::zeros_like(x), dim);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("interleave_forward(Tensor input, Tensor other, int dim) -> (Tensor output)");
    library.def("interleave_backward(Tensor grad, int dim) -> (Tensor grad_input, Tensor grad_other)");
    library.def("interleave_tangent(Tensor? tangent_input, Tensor? tangent_other, int dim) -> (Tensor tangent_output)",
                cuda_ops::interleave_tangent);
    CUDA_OPS_IMPLEMENT(library, "interleave_forward", cuda_ops::interleave_forward);
    CUDA_OPS_IMPLEMENT(library, "interleave_backward", cuda_ops::interleave_backward);
    CUDA_OPS_DERIVATIVES(library, "interleave_forward",
                         {"input, other: interleave_backward(grad_output, dim)",
                          "output <- interleave_tangent(tangent_input, tangent_other, dim)"});
    CUDA_OPS_DERIVATIVES(library, "interleave_backward",
                         {"grad: interleave_forward(grad_grad_input, grad_grad_other, dim)",
                          "grad_input, grad_other <- interleave_backward(tangent_grad, dim)"});
}
