// conv2d in float32 with 3 x 3 kernels, stride 1, by Winograd's F(2x2, 3x3) and F(4x4, 3x3):
//
//   forward, backward_input   target = A^T [sum over channels of (G g G^T) * (B^T window B)] A
//   backward_weight           grad_weight = G^T [sum over tiles of (B^T window B) * (A grad A^T)] G
//
// of tiles of 2 x 2 or 4 x 4 of the target, each from 16 or 36 products a channel instead of 36 or 144 (Lavin and Gray,
// 2016). Not fused: the sums are 16 or 36 products of matrices, one a point of the transform, that the GEMM makes
// (cuda_ops/gemm.h); images.cu and weight.cu transform. What is between them lies in the workspace, for as many rows of
// tiles at a time as fit into it. Bound by the GEMM's multiply-adds with many channels, and by memory with few: the
// transforms of F(4x4) are 2.25 times as large as the images, those of F(2x2) four times. Each group has products of its
// own, of the same transforms.
//
// Rounding errors, relative to the norm of the result, are about as large as the sum's own by F(2x2), and twice as large
// by F(4x4) (benchmarks/notes/conv2d_winograd.md). A NaN or an infinity makes NaN of whole tiles.
#include "common/common.cuh"
#include "conv2d/choice.h"
#include "conv2d/relayout.h"
#include "conv2d/winograd/parts.h"
#include "gemm/paths.h"

// Bytes of the transformed images of a chunk, at most; a row of tiles is the least.
static constexpr int64_t CHUNK_BYTES = 256 << 20, MOST_CHUNK_BYTES = 512 << 20;

// The model of times, for an H200 or H100 but where it asks the device: bytes a microsecond, and microseconds to start a
// transform. A call takes this path where that is expected to save a twentieth and 4 microseconds at least, since more
// launches take the host longer.
static constexpr double BYTES_RATE = 3e6, TRANSFORM_START = 1.2, GEMM_BYTES_NOT_HIDDEN = 0.1, WORTHWHILE = 0.95;
static constexpr double LEAST_SAVING = 4;

// A call as one of F(tile x tile, 3 x 3).
struct WinogradPlan {
    int tile, points;                           // points: of both axes
    int64_t source_channels, channels;          // of the target; both of all groups
    int64_t groups, group_source, group_target; // channels of a group, padded
    int64_t rows_of_image, columns;             // of tiles
    int64_t rows, chunk_rows, tiles;            // rows of all images and of a chunk, and a chunk's tiles, padded
    int64_t weight, source, target;             // elements of the transformed tensors, the images of a chunk
    bool source_last, target_last;              // channels_last
};

static bool is_weight(const ConvCall &call)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
}

// Of a row of the transformed weight. It has one side's channels of all groups: the target's, but in backward_input the
// source's.
static int64_t weight_row(const ConvCall &call, const WinogradPlan &plan)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? plan.group_target : plan.group_target * plan.groups;
}

// The product of all points of a chunk of `tiles` tiles, which is padded, for a group.
static cuda_ops_gemm_problem product_of(const ConvCall &call, const WinogradPlan &plan, int64_t tiles)
{
    const int64_t group_s = plan.group_source, group_r = plan.group_target, row = weight_row(call, plan);
    const int64_t s = group_s * plan.groups, r = group_r * plan.groups, weight = s * r / plan.groups;
    cuda_ops_gemm_problem p = {};
    p.batch = plan.points;
    p.alpha = 1;
    p.dtype = p.output_dtype = p.bias_dtype = CUDA_OPS_FLOAT32;
    if (is_weight(call)) { // [s][r] = source^T grad
        p.m = group_s, p.n = group_r, p.k = tiles;
        p.transpose_a = plan.source_last;
        p.transpose_b = !plan.target_last;
        p.lda = plan.source_last ? s : tiles;
        p.ldb = plan.target_last ? r : tiles;
        p.ldd = row;
        p.stride_a = tiles * s, p.stride_b = tiles * r, p.stride_d = weight;
    } else if (plan.target_last) { // [tile][r] = source weight
        p.m = tiles, p.n = group_r, p.k = group_s;
        p.transpose_a = !plan.source_last;
        p.lda = plan.source_last ? s : tiles;
        p.ldb = row;
        p.ldd = r;
        p.stride_a = tiles * s, p.stride_b = weight, p.stride_d = tiles * r;
    } else { // [r][tile] = weight^T source^T
        p.m = group_r, p.n = tiles, p.k = group_s;
        p.transpose_a = 1;
        p.transpose_b = plan.source_last;
        p.lda = row;
        p.ldb = plan.source_last ? s : tiles;
        p.ldd = tiles;
        p.stride_a = weight, p.stride_b = tiles * s, p.stride_d = tiles * r;
    }
    return p;
}

// Where a group's channels begin, in the transforms of a chunk of `tiles` tiles.
struct GroupOffsets {
    int64_t source, target, weight;
};
static GroupOffsets offsets_of(const ConvCall &call, const WinogradPlan &plan, int64_t tiles, int64_t group)
{
    const int64_t s = group * plan.group_source, r = group * plan.group_target;
    return {plan.source_last ? s : s * tiles, plan.target_last ? r : r * tiles,
            call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? s * plan.group_target : r};
}

static double microseconds_of(const ConvCall &call, const WinogradPlan &plan, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const double chunks = (double)ceil_div(plan.rows, plan.chunk_rows);
    const double input = (double)s.batch * (double)(s.in_channels * s.in_height * s.in_width);
    const double output = (double)s.batch * (double)(s.out_channels * s.out_height * s.out_width);
    const double kernels = 9.0 * (double)(s.in_channels / s.groups) * (double)s.out_channels;
    // Each transform is written and read once, and so are the images and the weight; its gradient is made of every
    // chunk's transform.
    const double weights = is_weight(call) ? chunks : 1;
    const double transforms =
        (double)(plan.source + plan.target) * chunks + (double)plan.weight * weights + input + output + kernels;
    const double product = (double)(plan.source + plan.target + plan.weight) * chunks;
    const double launches = is_weight(call) ? 3 * chunks : 2 * chunks + 1;
    const double sums = chunks * (double)s.groups * gemm_simt_microseconds(product_of(call, plan, plan.tiles), device);
    const double copies = 4 * product / BYTES_RATE;
    return launches * TRANSFORM_START + 4 * transforms / BYTES_RATE +
           (sums > copies ? sums + GEMM_BYTES_NOT_HIDDEN * copies : copies + GEMM_BYTES_NOT_HIDDEN * sums);
}

// tile 0: it cannot be done in the workspace.
static WinogradPlan plan_of(const ConvCall &call, int tile)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT; // whose target is the input
    const bool input_last = conv2d_is_channels_last(s.input_channels_last, s.in_channels, s.in_height, s.in_width);
    const bool output_last = conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
    WinogradPlan plan = {};
    plan.points = (tile + 2) * (tile + 2);
    plan.source_channels = input ? s.out_channels : s.in_channels;
    plan.channels = input ? s.in_channels : s.out_channels;
    plan.groups = s.groups;
    plan.group_source = conv2d_winograd_padded(plan.source_channels / s.groups);
    plan.group_target = conv2d_winograd_padded(plan.channels / s.groups);
    plan.source_last = input ? output_last : input_last;
    plan.target_last = input ? input_last : output_last;
    plan.rows_of_image = ceil_div(input ? s.in_height : s.out_height, tile);
    plan.columns = ceil_div(input ? s.in_width : s.out_width, tile);
    plan.rows = s.batch * plan.rows_of_image;
    const int64_t padded_s = conv2d_winograd_padded(plan.source_channels);
    const int64_t padded_r = conv2d_winograd_padded(plan.channels);
    const double row_bytes = (double)plan.columns * (double)(plan.points * 4) * (double)(padded_s + padded_r);
    const double weight_bytes = (double)(plan.points * 4) * (double)padded_s * (double)padded_r / (double)s.groups;
    if (row_bytes > (double)MOST_CHUNK_BYTES || weight_bytes > (double)MOST_CHUNK_BYTES || plan.rows > INT32_MAX / 2)
        return plan;
    const int64_t most = row_bytes < (double)CHUNK_BYTES ? (int64_t)((double)CHUNK_BYTES / row_bytes) : 1;
    plan.chunk_rows = ceil_div(plan.rows, ceil_div(plan.rows, most)); // chunks of about the same size
    plan.tiles = conv2d_winograd_padded(plan.chunk_rows * plan.columns);
    plan.tile = tile;
    plan.weight = plan.points * padded_s * padded_r / s.groups;
    plan.source = plan.points * padded_s * plan.tiles;
    plan.target = plan.points * padded_r * plan.tiles;
    return plan;
}

static Answer supports_sizes(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (call.dtype != CUDA_OPS_FLOAT32)
        return no("takes float32 alone");
    if (s.kernel_height != 3 || s.kernel_width != 3 || s.stride_height != 1 || s.stride_width != 1 ||
        s.dilation_height != 1 || s.dilation_width != 1)
        return no("the kernel is not 3x3 with stride 1 and dilation 1");
    // The transforms are padded behind all groups.
    if (s.groups != 1 && (s.in_channels / s.groups % 4 != 0 || s.out_channels / s.groups % 4 != 0))
        return no("a group's channels are no multiple of four");
    if (s.winograd < 2)
        return no("Winograd's algorithm is not allowed");
    return YES;
}

// About how long a plan takes, to compare tiles: without the GEMM's choice among its own, which takes the host longer.
static double rough_time(const WinogradPlan &plan)
{
    // Multiply-adds a microsecond, and the GEMM's least rows.
    constexpr double RATE = 25e6;
    constexpr int64_t ROWS = 32;
    const double tiles = (double)(ceil_div(plan.rows * plan.columns, ROWS) * ROWS);
    const double s = (double)plan.source_channels, r = (double)plan.channels;
    return plan.points * (tiles * s * r / (double)plan.groups / RATE +
                          2 * 4 * (tiles * (s + r) + s * r / (double)plan.groups) / BYTES_RATE);
}

// The faster of the tiles that are allowed. Its own is 0 where there is none.
static WinogradPlan plan_for(const ConvCall &call)
{
    WinogradPlan best = {};
    for (int tile = 2; tile <= 4 && tile <= call.sizes.winograd; tile += 2) {
        const WinogradPlan plan = plan_of(call, tile);
        if (plan.tile != 0 && (best.tile == 0 || rough_time(plan) < rough_time(best)))
            best = plan;
    }
    return best;
}

Answer conv2d_winograd_supports(const ConvCall &call, ConvDevice device)
{
    if (device.multiprocessors < 1)
        return no("there is no GPU");
    const Answer sizes = supports_sizes(call);
    return !sizes ? sizes : plan_for(call).tile != 0 ? YES : CONV_IS_LARGE;
}

double conv2d_winograd_microseconds(const ConvCall &call, ConvDevice device)
{
    return microseconds_of(call, plan_for(call), device);
}

// The others' memory is a half to a quarter as fast beside their multiply-adds.
bool conv2d_winograd_is_cheap(ConvDevice device)
{
    return device.capability == 80 || device.capability == 90 || device.capability == 100;
}

Answer conv2d_winograd_is_fast(const ConvCall &call, ConvDevice device)
{
    if (!conv2d_winograd_is_cheap(device))
        return no("chosen only on GPUs with high-bandwidth memory (capability 8.0, 9.0 and 10.0)");
    const double here = conv2d_winograd_microseconds(call, device), there = conv2d_simt_microseconds(call, device);
    return here < WORTHWHILE * there && here + LEAST_SAVING < there
               ? YES
               : no("its transforms cost more than its products save");
}

static size_t bytes_of(int64_t elements)
{
    return conv2d_round_to_256(elements * (int64_t)sizeof(float));
}

static size_t gemm_bytes_of(const ConvCall &call, const WinogradPlan &plan, int64_t rows)
{
    const cuda_ops_gemm_problem product = product_of(call, plan, conv2d_winograd_padded(rows * plan.columns));
    return (size_t)cuda_ops_gemm_workspace_cuda(&product, CUDA_OPS_GEMM_FASTEST);
}

// The transformed weight, source and target, and what the GEMM asks for, which may be more for the last chunk: with
// fewer tiles it splits k.
size_t conv2d_winograd_workspace(const ConvCall &call, ConvDevice)
{
    const WinogradPlan plan = plan_for(call);
    const int64_t last = plan.rows - (ceil_div(plan.rows, plan.chunk_rows) - 1) * plan.chunk_rows;
    const size_t of_chunk = gemm_bytes_of(call, plan, plan.chunk_rows), of_last = gemm_bytes_of(call, plan, last);
    return bytes_of(plan.weight) + bytes_of(plan.source) + bytes_of(plan.target) +
           (of_chunk > of_last ? of_chunk : of_last);
}

// The tiles of an image tensor. first: of the first tile's window.
static WinogradTiles tiles_of(const WinogradPlan &plan, float *transformed, int64_t channels, int64_t height,
                              int64_t width, bool channels_last, int64_t first_y, int64_t first_x)
{
    WinogradTiles t = {};
    t.transformed = transformed;
    t.n_stride = channels * height * width;
    t.c_stride = channels_last ? 1 : height * width;
    t.y_stride = channels_last ? width * channels : width;
    t.x_stride = channels_last ? channels : 1;
    t.height = (int)height;
    t.width = (int)width;
    t.first_y = (int)first_y;
    t.first_x = (int)first_x;
    t.channels = (int)channels;
    t.padded_channels = (int)conv2d_winograd_padded(channels);
    t.channels_last = channels_last;
    t.columns_value = (uint32_t)plan.columns;
    t.rows_value = (uint32_t)plan.rows_of_image;
    t.columns = divider_by(t.columns_value);
    t.rows = divider_by(t.rows_value);
    return t;
}

static void set_chunk(WinogradTiles &t, const WinogradPlan &plan, int64_t first_row)
{
    const int64_t left = plan.rows - first_row, rows = left < plan.chunk_rows ? left : plan.chunk_rows;
    t.first_row = (int)first_row;
    t.tiles = (int)(rows * plan.columns);
    t.padded_tiles = (int)conv2d_winograd_padded(t.tiles);
    t.fastest = divider_by((uint32_t)(t.channels_last ? t.padded_channels : t.padded_tiles));
}

cuda_ops_status conv2d_winograd(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const WinogradPlan plan = plan_for(call);
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    char *const workspace = (char *)call.workspace;
    float *const weight = (float *)workspace;
    float *const source = (float *)(workspace + bytes_of(plan.weight));
    float *const target = (float *)(workspace + bytes_of(plan.weight) + bytes_of(plan.source));
    void *const gemm = workspace + bytes_of(plan.weight) + bytes_of(plan.source) + bytes_of(plan.target);

    WinogradTiles of_source, of_target;
    if (input) { // a convolution of grad_output, padded by what is left of the kernel
        of_source = tiles_of(plan, source, s.out_channels, s.out_height, s.out_width, plan.source_last,
                             s.padding_top - 2, s.padding_left - 2);
        of_target = tiles_of(plan, target, s.in_channels, s.in_height, s.in_width, plan.target_last, 0, 0);
    } else {
        of_source = tiles_of(plan, source, s.in_channels, s.in_height, s.in_width, plan.source_last, -s.padding_top,
                             -s.padding_left);
        of_target = tiles_of(plan, target, s.out_channels, s.out_height, s.out_width, plan.target_last, 0, 0);
    }
    const float *const source_images = (const float *)(input ? call.output : call.input);

    cuda_ops_status status = CUDA_OPS_SUCCESS;
    if (!is_weight(call))
        status = conv2d_winograd_transform_weight(weight, call, plan.tile);
    for (int64_t row = 0; row < plan.rows && status == CUDA_OPS_SUCCESS; row += plan.chunk_rows) {
        set_chunk(of_source, plan, row);
        set_chunk(of_target, plan, row);
        const cuda_ops_gemm_problem product = product_of(call, plan, of_source.padded_tiles);
        status = conv2d_winograd_transform_source(of_source, source_images, plan.tile, call.stream);
        if (status == CUDA_OPS_SUCCESS && is_weight(call))
            status = conv2d_winograd_transform_grad(of_target, (const float *)call.output, plan.tile, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            break;
        for (int64_t group = 0; group < plan.groups && status == CUDA_OPS_SUCCESS; group++) {
            const GroupOffsets at = offsets_of(call, plan, of_source.padded_tiles, group);
            float *const of_weight = weight + at.weight, *const s_part = source + at.source,
                         *const t_part = target + at.target;
            float *const d = is_weight(call) ? of_weight : t_part;
            const float *const a = is_weight(call) || plan.target_last ? s_part : of_weight;
            const float *const b = is_weight(call) ? t_part : plan.target_last ? of_weight : s_part;
            status = cuda_ops_gemm_cuda(d, a, b, nullptr, gemm, &product, CUDA_OPS_GEMM_FASTEST, call.stream);
        }
        if (status == CUDA_OPS_SUCCESS && is_weight(call))
            status = conv2d_winograd_transform_grad_weight((float *)call.result, weight, call, plan.tile, row > 0);
        else if (status == CUDA_OPS_SUCCESS)
            status = conv2d_winograd_transform_target((float *)call.result, of_target, (const float *)call.bias,
                                                      plan.tile, call.stream);
    }
    return status;
}
