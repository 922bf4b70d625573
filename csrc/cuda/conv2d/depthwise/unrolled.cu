// conv2d with a group per channel in channels_last, forward and backward_input of 3x3 and 5x5 filters with strides of 1
// and 2, and of 7x7 filters with a stride of 1, with all loops over taps unrolled.
//
// A thread has a vector of channels, of as many as the number of channels is a multiple of, and fewer where there is
// little to do; it computes a unit of pixels: 2 rows of some columns of the output, or of backward_input with stride 2
// twice as many columns of the input, of which every second one of a row or column has the same taps. (Pixels are
// counted from the padding's first one on there, so that the taps of each are known when it is compiled.)
// backward_input of stride 1 is forward with a mirrored filter. A block has up to 32 channels, and a tile of units of
// an image, or those of some small images. Its filters are in shared memory; what neighbouring units read twice comes
// from L1. The first rows are fetched before the filters are waited for: a small call is one trip to memory, and one
// back.
// Bound by memory; small images by latency, 5x5 and 7x7 filters by instructions.
#include <algorithm>

#include "conv2d/depthwise/units.cuh"

// A thread's place: pixel (y, x) of image n, in units, and its first channel.
struct UnitPlace {
    int64_t n, channel;
    int lane, y, x;
    bool there;
};

template <int VECTOR>
static __device__ __forceinline__ UnitPlace unit_place(const DepthwiseProblem &p, const UnitTiles &t)
{
    UnitPlace u;
    int rest = blockIdx.x / t.channel_tiles;
    const int unit = quotient(threadIdx.x, t.by_lanes), image = quotient(unit, t.by_units);
    const int in_tile = unit - image * (t.units_x * t.units_y), down = quotient(in_tile, t.by_units_x);
    u.lane = (int)threadIdx.x - unit * t.lanes;
    u.channel = ((int64_t)(blockIdx.x - rest * t.channel_tiles) * t.lanes + u.lane) * VECTOR;
    const int tile_y = rest / t.tiles_x, images = tile_y / t.tiles_y;
    u.x = (rest - tile_y * t.tiles_x) * t.units_x + in_tile - down * t.units_x;
    u.y = (tile_y - images * t.tiles_y) * t.units_y + down;
    u.n = (int64_t)images * t.images + image;
    u.there = image < t.images && u.n < p.batch && u.channel < p.channels;
    return u;
}

// What a unit reads: rows of COLUMNS vectors. Which columns are inside the image is the same for all rows.
template <typename T, int VECTOR, int COLUMNS>
struct UnitWindow {
    typedef ChannelVector<T, VECTOR> V;
    const char *corner;         // of the window, which may lie outside the image
    int64_t in_line, in_column; // bytes from one to the next
    unsigned int inside;
    int y, height;

    __device__ __forceinline__ void aim(const void *tensor, const UnitPlace &u, const DirectStrides &strides, int at_y,
                                        int at_x, int rows, int columns)
    {
        in_line = strides.y * (int)sizeof(T);
        in_column = strides.x * (int)sizeof(T);
        corner = (const char *)((const T *)tensor + u.n * strides.n + u.channel) + at_y * in_line + at_x * in_column;
        y = at_y;
        height = rows;
        inside = 0;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
            inside |= (unsigned int)(u.there && (unsigned int)(at_x + i) < (unsigned int)columns) << i;
    }

    __device__ __forceinline__ void fetch(V (&raw)[COLUMNS], int row) const
    {
        const unsigned int there = (unsigned int)(y + row) < (unsigned int)height ? inside : 0;
        const char *from = corner + row * in_line;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++, from += in_column)
            load_channels(raw[i], (const T *)from, there >> i & 1);
    }
};

// Rows that a unit fetches before it multiplies the first one: as many as registers allow.
__host__ __device__ static constexpr int rows_ahead(int rows, int words, int vector)
{
    const int room = (vector == 4 ? 32 : 48) / words, ahead = room < 2 ? 2 : room;
    return ahead < rows ? ahead : rows;
}

template <typename T, int K, int STRIDE, int VECTOR>
__global__ void __launch_bounds__(THREADS, 2)
    conv2d_depthwise_forward_unrolled_kernel(const __grid_constant__ DepthwiseProblem p,
                                             const __grid_constant__ UnitTiles t)
{
    constexpr int UNIT_COLUMNS = unit_columns(VECTOR, STRIDE, true);
    constexpr int ROWS = (UNIT_ROWS - 1) * STRIDE + K, COLUMNS = (UNIT_COLUMNS - 1) * STRIDE + K;
    typedef ChannelVector<T, VECTOR> V;
    constexpr int AHEAD = rows_ahead(ROWS, COLUMNS * V::WORDS, VECTOR);
    __shared__ __align__(16) float filters[K * K * PITCH];
    const int width = t.lanes * VECTOR;
    const int64_t first = (int64_t)(blockIdx.x % t.channel_tiles) * width;
    prefetch_filters<T, K>(p, first, width);
    const UnitPlace u = unit_place<VECTOR>(p, t);
    const int x = u.x * UNIT_COLUMNS, y = u.y * UNIT_ROWS;
    wait_for_predecessor();
    release_successor();
    UnitWindow<T, VECTOR, COLUMNS> window;
    window.aim(p.input, u, p.in, y * STRIDE - p.padding_top, x * STRIDE - p.padding_left, p.height, p.width);
    V raw[AHEAD][COLUMNS];
#pragma unroll
    for (int row = 0; row < AHEAD; row++)
        window.fetch(raw[row], row);
    keep_filters<T, K>(filters, p, first, width);
    float sum[UNIT_ROWS][UNIT_COLUMNS][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        const float start =
            p.bias != nullptr && u.there ? load_as_accumulate(((const T *)p.bias)[u.channel + k]) : 0.0f;
#pragma unroll
        for (int i = 0; i < UNIT_ROWS; i++)
#pragma unroll
            for (int j = 0; j < UNIT_COLUMNS; j++)
                sum[i][j][k] = start;
    }
    __syncthreads();
    if (!u.there || x >= p.out_width || y >= p.out_height)
        return;
    const float *const own = filters + u.lane * VECTOR;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float value[COLUMNS][VECTOR];
        convert_channels(value, raw[row % AHEAD]);
        if (row + AHEAD < ROWS)
            window.fetch(raw[row % AHEAD], row + AHEAD);
        add_forward_row<K, STRIDE>(sum, value, own, row);
    }
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; i++)
#pragma unroll
        for (int j = 0; j < UNIT_COLUMNS; j++)
            conv2d_activate<T>(sum[i][j], p.activation);
    store_unit((T *)p.result + u.n * p.out.n + u.channel, p.out, sum, y, x, p.out_height, p.out_width);
}

// backward_input of stride 2.
template <typename T, int K, int VECTOR>
__global__ void __launch_bounds__(THREADS, 2)
    conv2d_depthwise_backward_input_unrolled_kernel(const __grid_constant__ DepthwiseProblem p,
                                                    const __grid_constant__ UnitTiles t)
{
    constexpr int UNIT_COLUMNS = unit_columns(VECTOR, 2, false), BACK = (K - 1) / 2, COLUMNS = UNIT_COLUMNS + BACK;
    typedef ChannelVector<T, VECTOR> V;
    constexpr int AHEAD = rows_ahead(BACK + 1, COLUMNS * V::WORDS, VECTOR);
    __shared__ __align__(16) float filters[K * K * PITCH];
    const int width = t.lanes * VECTOR;
    const int64_t first = (int64_t)(blockIdx.x % t.channel_tiles) * width;
    prefetch_filters<T, K>(p, first, width);
    const UnitPlace u = unit_place<VECTOR>(p, t);
    const int x = u.x * (2 * UNIT_COLUMNS) - p.padding_left % 2, y = u.y * 2 - p.padding_top % 2;
    wait_for_predecessor();
    release_successor();
    UnitWindow<T, VECTOR, COLUMNS> window;
    window.aim(p.output, u, p.out, (y + p.padding_top) / 2 - BACK, (x + p.padding_left) / 2 - BACK, p.out_height,
               p.out_width);
    V raw[AHEAD][COLUMNS];
#pragma unroll
    for (int row = 0; row < AHEAD; row++)
        window.fetch(raw[row], row);
    keep_filters<T, K>(filters, p, first, width);
    __syncthreads();
    if (!u.there || x >= p.width || y >= p.height)
        return;
    const float *const own = filters + u.lane * VECTOR;
    float sum[2][2 * UNIT_COLUMNS][VECTOR] = {};
#pragma unroll
    for (int row = 0; row <= BACK; row++) {
        float value[COLUMNS][VECTOR];
        convert_channels(value, raw[row % AHEAD]);
        if (row + AHEAD <= BACK)
            window.fetch(raw[row % AHEAD], row + AHEAD);
        add_backward_row<K>(sum, value, own, row);
    }
    store_unit((T *)p.result + u.n * p.in.n + u.channel, p.in, sum, y, x, p.height, p.width);
}

typedef void (*UnitKernel)(DepthwiseProblem, UnitTiles);

// The kernel that has these, or a null pointer. Pairs are for halves, and 7x7 halves by fours would want more registers
// than there are.
template <typename T, int K, int VECTOR>
static UnitKernel kernel_of(bool forward, int stride)
{
    constexpr bool FOURS = sizeof(T) == 4 || K < 7, PAIRS = sizeof(T) == 2;
    if constexpr ((VECTOR == 4 && !FOURS) || (VECTOR == 2 && !PAIRS))
        return nullptr;
    else if constexpr (K == 7)
        return forward && stride == 1 ? conv2d_depthwise_forward_unrolled_kernel<T, K, 1, VECTOR> : nullptr;
    else
        return !forward      ? conv2d_depthwise_backward_input_unrolled_kernel<T, K, VECTOR>
               : stride == 1 ? conv2d_depthwise_forward_unrolled_kernel<T, K, 1, VECTOR>
                             : conv2d_depthwise_forward_unrolled_kernel<T, K, 2, VECTOR>;
}

template <typename T, int K>
static UnitKernel kernel_of(bool forward, int stride, int vector)
{
    return vector == 4   ? kernel_of<T, K, 4>(forward, stride)
           : vector == 2 ? kernel_of<T, K, 2>(forward, stride)
                         : kernel_of<T, K, 1>(forward, stride);
}

template <typename T>
static UnitKernel kernel_of(int kernel, bool forward, int stride, int vector)
{
    return kernel == 3   ? kernel_of<T, 3>(forward, stride, vector)
           : kernel == 5 ? kernel_of<T, 5>(forward, stride, vector)
                         : kernel_of<T, 7>(forward, stride, vector);
}

static UnitKernel kernel_of(cuda_ops_dtype dtype, int kernel, bool forward, int stride, int vector)
{
    return dtype == CUDA_OPS_FLOAT32   ? kernel_of<float>(kernel, forward, stride, vector)
           : dtype == CUDA_OPS_FLOAT16 ? kernel_of<__half>(kernel, forward, stride, vector)
                                       : kernel_of<__nv_bfloat16>(kernel, forward, stride, vector);
}

// What a unit costs a thread, in instructions.
static double unit_instructions(int kernel, int columns, int rows_read, int columns_read, int vector)
{
    const double products = (double)kernel * kernel * UNIT_ROWS * columns * vector;
    const double loads = (double)rows_read * columns_read;
    return products + loads * (3 + vector) + UNIT_ROWS * kernel * kernel + UNIT_ROWS * columns * (4 + vector) + 60;
}

// The tiles of a call with that vector, and the cycles that it is expected to take beside other vectors; and its time
// beside another kernel.
static double tiles_of(UnitTiles &t, double &microseconds, const DepthwiseProblem &p, int bytes, bool forward,
                       int vector, int processors)
{
    static constexpr UnitTimes TIMES[] = {
        {2.15, 0.173, 0.0184, 0.306}, {2.14, 0.188, 0, 0.302}, {2.76, 0.12, 0.0166, 0.2}};
    constexpr double PER_CYCLE = 2.5; // instructions of warps of a multiprocessor
    constexpr double WARPS = 10;      // of a multiprocessor, from which on it gets there
    constexpr double L2_BYTES = 40;   // of a multiprocessor in a cycle
    const int K = p.kernel_width, stride = p.stride_width, columns = unit_columns(vector, stride, forward);
    const int step = forward ? stride : 1, more = forward ? K - stride : (K - 1) / 2;
    const int unit_rows = forward ? UNIT_ROWS : 1;
    const int64_t height = forward ? p.out_height : ceil_div(p.height + p.padding_top % 2, 2);
    const int64_t width = forward ? p.out_width : ceil_div(p.width + p.padding_left % 2, 2);
    const int64_t across = ceil_div(width, columns), down = ceil_div(height, unit_rows);
    const int64_t vectors = p.channels / vector;
    t.channel_tiles = (int)ceil_div(vectors, CHANNELS / vector);
    t.lanes = (int)ceil_div(vectors, t.channel_tiles);
    // Smaller blocks where there are too few for all multiprocessors.
    const double all = (double)across * (double)down * (double)p.batch * (double)t.channel_tiles * t.lanes;
    int threads = THREADS;
    while (threads > 64 && all / threads < 2.0 * processors)
        threads /= 2;
    const double work =
        unit_instructions(K, columns * (forward ? 1 : 2), unit_rows * step + more, columns * step + more, vector);
    const int64_t room = std::max<int64_t>(1, threads / t.lanes);
    double least = -1;
    for (int64_t most_x = std::min(across, room); most_x >= 1; most_x /= 2) {
        const int64_t tiles_x = ceil_div(across, most_x), units_x = ceil_div(across, tiles_x);
        const int64_t tiles_y = ceil_div(down, std::min(down, room / units_x)), units_y = ceil_div(down, tiles_y);
        const int64_t images =
            std::min(std::max<int64_t>(1, tiles_x * tiles_y == 1 ? room / (units_x * units_y) : 1), p.batch);
        const double warps = (double)ceil_div(units_x * units_y * images * t.lanes, WARP_SIZE);
        const double blocks = (double)t.channel_tiles * (double)(tiles_x * tiles_y) * (double)ceil_div(p.batch, images);
        const double read = (double)((units_x * columns * step + more) * (units_y * unit_rows * step + more)) *
                            (double)images * t.lanes * vector * bytes;
        const double here = blocks * warps / processors; // warps of a multiprocessor
        const double each = work + 2.0 * K * K / warps;  // instructions of a warp
        const double cycles = std::max(here, WARPS) * each / PER_CYCLE + blocks * read / processors / L2_BYTES;
        if (least >= 0 && cycles >= least)
            continue;
        least = cycles;
        microseconds = unit_microseconds(TIMES[unit_kind(p, bytes)], here * each, blocks * read / processors, p, bytes);
        t.tiles_x = (int)tiles_x;
        t.tiles_y = (int)tiles_y;
        t.units_x = (int)units_x;
        t.units_y = (int)units_y;
        t.images = (int)images;
        t.threads = (int)warps * WARP_SIZE;
    }
    return least;
}

// backward_input of stride 1 comes as forward.
bool conv2d_depthwise_unrolled_takes(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward)
{
    return dtype != CUDA_OPS_FLOAT64 && p.in.c == 1 && p.out.c == 1 && p.multiplier == 1 &&
           p.kernel_height == p.kernel_width && (p.kernel_width == 3 || p.kernel_width == 5 || p.kernel_width == 7) &&
           p.stride_height == p.stride_width &&
           (p.stride_width == 1 ? forward : p.stride_width == 2 && p.kernel_width < 7) && p.dilation_height == 1 &&
           p.dilation_width == 1 &&
           // A pixel's offset in a row has 32 bits.
           p.in.n <= INT_MAX / 4 && p.out.n <= INT_MAX / 4;
}

// The kernel that is expected to take the fewest cycles, its tiles, and its time.
static double choose(UnitKernel &kernel, UnitTiles &chosen, const DepthwiseProblem &p, cuda_ops_dtype dtype,
                     bool forward, const Device &device)
{
    const int bytes = (int)dtype_size(dtype), processors = std::max(1, device.multiprocessors);
    const uintptr_t addresses = (uintptr_t)(forward ? p.input : p.output) | (uintptr_t)p.result;
    double least = 0, microseconds = 0;
    kernel = nullptr;
    for (int vector = 4; vector >= 1; vector /= 2) {
        const UnitKernel with = kernel_of(dtype, p.kernel_width, forward, p.stride_width, vector);
        if (!with || p.channels % vector != 0 || addresses % (uintptr_t)(vector * bytes) != 0)
            continue;
        UnitTiles t = {};
        double time = 0;
        const double cycles = tiles_of(t, time, p, bytes, forward, vector, processors);
        if (kernel && cycles >= least)
            continue;
        least = cycles;
        microseconds = time;
        kernel = with;
        chosen = t;
    }
    return microseconds;
}

cuda_ops_status conv2d_depthwise_unrolled(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward,
                                          cudaStream_t stream)
{
    UnitKernel kernel;
    UnitTiles chosen = {};
    const Device device = current_device();
    const double microseconds = choose(kernel, chosen, p, dtype, forward, device);
    const cuda_ops_status staged = conv2d_depthwise_staged(p, dtype, forward, microseconds, device, stream);
    if (staged != CUDA_OPS_INVALID_ARGUMENT)
        return staged;
    set_divisors(chosen);
    const double blocks =
        (double)chosen.channel_tiles * chosen.tiles_x * chosen.tiles_y * (double)ceil_div(p.batch, chosen.images);
    if (blocks > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(kernel, dim3((unsigned int)blocks), dim3((unsigned int)chosen.threads), 0, stream, p, chosen);
    return launch_status();
}
