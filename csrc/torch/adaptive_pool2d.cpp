// adaptive_avg_pool2d and adaptive_max_pool2d for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/adaptive_pool2d.h"

#include <tuple>

#include "autograd.h"
#include "empty.h"
#include "pool2d.h"
#include "vmap.h"

namespace cuda_ops
{

// Geometry for an input of these sizes (3 or 4 of them, of which only the batch may be 0), or an error.
static cuda_ops_adaptive_pool2d make_adaptive(const char *op, at::IntArrayRef sizes, at::IntArrayRef output_size,
                                              bool channels_last)
{
    const size_t dim = sizes.size();
    TORCH_CHECK(dim == 3 || dim == 4, op, ": expected input to have 3 or 4 dimensions, got shape ", sizes);
    for (size_t d = dim - 3; d < dim; d++)
        TORCH_CHECK(sizes[d] > 0, op, ": expected input to have no empty dimension but the batch, got shape ", sizes);
    TORCH_CHECK(output_size.size() == 2, op, ": expected output_size to be an int or two ints, got ", output_size);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    for (const int64_t size : output_size)
        TORCH_CHECK(0 <= size && size <= most, op, ": expected output_size to be non-negative 32-bit integers, got ",
                    output_size);
    // Each for itself first: a product of larger ones may be beyond 64 bits.
    TORCH_CHECK(sizes[dim - 2] <= most && sizes[dim - 1] <= most && sizes[dim - 2] * sizes[dim - 1] <= most &&
                    output_size[0] * output_size[1] <= most,
                op, ": expected planes of less than 2^31 positions, got shape ", sizes, " and output_size ",
                output_size);
    const auto axis = [&](size_t i) {
        return cuda_ops_adaptive_axis{static_cast<int32_t>(sizes[dim - 2 + i]), static_cast<int32_t>(output_size[i])};
    };
    return {dim == 4 ? sizes[0] : 1, sizes[dim - 3], axis(0), axis(1), channels_last};
}

static Tensor adaptive_avg_pool2d_forward(const Tensor &input, at::IntArrayRef output_size)
{
    const char *const op = "adaptive_avg_pool2d";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const at::MemoryFormat format = input.suggest_memory_format();
    const cuda_ops_adaptive_pool2d pool =
        make_adaptive(op, input.sizes(), output_size, format == at::MemoryFormat::ChannelsLast);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(format);
    Tensor output = empty(with_plane(input.sizes(), output_size[0], output_size[1]), x.options().memory_format(format));
    if (output.numel() == 0)
        return output;
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(cuda_ops_adaptive_avg_pool2d_workspace_cuda(&pool, dtype), x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_adaptive_avg_pool2d_forward_cuda(output.data_ptr(), workspace.data_ptr(),
                                                                      x.const_data_ptr(), &pool, dtype,
                                                                      current_stream(op)));
    } else {
        parallel_pool2d(
            op, pool, pool.height.output, x.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_adaptive_avg_pool2d_forward_cpu(to, from, &pool, begin, end, type);
            },
            writes(output, pool2d_output(pool)), reads(x, pool2d_input(pool)));
    }
    return output;
}

// The gradient's layout is an argument, since the strides of an expanded grad_output do not tell it.
// Whether backward's CPU kernels take them as they are.
static bool takes_halves(const cuda_ops_adaptive_pool2d &pool, cuda_ops_dtype dtype)
{
    return is_half(dtype) && !cuda_ops_adaptive_pool2d_overlaps(&pool);
}

static Tensor adaptive_avg_pool2d_backward(const Tensor &grad_output, at::IntArrayRef input_size, bool channels_last)
{
    const char *const op = "adaptive_avg_pool2d_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    const at::DimVector sizes = unpooled_sizes(op, grad_output, "grad_output", input_size);
    TORCH_CHECK(!channels_last || sizes.size() == 4, op,
                ": expected grad_output to have 4 dimensions for channels_last, got shape ", grad_output.sizes());
    const at::MemoryFormat format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    const cuda_ops_adaptive_pool2d pool =
        make_adaptive(op, sizes, grad_output.sizes().slice(sizes.size() - 2), channels_last);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(format);
    Tensor grad_input = empty(sizes, g.options().memory_format(format));
    if (grad_input.numel() == 0)
        return grad_input;
    if (g.numel() == 0)
        return grad_input.zero_();
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_adaptive_avg_pool2d_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(), &pool,
                                                                       dtype, current_stream(op)));
    else if (takes_halves(pool, dtype))
        parallel_pool2d(op, pool, pool.height.input, grad_input.numel(), [&](int64_t begin, int64_t end) {
            return cuda_ops_adaptive_avg_pool2d_backward_cpu(grad_input.data_ptr(), g.const_data_ptr(), &pool, begin,
                                                             end, dtype);
        });
    else
        parallel_pool2d(
            op, pool, pool.height.input, grad_input.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_adaptive_avg_pool2d_backward_cpu(to, from, &pool, begin, end, type);
            },
            writes(grad_input, pool2d_input(pool)), reads(g, pool2d_output(pool)));
    return grad_input;
}

static std::tuple<Tensor, Tensor> adaptive_max_pool2d_forward(const Tensor &input, at::IntArrayRef output_size)
{
    const char *const op = "adaptive_max_pool2d";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const at::MemoryFormat format = input.suggest_memory_format();
    const cuda_ops_adaptive_pool2d pool =
        make_adaptive(op, input.sizes(), output_size, format == at::MemoryFormat::ChannelsLast);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(format);
    const at::DimVector sizes = with_plane(input.sizes(), output_size[0], output_size[1]);
    const at::TensorOptions options = x.options().memory_format(format);
    Tensor output = empty(sizes, options);
    Tensor indices = empty(sizes, options.dtype(at::kLong));
    if (output.numel() == 0)
        return {output, indices};
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_adaptive_max_pool2d_forward_cuda(output.data_ptr(), indices.data_ptr<int64_t>(),
                                                                      x.const_data_ptr(), &pool, dtype,
                                                                      current_stream(op)));
    else if (is_half(dtype) && cuda_ops_adaptive_max_pool2d_takes_halves_cpu(&pool))
        parallel_pool2d(op, pool, pool.height.output, x.numel(), [&](int64_t begin, int64_t end) {
            return cuda_ops_adaptive_max_pool2d_forward_cpu(output.data_ptr(), indices.data_ptr<int64_t>(),
                                                            x.const_data_ptr(), &pool, begin, end, dtype);
        });
    else
        parallel_pool2d(
            op, pool, pool.height.output, x.numel(), dtype,
            [&](void *to, void *positions, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_adaptive_max_pool2d_forward_cpu(to, static_cast<int64_t *>(positions), from, &pool,
                                                                begin, end, type);
            },
            writes(output, pool2d_output(pool)), writes(indices, pool2d_output(pool)), reads(x, pool2d_input(pool)));
    return {output, indices};
}

static Tensor adaptive_max_pool2d_backward(const Tensor &grad_output, const Tensor &indices, at::IntArrayRef input_size)
{
    const char *const op = "adaptive_max_pool2d_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    TORCH_CHECK(indices.scalar_type() == at::kLong, op, ": expected indices to be int64, got ",
                c10::getDtypeNames(indices.scalar_type()).first);
    check_same_device(op, "grad_output", grad_output, "indices", indices);
    check_same_shape(op, "grad_output", grad_output, "indices", indices);
    const at::DimVector sizes = unpooled_sizes(op, indices, "indices", input_size);
    // forward gave the indices the layout of its input, which the gradient shall have too.
    const at::MemoryFormat format = indices.suggest_memory_format();
    const cuda_ops_adaptive_pool2d pool =
        make_adaptive(op, sizes, indices.sizes().slice(sizes.size() - 2), format == at::MemoryFormat::ChannelsLast);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(format), positions = indices.contiguous(format);
    Tensor grad_input = empty(sizes, g.options().memory_format(format));
    if (grad_input.numel() == 0)
        return grad_input;
    if (g.numel() == 0)
        return grad_input.zero_();
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_adaptive_max_pool2d_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                                       positions.const_data_ptr<int64_t>(), &pool,
                                                                       dtype, current_stream(op)));
    else if (takes_halves(pool, dtype))
        parallel_pool2d(op, pool, pool.height.input, grad_input.numel(), [&](int64_t begin, int64_t end) {
            return cuda_ops_adaptive_max_pool2d_backward_cpu(grad_input.data_ptr(), g.const_data_ptr(),
                                                             positions.const_data_ptr<int64_t>(), &pool, begin, end,
                                                             dtype);
        });
    else
        parallel_pool2d(
            op, pool, pool.height.input, grad_input.numel(), dtype,
            [&](void *to, const void *from, const void *at, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_adaptive_max_pool2d_backward_cpu(to, from, static_cast<const int64_t *>(at), &pool,
                                                                 begin, end, type);
            },
            writes(grad_input, pool2d_input(pool)), reads(g, pool2d_output(pool)),
            reads(positions, pool2d_output(pool)));
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("adaptive_avg_pool2d_forward(Tensor input, SymInt[2] output_size) -> (Tensor output)");
    library.def("adaptive_avg_pool2d_backward(Tensor grad_output, SymInt[2] input_size, bool channels_last) "
                "-> (Tensor grad_input)");
    library.def("adaptive_max_pool2d_forward(Tensor input, SymInt[2] output_size) -> (Tensor output, Tensor indices)");
    library.def("adaptive_max_pool2d_backward(Tensor grad_output, Tensor indices, SymInt[2] input_size) "
                "-> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "adaptive_avg_pool2d_forward", cuda_ops::adaptive_avg_pool2d_forward);
    CUDA_OPS_VMAP(library, "adaptive_avg_pool2d_forward", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "adaptive_avg_pool2d_backward", cuda_ops::adaptive_avg_pool2d_backward);
    CUDA_OPS_VMAP(library, "adaptive_avg_pool2d_backward", "grad_output[1]*");
    CUDA_OPS_IMPLEMENT(library, "adaptive_max_pool2d_forward", cuda_ops::adaptive_max_pool2d_forward);
    CUDA_OPS_VMAP(library, "adaptive_max_pool2d_forward", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "adaptive_max_pool2d_backward", cuda_ops::adaptive_max_pool2d_backward);
    CUDA_OPS_VMAP(library, "adaptive_max_pool2d_backward", "grad_output[1]*, indices*");
    CUDA_OPS_DERIVATIVES(library, "adaptive_avg_pool2d_forward",
                         {"input: adaptive_avg_pool2d_backward(grad_output, input.plane, input.channels_last)",
                          "output <- adaptive_avg_pool2d_forward(tangent_input, output_size)"});
    // grad_input is linear in grad_output; the transpose of that map is the pooling.
    CUDA_OPS_DERIVATIVES(
        library, "adaptive_avg_pool2d_backward",
        {"grad_output: adaptive_avg_pool2d_forward(grad_grad_input, grad_output.plane)",
         "grad_input <- adaptive_avg_pool2d_backward(tangent_grad_output, input_size, channels_last)"});
    CUDA_OPS_DERIVATIVES(library, "adaptive_max_pool2d_forward",
                         {"input: adaptive_max_pool2d_backward(grad_output, indices, input.plane)",
                          "output <- max_pool2d_gather(tangent_input, indices)"});
    // grad_input scatters grad_output by the indices; the transpose of that linear map gathers by them.
    CUDA_OPS_DERIVATIVES(library, "adaptive_max_pool2d_backward",
                         {"grad_output: max_pool2d_gather(grad_grad_input, indices)",
                          "grad_input <- adaptive_max_pool2d_backward(tangent_grad_output, indices, input_size)"});
}
