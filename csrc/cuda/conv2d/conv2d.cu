// conv2d, its launchers of the C API and its table of paths:
//
//   output[n][o][y][x] = bias[o] + sum over c, r, s of weight[o][c][r][s] *
//                                               input[n][c][y * stride - padding + r * dilation][alike in x]
//
// Forward and the gradients of input and weight check the sizes, then ask the table's rows in order for the first that
// supports the call and is fast at its size. Where that is not sure to be the fastest, of one group, its expected time is
// compared with others' (fastest). bias.cu has the gradient of the bias.
#include "cuda_ops/conv2d.h"

#include <float.h>

#include "conv2d/choice.h"
#include "conv2d/paths.h"

// sm90's slices of k are of one tap and 128 bytes of channels. Where there are no more than 16, seven eighths of its
// products are of zeros; the mma path leaves no gaps between taps. With groups, slices and tiles end with each of them.
static Answer sm90_is_fast(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.groups > 1 && conv2d_mma_supports(call, device))
        return conv2d_sm90_microseconds(call, device) <= conv2d_mma_microseconds(call, device)
                   ? YES
                   : no("groups have so few channels that mma's smaller slices and tiles take less time");
    const int64_t summed = call.pass == CUDA_OPS_CONV2D_FORWARD ? s.in_channels : s.out_channels;
    const int64_t bytes = summed * (call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2);
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT || bytes > 16 || s.kernel_height * s.kernel_width == 1 ||
                   !conv2d_mma_supports(call, device)
               ? YES
               : no("most of its products would be of channels that are not there");
}

// The table of paths, in the order in which they are asked. The last row takes everything.
static const ConvPath PATHS[] = {
    {CUDA_OPS_CONV2D_PATCHES, "patches", "conv2d/patches/",
     "conv2d_patches_forward_kernel conv2d_patches_kernel conv2d_patches_input_kernel conv2d_patches_weight_kernel "
     "conv2d_rectangles_weight_kernel conv2d_rectangles_input_kernel",
     conv2d_patches_supports, conv2d_patches_is_fast, conv2d_patches_applies, conv2d_patches_workspace, conv2d_patches},
    {CUDA_OPS_CONV2D_FEW_CHANNELS, "few_channels", "conv2d/few_channels/",
     "conv2d_few_channels_forward_kernel conv2d_few_channels_backward_input_kernel "
     "conv2d_few_channels_backward_input_small_filter_kernel conv2d_few_channels_backward_input_fma_kernel "
     "conv2d_few_channels_backward_input_stride2_kernel conv2d_few_channels_backward_input_stride2_fma_kernel "
     "conv2d_few_channels_backward_weight_kernel",
     conv2d_few_channels_supports, conv2d_few_channels_is_fast, conv2d_applies_all, conv2d_few_channels_workspace,
     conv2d_few_channels},
    {CUDA_OPS_CONV2D_GEMM_1X1, "gemm_1x1", "conv2d/gemm_1x1.cu", "", conv2d_gemm_1x1_supports, conv2d_gemm_1x1_is_fast,
     conv2d_gemm_1x1_applies, conv2d_gemm_1x1_workspace, conv2d_gemm_1x1},
    {CUDA_OPS_CONV2D_DEPTHWISE, "depthwise", "conv2d/depthwise/",
     "conv2d_depthwise_forward_contiguous_kernel "
     "conv2d_depthwise_forward_unrolled_kernel conv2d_depthwise_backward_input_unrolled_kernel "
     "conv2d_depthwise_staged_kernel conv2d_depthwise_backward_weight_unrolled_kernel "
     "conv2d_depthwise_forward_any_kernel conv2d_depthwise_backward_input_any_kernel "
     "conv2d_depthwise_forward_kernel conv2d_depthwise_backward_input_kernel "
     "conv2d_depthwise_backward_weight_contiguous_kernel conv2d_depthwise_backward_weight_channels_last_kernel "
     "conv2d_depthwise_backward_weight_any_kernel conv2d_depthwise_backward_weight_kernel",
     conv2d_depthwise_supports, conv2d_depthwise_is_fast, conv2d_depthwise_applies, conv2d_depthwise_workspace,
     conv2d_depthwise},
    {CUDA_OPS_CONV2D_IM2COL, "im2col", "conv2d/im2col.cu", "conv2d_im2col_kernel conv2d_col2im_kernel",
     conv2d_im2col_supports, conv2d_im2col_is_fast, nullptr, conv2d_im2col_workspace, conv2d_im2col},
    {CUDA_OPS_CONV2D_SM90_HALO, "sm90_halo", "conv2d/sm90_halo/", "conv2d_sm90_halo_kernel", conv2d_sm90_halo_supports,
     conv2d_sm90_halo_is_fast, conv2d_applies_all, conv2d_sm90_halo_workspace, conv2d_sm90_halo},
    {CUDA_OPS_CONV2D_GROUPED, "grouped", "conv2d/grouped/",
     "conv2d_grouped_kernel conv2d_grouped_sm90_kernel conv2d_grouped_weight_kernel "
     "conv2d_grouped_weight_float32_kernel",
     conv2d_grouped_supports, conv2d_grouped_is_fast, nullptr, conv2d_grouped_workspace, conv2d_grouped},
    {CUDA_OPS_CONV2D_SM90, "sm90", "conv2d/sm90/",
     "conv2d_sm90_kernel conv2d_sm90_backward_input_strided_kernel conv2d_sm90_cluster_kernel", conv2d_sm90_supports,
     sm90_is_fast, conv2d_applies_all, conv2d_sm90_workspace, conv2d_sm90},
    {CUDA_OPS_CONV2D_MMA, "mma", "conv2d/mma/", "conv2d_mma_forward_kernel conv2d_mma_backward_weight_kernel",
     conv2d_mma_supports, nullptr, conv2d_applies_all, conv2d_mma_workspace, conv2d_mma},
    {CUDA_OPS_CONV2D_PADDED, "padded", "conv2d/padded.cu",
     "conv2d_pad_channels_last_kernel conv2d_pad_channels_contiguous_kernel", conv2d_padded_supports,
     conv2d_padded_is_fast, nullptr, conv2d_padded_workspace, conv2d_padded},
    {CUDA_OPS_CONV2D_WINOGRAD, "winograd", "conv2d/winograd/",
     "conv2d_winograd_image_kernel conv2d_winograd_weight_kernel conv2d_winograd_target_kernel "
     "conv2d_winograd_grad_weight_kernel",
     conv2d_winograd_supports, conv2d_winograd_is_fast, nullptr, conv2d_winograd_workspace, conv2d_winograd},
    {CUDA_OPS_CONV2D_SIMT, "simt", "conv2d/simt.cu", "conv2d_simt_kernel", conv2d_simt_supports, nullptr, nullptr,
     conv2d_simt_workspace, conv2d_simt},
};

static bool is_empty(const cuda_ops_conv2d_sizes &s)
{
    return s.batch < 1 || s.in_channels < 1 || s.in_height < 1 || s.in_width < 1 || s.out_channels < 1 ||
           s.out_height < 1 || s.out_width < 1;
}

// Sums over nothing, and sizes of 0, are the simt path's alone: no other divides by them.
static Answer supports(const ConvPath &path, const ConvCall &call, ConvDevice device)
{
    if (is_empty(call.sizes) && path.number != CUDA_OPS_CONV2D_SIMT)
        return no("there are no channels, or no pixels");
    if (call.sizes.activation != CUDA_OPS_CONV2D_NONE &&
        !(call.pass == CUDA_OPS_CONV2D_FORWARD && path.applies && path.applies(call)))
        return no("its epilogue has no such activation");
    return path.supports(call, device);
}

// Whether a row takes a call that asks for path `number`, whatever others would take.
static bool takes(const ConvPath &path, const ConvCall &call, int number, ConvDevice device)
{
    if (!supports(path, call, device))
        return false;
    return number == CUDA_OPS_CONV2D_FASTEST ? !path.is_fast || path.is_fast(call, device) : number == path.number;
}

static ConvCall call_of_sizes(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype)
{
    ConvCall call = {};
    call.pass = pass;
    call.sizes = *sizes;
    call.dtype = dtype;
    return call;
}

// The time that a path is expected to take for a call of one group that it supports; DBL_MAX where that is not known.
static double microseconds_of(const ConvPath &path, const ConvCall &call, ConvDevice device)
{
    switch (path.number) {
    case CUDA_OPS_CONV2D_SIMT:
        return conv2d_simt_expected_microseconds(call, device);
    case CUDA_OPS_CONV2D_SM90:
        return conv2d_sm90_microseconds(call, device);
    case CUDA_OPS_CONV2D_GEMM_1X1:
        return conv2d_gemm_1x1_microseconds(call, device);
    case CUDA_OPS_CONV2D_SM90_HALO:
        return conv2d_sm90_halo_microseconds(call, device);
    case CUDA_OPS_CONV2D_FEW_CHANNELS:
        return conv2d_few_channels_microseconds(call, device);
    case CUDA_OPS_CONV2D_MMA:
        return conv2d_mma_microseconds(call, device);
    case CUDA_OPS_CONV2D_WINOGRAD:
        return conv2d_winograd_expected_microseconds(call, device);
    case CUDA_OPS_CONV2D_PADDED:
        return conv2d_padded_microseconds(call, device);
    case CUDA_OPS_CONV2D_IM2COL:
        return conv2d_im2col_microseconds(call, device);
    case CUDA_OPS_CONV2D_PATCHES:
        return conv2d_patches_microseconds(call, device);
    default:
        return DBL_MAX;
    }
}

static bool is_1x1(const ConvCall &call)
{
    return call.sizes.kernel_height * call.sizes.kernel_width == 1;
}

// From so many channels on the tensor cores' paths have no rival where there is more than one tap, and most calls are
// spared the comparison.
static constexpr int64_t FILLS_SLICES = 64;

// The time that is compared: of a path of which none is known, DBL_MAX.
static double expected_of(const ConvPath &path, const ConvCall &call, ConvDevice device)
{
    return conv2d_corrected_microseconds(path.number, microseconds_of(path, call, device), call);
}

// Whether the first row that takes a call may be slower than one of those that are compared.
static bool is_compared(int number, const ConvCall &call, ConvDevice device)
{
    switch (number) {
    case CUDA_OPS_CONV2D_SIMT:
    case CUDA_OPS_CONV2D_WINOGRAD:
    case CUDA_OPS_CONV2D_PADDED:
    case CUDA_OPS_CONV2D_IM2COL:
    case CUDA_OPS_CONV2D_PATCHES:
        return true;
    case CUDA_OPS_CONV2D_SM90:
    case CUDA_OPS_CONV2D_MMA:
        return call.sizes.in_channels < FILLS_SLICES || call.sizes.out_channels < FILLS_SLICES || is_1x1(call);
    case CUDA_OPS_CONV2D_FEW_CHANNELS:
        return conv2d_few_channels_microseconds(call, device) < DBL_MAX;
    default:
        return false;
    }
}

// Whether a row is compared with the first that takes a call. few_channels' time is known least: it is taken only where
// the table has it, and left only for paths whose times are known at so few channels.
static bool is_contender(const ConvPath &path, int first, const ConvCall &call, ConvDevice device)
{
    switch (path.number) {
    case CUDA_OPS_CONV2D_FEW_CHANNELS:
    case CUDA_OPS_CONV2D_DEPTHWISE:
    case CUDA_OPS_CONV2D_GROUPED:
        return false;
    case CUDA_OPS_CONV2D_GEMM_1X1:
        return (first == CUDA_OPS_CONV2D_SIMT || first == CUDA_OPS_CONV2D_PATCHES || first == CUDA_OPS_CONV2D_PADDED ||
                first == CUDA_OPS_CONV2D_IM2COL) &&
               supports(path, call, device);
    case CUDA_OPS_CONV2D_PADDED:
    case CUDA_OPS_CONV2D_SM90_HALO:
        return first != CUDA_OPS_CONV2D_FEW_CHANNELS && supports(path, call, device);
    case CUDA_OPS_CONV2D_MMA:
    case CUDA_OPS_CONV2D_SM90:
        return !is_1x1(call) && supports(path, call, device);
    default:
        return (first != CUDA_OPS_CONV2D_FEW_CHANNELS || !is_1x1(call)) && supports(path, call, device);
    }
}

// Of what the table's row is expected to take, what another path takes at the most to be chosen instead.
static constexpr double AS_FAST = 0.95;

// The row for a call of any path, whose pointers make no difference; NULL: none takes it.
static const ConvPath *fastest_alone(const ConvCall &of, ConvDevice device)
{
    const ConvPath *best = nullptr;
    for (const ConvPath &path : PATHS)
        if (!best && takes(path, of, CUDA_OPS_CONV2D_FASTEST, device))
            best = &path;
    // The times are an H100's; those of GPUs whose memory is slower beside their multiply-adds are not in proportion.
    if (!best || !conv2d_winograd_is_cheap(device) || device.multiprocessors < 1 || of.sizes.groups != 1 ||
        is_empty(of.sizes) || of.dtype == CUDA_OPS_FLOAT64 || !is_compared(best->number, of, device))
        return best;
    const int first = best->number;
    double least = AS_FAST * expected_of(*best, of, device);
    for (const ConvPath &path : PATHS) {
        if (path.number == first || !is_contender(path, first, of, device))
            continue;
        const double time = expected_of(path, of, device);
        if (time < least) {
            least = time;
            best = &path;
        }
    }
    return best;
}

// The choice does not depend on an activation, so that a convolution is made alike with it and without; where the path
// has none, the first one that does.
static const ConvPath *fastest(const ConvCall &call, ConvDevice device)
{
    const ConvCall of = call_of_sizes(call.pass, &call.sizes, call.dtype);
    ConvCall alone = of;
    alone.sizes.activation = CUDA_OPS_CONV2D_NONE;
    const ConvPath *const best = fastest_alone(alone, device);
    if (!best || supports(*best, of, device))
        return best;
    for (const ConvPath &path : PATHS)
        if (takes(path, of, CUDA_OPS_CONV2D_FASTEST, device))
            return &path;
    return nullptr;
}

// The row for a call that asks for path `number`.
static const ConvPath *chosen_for(const ConvCall &call, int number, ConvDevice device)
{
    if (number == CUDA_OPS_CONV2D_FASTEST)
        return fastest(call, device);
    for (const ConvPath &path : PATHS)
        if (takes(path, call, number, device))
            return &path;
    return nullptr;
}

// Of few_channels' times that of the gradient of input under strides alone was ever held against a copy.
double conv2d_microseconds(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const ConvPath *const path = fastest(call, device);
    const bool is_known =
        path && (path->number != CUDA_OPS_CONV2D_FEW_CHANNELS ||
                 (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && s.stride_height * s.stride_width > 1));
    return is_known ? microseconds_of(*path, call, device) : DBL_MAX;
}

static double expected_microseconds(const ConvCall &call, ConvDevice device)
{
    const ConvPath *const path = fastest(call, device);
    return path ? expected_of(*path, call, device) : DBL_MAX;
}

extern "C" const char *cuda_ops_conv2d_path_name_cuda(int number)
{
    for (const ConvPath &path : PATHS)
        if (path.number == number)
            return path.name;
    return nullptr;
}

static int path_on(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path,
                   ConvDevice device)
{
    if (cuda_ops_conv2d_check_sizes(sizes) != CUDA_OPS_SUCCESS)
        return -1;
    const ConvPath *const row = chosen_for(call_of_sizes(pass, sizes, dtype), path, device);
    return row ? row->number : -1;
}

extern "C" int cuda_ops_conv2d_path_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                         cuda_ops_dtype dtype, int path)
{
    return path_on(pass, sizes, dtype, path, current_device());
}

extern "C" int cuda_ops_conv2d_applies_cuda(const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path)
{
    cuda_ops_conv2d_sizes without = *sizes;
    without.activation = CUDA_OPS_CONV2D_NONE;
    const int number = cuda_ops_conv2d_path_cuda(CUDA_OPS_CONV2D_FORWARD, &without, dtype, path);
    const ConvCall call = call_of_sizes(CUDA_OPS_CONV2D_FORWARD, sizes, dtype);
    for (const ConvPath &row : PATHS)
        if (row.number == number)
            return row.applies && row.applies(call);
    return 0;
}

extern "C" int cuda_ops_conv2d_paths_cuda(cuda_ops_path_report *reports, int room, cuda_ops_conv2d_pass pass,
                                          const cuda_ops_conv2d_sizes *sizes, cuda_ops_dtype dtype, int path,
                                          const cuda_ops_device_facts *device)
{
    if (cuda_ops_conv2d_check_sizes(sizes) != CUDA_OPS_SUCCESS)
        return -1;
    const ConvCall call = call_of_sizes(pass, sizes, dtype);
    const ConvDevice on = device ? *device : current_device();
    const ConvPath *const chosen = chosen_for(call, path, on);
    int count = 0;
    for (const ConvPath &row : PATHS) {
        const Answer can = supports(row, call, on);
        Answer is_fast = !can || &row == chosen || !row.is_fast ? YES : row.is_fast(call, on);
        if (is_fast && path == CUDA_OPS_CONV2D_FASTEST && &row < chosen)
            is_fast = no("another path is expected to take less time");
        if (count < room)
            reports[count] = {row.name, row.file,       row.kernels,   can ? is_fast.why_not : can.why_not,
                              can,      can && is_fast, &row == chosen};
        count++;
    }
    return count;
}

// On an H100: microseconds to start the copies from contiguous to channels_last and back, and for a megabyte of each
// (transpose_images.cu). Of groups: bytes that they move in a microsecond, and multiply-adds that simt makes in one.
static constexpr double COPIES_START = 5, COPIES_MEGABYTE = 0.8, COPY_RATE = 3e6, SIMT_RATE = 13e6;

// Whether a path is worth copying images to channels_last for.
static bool is_of_channels_last(int number)
{
    return number == CUDA_OPS_CONV2D_SM90 || number == CUDA_OPS_CONV2D_SM90_HALO || number == CUDA_OPS_CONV2D_MMA ||
           number == CUDA_OPS_CONV2D_GROUPED || number == CUDA_OPS_CONV2D_GEMM_1X1 || number == CUDA_OPS_CONV2D_IM2COL;
}

// The same of groups, where simt is taken to need four times as long as the path that is better; grouped has a model of
// its time, in float32 too.
static bool groups_want_channels_last(const ConvCall &call, const ConvCall &last, int present, int better,
                                      double copied, ConvDevice on)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (present != CUDA_OPS_CONV2D_SIMT && present != CUDA_OPS_CONV2D_WINOGRAD)
        return false;
    const double depth = (double)(s.in_channels / s.groups * s.kernel_height * s.kernel_width);
    const double products = (double)s.batch * (double)(s.out_channels * s.out_height * s.out_width) * depth;
    const bool grouped = better == CUDA_OPS_CONV2D_GROUPED;
    const double simt = grouped ? conv2d_simt_microseconds(call, on) : products / SIMT_RATE;
    const double then = grouped ? conv2d_grouped_microseconds(last, on) : 0.25 * simt;
    const double now = present == CUDA_OPS_CONV2D_WINOGRAD ? conv2d_winograd_microseconds(call, on) : simt;
    return now - then > 2 * copied / COPY_RATE + 4;
}

extern "C" int cuda_ops_conv2d_wants_channels_last_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                                        cuda_ops_dtype dtype, int path,
                                                        const cuda_ops_device_facts *device)
{
    const ConvDevice on = device ? *device : current_device();
    cuda_ops_conv2d_sizes of_last = *sizes;
    of_last.input_channels_last = of_last.output_channels_last = 1;
    if (path != CUDA_OPS_CONV2D_FASTEST || dtype == CUDA_OPS_FLOAT64)
        return 0;
    const int present = path_on(pass, sizes, dtype, path, on), better = path_on(pass, &of_last, dtype, path, on);
    const bool by_image = present == CUDA_OPS_CONV2D_GEMM_1X1 && conv2d_gemm_1x1_is_by_image(*sizes);
    if (present < 0 || (present == better && !by_image) || !is_of_channels_last(better))
        return 0;
    const ConvCall call = call_of_sizes(pass, sizes, dtype), last = call_of_sizes(pass, &of_last, dtype);
    const double input = (double)sizes->batch * (double)(sizes->in_channels * sizes->in_height * sizes->in_width);
    const double output = (double)sizes->batch * (double)(sizes->out_channels * sizes->out_height * sizes->out_width);
    const double copied = ((sizes->input_channels_last ? 0 : input) + (sizes->output_channels_last ? 0 : output)) *
                          (double)(dtype == CUDA_OPS_FLOAT32 ? 4 : 2);
    if (sizes->groups > 1)
        return groups_want_channels_last(call, last, present, better, copied, on);
    const double now = conv2d_microseconds(call, on), then = conv2d_microseconds(last, on);
    const double copies = COPIES_START + COPIES_MEGABYTE * copied / 1e6;
    // Of two that take as long the copies' time is the one that is known better.
    constexpr double AS_LONG = 1.2;
    if (now >= DBL_MAX || then + copies >= AS_LONG * now)
        return 0;
    const double expected = expected_microseconds(call, on);
    return expected >= DBL_MAX || expected_microseconds(last, on) + copies < expected;
}

extern "C" size_t cuda_ops_conv2d_workspace_cuda(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes *sizes,
                                                 cuda_ops_dtype dtype, int number)
{
    if (cuda_ops_conv2d_check_sizes(sizes) != CUDA_OPS_SUCCESS)
        return 0;
    const ConvCall call = call_of_sizes(pass, sizes, dtype);
    const ConvDevice device = current_device();
    // The call's pointers, which are not known here, may be less aligned than a row takes: then a later one runs.
    const ConvPath *const chosen = chosen_for(call, number, device);
    size_t bytes = 0;
    for (const ConvPath &path : PATHS)
        if (path.workspace && (&path == chosen || takes(path, call, number, device))) {
            const size_t wanted = path.workspace(call, device);
            bytes = wanted > bytes ? wanted : bytes;
        }
    return bytes;
}

// A path may find at its launch that it cannot after all (a driver that encodes no tensor maps), or not take the call's
// pointers: then the rows that take it are tried in order.
static cuda_ops_status launch_first(const ConvCall &call, int number)
{
    const ConvDevice device = current_device();
    cuda_ops_status status = CUDA_OPS_INVALID_ARGUMENT;
    const ConvPath *const chosen = chosen_for(call, number, device);
    if (chosen && supports(*chosen, call, device))
        status = chosen->launch(call, device);
    for (const ConvPath &path : PATHS) {
        if (status != CUDA_OPS_INVALID_ARGUMENT)
            break;
        if (&path != chosen && takes(path, call, number, device))
            status = path.launch(call, device);
    }
    return status;
}

extern "C" cuda_ops_status cuda_ops_conv2d_forward_cuda(void *output, const void *input, const void *weight,
                                                        const void *bias, const cuda_ops_conv2d_sizes *sizes,
                                                        void *workspace, int path, cuda_ops_dtype dtype,
                                                        cuda_ops_stream stream)
{
    const cuda_ops_status status = cuda_ops_conv2d_check_sizes(sizes);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (sizes->batch * sizes->out_channels * sizes->out_height * sizes->out_width == 0)
        return CUDA_OPS_SUCCESS;
    return launch_first(
        {CUDA_OPS_CONV2D_FORWARD, output, input, weight, nullptr, bias, workspace, *sizes, dtype, stream, 0, 0}, path);
}

extern "C" cuda_ops_status cuda_ops_conv2d_backward_input_cuda(void *grad_input, const void *grad_output,
                                                               const void *weight, const cuda_ops_conv2d_sizes *sizes,
                                                               void *workspace, int path, cuda_ops_dtype dtype,
                                                               cuda_ops_stream stream)
{
    const cuda_ops_status status = cuda_ops_conv2d_check_sizes(sizes);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (sizes->batch * sizes->in_channels * sizes->in_height * sizes->in_width == 0)
        return CUDA_OPS_SUCCESS;
    return launch_first({CUDA_OPS_CONV2D_BACKWARD_INPUT, grad_input, nullptr, weight, grad_output, nullptr, workspace,
                         *sizes, dtype, stream, 0, 0},
                        path);
}

extern "C" cuda_ops_status cuda_ops_conv2d_backward_weight_cuda(void *grad_weight, const void *grad_output,
                                                                const void *input, const cuda_ops_conv2d_sizes *sizes,
                                                                void *workspace, int path, cuda_ops_dtype dtype,
                                                                cuda_ops_stream stream)
{
    const cuda_ops_status status = cuda_ops_conv2d_check_sizes(sizes);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (sizes->out_channels * sizes->in_channels == 0)
        return CUDA_OPS_SUCCESS;
    return launch_first({CUDA_OPS_CONV2D_BACKWARD_WEIGHT, grad_weight, input, nullptr, grad_output, nullptr, workspace,
                         *sizes, dtype, stream, 0, 0},
                        path);
}
