// conv2d, padded path: tensor cores where a group's channels are no whole vectors of 16 bytes, which TMA and cp.async
// cannot read. The images that the product reads are copied to channels_last with zeros behind each group's channels
// (pad_channels.cu), and sm90_halo, grouped, sm90 or mma computes the product of the copies; the weight is padded where
// those copy it anyway, or sum up splits of its gradient. They write rows of any length, so that the result is no copy,
// but where it is not channels_last: then it is transposed in the end.
//
// A channel that is not there is zero in the image and in the weight, so that non-finite values stay where they are.
#include "common/aligned_vector.cuh"
#include "conv2d/choice.h"
#include "conv2d/pad_channels.h"
#include "conv2d/relayout.h"
#include "cuda_ops/transpose_images.h"

static constexpr double COPY_START = 2, COPY_RATE = 2e6; // on an H200: microseconds; bytes a microsecond

// The call on copies, and what is copied.
struct Padded {
    ConvCall call;
    bool pads_input, pads_output, transposes;
    ChannelPadding input, output;
    size_t input_bytes, output_bytes, result_bytes; // of the workspace, in this order
};

static int64_t element_size(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

static Padded padded_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t element = element_size(call), vector = 16 / element;
    const int64_t channels = s.in_channels / s.groups, outs = s.out_channels / s.groups;
    const bool reads_input = call.pass != CUDA_OPS_CONV2D_BACKWARD_INPUT;
    const bool reads_output = call.pass != CUDA_OPS_CONV2D_FORWARD;
    const bool input_is_last = conv2d_is_channels_last(s.input_channels_last, s.in_channels, s.in_height, s.in_width);
    const bool output_is_last =
        conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
    Padded padded = {};
    padded.input = {s.batch,      s.in_height * s.in_width, s.groups, channels, ceil_div(channels, vector) * vector,
                    input_is_last};
    padded.output = {s.batch, s.out_height * s.out_width,      s.groups,
                     outs,    ceil_div(outs, vector) * vector, output_is_last};
    padded.pads_input = reads_input && (channels % vector != 0 || !input_is_last);
    padded.pads_output = reads_output && (outs % vector != 0 || !output_is_last);
    ConvCall &inner = padded.call;
    inner = call;
    inner.sizes.input_channels_last = inner.sizes.output_channels_last = 1;
    const auto bytes_of = [&](const ChannelPadding &p) {
        return conv2d_round_to_256(p.images * p.pixels * p.groups * p.padded * element);
    };
    char *workspace = (char *)call.workspace; // null where only the sizes are asked about
    const auto reserve = [&](size_t bytes) {
        char *const at = workspace;
        workspace = workspace ? workspace + bytes : nullptr;
        return at;
    };
    if (padded.pads_input) {
        padded.input_bytes = bytes_of(padded.input);
        inner.input = reserve(padded.input_bytes);
        inner.sizes.in_channels = s.groups * padded.input.padded;
    }
    if (padded.pads_output) {
        padded.output_bytes = bytes_of(padded.output);
        inner.output = reserve(padded.output_bytes);
        inner.sizes.out_channels = s.groups * padded.output.padded;
    }
    if (inner.sizes.in_channels != s.in_channels || inner.sizes.out_channels != s.out_channels) {
        inner.weight_outs = outs;
        inner.weight_channels = channels;
    }
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    padded.transposes = call.pass != CUDA_OPS_CONV2D_BACKWARD_WEIGHT && !(forward ? output_is_last : input_is_last);
    if (padded.transposes) {
        const ChannelPadding &result = forward ? padded.output : padded.input;
        padded.result_bytes =
            conv2d_round_to_256(result.images * result.pixels * result.groups * result.channels * element);
        inner.result = reserve(padded.result_bytes);
    }
    inner.workspace = workspace;
    return padded;
}

// The path of the product of the copies.
struct Inner {
    Answer (*supports)(const ConvCall &call, ConvDevice device);
    size_t (*workspace)(const ConvCall &call, ConvDevice device);
    cuda_ops_status (*launch)(const ConvCall &call, ConvDevice device);
    double microseconds;
};

static Inner inner_of(const ConvCall &call, ConvDevice device)
{
    const Inner none = {nullptr, nullptr, nullptr, 0};
    const bool sm90 = conv2d_sm90_supports(call, device), mma = conv2d_mma_supports(call, device);
    const double sm90_time = sm90 ? conv2d_sm90_microseconds(call, device) : 0;
    const double mma_time = mma ? conv2d_mma_microseconds(call, device) : 0;
    if (conv2d_grouped_supports(call, device) && conv2d_grouped_is_fast(call, device))
        return {conv2d_grouped_supports, conv2d_grouped_workspace, conv2d_grouped,
                conv2d_grouped_microseconds(call, device)};
    // The halo is the faster one where it says so; the time is an upper bound.
    if (sm90 && conv2d_sm90_halo_supports(call, device) && conv2d_sm90_halo_is_fast(call, device))
        return {conv2d_sm90_halo_supports, conv2d_sm90_halo_workspace, conv2d_sm90_halo, sm90_time};
    if (sm90 && (!mma || sm90_time <= mma_time))
        return {conv2d_sm90_supports, conv2d_sm90_workspace, conv2d_sm90, sm90_time};
    return mma ? Inner{conv2d_mma_supports, conv2d_mma_workspace, conv2d_mma, mma_time} : none;
}

Answer conv2d_padded_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    if (!tf32 && call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return CONV_NEEDS_TENSOR_CORES;
    if (device.capability < 80)
        return NEEDS_80;
    const Padded padded = padded_of(call);
    if (padded.call.weight_outs == 0)
        return no("the channels that it reads are whole vectors of 16 bytes");
    if (s.kernel_height == 1 && s.kernel_width == 1 && s.groups == 1 && s.stride_height == 1 && s.stride_width == 1 &&
        s.padding_top == 0 && s.padding_left == 0 && s.out_height == s.in_height && s.out_width == s.in_width)
        return no("of 1x1 kernels gemm pads the matrices");
    if ((padded.pads_input && !conv2d_can_pad_channels(padded.input)) ||
        (padded.pads_output && !conv2d_can_pad_channels(padded.output)) ||
        cuda_ops_conv2d_check_sizes(&padded.call.sizes) != CUDA_OPS_SUCCESS)
        return CONV_IS_LARGE;
    return inner_of(padded.call, device).launch ? YES : no("no tensor-core path takes the padded tensors");
}

// Of an image read once and written once.
static double copy_time(size_t bytes)
{
    return bytes > 0 ? COPY_START + 2 * (double)bytes / COPY_RATE : 0;
}

double conv2d_padded_microseconds(const ConvCall &call, ConvDevice device)
{
    const Padded padded = padded_of(call);
    return inner_of(padded.call, device).microseconds + copy_time(padded.input_bytes) + copy_time(padded.output_bytes) +
           copy_time(padded.result_bytes);
}

Answer conv2d_padded_is_fast(const ConvCall &call, ConvDevice device)
{
    const double time = conv2d_padded_microseconds(call, device);
    // Simt's model is of one group. In those of 6 to 18 channels that were measured it takes 1.3 to 4 times as long.
    constexpr double GROUPS_SLOWER = 1.5;
    if (time >= (call.sizes.groups > 1 ? GROUPS_SLOWER : 1) * conv2d_simt_microseconds(call, device))
        return no("the copies and the product would take longer than simt");
    return conv2d_winograd_supports(call, device) && conv2d_winograd_is_fast(call, device) &&
                   time >= conv2d_winograd_microseconds(call, device)
               ? no("the copies and the product would take longer than winograd")
               : YES;
}

size_t conv2d_padded_workspace(const ConvCall &call, ConvDevice device)
{
    const Padded padded = padded_of(call);
    const Inner inner = inner_of(padded.call, device);
    return padded.input_bytes + padded.output_bytes + padded.result_bytes + inner.workspace(padded.call, device);
}

cuda_ops_status conv2d_padded(const ConvCall &call, ConvDevice device)
{
    if (!call.workspace)
        return CUDA_OPS_INVALID_ARGUMENT;
    const Padded padded = padded_of(call);
    const Inner inner = inner_of(padded.call, device);
    if (!inner.launch || !inner.supports(padded.call, device))
        return CUDA_OPS_INVALID_ARGUMENT;
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (padded.pads_input)
        status =
            conv2d_pad_channels((void *)padded.call.input, call.input, padded.input, element_size(call), call.stream);
    if (padded.pads_output && status == CUDA_OPS_SUCCESS)
        status = conv2d_pad_channels((void *)padded.call.output, call.output, padded.output, element_size(call),
                                     call.stream);
    if (status == CUDA_OPS_SUCCESS)
        status = inner.launch(padded.call, device);
    if (status != CUDA_OPS_SUCCESS || !padded.transposes)
        return status;
    const ChannelPadding &result = call.pass == CUDA_OPS_CONV2D_FORWARD ? padded.output : padded.input;
    return cuda_ops_transpose_images_cuda(call.result, padded.call.result, result.images, result.pixels,
                                          result.groups * result.channels, call.dtype, call.stream);
}
