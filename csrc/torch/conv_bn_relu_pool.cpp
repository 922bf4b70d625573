// conv_bn_relu_pool for PyTorch: checks, allocation and the choice of backend and of path.
//
// Parameters may be float32 beside a float16 or bfloat16 input. What forward saves for backward depends on the path,
// which both get from plan_of; to Python these tensors are opaque. One file, since all steps share the geometry and the
// plan below.
#include "cuda_ops/conv_bn_relu_pool.h"

#include <ATen/ops/zeros.h>

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#endif

#include <algorithm>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "conv2d.h"
#include "conv_block.h"
#include "cuda_ops/batch_norm.h"
#include "empty.h"
#include "parameters.h"
#include "paths.h"
#include "pool2d.h"
#include "running_statistics.h"

namespace cuda_ops
{

using at::IntArrayRef;

struct Problem {
    Conv2dParameters parameters;
    cuda_ops_conv2d_sizes conv; // without layouts
    cuda_ops_pool2d pool;       // of the convolution's output, in the layout of the op's output

    at::MemoryFormat format() const
    {
        return memory_format(pool.channels_last);
    }
    std::vector<int64_t> conv_output_size() const
    {
        return {conv.batch, conv.out_channels, conv.out_height, conv.out_width};
    }
    std::vector<int64_t> output_size() const
    {
        return {conv.batch, conv.out_channels, pool.height.output, pool.width.output};
    }
    bool empty() const
    {
        return conv.batch == 0;
    }
};

// The convolution's and the pooling's parameters in one list, since parsing costs time for each argument: stride (2),
// padding (top, bottom, left, right), dilation (2), groups, then the pooling's kernel_size, stride and padding (2
// each), and whether the output is channels_last.
static constexpr size_t GEOMETRY = 16;

static Problem make_problem(const char *op, IntArrayRef input, IntArrayRef weight, IntArrayRef geometry)
{
    TORCH_CHECK(geometry.size() == GEOMETRY, op, ": expected geometry to be ", GEOMETRY, " integers, got ", geometry);
    const Conv2dParameters parameters{geometry.slice(0, 2), geometry.slice(2, 4), geometry.slice(6, 2), geometry[8]};
    const IntArrayRef kernel_size = geometry.slice(9, 2);
    const bool channels_last = geometry[15] != 0;
    TORCH_CHECK(input.size() == 4, op, ": expected input to have 4 dimensions, got shape ", input);
    Problem problem{parameters, check_conv2d_sizes(op, input, weight, parameters), {}};
    TORCH_CHECK(input[1] > 0, op, ": expected input to have channels in dimension 1, got shape ", input);
    const std::string pooling_op = std::string(op) + "'s pooling";
    problem.pool =
        make_pool2d(pooling_op.c_str(), problem.conv_output_size(),
                    {kernel_size, geometry.slice(11, 2), geometry.slice(13, 2), {1, 1}, false}, channels_last);
    TORCH_CHECK_NOT_IMPLEMENTED((int64_t)problem.pool.height.kernel * problem.pool.width.kernel <=
                                    CUDA_OPS_POOL_LARGEST,
                                op, ": expected pool_kernel_size to be a window of at most ",
                                static_cast<int>(CUDA_OPS_POOL_LARGEST), " values, got ", kernel_size);
    return problem;
}

// ---- Paths ---------------------------------------------------------------------------------------------------------
// As torch's own convolution: torch.backends.cudnn.allow_tf32, or conv.fp32_precision.
static bool allows_tf32()
{
#if defined(TORCH_VERSION_MAJOR) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9)
    return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
#else
    return at::globalContext().allowTF32CuDNN();
#endif
}

// How training is computed, and what forward keeps for backward: on the CPU by conv_block.h in float32, else composed
// of conv2d, batch_norm's statistics and the pooling; on CUDA as the table of the C API says. The choice depends on
// plan_of's arguments and the current device, not on the batch, so that forward, backward and the fakes agree.
struct Plan {
    enum Kind { CPU_BLOCK, COMPOSED, WHOLE } kind; // WHOLE: one launcher a pass, CUDA
    cuda_ops_conv_bn_relu_pool_plan cuda;          // what is kept, also by COMPOSED
    cuda_ops_conv_bn_relu_pool_sizes sizes;        // WHOLE
};

// statistics begins with the mean and the variance of each channel. conv_output and maximum are empty where they are
// not kept.
static Plan plan_of(const Problem &problem, bool cuda, cuda_ops_dtype dtype)
{
    Plan plan{Plan::COMPOSED, {}, {problem.conv, problem.pool}};
    plan.sizes.conv.allow_tf32 = cuda && dtype == CUDA_OPS_FLOAT32 && allows_tf32();
    // Of Winograd's algorithms that one whose rounding errors are about those of sums as they stand.
    plan.sizes.conv.winograd =
        cuda && dtype == CUDA_OPS_FLOAT32 ? std::min(conv2d_winograd_tile("conv_bn_relu_pool"), 2) : 0;
    plan.sizes.conv.output_channels_last = problem.pool.channels_last;
    plan.cuda.keeps_conv_output = plan.cuda.keeps_maximum = plan.cuda.makes_grad_input = 1;
    plan.cuda.statistics = 2 * problem.conv.out_channels;
    if (!cuda) {
        if (const auto block = conv_block_sizes(problem.conv, problem.pool, dtype)) {
            plan.kind = Plan::CPU_BLOCK;
            plan.cuda.keeps_conv_output = plan.cuda.keeps_maximum = problem.conv.in_channels > 1;
            plan.cuda.statistics = conv_block_statistics(*block);
        }
        return plan;
    }
#ifdef CUDA_OPS_WITH_CUDA
    check_status("conv_bn_relu_pool", cuda_ops_conv_bn_relu_pool_plan_cuda(&plan.cuda, &plan.sizes, dtype));
    if (plan.cuda.path != CUDA_OPS_CONV_BN_RELU_POOL_GENERAL)
        plan.kind = Plan::WHOLE;
#endif
    return plan;
}

// --------------------------------------------------------------------------------------------------------------------

static const char *const CHANNEL = "output channel"; // in messages

// bn_weight and bn_bias, contiguous.
struct Norm {
    Tensor weight, bias;
    cuda_ops_norm_parameters parameters{nullptr, nullptr, CUDA_OPS_FLOAT32, 0.0};

    Norm(const char *op, const std::optional<Tensor> &given_weight, const std::optional<Tensor> &given_bias,
         const Tensor &input, int64_t channels, double eps)
    {
        parameters.eps = eps;
        if (given_weight) {
            parameters.dtype = check_channel_values(op, "bn_weight", *given_weight, input, channels, CHANNEL);
            weight = given_weight->contiguous();
            parameters.weight = weight.const_data_ptr();
        }
        if (given_bias) {
            parameters.dtype = check_channel_values(op, "bn_bias", *given_bias, input, channels, CHANNEL);
            if (given_weight)
                check_like(op, "bn_bias", *given_bias, "bn_weight", *given_weight);
            bias = given_bias->contiguous();
            parameters.bias = bias.const_data_ptr();
        }
    }
};

// `tensor` converted to `dtype`, since conv2d's kernels take one dtype, or nothing if it is undefined.
static std::optional<Tensor> in_dtype_of(const std::optional<Tensor> &tensor, const Tensor &input)
{
    return tensor ? std::optional<Tensor>(tensor->to(input.scalar_type())) : std::nullopt;
}

static Tensor pool_coefficients(const Tensor &input, const Problem &problem)
{
    return empty({CUDA_OPS_CONV_BN_RELU_POOL_COEFFICIENTS * problem.conv.out_channels}, input.options());
}

// Grain for parallel_ranges over `ranges` of `elements` in total.
static int64_t grain_of(int64_t elements, int64_t ranges)
{
    return std::max<int64_t>(1, ELEMENTWISE_GRAIN * ranges / std::max<int64_t>(1, elements));
}

// mean and variance of the channels of conv_output into statistics.
static void batch_statistics(const char *op, const Tensor &statistics, const Tensor &conv_output,
                             const Problem &problem, double eps, cuda_ops_dtype dtype)
{
    const int64_t channels = problem.conv.out_channels, pixels = problem.conv.out_height * problem.conv.out_width;
    const int64_t outer = problem.pool.channels_last ? problem.conv.batch * pixels : problem.conv.batch;
    const int64_t inner = problem.pool.channels_last ? 1 : pixels;
    double *const mean = statistics.data_ptr<double>(), *const variance = mean + channels;
    if (conv_output.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = empty_bytes(cuda_ops_batch_norm_workspace_cuda(outer, channels, inner), conv_output);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_batch_norm_forward_training_cuda(
                                nullptr, mean, variance, workspace.data_ptr(), nullptr, conv_output.const_data_ptr(),
                                nullptr, nullptr, outer, channels, inner, eps, dtype, dtype, current_stream(op)));
        return;
    }
    const Tensor workspace = empty_bytes(cuda_ops_batch_norm_workspace_cpu(outer, channels, inner), conv_output);
    const int64_t blocks = cuda_ops_batch_norm_blocks_cpu(outer, channels, inner);
    parallel_ranges(op, blocks, grain_of(conv_output.numel(), blocks), [&](int64_t begin, int64_t end) {
        return cuda_ops_batch_norm_moments_cpu(workspace.data_ptr(), conv_output.const_data_ptr(), outer, channels,
                                               inner, begin, end, dtype);
    });
    check_status(op, cuda_ops_batch_norm_prepare_training_cpu(mean, variance, workspace.data_ptr(), nullptr, nullptr,
                                                              outer, channels, inner, eps, dtype));
}

// Computes `output` from the convolution's output and its statistics (the batch's or running ones), and in training
// argmax and maximum where these are defined.
static void pool_forward(const char *op, const Tensor &output, const Tensor &argmax, const Tensor &maximum,
                         const Tensor &conv_output, const Problem &problem, const void *mean, const void *variance,
                         cuda_ops_dtype statistics_dtype, const Norm &norm, const cuda_ops_running_statistics *running,
                         cuda_ops_dtype dtype)
{
    const cuda_ops_pool2d &pool = problem.pool;
    uint8_t *const argmax_data = argmax.defined() ? argmax.data_ptr<uint8_t>() : nullptr;
    void *const maximum_data = maximum.defined() ? maximum.data_ptr() : nullptr;
    (void)running; // not used in a build without CUDA
    if (conv_output.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = empty_bytes(cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(&pool), conv_output);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_conv_bn_relu_pool_pool_forward_cuda(
                                output.data_ptr(), argmax_data, maximum_data, workspace.data_ptr(), running,
                                conv_output.const_data_ptr(), mean, variance, &norm.parameters, &pool, dtype,
                                statistics_dtype, current_stream(op)));
        return;
    }
    const Tensor coefficients = pool_coefficients(conv_output, problem);
    check_status(op, cuda_ops_conv_bn_relu_pool_prepare_forward_cpu(
                         coefficients.data_ptr(), mean, variance, norm.parameters.weight, norm.parameters.bias,
                         pool.channels, norm.parameters.eps, dtype, statistics_dtype));
    parallel_pool2d(op, pool, pool.height.output, conv_output.numel(), [&](int64_t begin, int64_t end) {
        return cuda_ops_conv_bn_relu_pool_pool_cpu(output.data_ptr(), argmax_data, maximum_data,
                                                   conv_output.const_data_ptr(), coefficients.const_data_ptr(), &pool,
                                                   begin, end, dtype);
    });
}

static void update_running_cpu(const char *op, const RunningStatistics &running, const double *mean,
                               const double *variance, const Problem &problem)
{
    if (running.mean.defined())
        running.update_cpu(op, mean, variance, problem.conv.out_channels,
                           problem.conv.batch * problem.conv.out_height * problem.conv.out_width);
    running.count_batch();
}

// Unused in a build without CUDA.
template <typename... T>
static void unused(const T &...)
{
}

// `tensor` in the given format, and 16-byte aligned where the path needs that.
static Tensor laid_out_for(const Plan &plan, const Tensor &tensor, at::MemoryFormat format)
{
    const Tensor result = tensor.contiguous(format);
    return !plan.cuda.aligned || reinterpret_cast<uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result
                                                                                                : result.clone(format);
}

// The memory format in which the path takes input and makes its gradient.
static at::MemoryFormat input_format(const Plan &plan)
{
    return memory_format(!plan.cuda.takes_contiguous);
}

static void whole_forward(const char *op, const Plan &plan, const Tensor &output, const Tensor &conv_output,
                          const Tensor &argmax, const Tensor &maximum, const Tensor &statistics, const Tensor &input,
                          const Tensor &weight, const std::optional<Tensor> &bias, const Norm &norm,
                          const cuda_ops_running_statistics &running, cuda_ops_dtype dtype)
{
    const Tensor x = laid_out_for(plan, input, input_format(plan));
    const Tensor w = laid_out_for(plan, weight, at::MemoryFormat::Contiguous);
    const Tensor b = bias ? bias->contiguous() : Tensor();
    unused(output, conv_output, argmax, maximum, statistics, norm, running, dtype);
#ifdef CUDA_OPS_WITH_CUDA
    const Tensor workspace = empty_bytes(cuda_ops_conv_bn_relu_pool_workspace_cuda(&plan.sizes, dtype), input);
#endif
    CUDA_OPS_LAUNCH(op, cuda_ops_conv_bn_relu_pool_forward_cuda(
                            output.data_ptr(), conv_output.data_ptr(), argmax.data_ptr<uint8_t>(), maximum.data_ptr(),
                            statistics.data_ptr<double>(), workspace.data_ptr(), &running, x.const_data_ptr(),
                            w.const_data_ptr(), bias ? b.const_data_ptr() : nullptr, &norm.parameters, &plan.sizes,
                            dtype, check_dtype(op, "weight", weight), current_stream(op)));
}

// grad_input (in the path's format) may be empty; grad_weight is contiguous. grad_output is in the format of output;
// what forward kept is in the format in which forward allocated it, whatever layout the path has in there.
static void whole_backward(const char *op, const Plan &plan, const Tensor &grad_input, const Tensor &grad_weight,
                           const Tensor &grad_bias, const Tensor &grad_bn_weight, const Tensor &grad_bn_bias,
                           const Tensor &grad_output, const Tensor &conv_output, const Tensor &argmax,
                           const Tensor &maximum, const Tensor &statistics, const Problem &problem, const Tensor &input,
                           const Tensor &weight, const Norm &norm, cuda_ops_dtype dtype)
{
    const at::MemoryFormat format = problem.format();
    const auto kept = [&](const Tensor &tensor, bool is_kept) {
        return is_kept ? laid_out_for(plan, tensor, format) : tensor;
    };
    const Tensor x = laid_out_for(plan, input, input_format(plan));
    const Tensor w = laid_out_for(plan, weight, at::MemoryFormat::Contiguous);
    const Tensor g = laid_out_for(plan, grad_output, format), kept_argmax = laid_out_for(plan, argmax, format);
    const Tensor y = kept(conv_output, plan.cuda.keeps_conv_output), most = kept(maximum, plan.cuda.keeps_maximum);
    unused(grad_input, grad_weight, grad_bias, grad_bn_weight, grad_bn_bias, statistics, norm, dtype);
#ifdef CUDA_OPS_WITH_CUDA
    const Tensor workspace = empty_bytes(cuda_ops_conv_bn_relu_pool_workspace_cuda(&plan.sizes, dtype), input);
    const auto data = [](const Tensor &tensor) { return tensor.numel() > 0 ? tensor.data_ptr() : nullptr; };
#endif
    CUDA_OPS_LAUNCH(
        op, cuda_ops_conv_bn_relu_pool_backward_cuda(
                data(grad_input), grad_weight.data_ptr(), data(grad_bias), data(grad_bn_weight), data(grad_bn_bias),
                workspace.data_ptr(), g.const_data_ptr(), kept_argmax.const_data_ptr<uint8_t>(), most.const_data_ptr(),
                y.const_data_ptr(), statistics.const_data_ptr<double>(), x.const_data_ptr(), w.const_data_ptr(),
                &norm.parameters, &plan.sizes, dtype, check_dtype(op, "weight", weight), current_stream(op)));
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
conv_bn_relu_pool_training(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                           const std::optional<Tensor> &bn_weight, const std::optional<Tensor> &bn_bias,
                           const std::optional<Tensor> &running_mean, const std::optional<Tensor> &running_var,
                           const std::optional<Tensor> &num_batches_tracked, double momentum, double eps,
                           IntArrayRef geometry)
{
    const char *const op = "conv_bn_relu_pool";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const Problem problem = make_problem(op, input.sizes(), weight.sizes(), geometry);
    const int64_t channels = problem.conv.out_channels;
    TORCH_CHECK_VALUE(problem.conv.batch * problem.conv.out_height * problem.conv.out_width != 1, op,
                      ": expected more than 1 value per channel in training, got input of shape ", input.sizes(),
                      ", whose convolution has shape ", problem.conv_output_size());
    check_parameter(op, "weight", weight, input);
    if (bias) {
        check_channel_values(op, "bias", *bias, input, channels, CHANNEL);
        check_like(op, "bias", *bias, "weight", weight);
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Norm norm(op, bn_weight, bn_bias, input, channels, eps);
    const RunningStatistics running(op, running_mean, running_var, num_batches_tracked, momentum, input, channels,
                                    CHANNEL);
    const Plan plan = plan_of(problem, input.is_cuda(), dtype);
    const bool keeps_conv_output = plan.cuda.keeps_conv_output;
    // Halves in float32 (halves.h), but those that conv_block takes.
    if (is_cpu_half(input) && !problem.empty() && plan.kind != Plan::CPU_BLOCK) {
        // With running statistics as float32 of their own, which are then rounded once.
        const std::optional<Tensor> new_mean = widened(running_mean), new_variance = widened(running_var);
        const auto [result, its_conv_output, its_argmax, its_maximum, its_statistics] =
            in_float32(conv_bn_relu_pool_training, input, weight, bias, bn_weight, bn_bias, new_mean, new_variance,
                       num_batches_tracked, momentum, eps, geometry);
        const at::ScalarType type = input.scalar_type();
        if (is_half(running.statistics.dtype) && new_mean) {
            round_back(running.mean, *new_mean);
            round_back(running.variance, *new_variance);
            running.finish();
        }
        return {result.to(type), its_conv_output.to(type), its_argmax, its_maximum.to(type), its_statistics};
    }

    const auto options = input.options();
    Tensor output = empty(problem.output_size(), options.memory_format(problem.format()));
    Tensor argmax = empty(problem.output_size(), options.dtype(at::kByte).memory_format(problem.format()));
    Tensor maximum = plan.cuda.keeps_maximum ? empty(problem.output_size(), options.memory_format(problem.format()))
                                             : empty({0}, options);
    Tensor conv_output;
    if (keeps_conv_output && (problem.empty() || plan.kind != Plan::COMPOSED))
        conv_output = empty(problem.conv_output_size(), options.memory_format(problem.format()));
    else if (!keeps_conv_output)
        conv_output = empty({0}, options);
    if (problem.empty()) {
        running.count_batch();
        running.finish();
        return {output, conv_output, argmax, maximum, at::zeros({plan.cuda.statistics}, options.dtype(at::kDouble))};
    }
    Tensor statistics = empty({plan.cuda.statistics}, options.dtype(at::kDouble));
    double *const mean = statistics.data_ptr<double>(), *const variance = mean + channels;
    switch (plan.kind) {
    case Plan::CPU_BLOCK: {
        ConvBlock block(*conv_block_sizes(problem.conv, problem.pool, dtype), input, weight, bias, norm.weight,
                        norm.bias, eps);
        block.convolve(op, conv_output, statistics);
        update_running_cpu(op, running, mean, variance, problem);
        block.pool(op, output, argmax, maximum, conv_output, mean, variance);
        break;
    }
    case Plan::COMPOSED:
        conv_output = conv2d_forward(op, input, weight.to(input.scalar_type()), in_dtype_of(bias, input),
                                     problem.parameters, problem.pool.channels_last);
        batch_statistics(op, statistics, conv_output, problem, eps, dtype);
        if (!input.is_cuda())
            update_running_cpu(op, running, mean, variance, problem);
        pool_forward(op, output, argmax, maximum, conv_output, problem, mean, variance, CUDA_OPS_FLOAT64, norm,
                     &running.statistics, dtype);
        break;
    case Plan::WHOLE:
        whole_forward(op, plan, output, conv_output, argmax, maximum, statistics, input, weight, bias, norm,
                      running.statistics, dtype);
        break;
    }
    running.finish();
    return {output, conv_output, argmax, maximum, statistics};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
conv_bn_relu_pool_forward(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                          const std::optional<Tensor> &bn_weight, const std::optional<Tensor> &bn_bias,
                          const std::optional<Tensor> &running_mean, const std::optional<Tensor> &running_var,
                          const std::optional<Tensor> &num_batches_tracked, double momentum, double eps,
                          IntArrayRef geometry)
{
    return conv_bn_relu_pool_training(resolved(input), resolved(weight), resolved(bias), resolved(bn_weight),
                                      resolved(bn_bias), running_mean, running_var, num_batches_tracked, momentum, eps,
                                      geometry);
}

// Evaluation: batch_norm is a multiply-add between convolution and pooling.
static Tensor conv_bn_relu_pool_inference(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                                          const std::optional<Tensor> &bn_weight, const std::optional<Tensor> &bn_bias,
                                          const Tensor &running_mean, const Tensor &running_var, double eps,
                                          IntArrayRef geometry)
{
    const char *const op = "conv_bn_relu_pool";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const Problem problem = make_problem(op, input.sizes(), weight.sizes(), geometry);
    const int64_t channels = problem.conv.out_channels;
    check_parameter(op, "weight", weight, input);
    if (bias) {
        check_channel_values(op, "bias", *bias, input, channels, CHANNEL);
        check_like(op, "bias", *bias, "weight", weight);
    }
    const cuda_ops_dtype statistics_dtype =
        check_channel_values(op, "running_mean", running_mean, input, channels, CHANNEL);
    check_channel_values(op, "running_var", running_var, input, channels, CHANNEL);
    check_like(op, "running_var", running_var, "running_mean", running_mean);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Norm norm(op, bn_weight, bn_bias, input, channels, eps);
    Tensor output = empty(problem.output_size(), input.options().memory_format(problem.format()));
    if (problem.empty())
        return output;
    if (is_cpu_half(input))
        return in_float32(conv_bn_relu_pool_inference, input, weight, bias, bn_weight, bn_bias, running_mean,
                          running_var, eps, geometry)
            .to(input.scalar_type());
    const Tensor mean = running_mean.contiguous(), variance = running_var.contiguous();
    const Tensor conv_output = conv2d_forward(op, input, weight.to(input.scalar_type()), in_dtype_of(bias, input),
                                              problem.parameters, problem.pool.channels_last);
    pool_forward(op, output, Tensor(), Tensor(), conv_output, problem, mean.const_data_ptr(), variance.const_data_ptr(),
                 statistics_dtype, norm, nullptr, dtype);
    return output;
}

// The gradients of the convolution's output, and of batch_norm's parameters and bias where these are defined.
static Tensor pool_backward(const char *op, const Tensor &grad_bn_weight, const Tensor &grad_bn_bias,
                            const Tensor &grad_bias, const Tensor &grad_output, const Tensor &argmax,
                            const Tensor &maximum, const Tensor &conv_output, const Tensor &statistics,
                            const Problem &problem, const Norm &norm, bool needs_grad_conv, cuda_ops_dtype dtype)
{
    const cuda_ops_pool2d &pool = problem.pool;
    const double *const mean = statistics.const_data_ptr<double>(), *const variance = mean + pool.channels;
    Tensor grad_conv = needs_grad_conv ? empty_like_dense(conv_output) : Tensor();
    const auto data = [](const Tensor &tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; };
    if (grad_output.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace = empty_bytes(cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(&pool), grad_output);
        const cuda_ops_dtype bias_dtype = grad_bias.defined() ? check_dtype(op, "bias", grad_bias) : CUDA_OPS_FLOAT32;
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_conv_bn_relu_pool_pool_backward_cuda(
                                data(grad_conv), data(grad_bn_weight), data(grad_bn_bias), data(grad_bias),
                                workspace.data_ptr(), grad_output.const_data_ptr(), argmax.const_data_ptr<uint8_t>(),
                                maximum.const_data_ptr(), conv_output.const_data_ptr(), mean, variance,
                                &norm.parameters, &pool, dtype, bias_dtype, current_stream(op)));
        return grad_conv;
    }
    const Tensor sums = empty({2 * pool.channels}, statistics.options());
    const Tensor coefficients = pool_coefficients(grad_output, problem);
    parallel_ranges(
        op, pool.channels, grain_of(3 * grad_output.numel(), pool.channels), [&](int64_t begin, int64_t end) {
            return cuda_ops_conv_bn_relu_pool_sums_cpu(sums.data_ptr<double>(), grad_output.const_data_ptr(),
                                                       argmax.const_data_ptr<uint8_t>(), maximum.const_data_ptr(), mean,
                                                       &pool, begin, end, dtype);
        });
    check_status(op,
                 cuda_ops_conv_bn_relu_pool_prepare_backward_cpu(
                     data(grad_bn_weight), data(grad_bn_bias), coefficients.data_ptr(), sums.const_data_ptr<double>(),
                     mean, variance, norm.parameters.weight, &pool, norm.parameters.eps, dtype));
    if (grad_bias.defined()) // 0, or NaN where something is not finite
        grad_bias.copy_(sums.narrow(0, 0, pool.channels)).mul_(0.0);
    if (!needs_grad_conv)
        return grad_conv;
    parallel_pool2d(op, pool, pool.height.input, 2 * grad_conv.numel(), [&](int64_t begin, int64_t end) {
        return cuda_ops_conv_bn_relu_pool_grad_conv_cpu(grad_conv.data_ptr(), grad_output.const_data_ptr(),
                                                        argmax.const_data_ptr<uint8_t>(), conv_output.const_data_ptr(),
                                                        coefficients.const_data_ptr(), &pool, begin, end, dtype);
    });
    return grad_conv;
}

// Training. A gradient that is not wanted, or whose parameter is not given, is returned empty.
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
conv_bn_relu_pool_backward(const Tensor &grad_output, const Tensor &input, const Tensor &weight,
                           const std::optional<Tensor> &bias, const std::optional<Tensor> &bn_weight,
                           const std::optional<Tensor> &bn_bias, const Tensor &conv_output, const Tensor &argmax,
                           const Tensor &maximum, const Tensor &statistics, double eps, IntArrayRef geometry,
                           bool needs_grad_input)
{
    const char *const op = "conv_bn_relu_pool_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const Problem problem = make_problem(op, input.sizes(), weight.sizes(), geometry);
    const int64_t channels = problem.conv.out_channels;
    check_parameter(op, "weight", weight, input);
    if (bias) {
        check_channel_values(op, "bias", *bias, input, channels, CHANNEL);
        check_like(op, "bias", *bias, "weight", weight);
    }
    check_like(op, "grad_output", grad_output, "input", input);
    TORCH_CHECK(grad_output.sizes() == IntArrayRef(problem.output_size()), op,
                ": expected grad_output to have the shape of output, ", IntArrayRef(problem.output_size()), ", got ",
                grad_output.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(input)); // plan_of asks the current device
    const Plan plan = plan_of(problem, input.is_cuda(), dtype);
    using Sizes = std::vector<int64_t>;
    const Sizes output_size = problem.output_size(), nothing{0};
    const std::tuple<const char *, const Tensor *, at::ScalarType, Sizes> expected[] = {
        {"conv_output", &conv_output, input.scalar_type(),
         plan.cuda.keeps_conv_output ? problem.conv_output_size() : nothing},
        {"argmax", &argmax, at::kByte, output_size},
        {"maximum", &maximum, input.scalar_type(), plan.cuda.keeps_maximum ? output_size : nothing},
        {"statistics", &statistics, at::kDouble, Sizes{plan.cuda.statistics}}};
    for (const auto &[name, tensor, type, sizes] : expected) {
        check_same_device(op, name, *tensor, "input", input);
        TORCH_CHECK(tensor->scalar_type() == type && tensor->sizes() == IntArrayRef(sizes), op, ": expected ", name,
                    " to be the one that forward returned, got ", tensor->toString(), " of shape ", tensor->sizes());
    }
    const Norm norm(op, bn_weight, bn_bias, input, channels, eps);
    const bool weight_channels_last = is_channels_last(weight);
    const auto grad_of = [&](const std::optional<Tensor> &parameter) {
        return parameter ? empty({channels}, parameter->options()) : empty({0}, input.options());
    };
    Tensor grad_bias = grad_of(bias), grad_bn_weight = grad_of(bn_weight), grad_bn_bias = grad_of(bn_bias);
    Tensor grad_input = needs_grad_input ? Tensor() : empty({0}, input.options());
    if (problem.empty()) {
        if (needs_grad_input)
            grad_input = empty(input.sizes(), input.options().memory_format(input.suggest_memory_format()));
        Tensor grad_weight = empty(weight.sizes(), weight.options().memory_format(memory_format(weight_channels_last)));
        return {grad_input, grad_weight.zero_(), grad_bias.zero_(), grad_bn_weight.zero_(), grad_bn_bias.zero_()};
    }
    if (is_cpu_half(input) && plan.kind != Plan::CPU_BLOCK) {
        const auto [to_input, to_weight, to_bias, to_bn_weight, to_bn_bias] =
            in_float32(conv_bn_relu_pool_backward, grad_output, input, weight, bias, bn_weight, bn_bias, conv_output,
                       argmax, maximum, statistics, eps, geometry, needs_grad_input);
        return {to_input.to(input.scalar_type()), to_weight.to(weight.scalar_type()),
                to_bias.to(grad_bias.scalar_type()), to_bn_weight.to(grad_bn_weight.scalar_type()),
                to_bn_bias.to(grad_bn_bias.scalar_type())};
    }
    const at::MemoryFormat format = problem.format();
    const Tensor g = grad_output.contiguous(format), kept_argmax = argmax.contiguous(format),
                 kept = statistics.contiguous();
    if (plan.kind == Plan::CPU_BLOCK) {
        const auto floats = input.options().dtype(at::kFloat);
        const auto float32_of = [&](const Tensor &grad) {
            return is_half(grad.scalar_type()) ? empty(grad.sizes(), floats) : grad;
        };
        const Tensor grad_weight = empty(weight.sizes(), floats.memory_format(at::MemoryFormat::Contiguous));
        if (needs_grad_input)
            grad_input = empty(input.sizes(), input.options().memory_format(input.suggest_memory_format()));
        ConvBlock block(*conv_block_sizes(problem.conv, problem.pool, dtype), input, weight, bias, norm.weight,
                        norm.bias, eps);
        const Tensor grad_gamma = float32_of(grad_bn_weight);
        const Tensor grad_beta = grad_bn_bias.numel() > 0 ? float32_of(grad_bn_bias) : empty({channels}, floats);
        block.backward(op, needs_grad_input ? grad_input : Tensor(), grad_weight, grad_gamma, grad_beta, g,
                       plan.cuda.keeps_conv_output ? conv_output.contiguous(format) : conv_output, kept_argmax,
                       plan.cuda.keeps_maximum ? maximum.contiguous(format) : maximum, kept);
        if (bias) { // 0, or NaN where something is not finite
            const Tensor zeros = float32_of(grad_bias);
            const float *const from = grad_beta.const_data_ptr<float>();
            std::transform(from, from + channels, zeros.data_ptr<float>(), [](float g) { return 0.0f * g; });
            round_back(grad_bias, zeros);
        }
        round_back(grad_bn_weight, grad_gamma);
        if (grad_bn_bias.numel() > 0)
            round_back(grad_bn_bias, grad_beta);
        return {grad_input, grad_weight.to(weight.scalar_type()).contiguous(memory_format(weight_channels_last)),
                grad_bias, grad_bn_weight, grad_bn_bias};
    }
    if (plan.kind == Plan::WHOLE && (plan.cuda.makes_grad_input || !needs_grad_input)) {
        // With one channel both formats are the same bytes, and differ in the strides only.
        const bool either = weight.size(1) == 1;
        const Tensor grad_weight =
            empty(weight.sizes(), weight.options().memory_format(memory_format(either && weight_channels_last)));
        if (needs_grad_input)
            grad_input = empty(input.sizes(), input.options().memory_format(input_format(plan)));
        whole_backward(op, plan, grad_input, grad_weight, grad_bias, grad_bn_weight, grad_bn_bias, g, conv_output,
                       argmax, maximum, kept, problem, input, weight, norm, dtype);
        if (needs_grad_input)
            grad_input = grad_input.contiguous(memory_format(is_channels_last(input)));
        return {grad_input, grad_weight.contiguous(memory_format(weight_channels_last)), grad_bias, grad_bn_weight,
                grad_bn_bias};
    }
    const auto or_none = [](const Tensor &grad) { return grad.numel() > 0 ? grad : Tensor(); };
    Tensor general_output = conv_output, general_argmax = kept_argmax, general_maximum = maximum;
    if (plan.kind == Plan::WHOLE) {
        // The gradient of images of one channel is rarely wanted: what the general path would have kept is computed
        // now. bias is left out, since it shifts y and its mean alike.
        const double *const mean = kept.const_data_ptr<double>();
        general_output = conv2d_forward(op, input, weight.to(input.scalar_type()), in_dtype_of(bias, input),
                                        problem.parameters, problem.pool.channels_last);
        general_argmax = empty_like_dense(kept_argmax);
        general_maximum = empty_like_dense(g);
        pool_forward(op, empty_like_dense(g), general_argmax, general_maximum, general_output, problem, mean,
                     mean + channels, CUDA_OPS_FLOAT64, norm, nullptr, dtype);
    }
    general_output = general_output.contiguous(format);
    general_maximum = general_maximum.contiguous(format);
    const Tensor grad_conv =
        pool_backward(op, or_none(grad_bn_weight), or_none(grad_bn_bias), or_none(grad_bias), g, general_argmax,
                      general_maximum, general_output, kept, problem, norm, true, dtype);
    const Tensor grad_weight =
        conv2d_backward_weight(op, grad_conv, input, weight.sizes(), weight_channels_last, problem.parameters)
            .to(weight.scalar_type());
    if (needs_grad_input)
        grad_input = conv2d_backward_input(op, grad_conv, weight.to(input.scalar_type()), input.sizes(),
                                           is_channels_last(input), problem.parameters);
    return {grad_input, grad_weight, grad_bias, grad_bn_weight, grad_bn_bias};
}

static cuda_ops_dtype dtype_of(at::ScalarType type)
{
    return type == at::kFloat    ? CUDA_OPS_FLOAT32
           : type == at::kDouble ? CUDA_OPS_FLOAT64
           : type == at::kHalf   ? CUDA_OPS_FLOAT16
                                 : CUDA_OPS_BFLOAT16;
}

// For the fakes: whether conv_output and maximum are kept, and how many statistics there are.
static std::vector<int64_t> conv_bn_relu_pool_saved(bool cuda, at::ScalarType type, IntArrayRef input_size,
                                                    IntArrayRef weight_size, IntArrayRef geometry)
{
    const Problem problem = make_problem("conv_bn_relu_pool", input_size, weight_size, geometry);
    const cuda_ops_conv_bn_relu_pool_plan plan = plan_of(problem, cuda, dtype_of(type)).cuda;
    return {plan.keeps_conv_output, plan.keeps_maximum, plan.statistics};
}

// For tests: how training of such sizes is computed on the current device with the current settings.
static std::string conv_bn_relu_pool_path(bool cuda, at::ScalarType type, IntArrayRef input_size,
                                          IntArrayRef weight_size, IntArrayRef geometry)
{
    const Problem problem = make_problem("conv_bn_relu_pool", input_size, weight_size, geometry);
    const Plan plan = plan_of(problem, cuda, dtype_of(type));
    if (plan.kind == Plan::CPU_BLOCK)
        return "cpu_block";
    if (plan.kind == Plan::COMPOSED)
        return "general";
    switch (plan.cuda.path) {
    case CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL:
        return "one_channel";
    case CUDA_OPS_CONV_BN_RELU_POOL_SM90:
        return "sm90";
    default:
        return allows_tf32() ? "tiled_tf32" : "tiled_float32";
    }
}

// For cuda_ops.explain: the table of paths for training.
static PathRows conv_bn_relu_pool_paths(at::ScalarType type, IntArrayRef input_size, IntArrayRef weight_size,
                                        IntArrayRef geometry, IntArrayRef device)
{
    const Problem problem = make_problem("conv_bn_relu_pool", input_size, weight_size, geometry);
    const cuda_ops_conv_bn_relu_pool_sizes sizes{problem.conv, problem.pool};
    (void)type, (void)sizes, (void)device;
    return CUDA_OPS_PATHS(device,
                          cuda_ops_conv_bn_relu_pool_paths_cuda(reports, room, &sizes, path_dtype(type), facts));
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("conv_bn_relu_pool_forward(Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight, "
                "Tensor? bn_bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
                "Tensor(c!)? num_batches_tracked, float momentum, float eps, int[] geometry)"
                " -> (Tensor output, Tensor conv_output, Tensor argmax, Tensor maximum, Tensor statistics)");
    library.def("conv_bn_relu_pool_inference(Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight, "
                "Tensor? bn_bias, Tensor running_mean, Tensor running_var, float eps, int[] geometry)"
                " -> (Tensor output)");
    // cuda_ops/ops/conv_bn_relu_pool.py composes these of the ops that are fused here; without running statistics they
    // are those of training.
    library.def("conv_bn_relu_pool_gradients(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
                "Tensor? bn_weight, Tensor? bn_bias, Tensor? running_mean, Tensor? running_var, float eps, "
                "int[] geometry, bool[5] wanted) -> Tensor[]");
    library.def("conv_bn_relu_pool_tangent(Tensor? tangent_input, Tensor? tangent_weight, Tensor? tangent_bias, "
                "Tensor? tangent_bn_weight, Tensor? tangent_bn_bias, Tensor input, Tensor weight, Tensor? bias, "
                "Tensor? bn_weight, Tensor? bn_bias, Tensor? running_mean, Tensor? running_var, float eps, "
                "int[] geometry) -> (Tensor tangent_output)");
    library.def("conv_bn_relu_pool_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
                "Tensor? bn_weight, Tensor? bn_bias, Tensor conv_output, Tensor argmax, Tensor maximum, "
                "Tensor statistics, float eps, int[] geometry, bool needs_grad_input) -> (Tensor grad_input, Tensor "
                "grad_weight, Tensor grad_bias, "
                "Tensor grad_bn_weight, Tensor grad_bn_bias)");
    library.def("conv_bn_relu_pool_saved(bool cuda, ScalarType dtype, int[4] input_size, int[4] weight_size, int[] "
                "geometry) -> int[]",
                cuda_ops::conv_bn_relu_pool_saved);
    library.def("conv_bn_relu_pool_path(bool cuda, ScalarType dtype, int[4] input_size, int[4] weight_size, int[] "
                "geometry) -> str",
                cuda_ops::conv_bn_relu_pool_path);
    library.def(
        "conv_bn_relu_pool_paths(ScalarType dtype, int[4] input_size, int[4] weight_size, int[] geometry, int[] "
        "device)" CUDA_OPS_PATH_ROWS,
        cuda_ops::conv_bn_relu_pool_paths);
    CUDA_OPS_IMPLEMENT(library, "conv_bn_relu_pool_forward", cuda_ops::conv_bn_relu_pool_forward);
    CUDA_OPS_IMPLEMENT(library, "conv_bn_relu_pool_inference", cuda_ops::conv_bn_relu_pool_inference);
    CUDA_OPS_IMPLEMENT(library, "conv_bn_relu_pool_backward", cuda_ops::conv_bn_relu_pool_backward);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "conv_bn_relu_pool_forward");
    CUDA_OPS_AUTOCAST(library, "conv_bn_relu_pool_forward", INPUT_ONLY);
    CUDA_OPS_AUTOCAST(library, "conv_bn_relu_pool_inference", INPUT_ONLY);
    // In training the gradients take into account that the statistics of the batch depend on input, weight and bias.
    CUDA_OPS_DERIVATIVES(
        library, "conv_bn_relu_pool_forward",
        {"running_mean, running_var: not differentiable",
         "input, weight, bias, bn_weight, bn_bias: conv_bn_relu_pool_backward(grad_output, input, weight, bias, "
         "bn_weight, bn_bias, conv_output, argmax, maximum, statistics, eps, geometry, wants_input) or "
         "conv_bn_relu_pool_gradients(grad_output, input, weight, bias, bn_weight, bn_bias, none, none, eps, geometry, "
         "wanted)",
         "output <- conv_bn_relu_pool_tangent(tangent_input, tangent_weight, tangent_bias, tangent_bn_weight, "
         "tangent_bn_bias, input, weight, bias, bn_weight, bn_bias, none, none, eps, geometry)"});
    CUDA_OPS_DERIVATIVES(
        library, "conv_bn_relu_pool_inference",
        {"running_mean, running_var: not differentiable",
         "input, weight, bias, bn_weight, bn_bias: conv_bn_relu_pool_gradients(grad_output, input, weight, bias, "
         "bn_weight, bn_bias, running_mean, running_var, eps, geometry, wanted)",
         "output <- conv_bn_relu_pool_tangent(tangent_input, tangent_weight, tangent_bias, tangent_bn_weight, "
         "tangent_bn_bias, input, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, geometry)"});
}
