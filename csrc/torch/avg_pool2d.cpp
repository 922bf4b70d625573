// avg_pool2d for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/avg_pool2d.h"

#include <optional>

#include "autograd.h"
#include "empty.h"
#include "pool2d.h"
#include "vmap.h"

namespace cuda_ops
{

static constexpr int64_t NO_DILATION[] = {1, 1};

// 0 in the C API stands for no override.
static int64_t check_divisor(const char *op, std::optional<int64_t> divisor_override)
{
    TORCH_CHECK(divisor_override != 0, op, ": expected divisor_override to be None or not zero, got 0");
    return divisor_override.value_or(0);
}

static Tensor avg_pool2d_forward(const Tensor &input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                                 at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                                 std::optional<int64_t> divisor_override)
{
    const char *const op = "avg_pool2d";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const at::MemoryFormat format = input.suggest_memory_format();
    const cuda_ops_pool2d pool = make_pool2d(op, input.sizes(), {kernel_size, stride, padding, NO_DILATION, ceil_mode},
                                             format == at::MemoryFormat::ChannelsLast);
    const int64_t divisor = check_divisor(op, divisor_override);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(format);
    Tensor output = empty(pooled_sizes(input.sizes(), pool), x.options().memory_format(format));
    if (output.numel() == 0)
        return output;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_avg_pool2d_forward_cuda(output.data_ptr(), x.const_data_ptr(), &pool,
                                                             count_include_pad, divisor, dtype, current_stream(op)));
    else if (dtype == CUDA_OPS_BFLOAT16 && pool.channels_last)
        parallel_pool2d(op, pool, pool.height.output, x.numel(), [&](int64_t begin, int64_t end) {
            return cuda_ops_avg_pool2d_forward_cpu(output.data_ptr(), x.const_data_ptr(), &pool, count_include_pad,
                                                   divisor, begin, end, dtype);
        });
    else
        parallel_pool2d(
            op, pool, pool.height.output, x.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_avg_pool2d_forward_cpu(to, from, &pool, count_include_pad, divisor, begin, end, type);
            },
            writes(output, pool2d_output(pool)), reads(x, pool2d_input(pool)));
    return output;
}

// The gradient's layout is an argument, since the strides of an expanded grad_output do not tell it.
static Tensor avg_pool2d_backward(const Tensor &grad_output, at::IntArrayRef input_size, at::IntArrayRef kernel_size,
                                  at::IntArrayRef stride, at::IntArrayRef padding, bool ceil_mode,
                                  bool count_include_pad, std::optional<int64_t> divisor_override, bool channels_last)
{
    const char *const op = "avg_pool2d_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    const at::DimVector sizes = unpooled_sizes(op, grad_output, "grad_output", input_size);
    TORCH_CHECK(!channels_last || sizes.size() == 4, op,
                ": expected grad_output to have 4 dimensions for channels_last, got shape ", grad_output.sizes());
    const at::MemoryFormat format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    const cuda_ops_pool2d pool =
        make_pool2d(op, sizes, {kernel_size, stride, padding, NO_DILATION, ceil_mode}, channels_last);
    check_pooled_shape(op, "grad_output", grad_output, pool);
    const int64_t divisor = check_divisor(op, divisor_override);
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = grad_output.contiguous(format);
    Tensor grad_input = empty(sizes, g.options().memory_format(format));
    if (grad_input.numel() == 0)
        return grad_input;
    if (g.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_avg_pool2d_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(), &pool,
                                                              count_include_pad, divisor, dtype, current_stream(op)));
    else
        parallel_pool2d(
            op, pool, pool.height.input, grad_input.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_avg_pool2d_backward_cpu(to, from, &pool, count_include_pad, divisor, begin, end, type);
            },
            writes(grad_input, pool2d_input(pool)), reads(g, pool2d_output(pool)));
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("avg_pool2d_forward(Tensor input, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode, "
                "bool count_include_pad, int? divisor_override) -> (Tensor output)");
    library.def("avg_pool2d_backward(Tensor grad_output, SymInt[2] input_size, int[2] kernel_size, int[2] stride, "
                "int[2] padding, bool ceil_mode, bool count_include_pad, int? divisor_override, bool channels_last) "
                "-> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "avg_pool2d_forward", cuda_ops::avg_pool2d_forward);
    CUDA_OPS_VMAP(library, "avg_pool2d_forward", "input[1]*");
    CUDA_OPS_IMPLEMENT(library, "avg_pool2d_backward", cuda_ops::avg_pool2d_backward);
    CUDA_OPS_VMAP(library, "avg_pool2d_backward", "grad_output[1]*");
    CUDA_OPS_DERIVATIVES(library, "avg_pool2d_forward",
                         {"input: avg_pool2d_backward(grad_output, input.plane, kernel_size, stride, padding, "
                          "ceil_mode, count_include_pad, divisor_override, input.channels_last)",
                          "output <- avg_pool2d_forward(tangent_input, kernel_size, stride, padding, ceil_mode, "
                          "count_include_pad, divisor_override)"});
    // grad_input is linear in grad_output; the transpose of that map is the pooling.
    CUDA_OPS_DERIVATIVES(library, "avg_pool2d_backward",
                         {"grad_output: avg_pool2d_forward(grad_grad_input, kernel_size, stride, padding, ceil_mode, "
                          "count_include_pad, divisor_override)",
                          "grad_input <- avg_pool2d_backward(tangent_grad_output, input_size, kernel_size, stride, "
                          "padding, ceil_mode, count_include_pad, divisor_override, channels_last)"});
}
