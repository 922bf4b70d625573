// conv2d for PyTorch: checks, allocation and the choice of backend of the convolution and its three gradients.
//
// Layouts: a tensor is read in the format that its strides suggest, by a copy where it is not dense in it; output is
// channels_last if input or weight is, and the caller chooses for a gradient.
#include "conv2d.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>
#include <atomic>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>

#include "autograd.h"
#include "cpu_workspace.h"
#include "cuda_ops/conv_transpose2d.h"
#include "cuda_ops/transpose_images.h"
#include "empty.h"
#include "halves.h"
#include "product_grain.h"
#include "vmap.h"

namespace cuda_ops
{

using at::IntArrayRef;

static Tensor dense_image(const Tensor &tensor)
{
    return tensor.contiguous(tensor.suggest_memory_format());
}

void check_conv2d_parameters(const char *op, size_t axes, const Conv2dParameters &parameters)
{
    TORCH_CHECK(parameters.stride.size() == axes && parameters.dilation.size() == axes &&
                    parameters.padding.size() == 2 * axes,
                op, ": expected stride and dilation to have ", axes, axes == 1 ? " value" : " values", " and padding ",
                2 * axes, ", got ", parameters.stride, ", ", parameters.dilation, " and ", parameters.padding);
    for (int64_t value : parameters.stride)
        TORCH_CHECK(value > 0, op, ": expected stride to be positive, got ", parameters.stride);
    for (int64_t value : parameters.padding)
        TORCH_CHECK(value >= 0, op, ": expected padding to be zero or more, got {",
                    axes == 1 ? "left, right} = " : "top, bottom, left, right} = ", parameters.padding);
    for (int64_t value : parameters.dilation)
        TORCH_CHECK(value > 0, op, ": expected dilation to be positive, got ", parameters.dilation);
    TORCH_CHECK(parameters.groups > 0, op, ": expected groups to be positive, got ", parameters.groups);
    for (IntArrayRef values : {parameters.padding, parameters.dilation})
        for (int64_t value : values)
            check_conv2d_limit(op, axes, value);
}

void check_conv2d_limit(const char *op, size_t axes, int64_t value)
{
    // The kernels count in int64, but keep rows and columns in 32 bits.
    TORCH_CHECK(value < CONV2D_LIMIT, op, ": expected ", axes == 1 ? "lengths" : "heights, widths",
                ", padding and dilation to be below ", CONV2D_LIMIT, ", got ", value);
}

// "5 x 3", or "5".
static std::string product_of(const at::DimVector &values)
{
    std::string text = std::to_string(values[0]);
    for (size_t i = 1; i < values.size(); i++)
        text += " x " + std::to_string(values[i]);
    return text;
}

cuda_ops_conv2d_sizes check_conv2d_sizes(const char *op, IntArrayRef input, IntArrayRef weight,
                                         const Conv2dParameters &parameters, size_t axes)
{
    TORCH_CHECK(input.size() == axes + 2, op, ": expected input to have ", axes + 2, " dimensions, or ", axes + 1,
                " without a batch, got shape ", input);
    TORCH_CHECK(weight.size() == axes + 2, op, ": expected weight to have ", axes + 2, " dimensions, got shape ",
                weight);
    check_conv2d_parameters(op, axes, parameters);
    const int64_t groups = parameters.groups;
    TORCH_CHECK(weight[0] >= groups && weight[0] % groups == 0, op,
                ": expected weight to have a positive multiple of groups=", groups,
                " output channels in dimension 0, got shape ", weight);
    TORCH_CHECK(input[1] == weight[1] * groups, op, ": expected input to have ", weight[1] * groups,
                " channels in dimension 1, for weight of shape ", weight, " and groups=", groups, ", got shape ",
                input);
    const IntArrayRef plane = input.slice(2), taps = weight.slice(2);
    TORCH_CHECK(std::all_of(taps.begin(), taps.end(), [](int64_t value) { return value > 0; }), op,
                ": expected weight to have a kernel that is not empty, got shape ", weight);
    for (IntArrayRef values : {plane, taps})
        for (int64_t value : values)
            check_conv2d_limit(op, axes, value);
    at::DimVector padded, kernel;
    for (size_t axis = 0; axis < axes; axis++) {
        padded.push_back(plane[axis] + parameters.padding[2 * axis] + parameters.padding[2 * axis + 1]);
        kernel.push_back((taps[axis] - 1) * parameters.dilation[axis] + 1);
    }
    bool fits = true, is_small = true;
    for (size_t axis = 0; axis < axes; axis++) {
        fits &= kernel[axis] <= padded[axis];
        is_small &= padded[axis] < CONV2D_LIMIT && kernel[axis] < CONV2D_LIMIT;
    }
    TORCH_CHECK(fits, op, ": expected the kernel to be no greater than the padded input, ", product_of(padded),
                ", got ", product_of(kernel));
    TORCH_CHECK(is_small, op, ": expected the kernel and the padded input to be smaller than ", CONV2D_LIMIT, ", got ",
                product_of(kernel), " and ", product_of(padded));
    TORCH_CHECK(input[0] == 0 || input[1] == 0 ||
                    std::all_of(plane.begin(), plane.end(), [](int64_t value) { return value > 0; }),
                op, ": expected input to have no empty dimension but batch or channels, got shape ", input);

    cuda_ops_conv2d_sizes sizes{};
    sizes.batch = input[0];
    sizes.groups = groups;
    sizes.in_channels = input[1];
    // As in PyTorch: without input channels there are no output channels.
    sizes.out_channels = input[1] == 0 ? 0 : weight[0];
    const size_t last = axes - 1;
    const bool has_rows = axes == 2;
    sizes.in_height = has_rows ? plane[0] : 1;
    sizes.in_width = plane[last];
    sizes.kernel_height = has_rows ? taps[0] : 1;
    sizes.kernel_width = taps[last];
    // Any stride that leaves one place for the kernel is the same as the least of them, which is below the limit.
    const auto stride = [&](size_t axis) { return std::min(parameters.stride[axis], padded[axis] - kernel[axis] + 1); };
    sizes.stride_height = has_rows ? stride(0) : 1;
    sizes.stride_width = stride(last);
    sizes.padding_top = has_rows ? parameters.padding[0] : 0;
    sizes.padding_left = parameters.padding[2 * last];
    sizes.dilation_height = has_rows ? parameters.dilation[0] : 1;
    sizes.dilation_width = parameters.dilation[last];
    sizes.out_height = has_rows ? (padded[0] - kernel[0]) / sizes.stride_height + 1 : 1;
    sizes.out_width = (padded[last] - kernel[last]) / sizes.stride_width + 1;
    return sizes;
}

static constexpr const char *PASS_NAMES[] = {"forward", "backward_input", "backward_weight"};

// Whether float32 may be rounded to TF32: torch.backends.cudnn.allow_tf32, as in PyTorch's own convolutions.
static int allow_tf32(const Tensor &tensor)
{
    return tensor.is_cuda() && tensor.scalar_type() == at::kFloat && at::globalContext().allowTF32CuDNN();
}

int conv2d_winograd_tile(const char *op)
{
    const char *const value = std::getenv("CUDA_OPS_CONV2D_WINOGRAD");
    if (!value || !*value)
        return 4;
    TORCH_CHECK((*value == '0' || *value == '2' || *value == '4') && value[1] == '\0', op,
                ": expected CUDA_OPS_CONV2D_WINOGRAD to be 0, 2 or 4, got ", value);
    return *value - '0';
}

static int winograd_tile(const char *op, const Tensor &tensor)
{
    return tensor.is_cuda() && tensor.scalar_type() == at::kFloat ? conv2d_winograd_tile(op) : 0;
}

static void check_grad_output(const char *op, const Tensor &grad_output, const cuda_ops_conv2d_sizes &sizes)
{
    const int64_t expected[] = {sizes.batch, sizes.out_channels, sizes.out_height, sizes.out_width};
    TORCH_CHECK(grad_output.sizes() == IntArrayRef(expected), op,
                ": expected grad_output to have the shape of output, ", IntArrayRef(expected), ", got ",
                grad_output.sizes());
}

#ifdef CUDA_OPS_WITH_CUDA
// The path that the environment's CUDA_OPS_CONV2D_PATH names, read at each call; CUDA_OPS_CONV2D_FASTEST without it.
static int forced_path(const char *op)
{
    const char *const value = std::getenv("CUDA_OPS_CONV2D_PATH");
    if (!value || !*value)
        return CUDA_OPS_CONV2D_FASTEST;
    std::string names;
    for (int path = 1; const char *const name = cuda_ops_conv2d_path_name_cuda(path); path++) {
        if (std::strcmp(name, value) == 0)
            return path;
        names += names.empty() ? name : std::string(", ") + name;
    }
    TORCH_CHECK(false, op, ": expected CUDA_OPS_CONV2D_PATH to be one of ", names, ", got ", value);
}

// A product's plan, which depends on its sizes, its dtype, the forced path and the device only.
struct CudaPlan {
    bool wants_channels_last; // images that are not channels_last are copied to it, and the result back
    bool is_possible;         // by the forced path
    bool applies;             // the sizes' activation, in its epilogue
    size_t workspace_bytes;
};

// Plans of this thread's last products: a network has the same ones at every step, and planning goes through all tiles
// of all paths.
static CudaPlan plan_of(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &sizes, cuda_ops_dtype dtype, int path,
                        c10::DeviceIndex device)
{
    struct Key {
        cuda_ops_conv2d_sizes sizes;
        int32_t pass, dtype, path, device;
    };
    static_assert(std::has_unique_object_representations_v<Key>, "keys are compared byte by byte");
    const Key key{sizes, pass, dtype, path, device};
    thread_local std::unordered_map<std::string_view, std::pair<std::unique_ptr<Key>, CudaPlan>> plans;
    const auto bytes_of = [](const Key &k) { return std::string_view(reinterpret_cast<const char *>(&k), sizeof k); };
    if (const auto found = plans.find(bytes_of(key)); found != plans.end())
        return found->second.second;
    const CudaPlan plan{
        cuda_ops_conv2d_wants_channels_last_cuda(pass, &sizes, dtype, path, nullptr) != 0,
        path == CUDA_OPS_CONV2D_FASTEST || cuda_ops_conv2d_path_cuda(pass, &sizes, dtype, path) == path,
        sizes.activation == CUDA_OPS_CONV2D_NONE || cuda_ops_conv2d_applies_cuda(&sizes, dtype, path) != 0,
        cuda_ops_conv2d_workspace_cuda(pass, &sizes, dtype, path),
    };
    if (plans.size() >= 1024) // sizes keep changing: plans are not reused
        plans.clear();
    auto kept = std::make_unique<Key>(key);
    const std::string_view bytes = bytes_of(*kept);
    plans.emplace(bytes, std::make_pair(std::move(kept), plan));
    return plan;
}

// tensor.contiguous(format) of a tensor on CUDA, at the speed of a copy.
static Tensor relaid(const char *op, const Tensor &tensor, at::MemoryFormat format)
{
    const bool to_last = format == at::MemoryFormat::ChannelsLast;
    const int64_t channels = tensor.size(1), pixels = tensor.size(2) * tensor.size(3);
    if (tensor.is_contiguous(format) || tensor.numel() == 0 || tensor.is_neg() || channels < 8 ||
        !tensor.is_contiguous(to_last ? at::MemoryFormat::Contiguous : at::MemoryFormat::ChannelsLast))
        return tensor.contiguous(format);
    Tensor copy = empty(tensor.sizes(), tensor.options().memory_format(format));
    const cuda_ops_status status = cuda_ops_transpose_images_cuda(
        copy.data_ptr(), tensor.const_data_ptr(), tensor.size(0), to_last ? channels : pixels,
        to_last ? pixels : channels, check_dtype(op, "input", tensor), current_stream(op));
    if (status == CUDA_OPS_INVALID_ARGUMENT) // more tiles than a grid has
        return tensor.contiguous(format);
    check_status(op, status);
    return copy;
}

// What all products on CUDA share beside their tensors.
struct CudaRun {
    int path;
    CudaPlan plan;
    Tensor workspace;

    CudaRun(const char *op, cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &sizes, cuda_ops_dtype dtype,
            const Tensor &like)
        : path(forced_path(op)), plan(plan_of(pass, sizes, dtype, path, like.get_device()))
    {
    }

    // Before the launch, with the planned sizes.
    void prepare(const char *op, cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &sizes, const Tensor &like)
    {
        TORCH_CHECK_NOT_IMPLEMENTED(plan.is_possible, op,
                                    ": CUDA_OPS_CONV2D_PATH=", cuda_ops_conv2d_path_name_cuda(path),
                                    " cannot do this convolution on this device: ", PASS_NAMES[pass], ", ",
                                    like.scalar_type(), sizes.allow_tf32 ? " (TF32 allowed)" : "", ", weight ",
                                    sizes.out_channels, " x ", sizes.in_channels / sizes.groups, " x ",
                                    sizes.kernel_height, " x ", sizes.kernel_width, ", groups ", sizes.groups);
        workspace = empty_bytes(static_cast<int64_t>(plan.workspace_bytes), like);
    }
};
#endif

// The CPU's products: workspace, and the middle step's ranges spread over threads.
struct CpuRun {
    cuda_ops_conv2d_plan plan{};
    int64_t grain = 1; // of the ranges of the middle step
    c10::DataPtr owned;
    void *prepared = nullptr;

    CpuRun(const char *op, cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &sizes, cuda_ops_dtype dtype)
    {
        check_status(op, cuda_ops_conv2d_plan_cpu(&plan, pass, &sizes, dtype));
        const int64_t depth = sizes.in_channels / sizes.groups * sizes.kernel_height * sizes.kernel_width;
        const int64_t input = sizes.batch * sizes.in_channels * sizes.in_height * sizes.in_width;
        const int64_t output = sizes.batch * sizes.out_channels * sizes.out_height * sizes.out_width;
        grain = product_grain(plan.count, output * depth, input + output + sizes.out_channels * depth,
                              is_half(dtype) ? HALF_PRODUCT_GRAIN : PRODUCT_GRAIN);
        // Kept by the calling thread as its workspace is, and for the same reason, up to the size of a large weight.
        constexpr size_t MOST_KEPT = size_t(32) << 20;
        thread_local c10::DataPtr kept;
        thread_local size_t kept_bytes = 0;
        if (plan.prepared_bytes > MOST_KEPT) {
            owned = c10::GetCPUAllocator()->allocate(plan.prepared_bytes);
            prepared = owned.get();
            return;
        }
        if (plan.prepared_bytes > kept_bytes) {
            kept_bytes = 0;
            kept = c10::DataPtr();
            kept = c10::GetCPUAllocator()->allocate(plan.prepared_bytes);
            kept_bytes = plan.prepared_bytes;
        }
        prepared = kept.get();
    }

    void *workspace() const
    {
        return thread_workspace(static_cast<int64_t>(plan.workspace_bytes));
    }
};

// Whether the CPU makes the product of these halves as they are, by AMX or AVX512-BF16; else it is made in float32.
static bool takes_halves(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &sizes, cuda_ops_dtype dtype,
                         const Tensor &a, const Tensor &b)
{
    cuda_ops_conv2d_plan plan{};
    if (cuda_ops_conv2d_plan_cpu(&plan, pass, &sizes, dtype) != CUDA_OPS_SUCCESS)
        return false;
    if (!cuda_ops_conv2d_needs_finite_cpu(pass, &sizes, dtype))
        return true;
    for (const Tensor &tensor : {a, b}) {
        std::atomic<bool> finite = true;
        const auto *const data = static_cast<const uint16_t *>(tensor.const_data_ptr());
        parallel_ranges("conv2d", tensor.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
            if (!cuda_ops_are_finite_cpu(data + begin, end - begin, dtype))
                finite = false;
            return CUDA_OPS_SUCCESS;
        });
        if (!finite)
            return false;
    }
    return true;
}

Tensor conv2d_forward(const char *op, const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                      const Conv2dParameters &parameters, bool channels_last, cuda_ops_conv2d_activation activation)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_like(op, "weight", weight, "input", input);
    cuda_ops_conv2d_sizes sizes = check_conv2d_sizes(op, input.sizes(), weight.sizes(), parameters);
    if (bias) {
        check_like(op, "bias", *bias, "input", input);
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": expected bias to have shape [",
                    weight.size(0), "], one value for each output channel of weight, got ", bias->sizes());
    }
    sizes.input_channels_last = is_channels_last(input);
    sizes.weight_channels_last = is_channels_last(weight);
    sizes.output_channels_last = channels_last;
    sizes.allow_tf32 = allow_tf32(input);
    sizes.winograd = winograd_tile(op, input);

    const c10::OptionalDeviceGuard guard(at::device_of(input));
    Tensor copied; // to channels_last, and so is the result then
#ifdef CUDA_OPS_WITH_CUDA
    std::optional<CudaRun> run_on_cuda;
    if (input.is_cuda()) {
        run_on_cuda.emplace(op, CUDA_OPS_CONV2D_FORWARD, sizes, dtype, input);
        if (input.numel() > 0 && run_on_cuda->plan.wants_channels_last) {
            copied = relaid(op, input, at::MemoryFormat::ChannelsLast);
            // Not by its strides: where a dimension is 1 they may be those of either format, or of none.
            sizes.input_channels_last = sizes.output_channels_last = 1;
            run_on_cuda.emplace(op, CUDA_OPS_CONV2D_FORWARD, sizes, dtype, input);
        }
        if (activation != CUDA_OPS_CONV2D_NONE) { // which has no part in the question before
            sizes.activation = activation;
            run_on_cuda.emplace(op, CUDA_OPS_CONV2D_FORWARD, sizes, dtype, input);
        }
    }
#endif
    TORCH_INTERNAL_ASSERT(input.is_cuda() || activation == CUDA_OPS_CONV2D_NONE);
    const Tensor x = copied.defined() ? copied : dense_image(input), w = dense_image(weight);
    const Tensor b = bias ? bias->contiguous() : Tensor();
    Tensor output = empty({sizes.batch, sizes.out_channels, sizes.out_height, sizes.out_width},
                          x.options().memory_format(memory_format(sizes.output_channels_last)));
    if (output.numel() == 0)
        return output;
    const void *const bias_data = bias ? b.const_data_ptr() : nullptr;
    if (x.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        CudaRun &run = *run_on_cuda;
        run.prepare(op, CUDA_OPS_CONV2D_FORWARD, sizes, x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_conv2d_forward_cuda(output.data_ptr(), x.const_data_ptr(), w.const_data_ptr(),
                                                         bias_data, &sizes, run.workspace.mutable_data_ptr(), run.path,
                                                         dtype, current_stream(op)));
#ifdef CUDA_OPS_WITH_CUDA
        if (copied.defined())
            return relaid(op, output, memory_format(channels_last));
#endif
        return output;
    }
    if (is_half(dtype) && !takes_halves(CUDA_OPS_CONV2D_FORWARD, sizes, dtype, x, w))
        return conv2d_forward(op, widened(x), widened(w), widened(bias), parameters, channels_last).to(x.scalar_type());
    const CpuRun run(op, CUDA_OPS_CONV2D_FORWARD, sizes, dtype);
    parallel_ranges(op, run.plan.prepare_count, is_half(dtype) ? 1 : 64, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv2d_prepare_cpu(run.prepared, w.const_data_ptr(), CUDA_OPS_CONV2D_FORWARD, &sizes, begin,
                                           end, dtype);
    });
    parallel_ranges(op, run.plan.count, run.grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv2d_forward_cpu(output.data_ptr(), x.const_data_ptr(), w.const_data_ptr(), run.prepared,
                                           bias_data, &sizes, begin, end, run.workspace(), dtype);
    });
    return output;
}

bool conv2d_applies(const char *op, const Tensor &input, const Tensor &weight, const Conv2dParameters &parameters,
                    bool channels_last, cuda_ops_conv2d_activation activation)
{
    if (activation == CUDA_OPS_CONV2D_NONE)
        return true;
    if (!input.is_cuda())
        return false;
#ifdef CUDA_OPS_WITH_CUDA
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    cuda_ops_conv2d_sizes sizes = check_conv2d_sizes(op, input.sizes(), weight.sizes(), parameters);
    sizes.input_channels_last = is_channels_last(input);
    sizes.weight_channels_last = is_channels_last(weight);
    sizes.output_channels_last = channels_last;
    sizes.allow_tf32 = allow_tf32(input);
    sizes.winograd = winograd_tile(op, input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    if (CudaRun(op, CUDA_OPS_CONV2D_FORWARD, sizes, dtype, input).plan.wants_channels_last)
        sizes.input_channels_last = sizes.output_channels_last = 1;
    sizes.activation = activation;
    // Plans are those of aligned tensors.
    const bool is_aligned = reinterpret_cast<uintptr_t>(input.const_data_ptr()) % 16 == 0;
    return is_aligned && CudaRun(op, CUDA_OPS_CONV2D_FORWARD, sizes, dtype, input).plan.applies;
#else
    (void)op, (void)weight, (void)parameters, (void)channels_last;
    return false;
#endif
}

Tensor conv2d_backward_input(const char *op, const Tensor &grad_output, const Tensor &weight, IntArrayRef input_size,
                             bool channels_last, const Conv2dParameters &parameters, const Tensor &bias)
{
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_like(op, "weight", weight, "grad_output", grad_output);
    cuda_ops_conv2d_sizes sizes = check_conv2d_sizes(op, input_size, weight.sizes(), parameters);
    check_grad_output(op, grad_output, sizes);
    sizes.input_channels_last = channels_last;
    sizes.weight_channels_last = is_channels_last(weight);
    sizes.output_channels_last = is_channels_last(grad_output);
    sizes.allow_tf32 = allow_tf32(grad_output);
    sizes.winograd = winograd_tile(op, grad_output);

    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    Tensor copied; // as in conv2d_forward
#ifdef CUDA_OPS_WITH_CUDA
    std::optional<CudaRun> run_on_cuda;
    if (grad_output.is_cuda()) {
        run_on_cuda.emplace(op, CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, dtype, grad_output);
        if (grad_output.numel() > 0 && run_on_cuda->plan.wants_channels_last) {
            copied = relaid(op, grad_output, at::MemoryFormat::ChannelsLast);
            sizes.input_channels_last = sizes.output_channels_last = 1;
            run_on_cuda.emplace(op, CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, dtype, grad_output);
        }
    }
#endif
    const Tensor g = copied.defined() ? copied : dense_image(grad_output), w = dense_image(weight);
    Tensor grad_input = empty(input_size, g.options().memory_format(memory_format(sizes.input_channels_last != 0)));
    if (grad_input.numel() == 0)
        return grad_input;
    if (g.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        CudaRun &run = *run_on_cuda;
        run.prepare(op, CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, g);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_conv2d_backward_input_cuda(
                                grad_input.data_ptr(), g.const_data_ptr(), w.const_data_ptr(), &sizes,
                                run.workspace.mutable_data_ptr(), run.path, dtype, current_stream(op)));
        if (bias.defined())
            grad_input.add_(bias.view({-1, 1, 1}));
#ifdef CUDA_OPS_WITH_CUDA
        if (copied.defined())
            return relaid(op, grad_input, memory_format(channels_last));
#endif
        return grad_input;
    }
    if (is_half(dtype) && !takes_halves(CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, dtype, g, w))
        return conv2d_backward_input(op, widened(g), widened(w), input_size, channels_last, parameters, widened(bias))
            .to(g.scalar_type());
    const void *const bias_data = bias.defined() ? bias.const_data_ptr() : nullptr;
    const CpuRun run(op, CUDA_OPS_CONV2D_BACKWARD_INPUT, sizes, dtype);
    parallel_ranges(op, run.plan.prepare_count, is_half(dtype) ? 1 : 64, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv2d_prepare_cpu(run.prepared, w.const_data_ptr(), CUDA_OPS_CONV2D_BACKWARD_INPUT, &sizes,
                                           begin, end, dtype);
    });
    parallel_ranges(op, run.plan.count, run.grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv_transpose2d_forward_cpu(grad_input.data_ptr(), g.const_data_ptr(), w.const_data_ptr(),
                                                     run.prepared, bias_data, &sizes, begin, end, run.workspace(),
                                                     dtype);
    });
    return grad_input;
}

Tensor conv2d_backward_weight(const char *op, const Tensor &grad_output, const Tensor &input, IntArrayRef weight_size,
                              bool channels_last, const Conv2dParameters &parameters)
{
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_like(op, "input", input, "grad_output", grad_output);
    cuda_ops_conv2d_sizes sizes = check_conv2d_sizes(op, input.sizes(), weight_size, parameters);
    check_grad_output(op, grad_output, sizes);
    sizes.input_channels_last = is_channels_last(input);
    sizes.weight_channels_last = channels_last;
    sizes.output_channels_last = is_channels_last(grad_output);
    sizes.allow_tf32 = allow_tf32(grad_output);
    sizes.winograd = winograd_tile(op, grad_output);

    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
#ifdef CUDA_OPS_WITH_CUDA
    bool copied = false;
    std::optional<CudaRun> run_on_cuda;
    if (grad_output.is_cuda() && grad_output.numel() > 0) {
        run_on_cuda.emplace(op, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, sizes, dtype, grad_output);
        copied = run_on_cuda->plan.wants_channels_last;
        if (copied) {
            sizes.input_channels_last = sizes.output_channels_last = 1;
            run_on_cuda.emplace(op, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, sizes, dtype, grad_output);
        }
    }
#endif
    const auto laid_out = [&](const Tensor &image) {
#ifdef CUDA_OPS_WITH_CUDA
        if (copied)
            return relaid(op, image, at::MemoryFormat::ChannelsLast);
#endif
        return dense_image(image);
    };
    const Tensor g = laid_out(grad_output), x = laid_out(input);
    Tensor grad_weight = empty(weight_size, g.options().memory_format(memory_format(channels_last)));
    if (grad_weight.numel() == 0)
        return grad_weight;
    if (g.numel() == 0) // the sum over an empty batch
        return grad_weight.zero_();
    if (g.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        CudaRun &run = *run_on_cuda;
        run.prepare(op, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, sizes, g);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_conv2d_backward_weight_cuda(
                                grad_weight.data_ptr(), g.const_data_ptr(), x.const_data_ptr(), &sizes,
                                run.workspace.mutable_data_ptr(), run.path, dtype, current_stream(op)));
        return grad_weight;
    }
    if (is_half(dtype) && !takes_halves(CUDA_OPS_CONV2D_BACKWARD_WEIGHT, sizes, dtype, g, x))
        return conv2d_backward_weight(op, widened(g), widened(x), weight_size, channels_last, parameters)
            .to(g.scalar_type());
    const CpuRun run(op, CUDA_OPS_CONV2D_BACKWARD_WEIGHT, sizes, dtype);
    parallel_ranges(op, run.plan.count, run.grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv2d_backward_weight_cpu(grad_weight.data_ptr(), run.prepared, g.const_data_ptr(),
                                                   x.const_data_ptr(), &sizes, begin, end, run.workspace(), dtype);
    });
    parallel_ranges(op, run.plan.reduce_count, is_half(dtype) ? 1 : 16, [&](int64_t begin, int64_t end) {
        return cuda_ops_conv2d_reduce_weight_cpu(grad_weight.data_ptr(), run.prepared, &sizes, begin, end, dtype);
    });
    return grad_weight;
}

// size: bias', which differs from output's number of channels where there are no input channels.
static Tensor conv2d_backward_bias(const Tensor &grad_output, at::OptionalIntArrayRef size)
{
    const char *const op = "conv2d_backward_bias";
    const cuda_ops_dtype dtype = check_dtype(op, "grad_output", grad_output);
    check_dim(op, "grad_output", grad_output, 3, 4);
    const Tensor image = grad_output.dim() == 3 ? grad_output.unsqueeze(2) : grad_output;
    const int channels_last = is_channels_last(image);
    const int64_t batch = image.size(0), channels = image.size(1), pixels = image.size(2) * image.size(3);

    const bool fits =
        !size || *size == IntArrayRef(channels) || (channels == 0 && size->size() == 1 && size->front() >= 0);
    TORCH_CHECK(fits, op, ": expected size to be [", channels, "], got ", size.value_or(IntArrayRef()));

    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const Tensor g = dense_image(image);
    if (g.numel() == 0)
        return at::zeros(size.value_or(IntArrayRef(channels)), g.options());
    Tensor grad_bias = empty({channels}, g.options());
    if (g.is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const Tensor workspace =
            empty_bytes(cuda_ops_conv2d_backward_bias_workspace_cuda(batch, channels, pixels, channels_last, dtype), g);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_conv2d_backward_bias_cuda(
                                grad_bias.data_ptr(), g.const_data_ptr(), batch, channels, pixels, channels_last,
                                workspace.mutable_data_ptr(), dtype, current_stream(op)));
        return grad_bias;
    }
    if (is_half(dtype))
        return in_float32(conv2d_backward_bias, image, size).to(g.scalar_type());
    parallel_ranges(op, channels, std::max<int64_t>(1, ELEMENTWISE_GRAIN / (batch * pixels)),
                    [&](int64_t begin, int64_t end) {
                        return cuda_ops_conv2d_backward_bias_cpu(grad_bias.data_ptr(), g.const_data_ptr(), batch,
                                                                 channels, pixels, channels_last, begin, end, dtype);
                    });
    return grad_bias;
}

// One value a channel, expanded to the shape `size`, whose channels are dimension 1, in `dtype`. Its gradient is the
// sum over all other dimensions. Without input channels output has none, whatever the bias.
static Tensor expand_channels(const Tensor &values, c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype)
{
    TORCH_CHECK(size.size() >= 2, "expand_channels: expected size to have a dimension of channels, got ", size);
    const Tensor v = dtype ? values.to(*dtype) : values;
    if (size[1] == 0)
        return v.new_zeros_symint(size);
    c10::SymDimVector shape(size.size(), 1);
    shape[1] = size[1];
    return v.view_symint(shape).expand_symint(size);
}

// The name of the path that a product of these tensors takes on the current device in the current environment, with
// input and output channels_last or neither; for tests. "" where the forced path cannot take it.
static std::string path_of(const Tensor &input, const Tensor &weight, c10::string_view product, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, int64_t groups)
{
    const char *const op = "conv2d_path";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_like(op, "weight", weight, "input", input);
    cuda_ops_conv2d_sizes sizes =
        check_conv2d_sizes(op, input.sizes(), weight.sizes(), {stride, padding, dilation, groups});
    const auto *const name = std::find(std::begin(PASS_NAMES), std::end(PASS_NAMES), product);
    TORCH_CHECK(name != std::end(PASS_NAMES), op,
                ": expected product to be forward, backward_input or backward_weight, got ", product);
    sizes.input_channels_last = is_channels_last(input);
    sizes.weight_channels_last = is_channels_last(weight);
    sizes.output_channels_last = sizes.input_channels_last || sizes.weight_channels_last;
    sizes.allow_tf32 = allow_tf32(input);
    sizes.winograd = winograd_tile(op, input);
    TORCH_CHECK(input.is_cuda(), op, ": expected input to be on a CUDA device, got ", input.device());
#ifdef CUDA_OPS_WITH_CUDA
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const auto number = static_cast<cuda_ops_conv2d_pass>(name - std::begin(PASS_NAMES));
    if (cuda_ops_conv2d_wants_channels_last_cuda(number, &sizes, dtype, forced_path(op), nullptr))
        sizes.input_channels_last = sizes.output_channels_last = 1;
    const char *const path =
        cuda_ops_conv2d_path_name_cuda(cuda_ops_conv2d_path_cuda(number, &sizes, dtype, forced_path(op)));
    return path ? path : "";
#else
    (void)dtype;
    current_stream(op);
    return "";
#endif
}

static Tensor forward(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias, IntArrayRef stride,
                      IntArrayRef padding, IntArrayRef dilation, int64_t groups)
{
    const bool channels_last = is_channels_last(input) || is_channels_last(weight);
    return conv2d_forward("conv2d", input, weight, bias, {stride, padding, dilation, groups}, channels_last);
}

static Tensor backward_input(const Tensor &grad_output, const Tensor &weight, IntArrayRef input_size,
                             bool channels_last, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                             int64_t groups)
{
    return conv2d_backward_input("conv2d_backward_input", grad_output, weight, input_size, channels_last,
                                 {stride, padding, dilation, groups});
}

static Tensor backward_weight(const Tensor &grad_output, const Tensor &input, IntArrayRef weight_size,
                              bool channels_last, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                              int64_t groups)
{
    return conv2d_backward_weight("conv2d_backward_weight", grad_output, input, weight_size, channels_last,
                                  {stride, padding, dilation, groups});
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("conv2d_forward(Tensor input, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[4] padding, "
                "SymInt[2] dilation, SymInt groups) -> (Tensor output)");
    library.def("conv2d_backward_input(Tensor grad_output, Tensor weight, SymInt[4] input_size, bool channels_last, "
                "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups) -> (Tensor grad_input)");
    library.def("conv2d_backward_weight(Tensor grad_output, Tensor input, SymInt[4] weight_size, bool channels_last, "
                "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups) -> (Tensor grad_weight)");
    library.def("conv2d_backward_bias(Tensor grad_output, SymInt[]? size=None) -> (Tensor grad_bias)");
    library.def("expand_channels(Tensor values, SymInt[] size, ScalarType? dtype=None) -> (Tensor output)",
                cuda_ops::expand_channels);
    library.def("conv2d_path(Tensor input, Tensor weight, str product, SymInt[2] stride, SymInt[4] padding, "
                "SymInt[2] dilation, SymInt groups) -> str");
    CUDA_OPS_IMPLEMENT(library, "conv2d_forward", cuda_ops::forward);
    CUDA_OPS_VMAP(library, "conv2d_forward", "input[4]*");
    CUDA_OPS_IMPLEMENT(library, "conv2d_backward_input", cuda_ops::backward_input);
    CUDA_OPS_VMAP(library, "conv2d_backward_input", "grad_output[4]*, input_size*");
    CUDA_OPS_IMPLEMENT(library, "conv2d_backward_weight", cuda_ops::backward_weight);
    CUDA_OPS_IMPLEMENT(library, "conv2d_backward_bias", cuda_ops::conv2d_backward_bias);
    CUDA_OPS_IMPLEMENT(library, "conv2d_path", cuda_ops::path_of);
    CUDA_OPS_AUTOCAST(library, "conv2d_forward", LOWER_PRECISION);
    // output, grad_input and grad_weight are three sums of products over the same triples (input, weight, output): the
    // derivatives of each in one of its factors are the other two.
    CUDA_OPS_DERIVATIVES(
        library, "conv2d_forward",
        {"input: conv2d_backward_input(grad_output, weight, input.size, input.channels_last, stride, padding, "
         "dilation, groups)",
         "weight: conv2d_backward_weight(grad_output, input, weight.size, weight.channels_last, stride, padding, "
         "dilation, groups)",
         "bias: conv2d_backward_bias(grad_output, bias.size)",
         "output <- conv2d_forward(tangent_input, weight, none, stride, padding, dilation, groups)",
         "output <- conv2d_forward(input, tangent_weight, none, stride, padding, dilation, groups)",
         "output <- expand_channels(tangent_bias, output.size, none)"});
    CUDA_OPS_DERIVATIVES(
        library, "conv2d_backward_input",
        {"grad_output: conv2d_forward(grad_grad_input, weight, none, stride, padding, dilation, groups)",
         "weight: conv2d_backward_weight(grad_output, grad_grad_input, weight.size, weight.channels_last, stride, "
         "padding, dilation, groups)",
         "grad_input <- conv2d_backward_input(tangent_grad_output, weight, input_size, channels_last, stride, padding, "
         "dilation, groups)",
         "grad_input <- conv2d_backward_input(grad_output, tangent_weight, input_size, channels_last, stride, padding, "
         "dilation, groups)"});
    CUDA_OPS_DERIVATIVES(
        library, "conv2d_backward_weight",
        {"grad_output: conv2d_forward(input, grad_grad_weight, none, stride, padding, dilation, groups)",
         "input: conv2d_backward_input(grad_output, grad_grad_weight, input.size, input.channels_last, stride, "
         "padding, dilation, groups)",
         "grad_weight <- conv2d_backward_weight(tangent_grad_output, input, weight_size, channels_last, stride, "
         "padding, dilation, groups)",
         "grad_weight <- conv2d_backward_weight(grad_output, tangent_input, weight_size, channels_last, stride, "
         "padding, dilation, groups)"});
    CUDA_OPS_DERIVATIVES(library, "conv2d_backward_bias",
                         {"grad_output: expand_channels(grad_grad_bias, grad_output.size, none)",
                          "grad_bias <- conv2d_backward_bias(tangent_grad_output, size)"});
}
