// max_pool2d for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/max_pool2d.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "pool2d.h"

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
    const std::vector<int64_t> sizes = pooled_sizes(input.sizes(), pool);
    Tensor output = at::empty(sizes, x.options(), format);
    Tensor indices = at::empty(sizes, x.options().dtype(at::kLong), format);
    if (output.numel() == 0)
        return {output, indices};
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_max_pool2d_forward_cuda(output.data_ptr(), indices.data_ptr<int64_t>(),
                                                             x.const_data_ptr(), &pool, dtype, current_stream(op)));
    else
        parallel_pool2d(op, pool, pool.height.output, x.numel(), [&](int64_t begin, int64_t end) {
            return cuda_ops_max_pool2d_forward_cpu(output.data_ptr(), indices.data_ptr<int64_t>(), x.const_data_ptr(),
                                                   &pool, begin, end, dtype);
        });
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
    const std::vector<int64_t> sizes = unpooled_sizes(op, indices, "indices", input_size);
    // forward gave the indices the layout of its input, which is the one that the gradient should have.
    const at::MemoryFormat format = indices.suggest_memory_format();
    const cuda_ops_pool2d pool = make_pool2d(op, sizes, {kernel_size, stride, padding, dilation, ceil_mode},
                                             format == at::MemoryFormat::ChannelsLast);
    check_pooled_shape(op, "indices", indices, pool);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(format), places = indices.contiguous(format);
    Tensor grad_input = at::empty(sizes, g.options(), format);
    if (grad_input.numel() == 0)
        return grad_input;
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_max_pool2d_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                              places.const_data_ptr<int64_t>(), &pool, dtype,
                                                              current_stream(op)));
    else
        parallel_pool2d(op, pool, pool.height.input, grad_input.numel(), [&](int64_t begin, int64_t end) {
            return cuda_ops_max_pool2d_backward_cpu(grad_input.data_ptr(), g.const_data_ptr(),
                                                    places.const_data_ptr<int64_t>(), &pool, begin, end, dtype);
        });
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("max_pool2d_forward(Tensor input, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, "
                "bool ceil_mode) -> (Tensor, Tensor)");
    library.def("max_pool2d_backward(Tensor grad_output, Tensor indices, SymInt[2] input_size, int[2] kernel_size, "
                "int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "max_pool2d_forward", cuda_ops::max_pool2d_forward);
    CUDA_OPS_IMPLEMENT(library, "max_pool2d_backward", cuda_ops::max_pool2d_backward);
}
