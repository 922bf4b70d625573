// conv_bn_relu_pool: max_pool2d(relu(batch_norm(conv2d(input)))) in training. The table of paths, and the launchers of
// the whole block.
#include "conv_bn_relu_pool/paths.h"

#include "common/common.cuh"

// What the fused paths have in common: a convolution that keeps the images' size, and windows that do not overlap.
static Answer is_block_3x3(const ConvBlockCall &call)
{
    const cuda_ops_conv2d_sizes &c = call.sizes.conv;
    const cuda_ops_pool_axis &h = call.sizes.pool.height, &w = call.sizes.pool.width;
    if (c.kernel_height != 3 || c.kernel_width != 3 || c.stride_height != 1 || c.stride_width != 1 ||
        c.dilation_height != 1 || c.dilation_width != 1 || c.padding_top != 1 || c.padding_left != 1 ||
        c.out_height != c.in_height || c.out_width != c.in_width)
        return no("the convolution is not 3x3 with stride 1, padding 1 and no dilation");
    if (h.kernel != 2 || w.kernel != 2 || h.stride != 2 || w.stride != 2 || h.padding || w.padding)
        return no("the pooling is not 2x2 with stride 2 and no padding");
    return c.groups == 1 ? YES : no("the convolution has groups");
}

static Answer one_channel_supports(const ConvBlockCall &call, const Device &)
{
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("does not take float64");
    if (call.sizes.conv.in_channels != 1)
        return no("input has more than one channel");
    if (const Answer answer = is_block_3x3(call); !answer)
        return answer;
    return call.sizes.conv.in_width <= CUDA_OPS_ONE_WIDEST ? YES : no("rows are wider than 1024 pixels");
}

static cuda_ops_conv_bn_relu_pool_one_sizes one_sizes_of(const ConvBlockCall &call)
{
    const cuda_ops_pool2d &pool = call.sizes.pool;
    return {call.sizes.conv.batch, call.sizes.conv.out_channels, pool.height.input,
            pool.width.input,      pool.channels_last,           call.sizes.conv.allow_tf32};
}

static int64_t one_channel_workspace(const ConvBlockCall &call, const Device &)
{
    const cuda_ops_conv_bn_relu_pool_one_sizes sizes = one_sizes_of(call);
    return conv_bn_relu_pool_one_channel_workspace(&sizes);
}

static cuda_ops_status one_channel(const ConvBlockCall &call, const Device &)
{
    const cuda_ops_conv_bn_relu_pool_one_sizes sizes = one_sizes_of(call);
    if (!call.backward)
        return conv_bn_relu_pool_one_channel_forward(call.output, call.argmax, call.statistics, call.workspace,
                                                     call.running, call.input, call.weight, call.bias, call.norm,
                                                     &sizes, call.dtype, call.weight_dtype, call.stream);
    if (call.grad_input)
        return CUDA_OPS_INVALID_ARGUMENT;
    return conv_bn_relu_pool_one_channel_backward(call.grad_weight, call.grad_bias, call.grad_norm_weight,
                                                  call.grad_norm_bias, call.workspace, call.grad_output, call.argmax,
                                                  call.statistics, call.input, call.weight, call.norm, &sizes,
                                                  call.dtype, call.weight_dtype, call.stream);
}

static Answer sm90_supports(const ConvBlockCall &call, const Device &device)
{
    if (const Answer answer = is_block_3x3(call); !answer)
        return answer;
    if (call.sizes.pool.channels_last)
        return no("output is channels_last");
    return conv_bn_relu_pool_sm90_supports(call, device);
}

static int64_t sm90_workspace(const ConvBlockCall &call, const Device &)
{
    return conv_bn_relu_pool_sm90_workspace(call.sizes.conv.batch);
}

static cuda_ops_status sm90(const ConvBlockCall &call, const Device &)
{
    const int64_t batch = call.sizes.conv.batch;
    return call.backward ? conv_bn_relu_pool_sm90_backward(call.grad_input, call.grad_weight, call.grad_bias,
                                                           call.grad_norm_weight, call.grad_norm_bias, call.workspace,
                                                           call.grad_output, call.argmax, call.maximum,
                                                           call.conv_output, call.statistics, call.input, call.weight,
                                                           call.norm, batch, call.dtype, call.weight_dtype, call.stream)
                         : conv_bn_relu_pool_sm90_forward(call.output, call.conv_output, call.argmax, call.maximum,
                                                          call.statistics, call.workspace, call.running, call.input,
                                                          call.weight, call.bias, call.norm, batch, call.dtype,
                                                          call.weight_dtype, call.stream);
}

static Answer tiled_supports(const ConvBlockCall &call, const Device &device)
{
    if (const Answer answer = is_block_3x3(call); !answer)
        return answer;
    return conv_bn_relu_pool_tiled_supports(call, device);
}

static cuda_ops_conv_bn_relu_pool_tiled_sizes tiled_sizes_of(const ConvBlockCall &call)
{
    const cuda_ops_conv2d_sizes &c = call.sizes.conv;
    return {c.batch,
            (int32_t)c.in_channels,
            (int32_t)c.out_channels,
            (int32_t)c.in_height,
            (int32_t)c.in_width,
            call.sizes.pool.channels_last,
            c.allow_tf32,
            c.winograd >= 2};
}

static int64_t tiled_workspace(const ConvBlockCall &call, const Device &)
{
    const cuda_ops_conv_bn_relu_pool_tiled_sizes sizes = tiled_sizes_of(call);
    return conv_bn_relu_pool_tiled_workspace(&sizes);
}

static cuda_ops_status tiled(const ConvBlockCall &call, const Device &)
{
    const cuda_ops_conv_bn_relu_pool_tiled_sizes sizes = tiled_sizes_of(call);
    return call.backward
               ? conv_bn_relu_pool_tiled_backward(
                     (float *)call.grad_input, (float *)call.grad_weight, call.grad_bias, call.grad_norm_weight,
                     call.grad_norm_bias, call.workspace, (const float *)call.grad_output, call.argmax,
                     (const float *)call.maximum, (const float *)call.conv_output, call.statistics,
                     (const float *)call.input, (const float *)call.weight, call.norm, &sizes, call.weight_dtype,
                     call.stream)
               : conv_bn_relu_pool_tiled_forward((float *)call.output, (float *)call.conv_output, call.argmax,
                                                 (float *)call.maximum, call.statistics, call.workspace, call.running,
                                                 (const float *)call.input, (const float *)call.weight, call.bias,
                                                 call.norm, &sizes, call.weight_dtype, call.stream);
}

// In the order of the table.
static const cuda_ops_conv_bn_relu_pool_path PATHS[] = {
    CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL, CUDA_OPS_CONV_BN_RELU_POOL_SM90, CUDA_OPS_CONV_BN_RELU_POOL_TILED,
    CUDA_OPS_CONV_BN_RELU_POOL_GENERAL};
static constexpr int COUNT = sizeof(PATHS) / sizeof(PATHS[0]);

static PathTable<ConvBlockCall, COUNT> table = {
    {"CUDA_OPS_CONV_BN_RELU_POOL_PATH"},
    {{"one_channel", "conv_bn_relu_pool/one_channel/",
      "one_moments_kernel one_forward_kernel one_forward_tensor_kernel one_forward_tf32_kernel one_sums_kernel "
      "one_sums_tensor_kernel one_sums_tf32_kernel one_gradients_kernel",
      one_channel_supports, nullptr, one_channel_workspace, one_channel},
     {"sm90", "conv_bn_relu_pool/sm90/", "forward_kernel backward_kernel", sm90_supports, nullptr, sm90_workspace,
      sm90},
     {"tiled", "conv_bn_relu_pool/tiled_sm80/",
      "convolve_kernel weight_kernel wgmma_convolve_kernel wgmma_backward_kernel winograd_convolve_kernel "
      "winograd_weight_kernel",
      tiled_supports, nullptr, tiled_workspace, tiled},
     {"general", "conv_bn_relu_pool/general.cu", "grad_conv_kernel", conv_bn_relu_pool_general_supports, nullptr,
      conv_bn_relu_pool_general_workspace, conv_bn_relu_pool_general}}};

static ConvBlockCall call_of_sizes(const cuda_ops_conv_bn_relu_pool_sizes &sizes, cuda_ops_dtype dtype)
{
    ConvBlockCall call = {};
    call.sizes = sizes;
    call.dtype = call.weight_dtype = dtype;
    return call;
}

extern "C" cuda_ops_status cuda_ops_conv_bn_relu_pool_plan_cuda(cuda_ops_conv_bn_relu_pool_plan *plan,
                                                                const cuda_ops_conv_bn_relu_pool_sizes *sizes,
                                                                cuda_ops_dtype dtype)
{
    const int row = find_path(table, call_of_sizes(*sizes, dtype), current_device());
    if (row == COUNT)
        return no_path(table);
    const int64_t channels = sizes->conv.out_channels;
    switch (PATHS[row]) {
    case CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL:
        *plan = {PATHS[row], 1, 0, 0, 0, 0, 0, conv_bn_relu_pool_one_channel_statistics(channels)};
        break;
    case CUDA_OPS_CONV_BN_RELU_POOL_SM90:
    case CUDA_OPS_CONV_BN_RELU_POOL_TILED:
        *plan = {PATHS[row], 0, 1, 1, 1, 1, 1, 2 * channels};
        break;
    case CUDA_OPS_CONV_BN_RELU_POOL_GENERAL:
        *plan = {PATHS[row], 1, 1, 0, 1, 1, 1, 2 * channels};
        break;
    }
    return CUDA_OPS_SUCCESS;
}

extern "C" int64_t cuda_ops_conv_bn_relu_pool_workspace_cuda(const cuda_ops_conv_bn_relu_pool_sizes *sizes,
                                                             cuda_ops_dtype dtype)
{
    const ConvBlockCall call = call_of_sizes(*sizes, dtype);
    const Device device = current_device();
    const int row = find_path(table, call, device);
    return row == COUNT || sizes->conv.batch == 0 ? 0 : table.rows[row].workspace(call, device);
}

extern "C" int cuda_ops_conv_bn_relu_pool_paths_cuda(cuda_ops_path_report *reports, int room,
                                                     const cuda_ops_conv_bn_relu_pool_sizes *sizes,
                                                     cuda_ops_dtype dtype, const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, call_of_sizes(*sizes, dtype), device);
}

// No fallback to another row: backward's path must be the one whose forward stored the intermediate results.
static cuda_ops_status run(const ConvBlockCall &call)
{
    const Device device = current_device();
    const int row = find_path(table, call, device);
    return row == COUNT ? no_path(table) : table.rows[row].launch(call, device);
}

extern "C" cuda_ops_status cuda_ops_conv_bn_relu_pool_forward_cuda(
    void *output, void *conv_output, uint8_t *argmax, void *maximum, double *statistics, void *workspace,
    const cuda_ops_running_statistics *running, const void *input, const void *weight, const void *bias,
    const cuda_ops_norm_parameters *norm, const cuda_ops_conv_bn_relu_pool_sizes *sizes, cuda_ops_dtype dtype,
    cuda_ops_dtype weight_dtype, cuda_ops_stream stream)
{
    if (sizes->conv.batch == 0)
        return CUDA_OPS_SUCCESS;
    const cuda_ops_running_statistics none = {nullptr, nullptr, CUDA_OPS_FLOAT32, nullptr, 0.0};
    ConvBlockCall call = call_of_sizes(*sizes, dtype);
    call.weight_dtype = weight_dtype;
    call.output = output, call.conv_output = conv_output, call.argmax = argmax, call.maximum = maximum;
    call.statistics = statistics, call.running = running ? running : &none;
    call.input = input, call.weight = weight, call.bias = bias, call.norm = norm;
    call.workspace = workspace, call.stream = stream;
    return run(call);
}

extern "C" cuda_ops_status cuda_ops_conv_bn_relu_pool_backward_cuda(
    void *grad_input, void *grad_weight, void *grad_bias, void *grad_norm_weight, void *grad_norm_bias, void *workspace,
    const void *grad_output, const uint8_t *argmax, const void *maximum, const void *conv_output,
    const double *statistics, const void *input, const void *weight, const cuda_ops_norm_parameters *norm,
    const cuda_ops_conv_bn_relu_pool_sizes *sizes, cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
    cuda_ops_stream stream)
{
    if (sizes->conv.batch == 0)
        return CUDA_OPS_SUCCESS;
    ConvBlockCall call = call_of_sizes(*sizes, dtype);
    call.backward = true;
    call.weight_dtype = weight_dtype;
    call.grad_input = grad_input, call.grad_weight = grad_weight, call.grad_bias = grad_bias;
    call.grad_norm_weight = grad_norm_weight, call.grad_norm_bias = grad_norm_bias;
    call.grad_output = grad_output, call.input = input, call.weight = weight, call.norm = norm;
    // Read-only in this pass.
    call.argmax = (uint8_t *)argmax, call.maximum = (void *)maximum, call.conv_output = (void *)conv_output;
    call.statistics = (double *)statistics;
    call.workspace = workspace, call.stream = stream;
    return run(call);
}
