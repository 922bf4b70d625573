// max_pool2d for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/max_pool2d.h"

#include <ATen/ops/gather.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <tuple>

#include "autograd.h"
#include "empty.h"
#include "pool2d.h"
#include "vmap.h"

namespace cuda_ops
{

static std::tuple<Tensor, Tensor> max_pool2d_forward(const Tensor &input, at::IntArrayRef kernel_size,
                                                     at::IntArrayRef stride, at::IntArrayRef padding,
                                                     at::IntArrayRef dilation, bool ceil_mode)
{
    const char *const op = "max_pool2d";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const at::MemoryFormat format = input.suggest_memory_format();
    const cuda_ops_pool2d pool = make_pool2d(op, input.sizes(), {kernel_size, stride, padding, dilation, ceil_mode},
                                             format == at::MemoryFormat::ChannelsLast);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(format);
    const at::DimVector sizes = pooled_sizes(input.sizes(), pool);
    const at::TensorOptions options = x.options().memory_format(format);
    Tensor output = empty(sizes, options);
    Tensor indices = empty(sizes, options.dtype(at::kLong));
    if (output.numel() == 0)
        return {output, indices};
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_max_pool2d_forward_cuda(output.data_ptr(), indices.data_ptr<int64_t>(),
                                                             x.const_data_ptr(), &pool, dtype, current_stream(op)));
    else
        parallel_pool2d(
            op, pool, pool.height.output, x.numel(), dtype,
            [&](void *to, void *positions, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_max_pool2d_forward_cpu(to, static_cast<int64_t *>(positions), from, &pool, begin, end,
                                                       type);
            },
            writes(output, pool2d_output(pool)), writes(indices, pool2d_output(pool)), reads(x, pool2d_input(pool)));
    return {output, indices};
}

static Tensor max_pool2d_backward(const Tensor &grad_output, const Tensor &indices, at::IntArrayRef input_size,
                                  at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                  at::IntArrayRef dilation, bool ceil_mode)
{
    const char *const op = "max_pool2d_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    TORCH_CHECK(indices.scalar_type() == at::kLong, op, ": expected indices to be int64, got ",
                c10::getDtypeNames(indices.scalar_type()).first);
    check_same_device(op, "grad_output", grad_output, "indices", indices);
    check_same_shape(op, "grad_output", grad_output, "indices", indices);
    const at::DimVector sizes = unpooled_sizes(op, indices, "indices", input_size);
    // forward gave the indices the layout of its input, which the gradient shall have too.
    const at::MemoryFormat format = indices.suggest_memory_format();
    const cuda_ops_pool2d pool = make_pool2d(op, sizes, {kernel_size, stride, padding, dilation, ceil_mode},
                                             format == at::MemoryFormat::ChannelsLast);
    check_pooled_shape(op, "indices", indices, pool);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(format), positions = indices.contiguous(format);
    Tensor grad_input = empty(sizes, g.options().memory_format(format));
    if (grad_input.numel() == 0)
        return grad_input;
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_max_pool2d_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                              positions.const_data_ptr<int64_t>(), &pool, dtype,
                                                              current_stream(op)));
    else
        parallel_pool2d(
            op, pool, pool.height.input, grad_input.numel(), dtype,
            [&](void *to, const void *from, const void *at, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_max_pool2d_backward_cpu(to, from, static_cast<const int64_t *>(at), &pool, begin, end,
                                                        type);
            },
            writes(grad_input, pool2d_input(pool)), reads(g, pool2d_output(pool)),
            reads(positions, pool2d_output(pool)));
    return grad_input;
}

// The elements of `input` at forward's indices, in their shape: the forward pass for known positions of the maxima. 0
// where the index is -1, that of a window entirely out of bounds.
static Tensor max_pool2d_gather(const Tensor &input, const Tensor &indices)
{
    const Tensor inside = indices.ge(0).logical_and(indices.lt(input.sym_size(-2) * input.sym_size(-1)));
    const Tensor positions = at::where(inside, indices, 0).flatten(-2);
    const Tensor gathered = input.flatten(-2).gather(-1, positions).view_symint(indices.sym_sizes());
    return at::where(inside, gathered, 0);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("max_pool2d_forward(Tensor input, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, "
                "bool ceil_mode) -> (Tensor output, Tensor indices)");
    library.def("max_pool2d_backward(Tensor grad_output, Tensor indices, SymInt[2] input_size, int[2] kernel_size, "
                "int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode) -> (Tensor grad_input)");
    library.def("max_pool2d_gather(Tensor input, Tensor indices) -> (Tensor output)", cuda_ops::max_pool2d_gather);
    CUDA_OPS_IMPLEMENT(library, "max_pool2d_forward", cuda_ops::max_pool2d_forward);
    CUDA_OPS_VMAP(library, "max_pool2d_forward", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "max_pool2d_backward", cuda_ops::max_pool2d_backward);
    CUDA_OPS_VMAP(library, "max_pool2d_backward", "grad_output[1]*, indices*");
    CUDA_OPS_DERIVATIVES(library, "max_pool2d_forward",
                         {"input: max_pool2d_backward(grad_output, indices, input.plane, kernel_size, stride, padding, "
                          "dilation, ceil_mode)",
                          "output <- max_pool2d_gather(tangent_input, indices)"});
    // grad_input scatters grad_output by the indices; the transpose of that linear map gathers by them.
    CUDA_OPS_DERIVATIVES(library, "max_pool2d_backward",
                         {"grad_output: max_pool2d_gather(grad_grad_input, indices)",
                          "grad_input <- max_pool2d_backward(tangent_grad_output, indices, input_size, kernel_size, "
                          "stride, padding, dilation, ceil_mode)"});
}
