// conv2d's gradient of the input under a stride, where patches share pixels, for few channels. grad_input is cut into
// rectangles of stride_height x stride_width pixels, of which none share any. A pixel's place in its rectangle is its
// stride phase (stride_phase.h), and all rectangles are alike:
//
//   rectangle [y][x][phase, c] = sum over (o, ky, kx) of weight[o][c][phase_y + ky stride_y][phase_x + kx stride_x]
//                                                        * grad_output[o][y - ky][x - kx]
//
// So the rectangles are a convolution of grad_output with stride 1 and ceil(kernel / stride) taps an axis, whose outputs
// are phases times channels: 48 of a stem with 11 x 11 taps, stride 4 and 3 channels. The table's fastest path makes it
// of a copy of the weight; one kernel before it copies the weight, one after it puts the rectangles side by side.
//
// Where a phase has a tap less than others, its weight is zero, and zero times an infinite grad_output would be NaN in
// pixels that this does not reach: an element that comes out as NaN is summed again, over its own taps.
#include "conv2d/choice.h"
#include "conv2d/patches/patches.cuh"
#include "conv2d/relayout.h"
#include "cuda_ops/transpose_images.h"

static constexpr int THREADS = 256;
static constexpr int64_t MOST_BYTES = 256 << 20; // of the rectangles

// What the sums are over. Strides in elements, of grad_output and of the weight.
struct RectangleSums {
    int taps_y, taps_x, stride_y, stride_x, padding_y, padding_x, kernel_height, kernel_width;
    int out_height, out_width, out_channels;
    int64_t output_n, output_o, output_y, output_x;
};

// to[phase, c][tap y][tap x][o], in the order of p's patches, which are the rectangles; taps in the order of a forward
// convolution, the last first. Zero where the kernel has no such tap, and behind the channels.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_rectangles_weight_kernel(T *to, const T *weight, int count, const __grid_constant__ Patches p,
                                    const __grid_constant__ RectangleSums sums)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const int rest = (int)i / sums.out_channels, o = (int)i - rest * sums.out_channels;
        const int line = rest / sums.taps_x, tap_x = sums.taps_x - 1 - (rest - line * sums.taps_x);
        const int k = line / sums.taps_y, tap_y = sums.taps_y - 1 - (line - k * sums.taps_y);
        const Place place = place_of(p, k);
        const int c = p.last ? place.at % p.channels : place.line / p.kernel_height;
        const int r = (p.last ? place.line : place.line % p.kernel_height) + tap_y * sums.stride_y;
        const int s = (p.last ? place.at / p.channels : place.at) + tap_x * sums.stride_x;
        const bool is_there = k < p.taken && r < sums.kernel_height && s < sums.kernel_width;
        to[i] = is_there ? weight[o * p.weight_o + c * p.weight_c + r * p.weight_y + s * p.weight_x]
                         : store_from_accumulate<T>(0);
    }
}

// grad_input[image][c][y][x] over the taps that reach it.
template <typename T>
__device__ __noinline__ T sum_of(const Patches &p, const RectangleSums &sums, const T *grad_output, const T *weight,
                                 int image, int c, int y, int x)
{
    float sum = 0;
    for (int out_y = (y + sums.padding_y) / sums.stride_y; out_y >= 0; out_y--) {
        const int r = y + sums.padding_y - out_y * sums.stride_y;
        if (r >= sums.kernel_height)
            break;
        for (int out_x = (x + sums.padding_x) / sums.stride_x; out_x >= 0 && out_y < sums.out_height; out_x--) {
            const int s = x + sums.padding_x - out_x * sums.stride_x;
            if (s >= sums.kernel_width)
                break;
            if (out_x >= sums.out_width)
                continue;
            const T *const from = grad_output + image * sums.output_n + out_y * sums.output_y + out_x * sums.output_x;
            const T *const by = weight + c * p.weight_c + r * p.weight_y + s * p.weight_x;
            for (int o = 0; o < sums.out_channels; o++)
                sum += load_as_accumulate(from[o * sums.output_o]) * load_as_accumulate(by[o * p.weight_o]);
        }
    }
    return store_from_accumulate<T>(sum);
}

// grad_input from p's patches, the rectangles, RUN elements side by side at once.
template <typename T, int RUN>
__global__ void __launch_bounds__(THREADS)
    conv2d_rectangles_input_kernel(T *grad_input, const T *rectangles, const T *grad_output, const T *weight, int count,
                                   const __grid_constant__ Patches p, const __grid_constant__ RectangleSums sums)
{
    typedef aligned_vector<T, RUN> Run;
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const int line = (int)p.by_runs.of((uint32_t)i), at = ((int)i - line * (p.length / RUN)) * RUN;
        const int image = (int)p.by_lines.of((uint32_t)line), in_image = line - image * p.lines;
        const int channel = (int)p.by_channel_height.of((uint32_t)in_image), in_y = in_image - channel * p.height;
        const int y = in_y + p.shift_y, x = at + p.shift_x;
        const int out_y = (int)p.by_step_y.of((uint32_t)y), out_x = (int)p.by_step_x.of((uint32_t)x);
        const int r = y - out_y * p.step_y, s = x - out_x * p.step_x;
        const int64_t rectangle = ((int64_t)image * p.out_height + out_y) * p.out_width + out_x;
        Run run = *(const Run *)(rectangles + rectangle * p.pitch + (channel * p.kernel_height + r) * p.run_length + s);
#pragma unroll
        for (int e = 0; e < RUN; e++) {
            const float value = load_as_accumulate(run.element[e]);
            if (value != value)
                run.element[e] = sum_of(p, sums, grad_output, weight, image, p.last ? (at + e) % p.channels : channel,
                                        in_y, p.last ? (at + e) / p.channels : at + e);
        }
        *(Run *)(grad_input + i * RUN) = run;
    }
}

// The rectangles as patches of grad_input: a call that nothing is multiplied in, whose kernel is its stride. Those of
// the padding alone are left out.
static ConvCall rectangles_of(const ConvCall &call)
{
    ConvCall of = call;
    cuda_ops_conv2d_sizes &s = of.sizes;
    s.kernel_height = s.stride_height, s.kernel_width = s.stride_width;
    s.padding_top %= s.stride_height, s.padding_left %= s.stride_width;
    s.out_height = ceil_div(s.in_height + s.padding_top, s.stride_height);
    s.out_width = ceil_div(s.in_width + s.padding_left, s.stride_width);
    return of;
}

static int64_t pitch_of(const cuda_ops_conv2d_sizes &s)
{
    return ceil_div(s.in_channels * s.stride_height * s.stride_width, VECTOR) * VECTOR;
}

// The convolution that makes the rectangles of grad_output.
static ConvCall product_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes, rectangles = rectangles_of(call).sizes;
    ConvCall product = {};
    product.pass = CUDA_OPS_CONV2D_FORWARD;
    product.dtype = call.dtype;
    product.stream = call.stream;
    cuda_ops_conv2d_sizes &p = product.sizes;
    p.batch = s.batch;
    p.groups = 1;
    p.in_channels = s.out_channels, p.in_height = s.out_height, p.in_width = s.out_width;
    p.out_channels = pitch_of(s), p.out_height = rectangles.out_height, p.out_width = rectangles.out_width;
    p.kernel_height = ceil_div(s.kernel_height, s.stride_height);
    p.kernel_width = ceil_div(s.kernel_width, s.stride_width);
    p.stride_height = p.stride_width = p.dilation_height = p.dilation_width = 1;
    p.padding_top = p.kernel_height - 1 - s.padding_top / s.stride_height;
    p.padding_left = p.kernel_width - 1 - s.padding_left / s.stride_width;
    p.input_channels_last = p.weight_channels_last = p.output_channels_last = 1;
    p.allow_tf32 = s.allow_tf32;
    return product;
}

// Bytes of the workspace, in this order.
struct RectangleParts {
    size_t output, weight, rectangles; // grad_output in channels_last, unless it is
};

static RectangleParts parts_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes, p = product_of(call).sizes;
    const int64_t element = dtype_size(call.dtype);
    const auto bytes = [&](int64_t elements) { return conv2d_round_to_256(elements * element); };
    const bool is_last = conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
    return {is_last ? 0 : bytes(s.batch * s.out_channels * s.out_height * s.out_width),
            bytes(p.out_channels * p.kernel_height * p.kernel_width * p.in_channels),
            bytes(s.batch * p.out_height * p.out_width * p.out_channels)};
}

Answer conv2d_rectangles_supports(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("does not take float64");
    if (s.stride_height == 1 && s.stride_width == 1)
        return no("patches share pixels, and with stride 1 their sums are the convolution");
    if ((s.dilation_height > 1 && s.kernel_height > 1) || (s.dilation_width > 1 && s.kernel_width > 1))
        return no("patches share pixels, and taps are not side by side");
    // Rectangles are numbered from the first that has a pixel, which has to meet a tap in each of the product's lines.
    if (s.padding_top / s.stride_height >= ceil_div(s.kernel_height, s.stride_height) ||
        s.padding_left / s.stride_width >= ceil_div(s.kernel_width, s.stride_width))
        return no("there is more padding than kernel");
    // Within which all that the kernels count in 32 bits has room.
    const int64_t most = MOST_BYTES / dtype_size(call.dtype);
    const auto fits = [&](int64_t first, int64_t second, int64_t limit) { return first <= limit / second; };
    if (!fits(s.kernel_height, s.kernel_width, most) || !fits(s.stride_height, s.stride_width, most) ||
        !fits(s.stride_height * s.stride_width, s.in_channels, most))
        return CONV_IS_LARGE;
    const cuda_ops_conv2d_sizes p = product_of(call).sizes;
    if (!fits(p.out_height, p.out_width, most) || !fits(p.out_height * p.out_width, s.batch, most) ||
        !fits(s.batch * p.out_height * p.out_width, p.out_channels, most) ||
        !fits(p.kernel_height * p.kernel_width, p.in_channels, most) ||
        !fits(p.kernel_height * p.kernel_width * p.in_channels, p.out_channels, most) ||
        !fits(s.out_height, s.out_width, INT_MAX) || !fits(s.out_height * s.out_width, s.out_channels, INT_MAX))
        return CONV_IS_LARGE;
    return YES;
}

// As an H100 has it: to start one of the two kernels, bytes that they move in a microsecond, and how much longer all
// take than their expected times together.
static constexpr double START = 1.5, BYTES_RATE = 2.5e6, SLOWER = 1.12;

double conv2d_rectangles_microseconds(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const RectangleParts parts = parts_of(call);
    const double result =
        (double)(s.batch * s.in_channels) * (double)(s.in_height * s.in_width * dtype_size(call.dtype));
    const double bytes = 2 * (double)(parts.output + parts.weight) + (double)parts.rectangles + result;
    const double product = conv2d_microseconds(product_of(call), device);
    return SLOWER * (START * (parts.output > 0 ? 3 : 2) + bytes / BYTES_RATE) + SLOWER * product;
}

size_t conv2d_rectangles_workspace(const ConvCall &call)
{
    const RectangleParts parts = parts_of(call);
    const cuda_ops_conv2d_sizes p = product_of(call).sizes;
    return parts.output + parts.weight + parts.rectangles +
           cuda_ops_conv2d_workspace_cuda(CUDA_OPS_CONV2D_FORWARD, &p, call.dtype, CUDA_OPS_CONV2D_FASTEST);
}

template <typename T, int RUN>
static void put_side_by_side(const ConvCall &call, const void *rectangles, const void *grad_output, Patches p,
                             const RectangleSums &sums)
{
    p.by_runs = divider_by((uint32_t)(p.length / RUN));
    const int count = (int)(call.sizes.batch * p.lines * (p.length / RUN));
    launch_dependent(conv2d_rectangles_input_kernel<T, RUN>, dim3(clamp_grid(ceil_div(count, THREADS))), THREADS, 0,
                     call.stream, (T *)call.result, (const T *)rectangles, (const T *)grad_output,
                     (const T *)call.weight, count, p, sums);
}

template <typename T>
static cuda_ops_status launch(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const RectangleParts parts = parts_of(call);
    char *const transposed = (char *)call.workspace, *const weight = transposed + parts.output;
    char *const rectangles = weight + parts.weight, *const workspace = rectangles + parts.rectangles;
    const ConvCall product = product_of(call);
    const cuda_ops_conv2d_sizes &of = product.sizes;
    const Patches of_weight = conv2d_patches_of(call);
    Patches p = conv2d_patches_of(rectangles_of(call));
    p.weight_o = of_weight.weight_o, p.weight_c = of_weight.weight_c;
    p.weight_y = of_weight.weight_y, p.weight_x = of_weight.weight_x;
    RectangleSums sums = {};
    sums.taps_y = (int)of.kernel_height, sums.taps_x = (int)of.kernel_width;
    sums.stride_y = (int)s.stride_height, sums.stride_x = (int)s.stride_width;
    sums.padding_y = (int)s.padding_top, sums.padding_x = (int)s.padding_left;
    sums.kernel_height = (int)s.kernel_height, sums.kernel_width = (int)s.kernel_width;
    sums.out_height = (int)s.out_height, sums.out_width = (int)s.out_width, sums.out_channels = (int)s.out_channels;
    sums.output_n = s.out_channels * s.out_height * s.out_width;
    sums.output_o = 1, sums.output_y = s.out_width * s.out_channels, sums.output_x = s.out_channels;

    const void *grad_output = call.output;
    if (parts.output > 0) {
        const cuda_ops_status status = cuda_ops_transpose_images_cuda(
            transposed, grad_output, s.batch, s.out_channels, s.out_height * s.out_width, call.dtype, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        grad_output = transposed;
    }
    const int count = (int)(of.out_channels * of.kernel_height * of.kernel_width * of.in_channels);
    launch_dependent(conv2d_rectangles_weight_kernel<T>, dim3(clamp_grid(ceil_div(count, THREADS))), THREADS, 0,
                     call.stream, (T *)weight, (const T *)call.weight, count, p, sums);
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS)
        status = cuda_ops_conv2d_forward_cuda(rectangles, grad_output, weight, nullptr, &of, workspace,
                                              CUDA_OPS_CONV2D_FASTEST, call.dtype, call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int run = conv2d_patches_run(p, call.result, sizeof(T));
    if constexpr (sizeof(T) == 2)
        if (run == 8)
            put_side_by_side<T, 8>(call, rectangles, grad_output, p, sums);
    if (run == 4)
        put_side_by_side<T, 4>(call, rectangles, grad_output, p, sums);
    else if (run == 2)
        put_side_by_side<T, 2>(call, rectangles, grad_output, p, sums);
    else if (run == 1)
        put_side_by_side<T, 1>(call, rectangles, grad_output, p, sums);
    return launch_status();
}

cuda_ops_status conv2d_rectangles(const ConvCall &call)
{
    if (!call.workspace)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (call.dtype) {
    case CUDA_OPS_FLOAT16:
        return launch<__half>(call);
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16>(call);
    default:
        return launch<float>(call);
    }
}
