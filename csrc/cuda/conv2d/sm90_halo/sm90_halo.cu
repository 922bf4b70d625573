// conv2d for few channels on Hopper's tensor cores: forward, and backward_input as the same product over grad_output
// with the kernel mirrored; stride 1, channels_last.
//
//   result[place][column] = sum over (tap, channel) of picture[place + tap][channel] * weight[column][tap][channel]
//
// With few channels a tile of places is multiplied by few columns, and fetching it again for every tap, as the tensor
// path does, takes longer than the products. Here a tile is fetched once for all taps: places are counted through the
// padded picture, line after line and image after image, so that a tap lies the same number of places further on from
// each, and a slot in shared memory with the tile's places and those of one kernel beyond is, read from another row on,
// the operand of any tap. The products at the ends of lines and images that belong to no output are the price. The
// weight of 64 columns stays in shared memory for the whole life of a block. It is wgmma's A, and the places are its B
// of 128 to 256 columns: with the places as A, of 64 rows, and 64 columns as B shared memory could not keep up.
//
// A block is a producer warp, which asks the copy engine for slots, and two warpgroups that take tiles in turn, so that
// one stores while the other multiplies. Persistent; blocks take every so many tiles.
#include "conv2d/sm90_halo/kernel.cuh"
#include "conv2d/tma_im2col.h"

static constexpr int SHARED_BYTES = 232448; // an SM's, for one block

#if defined(CUDA_OPS_SM90A)
static constexpr bool HAS_KERNELS = true;
#else
static constexpr bool HAS_KERNELS = false;
#endif

struct Steps {
    WindowProduct product;
    int row_bytes;
    bool by_channel, relayouts;
};

static int element_size(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

// Sizes must be within the limits that conv2d_sm90_halo_supports checks, but for the slots: none if they do not fit.
static Steps steps_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, tf32 = call.dtype == CUDA_OPS_FLOAT32;
    const int element = element_size(call);
    Steps steps = {};
    WindowProduct &p = steps.product;
    p.grid = forward ? conv2d_input_grid(s) : conv2d_output_grid(s);
    p.grid.grid_height += (s.kernel_height - 1) * s.dilation_height;
    p.grid.grid_width += (s.kernel_width - 1) * s.dilation_width;
    p.picture = forward ? call.input : call.output;
    p.weight = call.weight;
    p.dtype = call.dtype;
    p.stream = call.stream;
    const int64_t channels = p.grid.channels;
    steps.row_bytes = channels * element <= 64 && !tf32 ? 64 : 128;
    steps.by_channel = !forward && !tf32;
    steps.relayouts = !conv2d_weight_is_channels_last(s) || (!forward && tf32);

    WindowWork &w = p.work;
    w.result = call.result;
    w.bias = call.bias;
    w.images = (int)s.batch;
    w.grid_height = (int)p.grid.grid_height, w.grid_width = (int)p.grid.grid_width;
    w.start_y = (int)p.grid.start_y, w.start_x = (int)p.grid.start_x;
    w.height = (int)(forward ? s.out_height : s.in_height), w.width = (int)(forward ? s.out_width : s.in_width);
    w.columns = (int)(forward ? s.out_channels : s.in_channels);
    w.column_tiles = (int)ceil_div(w.columns, 64);
    w.kernel_height = (int)s.kernel_height, w.kernel_width = (int)s.kernel_width;
    w.dilation_y = (int)s.dilation_height, w.dilation_x = (int)s.dilation_width;
    w.mirrored = !forward;
    w.chunks = (int)ceil_div(channels * element, steps.row_bytes);
    const int places = conv2d_window_places(element, steps.row_bytes);
    const int64_t beyond =
        (s.kernel_height - 1) * s.dilation_height * w.grid_width + (s.kernel_width - 1) * s.dilation_width;
    const int64_t rows = ceil_div(places + beyond, 8) * 8;
    const int64_t slot = ceil_div(rows * steps.row_bytes, SWIZZLE_ATOM) * SWIZZLE_ATOM;
    const int64_t fixed = SWIZZLE_ATOM + w.chunks * s.kernel_height * s.kernel_width * 64 * steps.row_bytes +
                          (tf32 ? 0 : places * 128) + 256;
    const int64_t slots = fixed < SHARED_BYTES && rows <= 1024 ? (SHARED_BYTES - fixed) / slot : 0;
    w.rows = (int)rows;
    w.slot_bytes = (int)slot;
    w.slots = (int)(slots < 6 ? slots : 6);
    w.by_width = divider_by((uint32_t)w.grid_width);
    w.by_height = divider_by((uint32_t)w.grid_height);
    w.tiles = (int)ceil_div(s.batch * p.grid.grid_height * p.grid.grid_width, places);
    return steps;
}

Answer conv2d_sm90_halo_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    const bool halves = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    const int element = tf32 ? 4 : 2;
    if (!HAS_KERNELS)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return no("does not make the gradient of weight");
    if (!tf32 && !halves)
        return CONV_NEEDS_TENSOR_CORES;
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    if (s.stride_height != 1 || s.stride_width != 1)
        return no("takes stride 1");
    if (s.batch < 1 || s.in_channels < 1 || s.out_channels < 1)
        return CONV_IS_EMPTY;
    if (!conv2d_pictures_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    if (s.in_channels > 4096 || s.out_channels > 4096 || s.kernel_height * s.kernel_width > 64)
        return CONV_IS_LARGE;
    // Places are copied, and halves stored, in pieces of 16 bytes.
    if (s.in_channels * element % 16 != 0 || (!(forward && tf32) && s.out_channels * element % 16 != 0))
        return CONV_NEEDS_VECTORS;
    PixelGrid grid = forward ? conv2d_input_grid(s) : conv2d_output_grid(s);
    grid.grid_height += (s.kernel_height - 1) * s.dilation_height;
    grid.grid_width += (s.kernel_width - 1) * s.dilation_width;
    if (!is_aligned_16(call.weight) || !is_aligned_16(call.result))
        return NEEDS_ALIGNMENT;
    if (!pixel_map_possible(grid, forward ? call.input : call.output, element))
        return no("its padding or sizes have no TMA im2col descriptor, or images are not aligned");
    const WindowWork work = steps_of(call).product.work;
    return work.slots >= 2 && work.slots >= work.chunks && work.column_tiles <= device.multiprocessors
               ? YES
               : no("a tile with its halo, and the weights, do not fit into shared memory");
}

// Where columns are one tile, and the products that are thrown away few.
Answer conv2d_sm90_halo_is_fast(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT || s.kernel_height * s.kernel_width < 4)
        return no("the kernel has fewer than 4 taps");
    if (s.in_channels > 64 || s.out_channels > 64)
        return no("more than 64 channels");
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    const double height = (double)(forward ? s.out_height : s.in_height);
    const double width = (double)(forward ? s.out_width : s.in_width);
    return (height + (double)((s.kernel_height - 1) * s.dilation_height)) *
                       (width + (double)((s.kernel_width - 1) * s.dilation_width)) <=
                   1.7 * height * width
               ? YES
               : no("images are so small that more than 0.7 of the products are of the halo");
}

size_t conv2d_sm90_halo_workspace(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    return steps_of(call).relayouts ? conv2d_round_to_256(s.out_channels * s.in_channels * s.kernel_height *
                                                          s.kernel_width * element_size(call))
                                    : 0;
}

cuda_ops_status conv2d_sm90_halo(const ConvCall &call, ConvDevice device)
{
    Steps steps = steps_of(call);
    WindowProduct &p = steps.product;
    if (steps.relayouts) {
        const bool transposed = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && call.dtype == CUDA_OPS_FLOAT32;
        const cuda_ops_status status = conv2d_relayout(
            call.workspace, call.weight, conv2d_weight_relayout(call.sizes, transposed), call.dtype, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        p.weight = call.workspace;
    }
    switch (call.dtype) {
    case CUDA_OPS_BFLOAT16:
        return conv2d_sm90_halo_bfloat16(p, device, steps.row_bytes, steps.by_channel);
    case CUDA_OPS_FLOAT16:
        return conv2d_sm90_halo_float16(p, device, steps.row_bytes, steps.by_channel);
    case CUDA_OPS_FLOAT32:
        return conv2d_sm90_halo_tf32(p, device);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
