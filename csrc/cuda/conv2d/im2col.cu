// conv2d in float32, channels_last, by way of columns [pixel][tap][c], the input that each output pixel reads, as one
// call of gemm, and the gradient of the input in 16 bits, whose columns are float32 too:
//
//   output [pixel][o]      = columns [pixel][tap, c] weight^T
//   columns                = grad_output [pixel][o] weight [o][tap, c], whose sums over taps are grad_input
//   grad_weight [o][tap, c] = grad_output^T columns
//
// For what Winograd's algorithm does not take: the GEMM makes twice as many products in a time as the simt path, whose
// addresses have to be computed on the way. A thread copies, or adds up, 16 bytes of a pixel; bound by memory. With a
// 1x1 kernel and a stride the columns are the pixels that are read. In 16 bits it is for channels that are no whole
// vectors of 16 bytes.
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "conv2d/choice.h"
#include "conv2d/paths.h"
#include "conv2d/relayout.h"
#include "gemm/paths.h"

static constexpr int THREADS = 256;
static constexpr int64_t MOST_BYTES = 256 << 20; // of the columns

struct Columns {
    int in_height, in_width, out_height, out_width;
    int kernel_height, kernel_width, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
    int vectors, count; // of a pixel of the input, and of the tensor that is written
    Divider by_vectors, by_taps, by_kernel_width, by_width, by_height, by_stride_y, by_stride_x;
    // by_width and by_height: of the output in im2col, of the input in col2im
};

// The vector of columns that tap (row, column) of output pixel (image, y, x) has; false: it is padding.
__device__ __forceinline__ bool read_pixel(const Columns &c, int y, int x, int row, int column, int &at_y, int &at_x)
{
    at_y = y * c.stride_y - c.padding_y + row * c.dilation_y;
    at_x = x * c.stride_x - c.padding_x + column * c.dilation_x;
    return (unsigned int)at_y < (unsigned int)c.in_height && (unsigned int)at_x < (unsigned int)c.in_width;
}

template <typename V>
__global__ void __launch_bounds__(THREADS)
    conv2d_im2col_kernel(V *columns, const V *input, const __grid_constant__ Columns c)
{
    wait_for_predecessor();
    release_successor();
    const int taps = c.kernel_height * c.kernel_width;
    for (int64_t i = global_thread_index(); i < c.count; i += global_thread_count()) {
        const int index = (int)i, rest = (int)c.by_vectors.of((uint32_t)index), vector = index - rest * c.vectors;
        const int pixel = (int)c.by_taps.of((uint32_t)rest), tap = rest - pixel * taps;
        const int row = (int)c.by_kernel_width.of((uint32_t)tap), column = tap - row * c.kernel_width;
        const int line = (int)c.by_width.of((uint32_t)pixel), x = pixel - line * c.out_width;
        const int image = (int)c.by_height.of((uint32_t)line), y = line - image * c.out_height;
        int at_y, at_x;
        V value = {};
        if (read_pixel(c, y, x, row, column, at_y, at_x))
            value = input[(((int64_t)image * c.in_height + at_y) * c.in_width + at_x) * c.vectors + vector];
        columns[i] = value;
    }
}

__device__ __forceinline__ void add_to(float &sum, float value)
{
    sum += value;
}
__device__ __forceinline__ void add_to(float4 &sum, float4 value)
{
    sum = make_float4(sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w);
}

__device__ __forceinline__ void store_sum(float4 *to, float4 sum)
{
    *to = sum;
}
template <typename T>
__device__ __forceinline__ void store_sum(T *to, float sum)
{
    *to = store_from_accumulate<T>(sum);
}

// grad_input: the sum of what the columns have of each of its pixels, over the taps in their order. Out: float4, or an
// element of grad_input.
template <typename V, typename Out>
__global__ void __launch_bounds__(THREADS)
    conv2d_col2im_kernel(Out *grad_input, const V *columns, const __grid_constant__ Columns c)
{
    wait_for_predecessor();
    release_successor();
    const int taps = c.kernel_height * c.kernel_width;
    for (int64_t i = global_thread_index(); i < c.count; i += global_thread_count()) {
        const int index = (int)i, pixel = (int)c.by_vectors.of((uint32_t)index), vector = index - pixel * c.vectors;
        const int line = (int)c.by_width.of((uint32_t)pixel), x = pixel - line * c.in_width;
        const int image = (int)c.by_height.of((uint32_t)line), y = line - image * c.in_height;
        V sum = {};
        for (int row = 0; row < c.kernel_height; row++) {
            const int from_y = y + c.padding_y - row * c.dilation_y;
            const int out_y = from_y < 0 ? -1 : (int)c.by_stride_y.of((uint32_t)from_y);
            if (from_y < 0 || out_y * c.stride_y != from_y || out_y >= c.out_height)
                continue;
            for (int column = 0; column < c.kernel_width; column++) {
                const int from_x = x + c.padding_x - column * c.dilation_x;
                const int out_x = from_x < 0 ? -1 : (int)c.by_stride_x.of((uint32_t)from_x);
                if (from_x < 0 || out_x * c.stride_x != from_x || out_x >= c.out_width)
                    continue;
                const int64_t out = ((int64_t)image * c.out_height + out_y) * c.out_width + out_x;
                add_to(sum, columns[(out * taps + row * c.kernel_width + column) * c.vectors + vector]);
            }
        }
        store_sum(grad_input + i, sum);
    }
}

static bool is_weight(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
}

static bool is_input(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
}

static int64_t columns_elements(const cuda_ops_conv2d_sizes &s)
{
    return s.batch * s.out_height * s.out_width * s.kernel_height * s.kernel_width * s.in_channels;
}

cuda_ops_gemm_problem conv2d_im2col_problem(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t pixels = s.batch * s.out_height * s.out_width, o = s.out_channels;
    const int64_t width = s.kernel_height * s.kernel_width * s.in_channels;
    cuda_ops_gemm_problem p = {};
    p.m = is_weight(call) ? o : pixels;
    p.n = call.pass == CUDA_OPS_CONV2D_FORWARD ? o : width;
    p.k = is_weight(call) ? pixels : is_input(call) ? o : width;
    p.batch = 1;
    p.transpose_a = is_weight(call);
    p.transpose_b = call.pass == CUDA_OPS_CONV2D_FORWARD;
    p.lda = is_weight(call) ? p.m : p.k;
    p.ldb = p.transpose_b ? p.k : p.n;
    p.ldd = p.n;
    p.alpha = 1;
    p.dtype = p.bias_dtype = call.dtype;
    p.output_dtype = CUDA_OPS_FLOAT32;
    return p;
}

// Bytes of the weight, or its gradient, in the order of the columns, where that is not its own.
static size_t weight_bytes(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    return conv2d_weight_is_channels_last(s)
               ? 0
               : conv2d_round_to_256(s.out_channels * s.in_channels * s.kernel_height * s.kernel_width *
                                     (call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2));
}

Answer conv2d_im2col_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (device.multiprocessors < 1)
        return no("there is no GPU");
    const bool halves = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    if (call.dtype != CUDA_OPS_FLOAT32 && !(halves && is_input(call)))
        return no("takes float32, and of 16 bits the gradient of the input");
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    if (!conv2d_images_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    // Within which all indices of vectors are 32 bits wide.
    const int64_t most = MOST_BYTES / 4, pixels = s.in_height * s.in_width, taps = s.kernel_height * s.kernel_width;
    if (s.out_height * s.out_width > most / s.batch || pixels > most / s.batch || taps > most ||
        s.in_channels > most / (s.batch * pixels) || s.in_channels > most / taps ||
        s.batch * s.out_height * s.out_width > most / (taps * s.in_channels) ||
        s.out_channels > INT32_MAX / (taps * s.in_channels))
        return no("its columns do not fit into 256 MB");
    return gemm_path_on(conv2d_im2col_problem(call), device) >= 0 ? YES : no("the GEMM has no kernel for the product");
}

// Of one group the choice compares expected times (conv2d.cu).
Answer conv2d_im2col_is_fast(const ConvCall &call, ConvDevice device)
{
    if (call.dtype != CUDA_OPS_FLOAT32 || call.sizes.allow_tf32)
        return no("chosen only where it is expected to take less time than tensor cores");
    return conv2d_im2col_microseconds(call, device) <= conv2d_simt_expected_microseconds(call, device)
               ? YES
               : no("its copies cost more than its products save");
}

size_t conv2d_im2col_workspace(const ConvCall &call, ConvDevice)
{
    const cuda_ops_gemm_problem p = conv2d_im2col_problem(call);
    return conv2d_round_to_256(columns_elements(call.sizes) * 4) + weight_bytes(call) +
           (size_t)cuda_ops_gemm_workspace_cuda(&p, CUDA_OPS_GEMM_FASTEST);
}

static bool in_vectors(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 && call.sizes.in_channels % 4 == 0 &&
           is_aligned_16(is_input(call) ? call.result : call.input);
}

static Columns columns_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    Columns c = {};
    c.in_height = (int)s.in_height, c.in_width = (int)s.in_width;
    c.out_height = (int)s.out_height, c.out_width = (int)s.out_width;
    c.kernel_height = (int)s.kernel_height, c.kernel_width = (int)s.kernel_width;
    c.stride_y = (int)s.stride_height, c.stride_x = (int)s.stride_width;
    c.padding_y = (int)s.padding_top, c.padding_x = (int)s.padding_left;
    c.dilation_y = (int)s.dilation_height, c.dilation_x = (int)s.dilation_width;
    const int elements = in_vectors(call) ? 4 : 1;
    c.vectors = (int)(s.in_channels / elements);
    c.count =
        (int)((is_input(call) ? s.batch * s.in_height * s.in_width * s.in_channels : columns_elements(s)) / elements);
    c.by_vectors = divider_by((uint32_t)c.vectors);
    c.by_taps = divider_by((uint32_t)(s.kernel_height * s.kernel_width));
    c.by_kernel_width = divider_by((uint32_t)s.kernel_width);
    c.by_width = divider_by((uint32_t)(is_input(call) ? s.in_width : s.out_width));
    c.by_height = divider_by((uint32_t)(is_input(call) ? s.in_height : s.out_height));
    c.by_stride_y = divider_by((uint32_t)s.stride_height);
    c.by_stride_x = divider_by((uint32_t)s.stride_width);
    return c;
}

// im2col of the input, or col2im into grad_input.
static cuda_ops_status copy_columns(const ConvCall &call, void *columns)
{
    const Columns c = columns_of(call);
    const dim3 grid(clamp_grid(ceil_div(c.count, THREADS)));
    const bool vectors = in_vectors(call);
    if (is_input(call) && vectors)
        launch_dependent(conv2d_col2im_kernel<float4, float4>, grid, THREADS, 0, call.stream, (float4 *)call.result,
                         (const float4 *)columns, c);
    else if (is_input(call) && call.dtype == CUDA_OPS_BFLOAT16)
        launch_dependent(conv2d_col2im_kernel<float, __nv_bfloat16>, grid, THREADS, 0, call.stream,
                         (__nv_bfloat16 *)call.result, (const float *)columns, c);
    else if (is_input(call) && call.dtype == CUDA_OPS_FLOAT16)
        launch_dependent(conv2d_col2im_kernel<float, __half>, grid, THREADS, 0, call.stream, (__half *)call.result,
                         (const float *)columns, c);
    else if (is_input(call))
        launch_dependent(conv2d_col2im_kernel<float, float>, grid, THREADS, 0, call.stream, (float *)call.result,
                         (const float *)columns, c);
    else if (vectors)
        launch_dependent(conv2d_im2col_kernel<float4>, grid, THREADS, 0, call.stream, (float4 *)columns,
                         (const float4 *)call.input, c);
    else
        launch_dependent(conv2d_im2col_kernel<float>, grid, THREADS, 0, call.stream, (float *)columns,
                         (const float *)call.input, c);
    return launch_status();
}

cuda_ops_status conv2d_im2col(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    char *const columns = (char *)call.workspace;
    char *const ordered = columns + conv2d_round_to_256(columns_elements(s) * 4), *const gemm =
                                                                                      ordered + weight_bytes(call);
    const bool relays = weight_bytes(call) > 0;
    const cuda_ops_gemm_problem p = conv2d_im2col_problem(call);
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (relays && !is_weight(call))
        status = conv2d_relayout(ordered, call.weight, conv2d_weight_relayout(call, false), call.dtype, call.stream);
    if (status == CUDA_OPS_SUCCESS && !is_input(call))
        status = copy_columns(call, columns);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const void *const weight = relays ? ordered : call.weight;
    const void *const a = call.pass == CUDA_OPS_CONV2D_FORWARD ? columns : call.output;
    const void *const b = is_weight(call) ? columns : weight;
    void *const d = is_input(call) ? columns : is_weight(call) && relays ? ordered : call.result;
    status = cuda_ops_gemm_cuda(d, a, b, call.bias, gemm, &p, CUDA_OPS_GEMM_FASTEST, call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    if (is_input(call))
        return copy_columns(call, columns);
    if (!is_weight(call) || !relays)
        return CUDA_OPS_SUCCESS;
    // From [o][tap][c] to [o][c][tap].
    const int64_t taps = s.kernel_height * s.kernel_width, c = s.in_channels, o = s.out_channels;
    const Relayout relayout = {{o, o, o, taps * c}, {taps, taps, taps, c}, c, 1, taps};
    return conv2d_relayout(call.result, ordered, relayout, call.dtype, call.stream);
}
