// conv2d, grouped path: groups of few channels on the tensor cores from 8.0 on, by mma.sync, of channels_last tensors
// in fp16, bf16 and TF32; and in float32 as it is by multiply-adds.
//
//   forward           output[pixel][o]   = sum over (tap, c) of input[pixel + tap][c] * weight[o][tap][c]
//   backward_input    the same over grad_output with the weight as [c][tap][o], each stride phase over its own taps
//   backward_weight   weight[o][tap][c]  = sum over pixels of grad_output[pixel][o] * input[pixel + tap][c]
//
// A group of 8 channels has 16 bytes of a pixel, and a number meets 8 multiply-adds a tap: there is little to do. So a
// block takes several groups at a time, whose channels make about 128 bytes of each pixel, and a rectangle of pixels
// with the halo that the kernel reaches, which it copies once for all taps; of backward_input with a stride all phases
// are made from one halo. mma.sync's 8 columns are no more than the narrowest group has, and its k takes vectors of 16
// bytes from anywhere, so that no product is of another group or of a gap. On Hopper forward and backward_input of
// about 24 to 40 channels a group are made by wgmma of the same tiles. Bound by what warps wait for, few as there are
// on a multiprocessor: 2 to 4 times of what memory takes (benchmarks/notes/conv2d.md). Of more channels sm90's slices
// are full.
#include <math.h>
#include <string.h>

#include "common/aligned_vector.cuh"
#include "conv2d/grouped/problem.h"
#include "conv2d/relayout.h"
#include "conv2d/split_k.h"
#include "conv2d/stride_phase.h"

static int64_t element_size(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

// The grid of an axis, rows or columns: which pixels of the source it reads.
struct Axis {
    int64_t grid, step, start, reach; // reach: of the halo of one pixel, beyond its first
};

// Of backward_input over all phases that there are: they share the halo.
static Axis axis_of_phases(const stride_phase_axis &axis)
{
    int64_t first = 0, last = 0;
    bool any = false;
    for (int64_t phase = 0; phase < stride_phase_count(axis); phase++) {
        const stride_phase_taps taps = taps_of_stride_phase(axis, phase);
        if (taps.count == 0)
            continue;
        const int64_t lowest = taps.start - (taps.count - 1) * taps.back;
        first = !any || lowest < first ? lowest : first;
        last = !any || taps.start > last ? taps.start : last;
        any = true;
    }
    return {ceil_div(axis.extent, axis.stride), 1, first, last - first};
}

static Axis rows_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT)
        return axis_of_phases(stride_phase_rows(s));
    return {s.out_height, s.stride_height, -s.padding_top, (s.kernel_height - 1) * s.dilation_height};
}
static Axis columns_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT)
        return axis_of_phases(stride_phase_columns(s));
    return {s.out_width, s.stride_width, -s.padding_left, (s.kernel_width - 1) * s.dilation_width};
}

// How a call is cut up, and about how long it takes.
struct GroupedPlan {
    int64_t slab_groups, tile_height, tile_width, columns, blocks; // blocks of a slab; 0: there is no plan
    bool wgmma, cluster; // cluster: the blocks of a slab of the gradient of the weight are one
    int64_t stages;
    double microseconds;
};

// What all plans of a call have alike.
struct GroupedCall {
    Axis rows, columns;
    bool weight, tensor_cores; // else float32 as it is
    bool has_wgmma;
    int64_t groups, channels, result_columns, vectors, column_vectors, taps, element;
    int64_t k_vectors, k_steps, phases; // of images
};

// Of images in 16 bits, whose result is aligned: whether pixels of a group are whole vectors of 16 bytes.
static bool stores_vectors(const GroupedCall &c)
{
    return c.element == 2 && c.result_columns % 8 == 0;
}

static int64_t phase_steps(int64_t taps, int64_t vectors)
{
    return ceil_div(taps * vectors, 2);
}

static GroupedCall grouped_call(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    GroupedCall c = {};
    c.rows = rows_of(call), c.columns = columns_of(call);
    c.weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    c.tensor_cores = call.dtype != CUDA_OPS_FLOAT32 || s.allow_tf32;
    c.groups = s.groups;
    c.element = element_size(call);
    c.channels = (input ? s.out_channels : s.in_channels) / s.groups;
    c.result_columns = (input ? s.in_channels : s.out_channels) / s.groups;
    c.vectors = c.channels * c.element / 16;
    c.column_vectors = ceil_div(c.result_columns * c.element, 16);
    c.taps = s.kernel_height * s.kernel_width;
    // In TF32 wgmma would cut operands that nothing has rounded on their way into shared memory.
    c.has_wgmma = conv2d_grouped_has_sm90() && device.capability == 90 && c.element == 2 && !c.weight &&
                  c.result_columns * c.element % 16 == 0;
    c.phases = 1;
    c.k_steps = phase_steps(c.taps, c.vectors);
    if (input) {
        const stride_phase_axis rows = stride_phase_rows(s), columns = stride_phase_columns(s);
        c.phases = stride_phase_count(rows) * stride_phase_count(columns);
        c.k_steps = 0;
        if (c.phases <= GROUPED_MOST_PHASES)
            for (int64_t y = 0; y < stride_phase_count(rows); y++)
                for (int64_t x = 0; x < stride_phase_count(columns); x++)
                    c.k_steps += phase_steps(
                        taps_of_stride_phase(rows, y).count * taps_of_stride_phase(columns, x).count, c.vectors);
    }
    c.k_vectors = 2 * c.k_steps;
    return c;
}

// Of a pixel in shared memory, such that what an instruction reads of eight neighbours lies in different banks; of
// float read element by element, of four.
static int64_t pixel_pitch(int64_t vectors, bool by_elements)
{
    if (!by_elements)
        return (vectors | 1) * 16;
    while (vectors % 4 != 2)
        vectors++;
    return vectors * 16;
}

static int64_t halo_slots(const GroupedCall &c, int64_t tile_width)
{
    return ceil_div((tile_width - 1) * c.columns.step + c.columns.reach + 1, c.columns.step) * c.columns.step;
}
static int64_t halo_height(const GroupedCall &c, const GroupedPlan &plan)
{
    return (plan.tile_height - 1) * c.rows.step + c.rows.reach + 1;
}
static int64_t halo_pixels(const GroupedCall &c, const GroupedPlan &plan)
{
    return halo_height(c, plan) * halo_slots(c, plan.tile_width);
}

// For wgmma the halo's pixels are sorted by the remainders of their rows too.
static int64_t rows_of_remainder(const GroupedCall &c, const GroupedPlan &plan)
{
    return ceil_div(halo_height(c, plan), c.rows.step);
}
static int64_t plane_pixels(const GroupedCall &c, const GroupedPlan &plan)
{
    return rows_of_remainder(c, plan) * c.rows.step * halo_slots(c, plan.tile_width);
}

static int64_t round_to_128(int64_t bytes)
{
    return ceil_div(bytes, 128) * 128;
}

// Pixels of k in an instruction, and of a tile in whole steps.
static int64_t k_pixels(const GroupedCall &c, const GroupedPlan &plan)
{
    const int64_t step = 32 / c.element;
    return ceil_div(plan.tile_height * plan.tile_width, step) * step;
}

// Shared memory: where its parts begin.
struct GroupedLayout {
    int64_t pixel_bytes, grad_pixel_bytes, weight_pitch, weight_rows;
    int64_t positions, halo, weights, grad, stages, stage_bytes, zeros, bytes;
    int64_t plane_bytes;
};

static GroupedLayout layout_of(const GroupedCall &c, const GroupedPlan &plan)
{
    const bool by_elements = c.weight && c.element == 4;
    GroupedLayout l = {};
    if (plan.wgmma) {
        l.plane_bytes = (plane_pixels(c, plan) | 1) * 16;
        l.weight_rows = ceil_div(c.result_columns, 8) * 8;
        l.weight_pitch = (l.weight_rows + 1) * 16;
        l.positions = ceil_div(4 * c.k_steps, 8) * 8;
        l.halo = l.positions + 8 * c.taps;
        l.weights = round_to_128(l.halo + 8 * plane_pixels(c, plan));
        l.stages = round_to_128(l.weights + plan.slab_groups * c.k_vectors * l.weight_pitch);
        l.stage_bytes = round_to_128(plan.slab_groups * c.vectors * l.plane_bytes);
        // What 64 rows of zeros take is what products read past the last plane, too.
        l.zeros = l.stages + plan.stages * l.stage_bytes;
        // A sanitizer takes the two vectors of a product's step for neighbours, which they seldom are: 1024 bytes more.
        l.bytes = l.zeros + 2048;
        return l;
    }
    l.pixel_bytes = pixel_pitch(plan.slab_groups * c.vectors, by_elements);
    const int64_t halo = round_to_128(halo_pixels(c, plan) * l.pixel_bytes);
    if (c.weight) {
        l.grad_pixel_bytes = pixel_pitch(plan.slab_groups * c.column_vectors, by_elements);
        l.grad = halo;
        l.stage_bytes = halo + round_to_128(k_pixels(c, plan) * l.grad_pixel_bytes);
        l.halo = 16 + 8 * k_pixels(c, plan);
        l.stages = round_to_128(l.halo + 8 * halo_pixels(c, plan));
    } else {
        l.weight_rows = ceil_div(c.result_columns, 8) * 8;
        l.weight_pitch = (c.k_vectors | 1) * 16;
        l.positions = 16 + 4 * c.k_vectors;
        l.halo = ceil_div(l.positions + 4 * c.taps, 8) * 8;
        l.weights = round_to_128(l.halo + 8 * halo_pixels(c, plan));
        l.stages = round_to_128(l.weights + plan.slab_groups * l.weight_rows * l.weight_pitch);
        l.stage_bytes = halo;
    }
    l.bytes = l.stages + plan.stages * l.stage_bytes + 16; // past a pixel's last outputs float32 reads as many more
    return l;
}

static int64_t column_blocks(const GroupedCall &c, const GroupedPlan &plan)
{
    return ceil_div(c.result_columns, plan.wgmma ? 32 : c.tensor_cores ? 8 * plan.columns : 8);
}
static int64_t row_blocks(const GroupedCall &c, const GroupedPlan &plan)
{
    if (plan.wgmma) // the ends of rows are computed too
        return ceil_div((plan.tile_height - 1) * halo_slots(c, plan.tile_width) / c.columns.step + plan.tile_width, 64);
    return ceil_div(plan.tile_height * plan.tile_width, c.tensor_cores ? 16 * GROUPED_ROWS : 128);
}

// The tasks of a slab of the gradient of the weight: each of a warp, of float32 as it is of a thread.
struct WeightTasks {
    int64_t row_blocks, tasks, parts, pixel_splits, threads;
};
static WeightTasks weight_tasks(const GroupedCall &c, const GroupedPlan &plan)
{
    WeightTasks w = {};
    const int64_t rows = c.taps * c.channels, per_block = c.tensor_cores ? GROUPED_WARPS : GROUPED_THREADS;
    w.row_blocks = c.tensor_cores ? ceil_div(rows, 16 * GROUPED_WEIGHT_ROWS) : rows / 4;
    w.tasks = plan.slab_groups * w.row_blocks * column_blocks(c, plan);
    w.parts = ceil_div(w.tasks, per_block);
    w.pixel_splits = c.tensor_cores || w.parts > 1 ? 1 : per_block / w.tasks;
    w.threads =
        c.tensor_cores ? 32 * least(w.tasks, per_block) : ceil_div(least(w.tasks * w.pixel_splits, per_block), 32) * 32;
    return w;
}
static int64_t weight_splits(const GroupedCall &c, const GroupedPlan &plan)
{
    return plan.cluster ? 1 : plan.blocks * weight_tasks(c, plan).pixel_splits;
}
// Shared memory of a cluster's block: its sums lie where its tiles were.
static int64_t cluster_bytes(const GroupedCall &c, const GroupedPlan &plan, const GroupedLayout &layout)
{
    const int64_t sums = weight_tasks(c, plan).threads / 32 * 8 * plan.columns * GROUPED_SUM_PITCH * 4;
    const int64_t bytes = layout.stages + sums;
    return bytes > layout.bytes ? bytes : layout.bytes;
}

// The model of times, in clocks of a multiprocessor of an H200: to start; of a product of 16 x 8 and of 128 bytes from
// shared memory, beside each other; of a copied vector and a stored byte; bytes that it reads in a clock; what a warp
// waits for in a step, with each of the products, and before and after the steps of 64 pixels; what a block waits for
// with a tile; and an element of the weights. Fitted to 282 plans of 35 products, one H200, but for the last, which was
// 0.5 when the weights were copied element by element.
struct GroupedTimes {
    double start, product, shared, copy, store, read, step, step_product, pixels, tile, fill;
};
static constexpr double CLOCK = 1700, SUM_START = 2, SUM_RATE = 3e6, CLUSTER = 0.7, CLUSTER_TILES = 4;
// Of float32 as it is: a step of 128 pixels and 8 columns, and what a warp waits for; of the gradient of the weight a
// pixel.
static constexpr double FLOAT32_STEP_PRODUCTS = 100, FLOAT32_STEP = 500, FLOAT32_PIXEL = 14, FLOAT32_WEIGHT_STEP = 120;
static constexpr GroupedTimes IMAGES = {1.8, 3.7, 3.5, 0, 0.24, 9.8, 65, 20, 2000, 2100, 0.2};
// Of 16 bits by mma.sync: fitted to 384 plans of 16 channels a group and some of 8 and 24 (one H100), images with results
// stored by vectors.
static constexpr GroupedTimes IMAGES_HALVES = {1.8, 5.3, 7.3, 0, 0.078, 11, 8, 1.1, 3390, 1640, 0.2};
static constexpr GroupedTimes WEIGHT_HALVES = {1.8, 5.05, 8.4, 0.375, 0, 10, 218, 53, 0, 2370, 0};
// By wgmma a step is of 64 pixels and 32 columns: fitted to 365 plans of 74 products.
static constexpr GroupedTimes WGMMA = {0.1, 39.8, 0, 1.2, 0.2, 35.9, 116, 0, 1350, 2230, 0.24};
static constexpr GroupedTimes WEIGHT = {1.8, 7, 5.9, 1, 0, 18.6, 66, 42, 0, 3700, 0};
static constexpr GroupedTimes WEIGHT_TF32 = {2.7, 9.9, 18, 0, 0, 5.9, 113, 67, 0, 4900, 0};

// Of a plan without its blocks, which it chooses.
static void estimate(const GroupedCall &c, const ConvCall &call, ConvDevice device, GroupedPlan &plan)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t slabs = ceil_div(c.groups, plan.slab_groups);
    const int64_t tiles = s.batch * ceil_div(c.rows.grid, plan.tile_height) * ceil_div(c.columns.grid, plan.tile_width);
    const WeightTasks w = weight_tasks(c, plan);
    const int64_t pixels = plan.tile_height * plan.tile_width, parts = c.weight ? w.parts : 1;
    // A multiprocessor has 1 KB more, and takes as much for each of its blocks.
    const int64_t limit = device.shared_bytes;
    plan.stages = 2;
    if (layout_of(c, plan).bytes > limit)
        plan.stages = 1;
    const int64_t bytes = layout_of(c, plan).bytes;
    // The offsets in the source from a halo's first pixel, which may be above the image, are 32 bits wide.
    const int64_t source_width = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? s.out_width : s.in_width;
    const int64_t source_pixels = halo_height(c, plan) * source_width + halo_slots(c, plan.tile_width);
    if (bytes > limit || source_pixels * c.groups * c.channels * c.element > INT32_MAX || slabs * parts > MAX_GRID) {
        plan.blocks = 0;
        return;
    }
    int64_t at_once = (limit + 1024) / (bytes + 1024);
    if (c.weight) {
        const bool wide = c.element == 4; // of a thread, as they are compiled for 9.0
        const int64_t registers = plan.columns == 4 ? 128 : plan.columns == 2 ? (wide ? 96 : 80) : (wide ? 80 : 64);
        at_once = least(at_once, 65536 / (w.threads * registers));
    } else {
        at_once = least(at_once, plan.wgmma ? 4 : plan.columns == 1 ? 3 : 2);
    }
    int64_t blocks = least(tiles, device.multiprocessors * at_once / (slabs * parts));
    blocks = blocks < 1 ? 1 : blocks;
    blocks = ceil_div(tiles, ceil_div(tiles, blocks));
    if (plan.stages == 1 && blocks < tiles) { // a block that does not loop needs one
        if (c.weight) {
            plan.blocks = 0;
            return;
        }
        blocks = tiles;
    }
    const GroupedTimes &m = plan.wgmma                         ? WGMMA
                            : !c.weight && stores_vectors(c)   ? IMAGES_HALVES
                            : !c.weight                        ? IMAGES
                            : c.element == 2                   ? WEIGHT_HALVES
                            : c.element == 4 && c.tensor_cores ? WEIGHT_TF32
                                                               : WEIGHT;
    const double nt = (double)plan.columns, right = plan.columns == 1 ? 0.5 : 0.5 * nt; // 128 bytes each
    const double halo_vectors =
        (double)((plan.wgmma ? plane_pixels(c, plan) : halo_pixels(c, plan)) * plan.slab_groups * c.vectors);
    double throughput, latency, fill = 0, read = 16 * halo_vectors, copies = halo_vectors;
    if (c.weight) {
        const double steps = (double)ceil_div(pixels, c.tensor_cores ? 32 / c.element : w.pixel_splits);
        const double warps = (double)w.threads / 32, rows = GROUPED_WEIGHT_ROWS;
        throughput =
            warps * steps * (c.tensor_cores ? fmax((rows + right) * m.shared, rows * nt * m.product) : FLOAT32_PIXEL);
        latency = steps * (c.tensor_cores ? m.step + m.step_product * rows * nt : FLOAT32_WEIGHT_STEP);
        const double grad = (double)(pixels * plan.slab_groups * c.column_vectors);
        read += 16 * grad, copies += grad;
    } else {
        const double tasks = (double)(row_blocks(c, plan) * plan.slab_groups * c.phases * column_blocks(c, plan));
        const double steps = (double)c.k_steps / (double)c.phases, rows = GROUPED_ROWS;
        const double stored = (double)(pixels * c.phases * plan.slab_groups * c.result_columns * c.element);
        const double step = plan.wgmma       ? m.product
                            : c.tensor_cores ? fmax((rows + right) * m.shared, rows * nt * m.product)
                                             : FLOAT32_STEP_PRODUCTS;
        const double wait = plan.wgmma ? m.step : c.tensor_cores ? m.step + m.step_product * rows * nt : FLOAT32_STEP;
        throughput = tasks * steps * step + stored * m.store;
        latency = ceil(tasks / (plan.wgmma ? GROUPED_WARPS / 4 : GROUPED_WARPS)) * (steps * wait + m.pixels);
        read += stored;
        fill = m.fill * (double)(plan.slab_groups * c.result_columns * c.channels * c.taps);
    }
    throughput += m.copy * copies;
    const double weights = (double)(s.out_channels * (s.in_channels / s.groups) * c.taps);
    plan.microseconds = 1e30;
    const bool may_cluster =
        c.weight && c.tensor_cores && device.capability >= 90 && cluster_bytes(c, plan, layout_of(c, plan)) <= limit;
    for (int64_t b = blocks; b >= 1;
         b = b > GROUPED_MOST_CLUSTER && b / 2 < GROUPED_MOST_CLUSTER ? GROUPED_MOST_CLUSTER : b / 2) {
        const int64_t wave = device.multiprocessors * at_once, all = b * slabs * parts;
        const double waves = (double)ceil_div(all, wave), of_block = (double)ceil_div(tiles, b);
        const double together = (double)least(at_once, ceil_div(all, device.multiprocessors));
        const double tile = fmax(together * fmax(throughput, read / m.read), latency + m.tile);
        const int64_t splits = b * w.pixel_splits;
        // Of many tiles their blocks would wait for each other.
        const bool cluster = may_cluster && b > 1 && b <= GROUPED_MOST_CLUSTER && of_block <= CLUSTER_TILES;
        const double sum = !c.weight || splits == 1 ? 0
                           : cluster                ? CLUSTER
                                                    : SUM_START + (double)splits * weights * 8 / SUM_RATE;
        const double time = m.start + sum + waves * (of_block * tile + m.tile + fill * together) / CLOCK;
        if (time < plan.microseconds) {
            plan.microseconds = time;
            plan.blocks = b;
            plan.cluster = cluster;
        }
        if (!c.weight || plan.stages == 1)
            break;
    }
    if (plan.blocks == tiles && plan.stages == 2)
        plan.stages = 1;
}

// The number of parts of `extent` of about `size`, made as large as each other.
static int64_t even_part(int64_t extent, int64_t size)
{
    return ceil_div(extent, ceil_div(extent, size < 1 ? 1 : size));
}

// The plan that is expected to take the least time. Tried are slabs whose pixels have 64 to 256 bytes, rectangles of 64
// to 512 pixels as wide as the grid, a half, a third or a quarter of it, and all numbers of columns that a warp can
// have.
static GroupedPlan search(const ConvCall &call, ConvDevice device)
{
    const GroupedCall c = grouped_call(call, device);
    const int64_t bytes = 16 * (c.vectors > c.column_vectors ? c.vectors : c.column_vectors);
    GroupedPlan best = {};
    const auto consider = [&](int64_t groups, int64_t height, int64_t width, int64_t columns, bool wgmma = false) {
        GroupedPlan plan = {};
        plan.wgmma = wgmma;
        plan.slab_groups = least(groups, c.groups), plan.tile_height = height, plan.tile_width = width;
        plan.columns = c.tensor_cores ? columns : 0;
        estimate(c, call, device, plan);
        if (plan.blocks > 0 && (best.blocks == 0 || plan.microseconds < best.microseconds))
            best = plan;
    };
    for (int64_t groups = 1; groups == 1 || (groups < 2 * c.groups && groups * bytes <= 256); groups *= 2) {
        if (groups * bytes < 64 && groups < c.groups)
            continue;
        for (int64_t across = 1; across <= 4; across++) {
            const int64_t width = even_part(c.columns.grid, least(64, ceil_div(c.columns.grid, across)));
            for (int64_t pixels = 64; pixels <= 512; pixels *= 2)
                for (int64_t columns = 1; columns <= 4; columns *= 2) {
                    const int64_t height = even_part(c.rows.grid, pixels / width);
                    if (columns == 1 || (c.tensor_cores && columns < 2 * ceil_div(c.result_columns, 8)))
                        consider(groups, height, width, columns);
                    if (columns == 1 && c.has_wgmma)
                        consider(groups, height, width, columns, true);
                }
        }
    }
    if (best.blocks == 0) // large kernels, of which the weights leave little room
        consider(1, 1, least(8, c.columns.grid), 1);
    return best;
}

// A call asks for its path, its workspace and its launch, and a network for the same ones at every step: each thread
// keeps the answers for some.
static GroupedPlan plan_for(const ConvCall &call, ConvDevice device)
{
    struct Key {
        cuda_ops_conv2d_sizes sizes;
        int pass, dtype, multiprocessors, shared_bytes, capability;
    };
    struct Known {
        Key key;
        GroupedPlan plan;
    };
    static constexpr uint32_t KEPT = 64;
    static thread_local Known kept[KEPT];
    Key key;
    memset(&key, 0, sizeof key); // with any bytes between its members
    key.sizes = call.sizes;
    key.pass = call.pass, key.dtype = call.dtype;
    key.multiprocessors = device.multiprocessors, key.shared_bytes = device.shared_bytes;
    key.capability = device.capability;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof key; i += 4) {
        uint32_t word;
        memcpy(&word, (const char *)&key + i, 4);
        hash = (hash ^ word) * 16777619u;
    }
    Known &known = kept[(hash ^ hash >> 16) % KEPT];
    if (memcmp(&known.key, &key, sizeof key) != 0) {
        known.plan = search(call, device);
        known.key = key;
    }
    return known.plan;
}

Answer conv2d_grouped_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t most = INT32_MAX - 1024, element = element_size(call), taps = s.kernel_height * s.kernel_width;
    if (device.capability < 80)
        return NEEDS_80;
    if (device.multiprocessors < 1)
        return no("there is no GPU");
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("takes no float64");
    if (s.groups == 1)
        return no("takes several groups");
    if (!conv2d_images_are_channels_last(s))
        return CONV_NEEDS_CHANNELS_LAST;
    const int64_t channels = s.in_channels / s.groups, outs = s.out_channels / s.groups;
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT, forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    if ((!input && channels * element % 16 != 0) || (!forward && outs * element % 16 != 0))
        return CONV_NEEDS_GROUPS_OF_VECTORS;
    if (s.in_channels * taps > most || s.out_channels * taps > most || s.in_channels > most / s.out_channels ||
        s.batch * s.in_height > most / s.in_width || s.batch * s.out_height > most / s.out_width || s.groups > 65535)
        return CONV_IS_LARGE;
    // Offsets in an image are 32 bits wide; estimate() looks at those in a halo.
    if (s.in_channels * s.in_height > most / element / (s.in_width + s.kernel_width * s.dilation_width) ||
        s.out_channels * s.out_height > most / element / (s.out_width + s.kernel_width))
        return CONV_IS_LARGE;
    if (channels > 128 || outs > 128)
        return no("a group has more than 128 channels");
    if (input &&
        stride_phase_count(stride_phase_rows(s)) * stride_phase_count(stride_phase_columns(s)) > GROUPED_MOST_PHASES)
        return CONV_IS_LARGE;
    // The weight may begin anywhere. `input` and `output` are null in the passes that do not read them.
    if (!is_aligned_16(call.input) || !is_aligned_16(call.output) || !is_aligned_16(call.result))
        return NEEDS_ALIGNMENT;
    return plan_for(call, device).blocks > 0 ? YES : no("no tile fits into shared memory and 32-bit offsets");
}

double conv2d_grouped_microseconds(const ConvCall &call, ConvDevice device)
{
    return plan_for(call, device).microseconds;
}

Answer conv2d_grouped_is_fast(const ConvCall &call, ConvDevice device)
{
    // Past what was measured, and by then sm90's slices of 128 bytes are full.
    const GroupedCall c = grouped_call(call, device);
    if (c.tensor_cores && (c.vectors > 8 || c.column_vectors > 8) && conv2d_sm90_supports(call, device))
        return no("a group's channels fill more than a slice of sm90's");
    // Gradients of the weight of 32 channels a group in 16 bits were made faster by mma and sm90 wherever the model said
    // otherwise, by 1.03 to 2 times.
    if (c.weight && c.tensor_cores && c.element == 2 && c.vectors >= 4 && c.column_vectors >= 4 &&
        conv2d_mma_supports(call, device))
        return no("32 channels a group or more fill the tiles of mma and sm90");
    // Forward and gradients of input by mma.sync took longer than mma where the model said less.
    constexpr double CAUTION = 1.15;
    const double time =
        conv2d_grouped_microseconds(call, device) * (c.weight || plan_for(call, device).wgmma ? 1 : CAUTION);
    if (call.dtype == CUDA_OPS_FLOAT32 && !call.sizes.allow_tf32)
        return time > conv2d_simt_microseconds(call, device) ||
                       (conv2d_winograd_supports(call, device) && conv2d_winograd_is_fast(call, device) &&
                        conv2d_winograd_microseconds(call, device) < time)
                   ? no("groups have so many channels that winograd or simt takes less time")
                   : YES;
    return (conv2d_mma_supports(call, device) && conv2d_mma_microseconds(call, device) < time) ||
                   (conv2d_sm90_supports(call, device) && conv2d_sm90_microseconds(call, device) < time)
               ? no("groups have so many channels that sm90 or mma takes less time")
               : YES;
}

// The result of a gradient of the weight in splits, which are added in the end.
size_t conv2d_grouped_workspace(const ConvCall &call, ConvDevice device)
{
    if (call.pass != CUDA_OPS_CONV2D_BACKWARD_WEIGHT)
        return 0;
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const GroupedPlan plan = plan_for(call, device);
    const int64_t weight = s.out_channels * (s.in_channels / s.groups) * s.kernel_height * s.kernel_width;
    int64_t splits = weight_splits(grouped_call(call, device), plan);
    return splits > 1 ? conv2d_round_to_256(splits * weight * 4) : 0;
}

static GroupedTiles tiles_of(const ConvCall &call, const GroupedCall &c, const GroupedPlan &plan,
                             const GroupedLayout &layout)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    GroupedTiles t = {};
    t.source = input ? call.output : call.input;
    t.source_pixel = c.groups * c.channels;
    t.height = (int)(input ? s.out_height : s.in_height), t.width = (int)(input ? s.out_width : s.in_width);
    t.start_y = (int)c.rows.start, t.start_x = (int)c.columns.start;
    t.step_y = (int)c.rows.step, t.step_x = (int)c.columns.step;
    t.grid_height = (int)c.rows.grid, t.grid_width = (int)c.columns.grid;
    t.tile_height = (int)plan.tile_height, t.tile_width = (int)plan.tile_width;
    t.count_x = (int)ceil_div(c.columns.grid, plan.tile_width);
    t.count_of_image = t.count_x * (int)ceil_div(c.rows.grid, plan.tile_height);
    t.tiles = (int)s.batch * t.count_of_image;
    t.halo_slots = (int)halo_slots(c, plan.tile_width);
    t.halo_height = (int)halo_height(c, plan);
    t.halo_width = (int)((plan.tile_width - 1) * c.columns.step + c.columns.reach + 1);
    t.slots_of_remainder = t.halo_slots / t.step_x;
    t.pixel_bytes = (int)layout.pixel_bytes, t.halo_at = (int)layout.halo;
    t.rows_of_remainder = (int)rows_of_remainder(c, plan), t.plane_pixels = (int)plane_pixels(c, plan);
    t.plane_bytes = (int)layout.plane_bytes;
    t.by_slots = divider_by((uint32_t)t.slots_of_remainder);
    t.groups = (int)c.groups, t.slab_groups = (int)plan.slab_groups, t.channels = (int)c.channels;
    t.vectors = (int)c.vectors, t.slab_vectors = (int)(plan.slab_groups * c.vectors);
    t.tiles_x = divider_by((uint32_t)t.count_x), t.tiles_of_image = divider_by((uint32_t)t.count_of_image);
    t.by_tile_width = divider_by((uint32_t)t.tile_width);
    return t;
}

static cuda_ops_status backward_weight(const ConvCall &call, const GroupedCall &c, const GroupedPlan &plan)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const GroupedLayout layout = layout_of(c, plan);
    GroupedWeight work = {};
    work.tiles = tiles_of(call, c, plan, layout);
    work.grad_output = call.output;
    const int64_t splits = weight_splits(c, plan);
    const WeightTasks tasks = weight_tasks(c, plan);
    work.is_float = splits > 1;
    work.cluster = plan.cluster;
    work.result = work.is_float ? call.workspace : call.result;
    work.grad_pixel = s.out_channels;
    work.outs = (int)c.result_columns, work.out_vectors = (int)c.column_vectors;
    work.grad_pixel_bytes = (int)layout.grad_pixel_bytes, work.pixels = (int)k_pixels(c, plan);
    work.taps = (int)c.taps, work.kernel_width = (int)s.kernel_width;
    work.dilation_y = (int)s.dilation_height, work.dilation_x = (int)s.dilation_width;
    work.row_blocks = (int)tasks.row_blocks, work.column_blocks = (int)column_blocks(c, plan);
    work.tasks = (int)tasks.tasks, work.parts = (int)tasks.parts, work.pixel_splits = (int)tasks.pixel_splits;
    work.result_last = conv2d_weight_is_channels_last(s);
    work.result_outs = (int)(call.weight_outs ? call.weight_outs : c.result_columns);
    work.result_channels = (int)(call.weight_outs ? call.weight_channels : c.channels);
    work.grad_at = (int)layout.grad, work.stages_at = (int)layout.stages, work.stage_bytes = (int)layout.stage_bytes;
    const dim3 grid((unsigned int)plan.blocks, (unsigned int)(ceil_div(c.groups, plan.slab_groups) * work.parts));
    const int64_t bytes = plan.cluster ? cluster_bytes(c, plan, layout) : layout.bytes;
    const cuda_ops_status status =
        conv2d_grouped_weight(work, (int)plan.columns, grid, (int)tasks.threads, (int)bytes, call.dtype, call.stream);
    if (status != CUDA_OPS_SUCCESS || !work.is_float)
        return status;
    return conv2d_sum_weight_splits(call, (const float *)call.workspace, c.channels, splits);
}

// The taps of each phase: of forward one phase has all.
static void set_phases(GroupedImages &work, const ConvCall &call, const GroupedCall &c)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    work.result_step_y = work.result_step_x = 1;
    if (call.pass == CUDA_OPS_CONV2D_FORWARD) {
        work.phase_count = 1;
        GroupedPhase &phase = work.phases[0];
        phase = {};
        phase.steps = (int)c.k_steps;
        phase.taps_y = (int)s.kernel_height, phase.taps_x = (int)s.kernel_width;
        phase.back_y = (int)s.dilation_height, phase.back_x = (int)s.dilation_width;
        phase.next_y = phase.next_x = 1;
        return;
    }
    const stride_phase_axis rows = stride_phase_rows(s), columns = stride_phase_columns(s);
    work.result_step_y = (int)s.stride_height, work.result_step_x = (int)s.stride_width;
    int start = 0;
    for (int64_t y = 0; y < stride_phase_count(rows); y++)
        for (int64_t x = 0; x < stride_phase_count(columns); x++) {
            const stride_phase_taps of_rows = taps_of_stride_phase(rows, y);
            const stride_phase_taps of_columns = taps_of_stride_phase(columns, x);
            GroupedPhase &phase = work.phases[work.phase_count++];
            phase = {};
            phase.start = start;
            phase.steps = (int)phase_steps(of_rows.count * of_columns.count, c.vectors);
            phase.taps_y = phase.steps > 0 ? (int)of_rows.count : 0;
            phase.taps_x = phase.steps > 0 ? (int)of_columns.count : 1;
            phase.first_y = (int)(of_rows.start - c.rows.start), phase.back_y = -(int)of_rows.back;
            phase.first_x = (int)(of_columns.start - c.columns.start), phase.back_x = -(int)of_columns.back;
            phase.tap_y = (int)of_rows.first, phase.next_y = (int)of_rows.step;
            phase.tap_x = (int)of_columns.first, phase.next_x = (int)of_columns.step;
            phase.result_y = (int)y, phase.result_x = (int)x;
            start += 2 * phase.steps;
        }
}

cuda_ops_status conv2d_grouped(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const GroupedCall c = grouped_call(call, device);
    const GroupedPlan plan = plan_for(call, device);
    if (plan.blocks == 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (c.weight)
        return backward_weight(call, c, plan);
    const GroupedLayout layout = layout_of(c, plan);
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD;
    GroupedImages work = {};
    work.tiles = tiles_of(call, c, plan, layout);
    work.weight = call.weight, work.bias = call.bias, work.result = call.result;
    work.result_pixel = c.groups * c.result_columns;
    work.result_height = (int)(forward ? s.out_height : s.in_height);
    work.result_width = (int)(forward ? s.out_width : s.in_width);
    work.columns = (int)c.result_columns;
    work.stores_vectors = stores_vectors(c) && is_aligned_16(call.result);
    work.weight_outs = (int)(call.weight_outs ? call.weight_outs : s.out_channels / s.groups);
    work.weight_channels = (int)(call.weight_outs ? call.weight_channels : s.in_channels / s.groups);
    work.taps = (int)c.taps, work.kernel_width = (int)s.kernel_width;
    work.weight_last = conv2d_weight_is_channels_last(s), work.transposed = !forward;
    set_phases(work, call, c);
    work.k_vectors = (int)c.k_vectors;
    work.row_blocks = (int)row_blocks(c, plan), work.column_blocks = (int)column_blocks(c, plan);
    work.weight_rows = (int)layout.weight_rows, work.weight_pitch = (int)layout.weight_pitch;
    work.positions_at = (int)layout.positions, work.weight_at = (int)layout.weights;
    work.stages_at = (int)layout.stages, work.stage_bytes = (int)layout.stage_bytes;
    work.zeros_at = (int)layout.zeros;
    work.by_row_blocks = divider_by((uint32_t)work.row_blocks);
    work.by_column_blocks = divider_by((uint32_t)work.column_blocks);
    const int64_t row_vectors = work.weight_channels * c.element / 16;
    work.by_row_vectors = divider_by((uint32_t)(row_vectors > 0 ? row_vectors : 1));
    work.by_taps = divider_by((uint32_t)c.taps), work.by_weight_outs = divider_by((uint32_t)work.weight_outs);
    const dim3 grid((unsigned int)plan.blocks, (unsigned int)ceil_div(c.groups, plan.slab_groups));
    if (plan.wgmma)
        return conv2d_grouped_images_sm90(work, grid, (int)layout.bytes, call.dtype, call.stream);
    return conv2d_grouped_images(work, (int)plan.columns, grid, (int)layout.bytes, call.dtype, call.stream);
}
