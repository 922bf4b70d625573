// conv_bn_relu_pool's tiled path in float32 by Winograd's F(2x2, 3x3), where that is allowed: the convolution and both
// of its gradients from 16 products a channel and tile of 2 x 2 pixels instead of 36:
//     convolve   target tile = A^T [sum over channels of (G g G^T) * (B^T window B)] A   forward and gradient of input
//     weight     dw          = G^T [sum over tiles of (B^T window B) * (A dy A^T)] G
// of windows of 4 x 4 pixels. All in one kernel each: transforms go through shared memory and never to device memory.
// A block has 16 warps, one a point of the transform. In `convolve` a warp multiplies CHUNK channels of TILES tiles
// with the weight of its point, which stays in shared memory for all tiles, and the points meet in shared memory for
// the transform back; in `weight` it multiplies 32 in with 64 out channels of 16 tiles, and keeps the sums of all tiles
// in registers, so that the points meet once. Either has 8 x 8 sums a thread: 64 multiply-adds for four 16-byte loads.
// Rounding errors are about the sums' own (benchmarks/notes/conv2d_winograd.md).
// Bound by multiply-adds, by design: a group of TILES tiles takes 8192 cycles of them and about a third of that for its
// transforms (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/tiled_sm80/tile.cuh"

#include "common/fast_division.cuh"
#include "conv2d/winograd/transforms.cuh"

static constexpr int POINTS = 16, THREADS = POINTS * WARP_SIZE;
static constexpr int SUMS = 8; // of a thread, in both directions

// Tiles of 2 x 2 pixels of all images, numbered row by row.
struct tile_grid {
    int count, rows, columns; // rows and columns of an image
    Divider by_rows, by_columns;
};

static tile_grid grid_of(const tiled_problem &p)
{
    tile_grid g;
    g.rows = (p.height + 1) / 2;
    g.columns = (p.width + 1) / 2;
    g.count = (int)(p.batch * g.rows * g.columns);
    g.by_rows = divider_by((uint32_t)g.rows);
    g.by_columns = divider_by((uint32_t)g.columns);
    return g;
}

struct winograd_tile {
    int64_t image;
    int y, x; // the first pixel
    bool exists;
};

__device__ __forceinline__ winograd_tile tile_of(const tile_grid &grid, int number)
{
    winograd_tile tile;
    tile.exists = number < grid.count;
    const uint32_t index = tile.exists ? (uint32_t)number : 0, row = grid.by_columns.of(index);
    const uint32_t image = grid.by_rows.of(row);
    tile.image = image;
    tile.y = 2 * (int)(row - image * (uint32_t)grid.rows);
    tile.x = 2 * (int)(index - row * (uint32_t)grid.columns);
    return tile;
}

// The window of a tile in one channel of an image, channels_last; 0 outside. `exists`: of the channel.
__device__ __forceinline__ void load_window(float (&window)[4][4], const float *image, const tiled_problem &p,
                                            const winograd_tile &tile, int channel, int channels, bool exists)
{
    // Pointers that step instead of indices: two instructions a load.
    const int64_t step = channels, row_step = step * p.width;
    const float *row = image + (tile.image * p.height + tile.y - 1) * row_step + (tile.x - 1) * step + channel;
    exists = exists && tile.exists;
    bool in_columns[4];
#pragma unroll
    for (int c = 0; c < 4; c++)
        in_columns[c] = exists && (unsigned int)(tile.x - 1 + c) < (unsigned int)p.width;
#pragma unroll
    for (int r = 0; r < 4; r++, row += row_step) {
        const bool in_rows = (unsigned int)(tile.y - 1 + r) < (unsigned int)p.height;
        const float *from = row;
#pragma unroll
        for (int c = 0; c < 4; c++, from += step)
            window[r][c] = in_rows && in_columns[c] ? __ldg(from) : 0.0f;
    }
}

// The pooled gradient of a window and which of its pixels it goes to; none where there is no such window.
struct pooled_gradient {
    float value;
    int position;
};

__device__ __forceinline__ pooled_gradient load_pooled(const float *value, const uint8_t *position, bool exists)
{
    return {exists ? __ldg(value) : 0.0f, exists ? (int)__ldg(position) : 255};
}

// What makes a channel's dy of y and dz.
struct gradient_coefficients {
    float scale, slope, offset;
};

__device__ __forceinline__ gradient_coefficients coefficients_of(const gradient_source &s, int channel, bool exists)
{
    if (!exists)
        return {0.0f, 0.0f, 0.0f};
    return {__ldg(s.scale + channel), __ldg(s.slope + channel), __ldg(s.offset + channel)};
}

// dy of a window's pixel at `position`.
__device__ __forceinline__ float gradient_at(const gradient_coefficients &by, float y, const pooled_gradient &g,
                                             int position)
{
    const float dy = fmaf(by.slope, y, by.offset);
    return g.position == position ? fmaf(by.scale, g.value, dy) : dy;
}

// sums += a * b of eight by eight values, four and four of which lie side by side; SWAPPED: the pairs of a's fours.
template <bool SWAPPED>
__device__ __forceinline__ void multiply(float (&sums)[SUMS][SUMS], const float4 (&a)[2], const float4 (&b)[2])
{
    const float left[SUMS] = {SWAPPED ? a[0].z : a[0].x, SWAPPED ? a[0].w : a[0].y, SWAPPED ? a[0].x : a[0].z,
                              SWAPPED ? a[0].y : a[0].w, SWAPPED ? a[1].z : a[1].x, SWAPPED ? a[1].w : a[1].y,
                              SWAPPED ? a[1].x : a[1].z, SWAPPED ? a[1].y : a[1].w};
    const float right[SUMS] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int j = 0; j < SUMS; j++)
            sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
}

// ---- convolve ----

static constexpr int WEIGHTS = 2048;      // of a point: channels of the source by those of a block
static constexpr int CHUNK_VALUES = 1024; // of a point: channels by tiles
static constexpr int EXCHANGED = 512;     // of a point, in each round of the transform back
static constexpr int CONVOLVE_BYTES = POINTS * (WEIGHTS + CHUNK_VALUES + EXCHANGED) * 4;

struct winograd_arguments {
    tiled_problem problem;
    tile_grid grid;
    int depth, columns;           // channels of the source and of the result
    int chunks, kinds;            // of CHUNK channels; groups of COLUMNS channels
    const float *source, *weight; // source: backward's is dy, as the gradient of weight has stored it
    float *result;
    batch_moments moments; // forward
};

template <int COLUMNS>
struct convolve_shape {
    static constexpr int TILES = WEIGHTS / COLUMNS, CHUNK = CHUNK_VALUES / TILES;
    static constexpr int ACROSS = COLUMNS / SUMS, DOWN = TILES / SUMS; // threads of a warp
    static_assert(ACROSS * DOWN == WARP_SIZE, "a warp has all of a point");
    static constexpr int ROUNDS = 4, OUT = COLUMNS / ROUNDS; // channels of a round
    static_assert(OUT * TILES == THREADS && OUT * TILES == EXCHANGED, "a thread has a channel of a tile in each round");

    // Where a block's channel lies among a point's weights: a thread's are ACROSS apart, so that those of a round are
    // neighbours in memory, and its fours lie side by side.
    static __device__ __forceinline__ int column(int position)
    {
        const int half = position / (COLUMNS / 2), across = position % (COLUMNS / 2) / 4;
        return across + ACROSS * (half * 4 + position % 4);
    }
    // Tiles of a channel k lie in pairs, whose index is xored with k: 16 threads that store a pair each for 16 channels
    // then fall into different banks, and four neighbours are still 16 bytes.
    static __device__ __forceinline__ int pair(int k, int number)
    {
        return k * TILES + ((number ^ (k & 15)) << 1);
    }
    static __device__ __forceinline__ int four(int k, int number)
    {
        return k * TILES + ((number ^ (k >> 1 & 7)) << 2);
    }
    // Where a round's value of a tile is exchanged. Fours of channels are xored such that the lanes of a warp, DOWN
    // tiles of ACROSS channels, fall into different banks.
    static __device__ __forceinline__ int exchange(int tile, int channel)
    {
        const int at = tile * OUT + channel;
        return ((at >> 2) ^ ((tile / 4 % DOWN) * (ACROSS / 4))) << 2 | (at & 3);
    }
    // The same for the thread's tile i of eight, and the channel number e of its two: `own` is exchange(4 * down,
    // across), and the rest known to the compiler.
    static __device__ __forceinline__ int exchange(int own, int i, int e)
    {
        const int fours = i % 4 * (OUT / 4) + e * (ACROSS / 4);
        return (own ^ (fours & 7) << 2) + ((fours & ~7) << 2) + i / 4 * (TILES / 2) * OUT;
    }
};

// G g G^T of a block's kernels to transformed[point][channel of the source][position], by way of `raw`. Backward's
// kernels are rotated. All threads; ends with a barrier.
template <bool BACKWARD, int COLUMNS>
__device__ __forceinline__ void transform_weight(float *transformed, float *raw, const winograd_arguments &a,
                                                 int first_column)
{
    typedef convolve_shape<COLUMNS> Shape;
    constexpr int TAPS = 9;
    // weight is [out][in][9]: a line is one index of the first dimension, and contiguous along the other two.
    const int columns = min(a.columns - first_column, COLUMNS), depth = a.chunks * Shape::CHUNK;
    const int lines = BACKWARD ? a.depth : columns, length = (BACKWARD ? columns : a.depth) * TAPS;
    const int line_step = a.problem.in_channels * TAPS, pitch = length | 1; // odd, against bank conflicts
    const float *const from = a.weight + (int64_t)first_column * (BACKWARD ? TAPS : line_step);
    for (int line = threadIdx.x / WARP_SIZE; line < lines; line += THREADS / WARP_SIZE) {
#pragma unroll 9
        for (int i = threadIdx.x % WARP_SIZE; i < length; i += WARP_SIZE)
            raw[line * pitch + i] = __ldg(from + (int64_t)line * line_step + i);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < depth * COLUMNS; i += THREADS) {
        const int k = i / COLUMNS, column = Shape::column(i % COLUMNS);
        float kernel[3][3], points[4][4];
        const bool exists = k < a.depth && column < columns;
        const float *const of = raw + (BACKWARD ? k * pitch + column * TAPS : column * pitch + k * TAPS);
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
            kernel[tap / 3][tap % 3] = exists ? of[BACKWARD ? TAPS - 1 - tap : tap] : 0.0f;
        transform(points, kernel);
#pragma unroll
        for (int point = 0; point < POINTS; point++)
            transformed[point * WEIGHTS + i] = points[point / 4][point % 4];
    }
    __syncthreads();
}

template <int COLUMNS>
__device__ __forceinline__ void multiply_chunk(float (&sums)[SUMS][SUMS], const float *tiles, const float *weights,
                                               int lane)
{
    typedef convolve_shape<COLUMNS> Shape;
    const int down = lane / Shape::ACROSS, across = lane % Shape::ACROSS;
    const float *const right = weights + across * 4;
#pragma unroll 8
    for (int k = 0; k < Shape::CHUNK; k++) {
        const float4 a[2] = {*reinterpret_cast<const float4 *>(tiles + Shape::four(k, down)),
                             *reinterpret_cast<const float4 *>(tiles + Shape::four(k, down + Shape::DOWN))};
        const float4 b[2] = {*reinterpret_cast<const float4 *>(right + k * COLUMNS),
                             *reinterpret_cast<const float4 *>(right + k * COLUMNS + COLUMNS / 2)};
        if (k % 2)
            multiply<true>(sums, a, b);
        else
            multiply<false>(sums, a, b);
    }
}

// Merges the values of a tile that lie in the image into the thread's moments of a channel: `more` of them, a `share`
// of the new count.
__device__ __forceinline__ void add_tile(float &mean, float &square, const float (&values)[2][2],
                                         const bool (&inside)[2][2], float count, float more, float share)
{
    float sum = 0.0f, differences = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum += inside[i / 2][i % 2] ? values[i / 2][i % 2] : 0.0f;
    const float here = more > 0.0f ? sum * (more == 4.0f ? 0.25f : more == 2.0f ? 0.5f : 1.0f) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float difference = inside[i / 2][i % 2] ? values[i / 2][i % 2] - here : 0.0f;
        differences = fmaf(difference, difference, differences);
    }
    const float delta = here - mean;
    mean += delta * share;
    square += differences + delta * delta * (count * share);
}

// One long function: the steps of a group of tiles share the sums.
template <bool BACKWARD, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 1) winograd_convolve_kernel(const __grid_constant__ winograd_arguments a)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 // Turing has too little shared memory
    typedef convolve_shape<COLUMNS> Shape;
    constexpr int CHUNK = Shape::CHUNK, TILES = Shape::TILES, OUT = Shape::OUT;
    extern __shared__ __align__(16) unsigned char shared[];
    float *const weights = reinterpret_cast<float *>(shared), *const tiles = weights + POINTS * WEIGHTS;
    float *const exchanged = tiles + POINTS * CHUNK_VALUES;
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const tiled_problem &p = a.problem;
    const int kind = blockIdx.x % a.kinds, block = blockIdx.x / a.kinds, blocks = gridDim.x / a.kinds;
    wait_for_predecessor();
    release_successor();
    transform_weight<BACKWARD, COLUMNS>(weights, tiles, a, kind * COLUMNS);

    // What the thread transforms: a channel of each chunk of a pair of the group's tiles.
    const int k = threadIdx.x % CHUNK, pair = threadIdx.x / CHUNK;
    // And what it transforms back: OUT channels of a tile, one a round.
    const int own_tile = threadIdx.x / OUT, own_channel = threadIdx.x % OUT;
    const int own_exchange = Shape::exchange(lane / Shape::ACROSS * 4, lane % Shape::ACROSS);
    float count = 0.0f, mean[Shape::ROUNDS] = {}, square[Shape::ROUNDS] = {};
    const int groups = (a.grid.count + TILES - 1) / TILES;
    const auto load = [&](float(&windows)[2][4][4], int group, int chunk) {
        const int channel = chunk * CHUNK + k;
#pragma unroll
        for (int e = 0; e < 2; e++)
            load_window(windows[e], a.source, p, tile_of(a.grid, group * TILES + 2 * pair + e), channel, a.depth,
                        channel < a.depth);
    };
    // The next windows are on their way while the sums of these are made and stored.
    float windows[2][4][4];
    if (block < groups)
        load(windows, block, 0);
    for (int group = block; group < groups; group += blocks) {
        float sums[SUMS][SUMS] = {};
        for (int chunk = 0; chunk < a.chunks; chunk++) {
            float points[2][4][4];
#pragma unroll
            for (int e = 0; e < 2; e++)
                transform(points[e], windows[e]);
#pragma unroll
            for (int point = 0; point < POINTS; point++)
                *reinterpret_cast<float2 *>(tiles + point * CHUNK_VALUES + Shape::pair(k, pair)) =
                    make_float2(points[0][point / 4][point % 4], points[1][point / 4][point % 4]);
            __syncthreads();
            multiply_chunk<COLUMNS>(sums, tiles + warp * CHUNK_VALUES,
                                    weights + warp * WEIGHTS + chunk * CHUNK * COLUMNS, lane);
            const bool last = chunk + 1 == a.chunks;
            if (!last || group + blocks < groups)
                load(windows, last ? group + blocks : group, last ? 0 : chunk + 1);
            if (!last)
                __syncthreads(); // every warp has read the chunk
        }
        const winograd_tile tile = tile_of(a.grid, group * TILES + own_tile);
        bool inside[2][2];
        int pixels = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            inside[i / 2][i % 2] = tile.exists && tile.y + i / 2 < p.height && tile.x + i % 2 < p.width;
            pixels += inside[i / 2][i % 2];
        }
        const float more = (float)pixels, share = pixels ? more / (count + more) : 0.0f;
        float *const to = a.result + ((tile.image * p.height + tile.y) * p.width + tile.x) * (int64_t)a.columns +
                          kind * COLUMNS + own_channel;
#pragma unroll
        for (int round = 0; round < Shape::ROUNDS; round++) {
#pragma unroll
            for (int i = 0; i < SUMS; i++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    exchanged[warp * EXCHANGED + Shape::exchange(own_exchange, i, e)] = sums[i][2 * round + e];
            __syncthreads();
            float points[4][4], values[2][2];
#pragma unroll
            for (int point = 0; point < POINTS; point++)
                points[point / 4][point % 4] = exchanged[point * EXCHANGED + Shape::exchange(own_tile, own_channel)];
            transform(values, points);
            if (kind * COLUMNS + round * OUT + own_channel < a.columns)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (inside[i / 2][i % 2])
                        to[(int64_t)(i / 2 * p.width + i % 2) * a.columns + round * OUT] = values[i / 2][i % 2];
            if constexpr (!BACKWARD)
                add_tile(mean[round], square[round], values, inside, count, more, share);
            __syncthreads(); // the next round, or group, stores where this one has been read
        }
        count += more;
    }
    if constexpr (!BACKWARD) {
        // Merges the lanes of a channel, then the warps, in a fixed order.
        moments *const of_warps = reinterpret_cast<moments *>(exchanged); // [warp][COLUMNS]
#pragma unroll
        for (int round = 0; round < Shape::ROUNDS; round++) {
            moments m = {count, mean[round], square[round]};
#pragma unroll
            for (int step = WARP_SIZE / 2; step >= OUT; step /= 2) {
                const moments other = {__shfl_xor_sync(FULL_WARP, m.count, step),
                                       __shfl_xor_sync(FULL_WARP, m.mean, step),
                                       __shfl_xor_sync(FULL_WARP, m.square, step)};
                m = merge(m, other);
            }
            if (lane < OUT)
                of_warps[warp * COLUMNS + round * OUT + lane] = m;
        }
        __syncthreads();
        const int channel = kind * COLUMNS + threadIdx.x;
        if (threadIdx.x < COLUMNS && channel < a.columns) {
            moments m = of_warps[threadIdx.x];
            double all = (double)m.count;
            for (int i = 1; i < THREADS / WARP_SIZE; i++) {
                const moments other = of_warps[i * COLUMNS + threadIdx.x];
                all += (double)other.count;
                m = merge(m, other);
            }
            a.moments.partial[(int64_t)block * a.columns + channel] = make_float2(m.mean, m.square);
            if (channel == 0)
                a.moments.pixels[block] = all;
        }
    }
#endif
}

// Columns of a block: its weights stay in shared memory, and so 64 from 32 channels at most, or 32 from 64. 0: neither.
static int columns_of(int depth, int columns)
{
    return depth <= 32 && columns > 32 ? 64 : depth <= 64 ? 32 : 0;
}

bool winograd_fits(const tiled_problem &p)
{
    const int64_t tiles = p.batch * ((p.height + 1) / 2) * ((p.width + 1) / 2);
    return columns_of(p.in_channels, p.out_channels) && columns_of(p.out_channels, p.in_channels) &&
           tiles < INT32_MAX / 2 && current_device().shared_bytes >= CONVOLVE_BYTES;
}

int64_t winograd_convolve_blocks(const tiled_problem &p, bool backward)
{
    const int depth = backward ? p.out_channels : p.in_channels, columns = backward ? p.in_channels : p.out_channels;
    const int of_block = columns_of(depth, columns);
    return tiled_blocks(ceil_div(grid_of(p).count, WEIGHTS / of_block), ceil_div(columns, of_block));
}

template <bool BACKWARD, int COLUMNS>
static cuda_ops_status launch(winograd_arguments &a, cudaStream_t stream)
{
    a.chunks = (int)ceil_div(a.depth, convolve_shape<COLUMNS>::CHUNK);
    a.kinds = (int)ceil_div(a.columns, COLUMNS);
    const int64_t blocks = winograd_convolve_blocks(a.problem, BACKWARD) * a.kinds;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(winograd_convolve_kernel<BACKWARD, COLUMNS>, CONVOLVE_BYTES);
    launch_dependent(winograd_convolve_kernel<BACKWARD, COLUMNS>, (unsigned int)blocks, THREADS, CONVOLVE_BYTES, stream,
                     a);
    return launch_status();
}

template <bool BACKWARD>
static cuda_ops_status convolve(winograd_arguments &a, const tiled_problem &p, cudaStream_t stream)
{
    a.problem = p;
    a.grid = grid_of(p);
    a.depth = BACKWARD ? p.out_channels : p.in_channels;
    a.columns = BACKWARD ? p.in_channels : p.out_channels;
    return columns_of(a.depth, a.columns) == 64 ? launch<BACKWARD, 64>(a, stream) : launch<BACKWARD, 32>(a, stream);
}

cuda_ops_status winograd_convolve_forward(float *conv_output, batch_moments moments, const float *input,
                                          const float *weight, const tiled_problem &p, cudaStream_t stream)
{
    winograd_arguments a = {};
    a.source = input;
    a.weight = weight;
    a.result = conv_output;
    a.moments = moments;
    return convolve<false>(a, p, stream);
}

cuda_ops_status winograd_convolve_backward(float *grad_input, const float *gradient, const float *weight,
                                           const tiled_problem &p, cudaStream_t stream)
{
    winograd_arguments a = {};
    a.source = gradient;
    a.weight = weight;
    a.result = grad_input;
    return convolve<true>(a, p, stream);
}

// ---- weight ----

static constexpr int DEEP = 16;                           // tiles that are multiplied at a time
static constexpr int INPUT_VALUES = DEEP * WEIGHT_IN;     // of a point: [tile][in channel]
static constexpr int GRADIENT_VALUES = DEEP * WEIGHT_OUT; // of a point: [tile][out channel]
static constexpr int STAGE_VALUES = POINTS * (INPUT_VALUES + GRADIENT_VALUES);
static constexpr int WEIGHT_BYTES = 2 * STAGE_VALUES * 4;
static_assert(POINTS * WEIGHT_IN * WEIGHT_OUT <= 2 * STAGE_VALUES, "the sums of all points fit where the tiles were");
static_assert(WEIGHT_IN * WEIGHT_OUT == SUMS * SUMS * WARP_SIZE, "a warp has all sums of a point");
static_assert(WEIGHT_IN * DEEP == THREADS && WEIGHT_OUT * DEEP == 2 * THREADS, "what a thread transforms");

struct winograd_weight_arguments {
    tiled_problem problem;
    tile_grid grid;
    int out_kinds, in_kinds; // groups of WEIGHT_OUT and WEIGHT_IN channels
    gradient_source gradient;
    const float *input;
    float4 *partial; // as backward_weight.cu has it in float32
};

// What a thread loads of DEEP tiles: a channel of the input's window of one, and of two tiles' dy.
struct winograd_loaded {
    float window[4][4], y[2][2][2];
    pooled_gradient pooled[2];
    bool inside[2][2][2];
};

// One long function: what is loaded for the next tiles is on its way while these are multiplied.
__global__ void __launch_bounds__(THREADS, 1)
    winograd_weight_kernel(const __grid_constant__ winograd_weight_arguments a)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) unsigned char shared[];
    float *const stages = reinterpret_cast<float *>(shared);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const tiled_problem &p = a.problem;
    const int kinds = a.out_kinds * a.in_kinds, kind = blockIdx.x % kinds;
    const int first_out = kind / a.in_kinds * WEIGHT_OUT, first_in = kind % a.in_kinds * WEIGHT_IN;
    const int block = blockIdx.x / kinds, blocks = gridDim.x / kinds;
    wait_for_predecessor();
    release_successor();

    const int in = threadIdx.x % WEIGHT_IN, in_tile = threadIdx.x / WEIGHT_IN;
    const int out = threadIdx.x % WEIGHT_OUT, out_tile = threadIdx.x / WEIGHT_OUT; // and DEEP / 2 further on
    const bool in_exists = first_in + in < p.in_channels, out_exists = first_out + out < p.out_channels;
    const gradient_coefficients by = coefficients_of(a.gradient, first_out + out, out_exists);
    const auto offset_of = [&](const winograd_tile &tile) { // of the thread's out channel
        return ((tile.image * p.height + tile.y) * p.width + tile.x) * p.out_channels + first_out + out;
    };
    const auto load = [&](winograd_loaded &l, int group) {
        load_window(l.window, a.input, p, tile_of(a.grid, group * DEEP + in_tile), first_in + in, p.in_channels,
                    in_exists);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const winograd_tile tile = tile_of(a.grid, group * DEEP + out_tile + e * (DEEP / 2));
            const int row = tile.y / 2, column = tile.x / 2;
            const int64_t window = (tile.image * p.pooled_height + row) * p.pooled_width + column;
            const int64_t at = window * p.out_channels + first_out + out;
            const bool exists = out_exists && tile.exists;
            l.pooled[e] = load_pooled(a.gradient.grad_pooled + at, a.gradient.argmax + at,
                                      exists && row < p.pooled_height && column < p.pooled_width);
            const int64_t step = p.out_channels;
            const float *from =
                a.gradient.conv_output + ((tile.image * p.height + tile.y) * p.width + tile.x) * step + first_out + out;
#pragma unroll
            for (int r = 0; r < 2; r++, from += p.width * step)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    l.inside[e][r][c] = exists && tile.y + r < p.height && tile.x + c < p.width;
                    l.y[e][r][c] = l.inside[e][r][c] ? __ldg(from + c * step) : 0.0f;
                }
        }
    };
    float *const made = first_in == 0 ? a.gradient.made : nullptr;
    const auto store = [&](const winograd_loaded &l, float *stage, int group) {
        float points[4][4];
        transform(points, l.window);
#pragma unroll
        for (int point = 0; point < POINTS; point++)
            stage[point * INPUT_VALUES + in_tile * WEIGHT_IN + in] = points[point / 4][point % 4];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float dy[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                dy[i / 2][i % 2] =
                    l.inside[e][i / 2][i % 2] ? gradient_at(by, l.y[e][i / 2][i % 2], l.pooled[e], i) : 0.0f;
            if (made) {
                const winograd_tile tile = tile_of(a.grid, group * DEEP + out_tile + e * (DEEP / 2));
                float *to = made + offset_of(tile);
#pragma unroll
                for (int r = 0; r < 2; r++, to += (int64_t)p.width * p.out_channels)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        if (l.inside[e][r][c])
                            to[c * p.out_channels] = dy[r][c];
            }
            transform(points, dy);
#pragma unroll
            for (int point = 0; point < POINTS; point++)
                stage[POINTS * INPUT_VALUES + point * GRADIENT_VALUES + (out_tile + e * (DEEP / 2)) * WEIGHT_OUT +
                      out] = points[point / 4][point % 4];
        }
    };

    const int groups = (a.grid.count + DEEP - 1) / DEEP;
    const int down = lane / 8, across = lane % 8; // of the in and of the out channels, fours of each half
    float sums[SUMS][SUMS] = {};
    winograd_loaded loaded;
    if (block < groups) {
        load(loaded, block);
        store(loaded, stages, block);
    }
    __syncthreads();
    int stage = 0;
    for (int group = block; group < groups; group += blocks, stage ^= 1) {
        const bool more = group + blocks < groups;
        if (more)
            load(loaded, group + blocks);
        const float *const left = stages + stage * STAGE_VALUES + warp * INPUT_VALUES + down * 4;
        const float *const right =
            stages + stage * STAGE_VALUES + POINTS * INPUT_VALUES + warp * GRADIENT_VALUES + across * 4;
#pragma unroll 8
        for (int tile = 0; tile < DEEP; tile++) {
            const float4 x[2] = {*reinterpret_cast<const float4 *>(left + tile * WEIGHT_IN),
                                 *reinterpret_cast<const float4 *>(left + tile * WEIGHT_IN + WEIGHT_IN / 2)};
            const float4 dy[2] = {*reinterpret_cast<const float4 *>(right + tile * WEIGHT_OUT),
                                  *reinterpret_cast<const float4 *>(right + tile * WEIGHT_OUT + WEIGHT_OUT / 2)};
            multiply<false>(sums, x, dy);
        }
        if (more)
            store(loaded, stages + (stage ^ 1) * STAGE_VALUES, group + blocks);
        __syncthreads(); // the next stage is ready, and every warp has read this one
    }
    // The points meet: [point][in][out].
#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = i / 4 * (WEIGHT_IN / 2) + down * 4 + i % 4;
            *reinterpret_cast<float4 *>(stages + (warp * WEIGHT_IN + row) * WEIGHT_OUT + half * (WEIGHT_OUT / 2) +
                                        across * 4) =
                make_float4(sums[i][half * 4], sums[i][half * 4 + 1], sums[i][half * 4 + 2], sums[i][half * 4 + 3]);
        }
    __syncthreads();
    const int of_out = threadIdx.x % WEIGHT_OUT, of_in = threadIdx.x / WEIGHT_OUT * 4;
    float kernels[4][3][3];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float points[4][4];
#pragma unroll
        for (int point = 0; point < POINTS; point++)
            points[point / 4][point % 4] = stages[(point * WEIGHT_IN + of_in + e) * WEIGHT_OUT + of_out];
        transform(kernels[e], points);
    }
    float4 *const to = a.partial + ((int64_t)block * kinds + kind) * WEIGHT_VECTORS;
#pragma unroll
    for (int tap = 0; tap < 9; tap++)
        to[weight_vector(tap, of_out, of_in)] = make_float4(kernels[0][tap / 3][tap % 3], kernels[1][tap / 3][tap % 3],
                                                            kernels[2][tap / 3][tap % 3], kernels[3][tap / 3][tap % 3]);
#endif
}

int64_t winograd_weight_groups(const tiled_problem &p)
{
    return ceil_div(grid_of(p).count, DEEP);
}

cuda_ops_status winograd_weight_gradient(float4 *partial, const gradient_source &source, const float *input,
                                         const tiled_problem &p, int64_t blocks, cudaStream_t stream)
{
    winograd_weight_arguments a = {};
    a.problem = p;
    a.grid = grid_of(p);
    a.out_kinds = (int)ceil_div(p.out_channels, WEIGHT_OUT);
    a.in_kinds = (int)ceil_div(p.in_channels, WEIGHT_IN);
    a.gradient = source;
    a.input = input;
    a.partial = partial;
    allow_shared_memory(winograd_weight_kernel, WEIGHT_BYTES);
    launch_dependent(winograd_weight_kernel, (unsigned int)blocks, THREADS, WEIGHT_BYTES, stream, a);
    return launch_status();
}
