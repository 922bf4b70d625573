// conv2d with a group per channel in channels_last, of whole vectors of 16 bytes of channels, from tiles in shared memory:
// forward and backward_input of 3x3 and 5x5 filters with strides of 1 and 2, and of 7x7 filters with a stride of 1.
//
// Units are unrolled.cu's, of four channels a thread. But a block copies a tile with its halo to shared memory, as it is,
// by cp.async, zeros where there is no pixel, and the next tile while it multiplies one: a value is one load at a
// constant distance and its conversion, without the addresses, comparisons and zeros that loads of device memory need,
// of which unrolled.cu has as many as products. Blocks walk over tiles of the same channels, whose filters they convert
// once. Of few pixels the copy and its barriers are a trip to memory more.
// Bound by instructions, of which 2/3 are products in 5x5 filters; 3x3 by memory.
#include <algorithm>

#include "conv2d/depthwise/units.cuh"

static constexpr int VECTOR = 4;
static constexpr int STAGES = 2;

// Of a pixel in shared memory: what a warp reads of neighbouring units lies in different banks.
template <typename T>
__host__ __device__ static constexpr int pixel_bytes()
{
    return CHANNELS * (int)sizeof(T) + (sizeof(T) == 2 ? 16 : 0);
}

// A tile of the result and what it reads of the source, which is `rows` x `columns` pixels of each of its images.
struct StagedTiles {
    UnitTiles units;
    const void *source;
    struct DirectStrides in, out; // of the source and of the result
    int height, width, out_height, out_width;
    int start_y, start_x, tile_step_y, tile_step_x; // in the source: the first tile's window, and the next ones'
    int rows, columns, line_bytes, image_bytes, stage_bytes;
    int tiles, parts; // of all images; blocks of a tile of channels
    struct Divider by_tiles_x, by_tiles_y;
};

// A tile: its first image, and its number in it.
struct StagedPlace {
    int n, y, x;
};

static __device__ __forceinline__ StagedPlace staged_place(const StagedTiles &t, int tile)
{
    StagedPlace place;
    const int row = (int)t.by_tiles_x.of((uint32_t)tile), images = (int)t.by_tiles_y.of((uint32_t)row);
    place.x = tile - row * t.units.tiles_x;
    place.y = row - images * t.units.tiles_y;
    place.n = images * t.units.images;
    return place;
}

// Copies a tile's `vectors` vectors of 16 bytes of each pixel, from channel `first` on. Warps take lines of it.
template <typename T>
static __device__ __forceinline__ void copy_tile(char *stage, const StagedTiles &t, const DepthwiseProblem &p,
                                                 StagedPlace place, int64_t first, Divisor vectors)
{
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int y0 = t.start_y + place.y * t.tile_step_y, x0 = t.start_x + place.x * t.tile_step_x;
    const int64_t step = warps * t.in.y * (int)sizeof(T);
    const int images = min(t.units.images, (int)p.batch - place.n);
    for (int image = 0; image < images; image++) {
        const char *const corner = (const char *)((const T *)t.source + (place.n + image) * t.in.n + first) +
                                   ((y0 + warp) * t.in.y + x0 * t.in.x) * (int)sizeof(T);
        char *const to_image = stage + image * t.image_bytes + warp * t.line_bytes;
        for (int at = lane; at < t.columns * (int)vectors.value; at += WARP_SIZE) {
            const int column = quotient(at, vectors), vector = at - column * (int)vectors.value;
            const bool inside = (unsigned int)(x0 + column) < (unsigned int)t.width;
            const char *from = corner + column * t.in.x * (int)sizeof(T) + vector * 16;
            char *to = to_image + column * pixel_bytes<T>() + vector * 16;
#pragma unroll 4
            for (int row = warp; row < t.rows; row += warps, from += step, to += warps * t.line_bytes)
                copy_to_shared<16>(to, from, inside && (unsigned int)(y0 + row) < (unsigned int)t.height);
        }
    }
}

// FORWARD: forward, and backward_input of stride 1, which comes as forward; else backward_input of stride 2.
template <typename T, int K, int STRIDE, bool FORWARD>
__global__ void __launch_bounds__(THREADS, 2)
    conv2d_depthwise_staged_kernel(const __grid_constant__ DepthwiseProblem p, const __grid_constant__ StagedTiles t)
{
    constexpr int UNIT_COLUMNS = unit_columns(VECTOR, STRIDE, FORWARD), BACK = (K - 1) / 2;
    constexpr int STEP = FORWARD ? STRIDE : 1, STEP_ROWS = FORWARD ? UNIT_ROWS * STRIDE : 1; // of a unit, in the source
    constexpr int ROWS = FORWARD ? (UNIT_ROWS - 1) * STRIDE + K : BACK + 1;
    constexpr int COLUMNS = FORWARD ? (UNIT_COLUMNS - 1) * STRIDE + K : UNIT_COLUMNS + BACK;
    constexpr int RESULTS = FORWARD ? UNIT_COLUMNS : 2 * UNIT_COLUMNS;
    typedef ChannelVector<T, VECTOR> V;
    extern __shared__ __align__(16) char stages[];
    __shared__ __align__(16) float filters[K * K * PITCH];
    const UnitTiles &units = t.units;
    const int part = blockIdx.x / units.channel_tiles, width = units.lanes * VECTOR;
    const int64_t first = (int64_t)((int)blockIdx.x - part * units.channel_tiles) * width;
    prefetch_filters<T, K>(p, first, width);
    const Divisor vectors = make_divisor((uint32_t)min((int64_t)width, p.channels - first) * (uint32_t)sizeof(T) / 16);
    // The thread's unit, which is the same in all tiles.
    const int unit = quotient(threadIdx.x, units.by_lanes), image = quotient(unit, units.by_units);
    const int in_tile = unit - image * (units.units_x * units.units_y), down = quotient(in_tile, units.by_units_x);
    const int across = in_tile - down * units.units_x, lane = (int)threadIdx.x - unit * units.lanes;
    const int64_t channel = first + lane * VECTOR;
    const bool works = image < units.images && channel < p.channels;
    const int window = image * t.image_bytes + down * STEP_ROWS * t.line_bytes +
                       across * (UNIT_COLUMNS * STEP) * pixel_bytes<T>() + lane * V::BYTES;
    wait_for_predecessor();
    copy_tile<T>(stages, t, p, staged_place(t, part), first, vectors);
    cp_async_commit_group();
    keep_filters<T, K>(filters, p, first, width);
    const float *const own = filters + lane * VECTOR;
    float start[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; k++)
        start[k] = FORWARD && p.bias != nullptr && works ? load_as_accumulate(((const T *)p.bias)[channel + k]) : 0.0f;

    int stage = 0;
    for (int tile = part; tile < t.tiles; tile += t.parts, stage ^= t.stage_bytes) {
        cp_async_wait_group<0>();
        __syncthreads(); // and all have read the other stage
        if (tile + t.parts < t.tiles) {
            copy_tile<T>(stages + (stage ^ t.stage_bytes), t, p, staged_place(t, tile + t.parts), first, vectors);
            cp_async_commit_group();
        } else
            release_successor();
        const StagedPlace place = staged_place(t, tile);
        const int n = place.n + image;
        const int x = (place.x * units.units_x + across) * RESULTS - (FORWARD ? 0 : p.padding_left % 2);
        const int y = (place.y * units.units_y + down) * 2 - (FORWARD ? 0 : p.padding_top % 2);
        if (!works || n >= p.batch || x >= t.out_width || y >= t.out_height)
            continue;
        float sum[UNIT_ROWS][RESULTS][VECTOR];
#pragma unroll
        for (int i = 0; i < UNIT_ROWS; i++)
#pragma unroll
            for (int j = 0; j < RESULTS; j++)
#pragma unroll
                for (int k = 0; k < VECTOR; k++)
                    sum[i][j][k] = start[k];
        const char *line = stages + stage + window;
#pragma unroll
        for (int row = 0; row < ROWS; row++, line += t.line_bytes) {
            V raw[COLUMNS];
            float value[COLUMNS][VECTOR];
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                load_channels(raw[i], (const T *)(line + i * pixel_bytes<T>()), true);
            convert_channels(value, raw);
            if constexpr (FORWARD)
                add_forward_row<K, STRIDE>(sum, value, own, row);
            else
                add_backward_row<K>(sum, value, own, row);
        }
        if constexpr (FORWARD)
#pragma unroll
            for (int i = 0; i < UNIT_ROWS; i++)
#pragma unroll
                for (int j = 0; j < RESULTS; j++)
                    conv2d_activate<T>(sum[i][j], p.activation);
        store_unit((T *)p.result + n * t.out.n + channel, t.out, sum, y, x, t.out_height, t.out_width);
    }
}

typedef void (*StagedKernel)(DepthwiseProblem, StagedTiles);

template <typename T>
static StagedKernel kernel_of(int kernel, int stride, bool forward)
{
    if (!forward)
        return kernel == 3 ? conv2d_depthwise_staged_kernel<T, 3, 2, false>
                           : conv2d_depthwise_staged_kernel<T, 5, 2, false>;
    if (stride == 2)
        return kernel == 3 ? conv2d_depthwise_staged_kernel<T, 3, 2, true>
                           : conv2d_depthwise_staged_kernel<T, 5, 2, true>;
    return kernel == 3   ? conv2d_depthwise_staged_kernel<T, 3, 1, true>
           : kernel == 5 ? conv2d_depthwise_staged_kernel<T, 5, 1, true>
                         : conv2d_depthwise_staged_kernel<T, 7, 1, true>;
}

// The tiles of a call, by the cycles that they are expected to take, and the time in microseconds; -1: there are none.
static double tiles_of(StagedTiles &best, const DepthwiseProblem &p, int bytes, bool forward, const Device &device)
{
    constexpr double PER_CYCLE = 2.6;             // instructions of warps of a multiprocessor
    constexpr double L2_BYTES = 40;               // of a multiprocessor in a cycle
    constexpr double START = 2500, OF_TILE = 700; // of a block: what nothing hides, to begin and with each tile
    // Sectors that two blocks share are read and written by both: of 24 channels measured.
    constexpr double SHARED_SECTORS = 1.15;
    static constexpr UnitTimes TIMES[] = {
        {3.02, 0.231, 0.0064, 0.0346}, {3.2, 0.179, 0, 0.252}, {2.35, 0.183, 0.0092, 0.153}};
    const int K = p.kernel_width, stride = p.stride_width, columns = unit_columns(VECTOR, stride, forward);
    const int pixel = CHANNELS * bytes + (bytes == 2 ? 16 : 0), group = bytes == 2 ? 2 : 1; // lanes of 16 bytes
    const int step = forward ? stride : 1, more = forward ? K - stride : (K - 1) / 2,
              unit_rows = forward ? UNIT_ROWS : 1;
    const int processors = std::max(1, device.multiprocessors);
    StagedTiles t = {};
    UnitTiles &u = t.units;
    t.out_height = forward ? p.out_height : p.height;
    t.out_width = forward ? p.out_width : p.width;
    const int64_t height = forward ? p.out_height : ceil_div(p.height + p.padding_top % 2, 2);
    const int64_t width = forward ? p.out_width : ceil_div(p.width + p.padding_left % 2, 2);
    const int64_t across = ceil_div(width, columns), down = ceil_div(height, unit_rows), vectors = p.channels / VECTOR;
    u.channel_tiles = (int)ceil_div(vectors, CHANNELS / VECTOR);
    u.lanes = (int)ceil_div(ceil_div(vectors, u.channel_tiles), group) * group;
    u.channel_tiles = (int)ceil_div(vectors, u.lanes);
    const double window = (double)(unit_rows * step + more) * (columns * step + more);
    const double results = UNIT_ROWS * columns * (forward ? 1 : 2);
    const double work =
        results * K * K * VECTOR / (forward ? 1 : 4) + window * (1 + VECTOR) + K * K + results * (4 + VECTOR) + 60;
    double least = -1, microseconds = -1;
    for (const int threads : {128, 256})
        for (int64_t most_x = std::min<int64_t>(across, threads / u.lanes); most_x >= 1; most_x /= 2) {
            const int64_t room = threads / u.lanes;
            const int64_t tiles_x = ceil_div(across, most_x), units_x = ceil_div(across, tiles_x);
            const int64_t tiles_y = ceil_div(down, std::min(down, room / units_x)), units_y = ceil_div(down, tiles_y);
            const int64_t images =
                std::min(std::max<int64_t>(1, tiles_x * tiles_y == 1 ? room / (units_x * units_y) : 1), p.batch);
            t.rows = (int)(units_y * unit_rows * step + more);
            t.columns = (int)(units_x * columns * step + more);
            t.line_bytes = t.columns * pixel;
            t.image_bytes = t.rows * t.line_bytes;
            const double stage_bytes = (double)t.image_bytes * (double)images;
            const double tiles = (double)(tiles_x * tiles_y) * (double)ceil_div(p.batch, images);
            const int64_t warps = ceil_div(units_x * units_y * images * u.lanes, WARP_SIZE);
            const double bytes_each = STAGES * stage_bytes + sizeof(float) * K * K * PITCH + 1024;
            if (2 * bytes_each > device.shared_bytes + 1024 || tiles > INT_MAX / 2)
                continue; // else a multiprocessor would have one block
            const int64_t at_once =
                std::max<int64_t>(1, std::min<int64_t>((int64_t)((device.shared_bytes + 1024) / bytes_each),
                                                       65536 / (128 * warps * WARP_SIZE)));
            // As many blocks as run at once, each with as many tiles.
            const int64_t wanted = std::max<int64_t>(1, processors * at_once / u.channel_tiles);
            const int64_t each = ceil_div((int64_t)tiles, wanted), parts = ceil_div((int64_t)tiles, each);
            const double blocks = (double)parts * u.channel_tiles;
            const double waves = (double)ceil_div((int64_t)blocks, processors * at_once);
            const double beside = std::min<double>((double)at_once, (double)ceil_div((int64_t)blocks, processors));
            const double lines = (double)t.rows * (double)images, of_line = t.columns * u.lanes / (double)group;
            const double copies = (double)ceil_div((int64_t)lines, warps) * (double)warps *
                                  (double)ceil_div((int64_t)of_line, WARP_SIZE) * 10;
            const double instructions = (double)warps * (work + 40) + copies;
            const double read = stage_bytes + results * VECTOR * bytes * (double)(warps * WARP_SIZE);
            const double of_tile =
                std::max(beside * std::max(instructions / PER_CYCLE, read / L2_BYTES), work * 2 + OF_TILE);
            const double cycles = waves * (START + (double)each * of_tile);
            if (least >= 0 && cycles >= least)
                continue;
            least = cycles;
            microseconds = unit_microseconds(TIMES[unit_kind(p, bytes)], instructions * beside * waves * (double)each,
                                             read * beside * waves * (double)each, p, bytes);
            u.tiles_x = (int)tiles_x, u.tiles_y = (int)tiles_y;
            u.units_x = (int)units_x, u.units_y = (int)units_y;
            u.images = (int)images, u.threads = (int)warps * WARP_SIZE;
            t.tiles = (int)tiles, t.parts = (int)parts;
            t.stage_bytes = (int)stage_bytes;
            best = t;
        }
    return best.units.lanes * VECTOR * bytes % 32 != 0 ? microseconds * SHARED_SECTORS : microseconds;
}

// unrolled.cu takes it.
static bool takes(const DepthwiseProblem &p, int bytes, bool forward, const Device &device)
{
    // 3x3 floats with a stride of 2 are bound by memory, and took 1.03 to 1.13 times as long as unrolled.cu's.
    if (bytes == 4 && p.stride_width == 2 && p.kernel_width == 3)
        return false;
    return device.capability >= 80 && p.channels * bytes % 16 == 0 && is_aligned_16(forward ? p.input : p.output) &&
           (uintptr_t)p.result % (uintptr_t)(VECTOR * bytes) == 0 && p.batch <= INT_MAX && p.channels <= INT_MAX / 64;
}

cuda_ops_status conv2d_depthwise_staged(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward,
                                        double microseconds, const Device &device, cudaStream_t stream)
{
    const int bytes = (int)dtype_size(dtype);
    if (!takes(p, bytes, forward, device))
        return CUDA_OPS_INVALID_ARGUMENT;
    StagedTiles t = {};
    const double expected = tiles_of(t, p, bytes, forward, device);
    if (expected < 0 || expected >= microseconds)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int columns = unit_columns(VECTOR, p.stride_width, forward);
    set_divisors(t.units);
    t.by_tiles_x = divider_by((uint32_t)t.units.tiles_x);
    t.by_tiles_y = divider_by((uint32_t)t.units.tiles_y);
    if (forward) {
        t.source = p.input, t.in = p.in, t.out = p.out;
        t.height = p.height, t.width = p.width;
        t.start_y = -p.padding_top, t.start_x = -p.padding_left;
        t.tile_step_y = t.units.units_y * UNIT_ROWS * p.stride_height;
        t.tile_step_x = t.units.units_x * columns * p.stride_width;
    } else {
        const int back = (p.kernel_width - 1) / 2;
        t.source = p.output, t.in = p.out, t.out = p.in;
        t.height = p.out_height, t.width = p.out_width;
        t.start_y = p.padding_top / 2 - back, t.start_x = p.padding_left / 2 - back;
        t.tile_step_y = t.units.units_y;
        t.tile_step_x = t.units.units_x * columns;
    }
    const double blocks = (double)t.parts * t.units.channel_tiles;
    if (blocks > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const StagedKernel kernel = dtype == CUDA_OPS_FLOAT32 ? kernel_of<float>(p.kernel_width, p.stride_width, forward)
                                : dtype == CUDA_OPS_FLOAT16
                                    ? kernel_of<__half>(p.kernel_width, p.stride_width, forward)
                                    : kernel_of<__nv_bfloat16>(p.kernel_width, p.stride_width, forward);
    const size_t shared = (size_t)STAGES * (size_t)t.stage_bytes;
    allow_shared_memory(kernel, shared);
    launch_dependent(kernel, dim3((unsigned int)blocks), dim3((unsigned int)t.units.threads), shared, stream, p, t);
    return launch_status();
}
