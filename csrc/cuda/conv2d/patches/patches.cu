// conv2d in 16 bits by way of patches [pixel][k], the input that each output pixel reads, as a matrix for gemm:
//
//   output [pixel][o]  = patches weight^T         grad_weight [o][k] = grad_output^T patches
//   patches            = grad_output [pixel][o] weight [o][k], which are grad_input where no pixel has two of them
//
// For few channels, of whose pixels neither TMA nor a vector of 16 bytes takes one by itself, and for patch embeddings,
// whose patches are the image in another order. k counts the lines of a kernel, and along a line its elements, as they
// lie side by side in the image: kernel_width of a channel, or kernel_width x channels in channels_last. A thread makes
// the same 16 bytes of several pixels' patches, of runs of as many elements as the sizes align. Bound by memory. Of few
// taps forward is one kernel, with the patches in shared memory (forward_sm80.cu). Where patches share pixels grad_input
// is cut otherwise (rectangles.cu).
#include "conv2d/patches/patches.cuh"

#include "conv2d/choice.h"
#include "conv2d/relayout.h"
#include "cuda_ops/transpose_images.h"
#include "gemm/paths.h"

static constexpr int THREADS = 256;
static constexpr int64_t MOST_BYTES = 256 << 20; // of the patches

// The weight as [o][pitch], its k in the order of the patches.
__device__ __forceinline__ void copy_weight(uint16_t *to, const uint16_t *weight, const uint16_t *bias,
                                            const Patches &p, int first, int step)
{
    for (int i = first; i < p.out_channels * p.pitch; i += step) {
        const int o = i / p.pitch, k = i - o * p.pitch;
        to[i] = k < p.taken ? weight[weight_offset(p, o, k)] : k == p.taken && bias ? bias[o] : 0;
    }
}

// 16 bytes of zeros but for one element.
__device__ __forceinline__ uint4 at_element(uint32_t bits, int index)
{
    const uint32_t word = bits << index % 2 * 16;
    return make_uint4(index / 2 == 0 ? word : 0, index / 2 == 1 ? word : 0, index / 2 == 2 ? word : 0,
                      index / 2 == 3 ? word : 0);
}

// Blocks from patch_blocks on copy the weight. Run: what one load takes, of 1 to 8 elements.
template <typename Run>
__global__ void __launch_bounds__(THREADS)
    conv2d_patches_kernel(uint4 *patches, const Run *input, uint16_t *weight_copy, const uint16_t *weight,
                          const uint16_t *bias, uint32_t one, const __grid_constant__ Patches p)
{
    wait_for_predecessor();
    release_successor();
    if ((int)blockIdx.x >= p.patch_blocks) {
        const int blocks = gridDim.x - p.patch_blocks;
        copy_weight(weight_copy, weight, bias, p,
                    ((blockIdx.x - p.patch_blocks) * gridDim.y + blockIdx.y) * THREADS + threadIdx.x,
                    blocks * gridDim.y * THREADS);
        return;
    }
    const int vectors = p.pitch / VECTOR, across = min(vectors, THREADS), rows = THREADS / across;
    const int row = threadIdx.x / across, vector = blockIdx.y * across + threadIdx.x % across;
    if (row >= rows || vector >= vectors)
        return;
    const PatchVector<Run> read(p, input, vector);
    const uint4 ones = p.bias && p.taken / VECTOR == vector ? at_element(one, p.taken % VECTOR) : uint4{};
    for (int pixel = blockIdx.x * rows + row; pixel < p.pixels; pixel += p.patch_blocks * rows) {
        uint4 value = read.of(p, pixel);
        value.x |= ones.x, value.y |= ones.y, value.z |= ones.z, value.w |= ones.w;
        patches[(int64_t)pixel * vectors + vector] = value;
    }
}

// grad_input from the patches: the element of the only one that has it, or zero.
template <typename Run>
__global__ void __launch_bounds__(THREADS)
    conv2d_patches_input_kernel(Run *grad_input, const Run *patches, int count, const __grid_constant__ Patches p)
{
    constexpr int RUN = sizeof(Run) / 2;
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const int line = (int)p.by_runs.of((uint32_t)i), at = ((int)i - line * (p.length / RUN)) * RUN;
        const int image = (int)p.by_lines.of((uint32_t)line), in_image = line - image * p.lines;
        const int channel = (int)p.by_channel_height.of((uint32_t)in_image);
        const int y = in_image - channel * p.height + p.shift_y, x = at + p.shift_x;
        const int out_y = (int)p.by_step_y.of((uint32_t)y), out_x = (int)p.by_step_x.of((uint32_t)x);
        const int r = y - out_y * p.step_y, s = x - out_x * p.step_x;
        Run value = {};
        if (r < p.kernel_height && s < p.run_length && out_y < p.out_height && out_x < p.out_width) {
            const int64_t pixel = ((int64_t)image * p.out_height + out_y) * p.out_width + out_x;
            value = patches[(pixel * p.pitch + (channel * p.kernel_height + r) * p.run_length + s) / RUN];
        }
        grad_input[i] = value;
    }
}

// grad_weight in its own order from [o][pitch].
__global__ void __launch_bounds__(THREADS)
    conv2d_patches_weight_kernel(uint16_t *grad_weight, const uint16_t *from, const __grid_constant__ Patches p)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < (int64_t)p.out_channels * p.taken; i += global_thread_count()) {
        const int o = (int)i / p.taken, k = (int)i - o * p.taken;
        grad_weight[weight_offset(p, o, k)] = from[(int64_t)o * p.pitch + k];
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

static bool is_forward(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_FORWARD;
}

static bool input_is_last(const cuda_ops_conv2d_sizes &s)
{
    return s.input_channels_last && s.in_channels > 1;
}

static bool output_is_last(const cuda_ops_conv2d_sizes &s)
{
    return conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
}

static int64_t taken_of(const cuda_ops_conv2d_sizes &s)
{
    return s.in_channels * s.kernel_height * s.kernel_width;
}

// The GEMM adds a bias to columns; where channels are rows, it is one more column of the weight, times one.
static bool adds_bias(const ConvCall &call)
{
    return is_forward(call) && !output_is_last(call.sizes) && call.bias;
}

static int64_t pitch_of(const ConvCall &call)
{
    return ceil_div(taken_of(call.sizes) + adds_bias(call), VECTOR) * VECTOR;
}

static int64_t pixels_of(const cuda_ops_conv2d_sizes &s)
{
    return s.batch * s.out_height * s.out_width;
}

// Whether patches are whole rectangles of pixels, and no pixel has two.
static bool are_apart(const cuda_ops_conv2d_sizes &s)
{
    return (s.dilation_height == 1 || s.kernel_height == 1) &&
           (s.out_height == 1 || s.kernel_height <= s.stride_height) &&
           (s.out_width == 1 || s.kernel_width <= s.stride_width);
}

bool conv2d_patches_share_pixels(const ConvCall &call)
{
    return is_input(call) && !are_apart(call.sizes);
}

// Whether the weight, or its gradient, lies in memory as [o][pitch].
static bool weight_is_ready(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    return pitch_of(call) == taken_of(s) &&
           (conv2d_weight_is_channels_last(s) ? input_is_last(s) || s.in_channels == 1 : !input_is_last(s));
}

cuda_ops_gemm_problem conv2d_patches_problem(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t image = s.out_height * s.out_width, pixels = pixels_of(s), o = s.out_channels;
    const int64_t pitch = pitch_of(call);
    const bool by_image = !is_weight(call) && !output_is_last(s);
    cuda_ops_gemm_problem p = {};
    p.alpha = 1;
    p.batch = by_image ? s.batch : 1;
    p.dtype = p.output_dtype = p.bias_dtype = call.dtype;
    if (is_weight(call)) {
        p.m = o, p.n = pitch, p.k = pixels;
        p.transpose_a = 1;
    } else if (is_input(call)) {
        p.m = by_image ? image : pixels, p.n = pitch, p.k = o;
        p.transpose_a = by_image;
        p.stride_a = by_image ? o * image : 0, p.stride_d = by_image ? image * pitch : 0;
    } else {
        p.m = by_image ? o : pixels, p.n = by_image ? image : o, p.k = pitch;
        p.activation = conv2d_gemm_activation(call);
        p.transpose_b = 1;
        p.stride_b = by_image ? image * pitch : 0, p.stride_d = by_image ? o * image : 0;
    }
    p.lda = p.transpose_a ? p.m : p.k;
    p.ldb = p.transpose_b ? p.k : p.n;
    p.ldd = p.n;
    return p;
}

// Bytes of the workspace, in this order.
struct Parts {
    size_t patches, weight, output; // the weight or its gradient as [o][pitch]; grad_output in channels_last
};

static Parts parts_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    Parts parts = {};
    parts.patches = conv2d_round_to_256(2 * pixels_of(s) * pitch_of(call));
    parts.weight = weight_is_ready(call) ? 0 : conv2d_round_to_256(2 * s.out_channels * pitch_of(call));
    parts.output = is_weight(call) && !output_is_last(s) ? conv2d_round_to_256(2 * pixels_of(s) * s.out_channels) : 0;
    return parts;
}

Answer conv2d_patches_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    if (device.capability < 80)
        return NEEDS_80;
    if (conv2d_patches_share_pixels(call))
        return conv2d_rectangles_supports(call, device);
    if (call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return NEEDS_HALVES;
    if (s.dilation_width > 1 && s.kernel_width > 1)
        return no("elements of a kernel's line do not lie side by side");
    // Within which all that the kernels count in 32 bits has room.
    const int64_t most = MOST_BYTES / 2, channels = input_is_last(s) ? s.in_channels : 1;
    const auto fits = [&](int64_t first, int64_t second, int64_t limit) { return first <= limit / second; };
    if (!fits(s.out_height, s.out_width, most) || !fits(s.out_height * s.out_width, s.batch, most) ||
        !fits(s.kernel_height, s.kernel_width, most) || !fits(s.kernel_height * s.kernel_width, s.in_channels, most) ||
        !fits(taken_of(s) + VECTOR, pixels_of(s), most) || !fits(taken_of(s) + VECTOR, s.out_channels, most) ||
        !fits(s.in_height, s.in_width, INT_MAX) || !fits(s.in_height * s.in_width, s.in_channels, INT_MAX) ||
        !fits(s.in_height * s.in_width * s.in_channels, s.batch, INT_MAX) ||
        // Where a patch begins in the padding, its lines inside of the image may lie this far behind it.
        s.kernel_height > INT_MAX / s.dilation_height ||
        !fits(s.in_channels * s.in_height + s.kernel_height * s.dilation_height, s.in_width * channels, INT_MAX))
        return CONV_IS_LARGE;
    const int64_t reach_y = (s.out_height - 1) * s.stride_height + s.kernel_height * s.dilation_height;
    const int64_t reach_x = (s.out_width - 1) * s.stride_width + s.kernel_width;
    if (reach_y > INT_MAX / 2 || s.padding_top > INT_MAX / 2 || s.in_height + s.padding_top > INT_MAX / 2 ||
        !fits(reach_x, channels, INT_MAX / 2) || !fits(s.in_width + s.padding_left, channels, INT_MAX / 2))
        return CONV_IS_LARGE;
    return YES;
}

// As an H200 had it, of three channels for the most part. Where strides are larger, few_channels' tiles have few pixels
// for the patch of input under them.
static constexpr int64_t FEW_STRIDES = 4;
// With smaller strides a tile of few_channels has its patch in shared memory once for all taps: that is less to copy,
// but for few taps, and for grad_output of odd lines, which it reads by elements.
static constexpr int64_t FEW_TAPS_FORWARD = 32, FEW_TAPS_WEIGHT = 64;
// From so many pixels on gemm streams patches of few taps in channels_last faster than the one kernel makes and
// multiplies them.
static constexpr int64_t MANY_PIXELS = 200000;

// Of rectangles: from this stride on.
static constexpr int64_t LARGE_STRIDE = 3;

Answer conv2d_patches_is_fast(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.in_channels >= VECTOR)
        return no("other paths read so many channels as vectors, or copies of them");
    if (s.kernel_height * s.kernel_width == 1)
        return no("a 1x1 kernel's patches are the pixels");
    if (conv2d_patches_share_pixels(call))
        return s.stride_height >= LARGE_STRIDE && s.stride_width >= LARGE_STRIDE
                   ? YES
                   : no("of few stride phases another path may take less time");
    const int64_t strides = (s.out_height == 1 ? 1 : s.stride_height) * (s.out_width == 1 ? 1 : s.stride_width);
    if (is_input(call) || are_apart(s) || strides > FEW_STRIDES)
        return YES;
    if (s.in_channels > 4 || strides == 1)
        return no("its patches have every pixel several times");
    if (is_forward(call))
        return taken_of(s) <= FEW_TAPS_FORWARD ? YES : no("its patches have every pixel several times");
    const bool odd = s.out_width % 2 == 1;
    return odd && (taken_of(s) <= FEW_TAPS_WEIGHT || !output_is_last(s))
               ? YES
               : no("its patches have every pixel several times");
}

// Whether the patches are made where they are multiplied.
static bool in_shared_memory(const ConvCall &call)
{
    if (!is_forward(call) || taken_of(call.sizes) > FEW_TAPS_FORWARD)
        return false;
    const Patches p = conv2d_patches_of(call);
    return conv2d_patches_run(p, nullptr) == 1 && (!output_is_last(call.sizes) || p.pixels < MANY_PIXELS) &&
           conv2d_patches_forward_fits(p);
}

// The one kernel has no activation, and gemm's path narrow has relu alone.
bool conv2d_patches_applies(const ConvCall &call)
{
    ConvCall product = call;
    product.sizes.activation = CUDA_OPS_CONV2D_NONE;
    return !in_shared_memory(product) &&
           (call.sizes.activation == CUDA_OPS_CONV2D_RELU ||
            gemm_path_on(conv2d_patches_problem(product), current_device()) != GEMM_NARROW);
}

static size_t workspace_of(const ConvCall &call)
{
    const cuda_ops_gemm_problem p = conv2d_patches_problem(call);
    const Parts parts = parts_of(call);
    return parts.patches + parts.weight + parts.output +
           (size_t)cuda_ops_gemm_workspace_cuda(&p, CUDA_OPS_GEMM_FASTEST);
}

Patches conv2d_patches_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool last = input_is_last(s), weight_last = s.weight_channels_last;
    const int64_t unit = last ? s.in_channels : 1, taps = s.kernel_height * s.kernel_width;
    Patches p = {};
    p.image = s.in_channels * s.in_height * s.in_width;
    p.height = (int)s.in_height, p.length = (int)(s.in_width * unit);
    p.lines = (int)(last ? s.in_height : s.in_channels * s.in_height);
    p.out_height = (int)s.out_height, p.out_width = (int)s.out_width;
    p.kernel_height = (int)s.kernel_height, p.run_length = (int)(s.kernel_width * unit);
    p.shift_y = (int)s.padding_top, p.shift_x = (int)(s.padding_left * unit);
    // Of a single output a step is as good as any other, and one beyond the image keeps patches apart.
    p.step_y = s.out_height == 1 ? p.height + p.shift_y : (int)s.stride_height;
    p.step_x = s.out_width == 1 ? p.length + p.shift_x : (int)(s.stride_width * unit);
    p.dilation_y = (int)s.dilation_height, p.reach_y = (int)((s.kernel_height - 1) * s.dilation_height + 1);
    p.pixels = (int)pixels_of(s), p.taken = (int)taken_of(s), p.pitch = (int)pitch_of(call);
    p.bias = adds_bias(call);
    p.output_last = output_is_last(s);
    p.channels = (int)s.in_channels, p.last = last, p.out_channels = (int)s.out_channels;
    p.weight_o = taken_of(s);
    p.weight_c = weight_last ? 1 : taps;
    p.weight_x = weight_last ? s.in_channels : 1;
    p.weight_y = s.kernel_width * p.weight_x;
    p.by_width = divider_by((uint32_t)p.out_width), p.by_height = divider_by((uint32_t)p.out_height);
    p.by_lines = divider_by((uint32_t)p.lines), p.by_channel_height = divider_by((uint32_t)p.height);
    p.by_step_y = divider_by((uint32_t)p.step_y), p.by_step_x = divider_by((uint32_t)p.step_x);
    return p;
}

// With a bias or without, which is not known here.
size_t conv2d_patches_memory_workspace(const ConvCall &call)
{
    ConvCall with = call;
    with.bias = &with;
    const size_t without_bias = workspace_of(call), with_bias = workspace_of(with);
    return with_bias > without_bias ? with_bias : without_bias;
}

size_t conv2d_patches_workspace(const ConvCall &call, ConvDevice)
{
    if (conv2d_patches_share_pixels(call))
        return conv2d_rectangles_workspace(call);
    return in_shared_memory(call) ? 0 : conv2d_patches_memory_workspace(call);
}

// Calls `visit` with a value of the type of a run.
template <typename Visitor>
static void with_run(int run, Visitor visit)
{
    if (run == 8)
        visit(uint4());
    else if (run == 4)
        visit(uint2());
    else if (run == 2)
        visit(uint32_t());
    else
        visit(uint16_t());
}

// The patches of the input, unless they are NULL, and the copy of the weight, unless it is.
static cuda_ops_status copy_patches(const ConvCall &call, void *patches, void *weight, ConvDevice device)
{
    Patches p = conv2d_patches_of(call);
    const int vectors = p.pitch / VECTOR, rows = THREADS / (vectors < THREADS ? vectors : THREADS);
    const int64_t most = (int64_t)device.multiprocessors * 8, chunks = ceil_div(vectors, THREADS);
    const int64_t wanted = ceil_div(p.pixels, rows), share = ceil_div(most, chunks);
    p.patch_blocks = patches ? (int)(wanted < share ? wanted : share) : 0;
    const int64_t weight_blocks =
        weight ? clamp_grid(ceil_div((int64_t)p.out_channels * p.pitch, (int64_t)THREADS * chunks * 4)) : 0;
    const dim3 grid((unsigned int)(p.patch_blocks + weight_blocks), (unsigned int)chunks);
    const uint32_t one = call.dtype == CUDA_OPS_BFLOAT16 ? 0x3f80 : 0x3c00;
    const uint16_t *const bias = p.bias ? (const uint16_t *)call.bias : nullptr;
    with_run(patches ? conv2d_patches_run(p, call.input) : 1, [&](auto run) {
        typedef decltype(run) Run;
        launch_dependent(conv2d_patches_kernel<Run>, grid, THREADS, 0, call.stream, (uint4 *)patches,
                         (const Run *)call.input, (uint16_t *)weight, (const uint16_t *)call.weight, bias, one, p);
    });
    return launch_status();
}

static cuda_ops_status copy_to_input(const ConvCall &call, const void *patches)
{
    Patches p = conv2d_patches_of(call);
    const int run = conv2d_patches_run(p, call.result), runs = p.length / run;
    const int count = (int)(call.sizes.batch * p.lines * runs);
    p.by_runs = divider_by((uint32_t)runs);
    with_run(run, [&](auto one) {
        typedef decltype(one) Run;
        launch_dependent(conv2d_patches_input_kernel<Run>, dim3(clamp_grid(ceil_div(count, THREADS))), THREADS, 0,
                         call.stream, (Run *)call.result, (const Run *)patches, count, p);
    });
    return launch_status();
}

cuda_ops_status conv2d_patches_in_memory(const ConvCall &call, ConvDevice device)
{
    if (!call.workspace)
        return CUDA_OPS_INVALID_ARGUMENT;
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const Parts parts = parts_of(call);
    char *const patches = (char *)call.workspace, *const ordered = patches + parts.patches;
    char *const transposed = ordered + parts.weight, *const workspace = transposed + parts.output;
    const bool copies_weight = parts.weight > 0 && !is_weight(call);
    const cuda_ops_gemm_problem p = conv2d_patches_problem(call);
    const void *output = call.output;
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (parts.output > 0) {
        status = cuda_ops_transpose_images_cuda(transposed, output, s.batch, s.out_channels, s.out_height * s.out_width,
                                                call.dtype, call.stream);
        output = transposed;
    }
    if (status == CUDA_OPS_SUCCESS && (!is_input(call) || copies_weight))
        status = copy_patches(call, is_input(call) ? nullptr : patches, copies_weight ? ordered : nullptr, device);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const void *const weight = copies_weight ? ordered : call.weight;
    if (is_input(call)) {
        status =
            cuda_ops_gemm_cuda(patches, output, weight, nullptr, workspace, &p, CUDA_OPS_GEMM_FASTEST, call.stream);
        return status == CUDA_OPS_SUCCESS ? copy_to_input(call, patches) : status;
    }
    if (is_forward(call)) {
        const bool by_pixel = output_is_last(s);
        return cuda_ops_gemm_cuda(call.result, by_pixel ? patches : weight, by_pixel ? weight : patches,
                                  by_pixel ? call.bias : nullptr, workspace, &p, CUDA_OPS_GEMM_FASTEST, call.stream);
    }
    void *const grad_weight = parts.weight > 0 ? ordered : call.result;
    status =
        cuda_ops_gemm_cuda(grad_weight, output, patches, nullptr, workspace, &p, CUDA_OPS_GEMM_FASTEST, call.stream);
    if (status != CUDA_OPS_SUCCESS || parts.weight == 0)
        return status;
    const Patches of = conv2d_patches_of(call);
    launch_dependent(conv2d_patches_weight_kernel,
                     dim3(clamp_grid(ceil_div((int64_t)of.out_channels * of.taken, THREADS))), THREADS, 0, call.stream,
                     (uint16_t *)call.result, (const uint16_t *)ordered, of);
    return launch_status();
}

cuda_ops_status conv2d_patches(const ConvCall &call, ConvDevice device)
{
    if (conv2d_patches_share_pixels(call))
        return conv2d_rectangles(call);
    return in_shared_memory(call) ? conv2d_patches_forward(call, conv2d_patches_of(call), device)
                                  : conv2d_patches_in_memory(call, device);
}
