// conv_block for conv_bn_relu_pool: allocation, and its steps spread over PyTorch's threads.
#include "conv_block.h"

#include <algorithm>

#include "cpu_workspace.h"
#include "empty.h"
#include "halves.h"

namespace cuda_ops
{

std::optional<cuda_ops_conv_block_sizes> conv_block_sizes(const cuda_ops_conv2d_sizes &conv,
                                                          const cuda_ops_pool2d &pool, cuda_ops_dtype dtype)
{
    const auto halved = [](const cuda_ops_pool_axis &axis) {
        return axis.kernel == 2 && axis.stride == 2 && axis.padding == 0 && axis.dilation == 1;
    };
    if (conv.groups != 1 || conv.kernel_height != 3 || conv.kernel_width != 3 || conv.stride_height != 1 ||
        conv.stride_width != 1 || conv.padding_top != 1 || conv.padding_left != 1 || conv.dilation_height != 1 ||
        conv.dilation_width != 1 || conv.out_height != conv.in_height || conv.out_width != conv.in_width ||
        !halved(pool.height) || !halved(pool.width))
        return std::nullopt;
    cuda_ops_conv_block_sizes sizes{
        1, conv.in_channels, conv.out_channels, conv.in_height, conv.in_width, 0, pool.channels_last, dtype};
    cuda_ops_conv_block_plan plan;
    if (cuda_ops_conv_block_plan_cpu(&plan, &sizes) != CUDA_OPS_SUCCESS)
        return std::nullopt;
    sizes.batch = conv.batch;
    return sizes;
}

int64_t conv_block_statistics(const cuda_ops_conv_block_sizes &sizes)
{
    return 2 * sizes.out_channels + (sizes.in_channels == 1 ? CUDA_OPS_CONV_BLOCK_TAP_MOMENTS : 0);
}

ConvBlock::ConvBlock(const cuda_ops_conv_block_sizes &given, const Tensor &given_input, const Tensor &given_weight,
                     const std::optional<Tensor> &given_bias, const Tensor &given_norm_weight,
                     const Tensor &given_norm_bias, double eps)
    : sizes(given), input(given_input.contiguous(given_input.suggest_memory_format())),
      weight(widened(given_weight).contiguous()), bias(given_bias ? widened(*given_bias).contiguous() : Tensor()),
      norm_weight(widened(given_norm_weight)), norm_bias(widened(given_norm_bias)), eps(eps)
{
    sizes.input_channels_last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

static void *data(const Tensor &tensor)
{
    return tensor.defined() && tensor.numel() > 0 ? tensor.data_ptr() : nullptr;
}

static float *floats(const Tensor &tensor)
{
    return tensor.defined() && tensor.numel() > 0 ? tensor.data_ptr<float>() : nullptr;
}

Tensor ConvBlock::bytes(size_t count) const
{
    return empty_bytes(static_cast<int64_t>(count), input);
}

void ConvBlock::prepare(const char *op, bool backward)
{
    check_status(op, cuda_ops_conv_block_plan_cpu(&plan, &sizes));
    prepared = bytes(plan.prepared_bytes);
    parallel_ranges(op, sizes.out_channels / 16, 2, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv_block_prepare_cpu(prepared.data_ptr(), floats(weight), backward, &sizes, begin, end);
    });
}

// kernel(begin, end, workspace) over the chunks.
template <typename Kernel>
static void over_chunks(const char *op, const cuda_ops_conv_block_plan &plan, const Kernel &kernel)
{
    parallel_ranges(op, plan.chunks, 1, [&](int64_t begin, int64_t end) {
        void *const workspace = thread_workspace(plan.workspace_bytes);
        return kernel(begin, end, workspace);
    });
}

void ConvBlock::convolve(const char *op, const Tensor &conv_output, const Tensor &statistics)
{
    prepare(op, false);
    const Tensor moments = bytes(plan.moments_bytes);
    over_chunks(op, plan, [&](int64_t begin, int64_t end, void *workspace) {
        return cuda_ops_conv_block_convolve_cpu(data(conv_output), moments.data_ptr(), data(input), prepared.data_ptr(),
                                                floats(bias), &sizes, begin, end, workspace);
    });
    double *const mean = statistics.data_ptr<double>(), *const variance = mean + sizes.out_channels;
    check_status(op, cuda_ops_conv_block_statistics_cpu(mean, variance, moments.data_ptr(), floats(weight),
                                                        floats(bias), &sizes));
    if (sizes.in_channels == 1)
        std::copy_n(static_cast<const double *>(moments.data_ptr()), CUDA_OPS_CONV_BLOCK_TAP_MOMENTS,
                    variance + sizes.out_channels);
}

void ConvBlock::pool(const char *op, const Tensor &output, const Tensor &argmax, const Tensor &maximum,
                     const Tensor &conv_output, const double *mean, const double *variance)
{
    over_chunks(op, plan, [&](int64_t begin, int64_t end, void *workspace) {
        return cuda_ops_conv_block_pool_cpu(data(output), argmax.defined() ? argmax.data_ptr<uint8_t>() : nullptr,
                                            data(maximum), data(conv_output), data(input), prepared.data_ptr(),
                                            floats(bias), mean, variance, floats(norm_weight), floats(norm_bias), eps,
                                            &sizes, begin, end, workspace);
    });
}

void ConvBlock::backward(const char *op, const Tensor &grad_input, const Tensor &grad_weight,
                         const Tensor &grad_norm_weight, const Tensor &grad_norm_bias, const Tensor &grad_output,
                         const Tensor &conv_output, const Tensor &argmax, const Tensor &maximum,
                         const Tensor &statistics)
{
    check_status(op, cuda_ops_conv_block_plan_cpu(&plan, &sizes));
    if (grad_input.defined())
        prepare(op, true);
    const double *const mean = statistics.const_data_ptr<double>(), *const variance = mean + sizes.out_channels;
    const double *const moments = variance + sizes.out_channels; // of the taps, with one input channel only
    const uint8_t *const argmax_data = argmax.const_data_ptr<uint8_t>();
    const Tensor partials = bytes(plan.partials_bytes), weights = bytes(plan.weights_bytes);
    const Tensor coefficients = empty({4 * sizes.out_channels}, weight.options());
    over_chunks(op, plan, [&](int64_t begin, int64_t end, void *workspace) {
        return cuda_ops_conv_block_sums_cpu(partials.data_ptr(), data(grad_output), argmax_data, data(maximum),
                                            data(input), mean, &sizes, begin, end, workspace);
    });
    check_status(op, cuda_ops_conv_block_prepare_backward_cpu(
                         floats(coefficients), floats(grad_norm_weight), floats(grad_norm_bias), floats(grad_weight),
                         partials.data_ptr(), moments, floats(weight), floats(bias), mean, variance,
                         floats(norm_weight), eps, &sizes));
    if (sizes.in_channels == 1 && !grad_input.defined())
        return;
    over_chunks(op, plan, [&](int64_t begin, int64_t end, void *workspace) {
        return cuda_ops_conv_block_gradients_cpu(data(grad_input), weights.data_ptr(), data(grad_output), argmax_data,
                                                 data(conv_output), data(input), data(prepared), floats(bias),
                                                 floats(coefficients), &sizes, begin, end, workspace);
    });
    if (sizes.in_channels > 1)
        parallel_ranges(op, sizes.in_channels, 4, [&](int64_t begin, int64_t end) {
            return cuda_ops_conv_block_reduce_weight_cpu(floats(grad_weight), weights.data_ptr(), &sizes, begin, end);
        });
}

} // namespace cuda_ops
