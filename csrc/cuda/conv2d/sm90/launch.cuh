// How the kernels of conv2d's sm90 path are launched: tensor maps, tiles, grid. To be instantiated a dtype and product
// a file.
#ifndef CUDA_OPS_CONV2D_SM90_LAUNCH_CUH
#define CUDA_OPS_CONV2D_SM90_LAUNCH_CUH

#include "conv2d/sm90/kernel.cuh"

// The grid, the taps and the groups' operands. `width`: channels of a chunk.
static inline ConvWork conv2d_work(const ConvProduct &p, int width)
{
    const PixelGrid &g = p.grid;
    ConvWork work = {};
    work.grid_height = (int)g.grid_height, work.grid_width = (int)g.grid_width;
    work.by_height = divider_by((uint32_t)g.grid_height), work.by_width = divider_by((uint32_t)g.grid_width);
    work.start_y = (int)g.start_y, work.start_x = (int)g.start_x;
    work.step_y = (int)g.step_y, work.step_x = (int)g.step_x;
    work.kernel_width = (int)p.kernel_width, work.taps = (int)conv2d_taps(p);
    work.dilation_y = (int)p.dilation_height, work.dilation_x = (int)p.dilation_width;
    work.last_offset_y = (int)((p.kernel_height - 1) * p.dilation_height);
    work.last_offset_x = (int)((p.kernel_width - 1) * p.dilation_width);
    work.mirrored = p.mirrored;
    work.chunks = (int)ceil_div(g.channels, width);
    work.next_channel = (int)g.channels;
    work.next_tap_x = p.groups_inside ? (int)p.groups : 1;
    work.next_tap_y = (int)p.kernel_width * work.next_tap_x;
    work.next_group = p.groups_inside ? 1 : (int)((p.weight_by_channel ? g.channels : p.columns) * conv2d_taps(p));
    work.first_tap = (int)p.first_group * work.next_group;
    work.gemm.batch = work.gemm.splits = 1;
    work.gemm.a_shared = work.gemm.b_shared = 1;
    work.gemm.alpha = 1;
    return work;
}

// Tiles and their order.
template <typename C>
static bool conv2d_set_tiles(GroupedGemmWork &gemm, const ConvProduct &p, const ConvPlan &plan)
{
    gemm.groups = (int)p.group_count;
    gemm.clusters_m = (int)ceil_div(gemm.m, C::M * C::CLUSTER_M);
    const int clusters_n = (int)ceil_div(gemm.n, C::N * C::CLUSTER_N);
    gemm.clusters_n = gemm.groups * clusters_n;
    gemm.group_width = clusters_n * C::N * C::CLUSTER_N;
    gemm.group = plan.group;
    const int64_t total = (int64_t)gemm.clusters_m * gemm.clusters_n * gemm.splits;
    gemm.total = (int)total;
    return total <= INT32_MAX / 8;
}

// `clusters` of `size` blocks, or as many as the GPU holds.
template <typename C, typename... Parameters>
static cuda_ops_status conv2d_start_kernel(void (*kernel)(Parameters...), int64_t clusters, int size,
                                           cudaStream_t stream, const Parameters &...arguments)
{
    allow_shared_memory(kernel, C::SHARED_BYTES);
    start_clusters(kernel, clusters * size, 3 * WARPGROUP, size, C::SHARED_BYTES, 90, stream, arguments...);
    return launch_status();
}

template <typename C, ConvKind KIND = CONV_IM2COL>
static cuda_ops_status conv2d_start(const ConvMaps &maps, const CUtensorMap &map_b, const CUtensorMap &map_d,
                                    ConvWork work, ConvDevice device, const ConvPlan &plan, const ConvProduct &p)
{
    if (!conv2d_set_tiles<C>(work.gemm, p, plan))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t total = work.gemm.total, room = device.multiprocessors / C::CLUSTER;
    return conv2d_start_kernel<C>(conv2d_sm90_kernel<C, KIND>, total < room ? total : room, C::CLUSTER, p.stream, maps,
                                  map_b, map_d, work);
}

// The taps of the product's stride phase, and its pixels in the result.
static inline void conv2d_set_stride_phase(ConvWork &work, const ConvProduct &p)
{
    work.taps = (int)(p.taps_y.count * p.taps_x.count);
    work.kernel_width = (int)p.taps_x.count;
    work.dilation_y = (int)p.taps_y.back, work.dilation_x = (int)p.taps_x.back;
    work.last_offset_y = (int)((p.taps_y.count - 1) * p.taps_y.back);
    work.last_offset_x = (int)((p.taps_x.count - 1) * p.taps_x.back);
    work.first_tap += (int)p.taps_y.first * work.next_tap_y + (int)p.taps_x.first * work.next_tap_x;
    work.next_tap_y *= (int)p.taps_y.step, work.next_tap_x *= (int)p.taps_x.step;
    StridedGemmWork &gemm = work.gemm;
    gemm.grid_height = (int)p.grid.grid_height, gemm.grid_width = (int)p.grid.grid_width;
    gemm.by_height = divider_by((uint32_t)p.grid.grid_height), gemm.by_width = divider_by((uint32_t)p.grid.grid_width);
    gemm.result_height = (int)p.result_height, gemm.result_width = (int)p.result_width;
    gemm.result_y = (int)p.result_y, gemm.result_x = (int)p.result_x;
    gemm.stride_y = (int)p.stride_y, gemm.stride_x = (int)p.stride_x;
    gemm.by_vectors = p.columns % (p.dtype == CUDA_OPS_FLOAT32 ? 2 : 8) == 0;
}

// The weight's tensor map, where rows are pixels.
template <typename C>
static bool conv2d_map_weight(CUtensorMap *map, const ConvProduct &p)
{
    // The matrices of taps and groups overlap: the rows of one tap are `taps` rows apart.
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const int64_t taps = conv2d_taps(p), channels = p.grid.channels, outer = C::B_MN_MAJOR ? channels : p.columns;
    const int64_t row = C::B_MN_MAJOR ? p.other_pitch : channels, between = p.groups_inside ? p.groups : 1;
    const int64_t matrices = p.groups_inside ? taps * p.groups : ((p.groups - 1) * outer + 1) * taps;
    return make_map(map, p.other, p.dtype, tf32, C::B_MN_MAJOR ? p.columns : channels, outer, matrices,
                    taps * row * between, row, C::ROW, (C::B_MN_MAJOR ? C::K : C::N) / C::CLUSTER_M);
}

// The gathered operand's map, or a map of each group's channels, of boxes of `pixels`. `count`: of maps before them.
template <typename C>
static bool conv2d_map_pixels(ConvMaps &maps, int &count, ConvWork &work, const ConvProduct &p, int pixels)
{
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const bool of_groups = conv2d_has_group_maps(p);
    PixelGrid grid = p.grid;
    work.first_map = count;
    if (of_groups) {
        work.next_map = 1;
        work.next_channel = 0;
    } else {
        grid.channels = p.pixel_stride;
    }
    bool mapped = true;
    for (int64_t i = 0; i < (of_groups ? p.group_count : 1) && mapped; i++) {
        const int64_t channel = of_groups ? (p.first_group + i) * p.grid.channels : 0;
        mapped = count < MOST_MAPS && make_group_pixel_map(&maps.a[count++], (const typename C::T *)p.source + channel,
                                                           p.dtype, tf32, grid, p.pixel_stride, C::ROW, pixels);
    }
    return mapped;
}

// backward_input with a stride: the products of some stride phases in one launch.
template <typename C>
static cuda_ops_status conv2d_launch_backward_input_strided(const ConvProduct *products, int count, ConvDevice device,
                                                            const ConvPlan &plan)
{
    static_assert(!C::A_MN_MAJOR && C::CLUSTER_N == 1, "rows are pixels");
    StridePhasesWork work = {};
    ConvMaps maps = {};
    int count_of_maps = 0;
    CUtensorMap map_b;
    bool mapped = conv2d_map_weight<C>(&map_b, products[0]);
    work.batch = 1;
    for (int i = 0; i < MOST_PHASES_TOGETHER; i++) {
        if (i >= count) {
            work.first[i] = INT32_MAX;
            continue;
        }
        const ConvProduct &p = products[i];
        ConvWork &phase = work.phases[i] = conv2d_work(p, C::K);
        conv2d_set_stride_phase(phase, p);
        GemmWork &gemm = phase.gemm;
        gemm.m = (int)conv2d_pixels(p.grid), gemm.n = (int)p.columns;
        gemm.k = gemm.chunk = phase.taps * phase.chunks * C::K;
        gemm.d = p.result;
        gemm.ldd = p.columns * p.groups;
        mapped = mapped && conv2d_set_tiles<C>(phase.gemm, p, plan) &&
                 conv2d_map_pixels<C>(maps, count_of_maps, phase, p, C::M);
        work.first[i] = work.total;
        work.total += gemm.total;
    }
    const int64_t room = device.multiprocessors / C::CLUSTER;
    return mapped ? conv2d_start_kernel<C>(conv2d_sm90_backward_input_strided_kernel<C>,
                                           work.total < room ? work.total : room, C::CLUSTER, products[0].stream, maps,
                                           map_b, work)
                  : CUDA_OPS_INVALID_ARGUMENT;
}

// forward, and backward_input, which is the same product over grad_output: rows are pixels, columns the result's
// channels.
template <typename C>
static cuda_ops_status conv2d_launch_forward(const ConvProduct &p, ConvDevice device, const ConvPlan &plan)
{
    static_assert(!C::A_MN_MAJOR, "rows are pixels");
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const int64_t pixels = conv2d_pixels(p.grid);
    ConvWork work = conv2d_work(p, C::K);
    GemmWork &gemm = work.gemm;
    gemm.m = (int)pixels, gemm.n = (int)p.columns, gemm.k = gemm.chunk = work.taps * work.chunks * C::K;
    gemm.d = p.result;
    gemm.ldd = p.columns * p.groups;
    gemm.stride_d = p.columns;
    gemm.bias = p.bias;
    gemm.bias_is_float = gemm.output_is_float = tf32;
    gemm.activation = p.activation;
    ConvMaps maps = {};
    int count_of_maps = 0;
    CUtensorMap map_b, map_d;
    bool mapped = conv2d_map_pixels<C>(maps, count_of_maps, work, p, C::M / C::CLUSTER_N);
    mapped = mapped && conv2d_map_weight<C>(&map_b, p);
    map_d = maps.a[0];
    const int64_t next_group = p.groups > 1 ? p.columns : 0;
    if (C::BUFFERS > 0 &&
        map_possible(p.result, sizeof(typename C::T), p.columns, pixels, p.groups, gemm.ldd, next_group)) {
        gemm.copies_out = 1;
        mapped = mapped && make_map(&map_d, p.result, p.dtype, false, p.columns, pixels, p.groups, gemm.ldd, next_group,
                                    C::CHUNK, C::GROUP_M);
    }
    return mapped ? conv2d_start<C>(maps, map_b, map_d, work, device, plan, p) : CUDA_OPS_INVALID_ARGUMENT;
}

// backward_weight: one side is grad_output's channels, the other (tap, channel), and k is pixels. The result is float
// where k is split, or where channels do not fill the tile's columns.
template <typename C>
static cuda_ops_status conv2d_launch_backward_weight(const ConvProduct &p, ConvDevice device, const ConvPlan &plan)
{
    static_assert(C::A_MN_MAJOR, "k is pixels");
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const int64_t taps = conv2d_taps(p), pixels = conv2d_pixels(p.grid);
    ConvWork work = conv2d_work(p, C::ROW);
    GemmWork &gemm = work.gemm;
    const int64_t width = taps * work.chunks * C::ROW;
    gemm.m = (int)(tf32 ? width : p.columns), gemm.n = (int)(tf32 ? p.columns : width), gemm.k = (int)pixels;
    const int64_t chunk = ceil_div(ceil_div(pixels, plan.splits), C::K) * C::K;
    gemm.chunk = (int)chunk;
    gemm.splits = (int)ceil_div(pixels, chunk);
    gemm.d = p.result;
    gemm.ldd = width;
    gemm.stride_d = p.columns * width;
    gemm.output_is_float = p.result_is_float;
    gemm.swapped = tf32;
    // What a tile reads of the next group's channels are rows and columns of products that are not stored.
    PixelGrid grid = p.grid;
    grid.channels = p.pixel_stride;
    const auto next_group = [&](int64_t stride) { return p.groups > 1 ? stride : 0; };
    ConvMaps maps = {};
    CUtensorMap map_b, map_d;
    bool mapped;
    if (tf32) {
        mapped = make_pixel_map(&maps.a[0], p.source, p.dtype, true, grid, C::ROW, C::K / C::CLUSTER_N) &&
                 make_map(&map_b, p.other, p.dtype, true, pixels, p.columns, p.groups, p.other_pitch,
                          next_group(p.columns * p.other_pitch), C::ROW, C::N / C::CLUSTER_M);
    } else {
        mapped = make_map(&maps.a[0], p.other, p.dtype, false, p.columns, pixels, p.groups, p.columns * p.groups,
                          next_group(p.columns), C::ROW, C::K / C::CLUSTER_N) &&
                 make_pixel_map(&map_b, p.source, p.dtype, false, grid, C::ROW, C::K / C::CLUSTER_M);
    }
    map_d = maps.a[0];
    if (!p.result_is_float) {
        gemm.copies_out = 1;
        mapped = mapped && make_map(&map_d, p.result, p.dtype, false, width, p.columns, p.groups, width,
                                    next_group(p.columns * width), C::CHUNK, C::GROUP_M);
    }
    return mapped ? conv2d_start<C>(maps, map_b, map_d, work, device, plan, p) : CUDA_OPS_INVALID_ARGUMENT;
}

// TF32's backward_weight of stride 1. source is [kernel_width][group][channel][pitch], other [group][channel][pitch];
// grid.grid_height and grid_width count the zeros between rows and images.
template <typename C>
static cuda_ops_status conv2d_launch_backward_weight_stride1(const ConvProduct &p, ConvDevice device,
                                                             const ConvPlan &plan)
{
    static_assert(sizeof(typename C::T) == 4 && !C::A_MN_MAJOR && !C::B_MN_MAJOR, "TF32 is K-major");
    const int64_t pixels = conv2d_pixels(p.grid);
    ConvWork work = conv2d_work(p, SHIFTED_CHUNK);
    work.line = (int)p.grid.grid_width;
    work.first_shift = (int)(p.grid.start_y * p.grid.grid_width);
    GemmWork &gemm = work.gemm;
    const int64_t width = conv2d_taps(p) * work.chunks * SHIFTED_CHUNK;
    gemm.m = (int)p.columns, gemm.n = (int)width, gemm.k = (int)pixels;
    const int64_t chunk = ceil_div(ceil_div(pixels, plan.splits), C::K) * C::K;
    gemm.chunk = (int)chunk;
    gemm.splits = (int)ceil_div(pixels, chunk);
    gemm.d = p.result;
    gemm.ldd = width;
    gemm.stride_d = p.columns * width;
    gemm.output_is_float = 1;
    ConvMaps maps = {};
    CUtensorMap map_b;
    const int64_t channels = p.grid.channels * p.groups;
    const bool mapped = make_map(&maps.a[0], p.other, p.dtype, true, pixels, p.columns, p.groups, p.other_pitch,
                                 p.groups > 1 ? p.columns * p.other_pitch : 0, C::ROW, C::M) &&
                        make_map(&map_b, p.source, p.dtype, true, pixels, channels, p.kernel_width, p.other_pitch,
                                 channels * p.other_pitch, C::ROW, SHIFTED_CHUNK);
    return mapped ? conv2d_start<C, CONV_SHIFTED>(maps, map_b, maps.a[0], work, device, plan, p)
                  : CUDA_OPS_INVALID_ARGUMENT;
}

#endif
