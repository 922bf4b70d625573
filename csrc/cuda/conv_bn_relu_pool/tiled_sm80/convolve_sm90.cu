// The convolution of conv_bn_relu_pool's tiled path in TF32 on Hopper, by wgmma: forward, with the batch's statistics,
// and as the gradient of input, from dy as the gradient of weight has stored it:
//     y[64 channels][224 pixels] = sum over the nine taps of weight[64][32 of a tap] * image shifted by the tap
//     dx[32 channels][pixels]    = sum over the nine taps of weight[32][64 of a tap] * dy shifted by the tap
// TMA brings tiles of 14 x 14 pixels with their halo, a raster of 16 x 16 pixels of 32 channels: it pads with zeros,
// rounds to TF32 and swizzles, so that eight neighbours are a core matrix and a tap is an offset in the descriptor's
// address. Two of a row's 16 columns of results are masked. A warpgroup has a tile; the other one multiplies while it
// stores.
// Bound by the tensor cores (4032 cycles a tile forward, 5760 backward) and the stores (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/tiled_sm80/tile_sm90.cuh"

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

static constexpr int PIXELS = SIDE * RASTER; // wgmma's n
static constexpr int TAPS = 9, COLUMNS = 64, TAP_BYTES = COLUMNS * PIXEL_BYTES;
static constexpr int STAGE_BYTES = BOX_BYTES + SWIZZLE_ATOM; // masked columns read two pixels more
static constexpr int BARRIERS = TAPS * TAP_BYTES + 4 * STAGE_BYTES, SHARED_BYTES = BARRIERS + 4 * 8;

struct wgmma_arguments {
    tiled_problem problem;
    wgmma_tiling tiles;
    int kinds; // groups of the result's channels
    const float *weight;
    float *result;
    batch_moments moments;
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The weights, rounded, to [tap][channel][in channel], swizzled as wgmma wants it; zeros where there are none.
__device__ __forceinline__ void stage_weight(uint32_t staged, const wgmma_arguments &a, int first_column)
{
    const int in_channels = a.problem.in_channels, length = in_channels * TAPS;
    const float *const from = a.weight + (int64_t)first_column * length;
    const int columns = min(a.problem.out_channels - first_column, COLUMNS);
#pragma unroll 9
    for (int i = threadIdx.x; i < COLUMNS * DEPTH * TAPS / 4; i += 2 * WARPGROUP) {
        const int column = i / (DEPTH * TAPS / 4), at = i % (DEPTH * TAPS / 4) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column < columns && at < length)
            v = *reinterpret_cast<const float4 *>(from + (int64_t)column * length + at);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int in = (at + e) / TAPS, tap = (at + e) % TAPS;
            st_shared(staged + tap * TAP_BYTES + column * PIXEL_BYTES + (((in >> 2) ^ (column & 7)) << 4) +
                          (in & 3) * 4,
                      cvt_rna_tf32(values[e]));
        }
    }
}

// A thread's results in the image: rows, and which of its columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
struct thread_pixels {
    int rows;
    bool column[4];
};

// Stores a thread's results of two channels; `to`: that of the tile's first pixel in the first one. Eight threads store
// 32 bytes. WHOLE: all rows and both channels exist.
template <bool WHOLE>
__device__ __forceinline__ void store(float *to, const float (&d)[PIXELS / 2], int q, const thread_pixels &in,
                                      const bool (&exists)[2], const tiled_problem &p)
{
    const int64_t row_step = (int64_t)p.width * p.out_channels;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float *at = to + (c / 2 * 8 + 2 * q + c % 2) * p.out_channels;
        if (in.column[c])
#pragma unroll
            for (int row = 0; row < SIDE; row++, at += row_step)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (WHOLE || (row < in.rows && exists[half]))
                        at[half * 8] = d[row * 8 + c / 2 * 4 + half * 2 + c % 2];
    }
}

// Merges a tile's sums d, of channel r + 8 * half, into the thread's moments: `more` values, a `share` of the new
// count.
template <bool ALL_ROWS>
__device__ __forceinline__ void add_moments(float &mean, float &square, const float (&d)[PIXELS / 2], int half,
                                            const thread_pixels &in, float count, float more, float share)
{
    const float reciprocal = more > 0.0f ? 1.0f / more : 0.0f;
    float sum = 0.0f, differences = 0.0f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float of_column = 0.0f;
#pragma unroll
        for (int row = 0; row < SIDE; row++)
            of_column += ALL_ROWS || row < in.rows ? d[row * 8 + c / 2 * 4 + half * 2 + c % 2] : 0.0f;
        sum += in.column[c] ? of_column : 0.0f;
    }
    const float here = sum * reciprocal;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float of_column = 0.0f;
#pragma unroll
        for (int row = 0; row < SIDE; row++) {
            const float value = d[row * 8 + c / 2 * 4 + half * 2 + c % 2];
            const float difference = ALL_ROWS || row < in.rows ? value - here : 0.0f;
            of_column = fmaf(difference, difference, of_column);
        }
        differences += in.column[c] ? of_column : 0.0f;
    }
    const float delta = here - mean;
    mean += delta * share;
    square += differences + delta * delta * (count * share);
}

#endif

__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    wgmma_convolve_kernel(const __grid_constant__ CUtensorMap images, const __grid_constant__ wgmma_arguments a)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(1024) unsigned char shared[];
    // warp_uniform tells the compiler so, and descriptors stay in uniform registers.
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32, r = thread / 32 * 16 + lane / 4, q = lane % 4;
    const tiled_problem &p = a.problem;
    const uint32_t weights = shared_address(shared);
    const uint32_t stages = weights + TAPS * TAP_BYTES + group * 2 * STAGE_BYTES;
    const uint32_t full = weights + BARRIERS + group * 16;
    const int kind = blockIdx.x % a.kinds;
    const int64_t block = blockIdx.x / a.kinds, blocks = gridDim.x / a.kinds;
    if (thread == 0) {
        prefetch_tensormap(&images);
        mbarrier_init(full, 1);
        mbarrier_init(full + 8, 1);
        fence_mbarrier_init();
    }
    st_shared(stages + BOX_BYTES + thread * 8, 0);
    st_shared(stages + BOX_BYTES + thread * 8 + 4, 0);
    st_shared(stages + STAGE_BYTES + BOX_BYTES + thread * 8, 0);
    st_shared(stages + STAGE_BYTES + BOX_BYTES + thread * 8 + 4, 0);
    wait_for_predecessor();
    release_successor();
    const auto tile_of = [&](int n) { return block + ((int64_t)n * 2 + group) * blocks; };
    const auto start = [&](int n) {
        const int64_t tile = tile_of(n);
        if (thread == 0 && tile < a.tiles.count) {
            const tile_coordinate origin = origin_of(a.tiles, tile);
            const uint32_t barrier = full + (n & 1) * 8;
            mbarrier_arrive_expect_tx(barrier, BOX_BYTES);
            tma_load_4d(stages + (n & 1) * STAGE_BYTES, &images, barrier, 0, origin.x - 1, origin.y - 1,
                        (int)origin.image);
        }
    };
    start(0);
    start(1);
    stage_weight(weights, a, kind * COLUMNS);
    fence_proxy_async();
    __syncthreads();

    const int channel = kind * COLUMNS + r;
    const bool exists[2] = {channel < p.out_channels, channel + 8 < p.out_channels};
    const uint64_t left = wgmma_descriptor(weights, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
    const uint64_t rasters = wgmma_descriptor(stages, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
    float count = 0.0f, mean[2] = {0.0f, 0.0f}, square[2] = {0.0f, 0.0f};
    int64_t pixels = 0;
    for (int n = 0; tile_of(n) < a.tiles.count; n++) {
        const uint64_t right = wgmma_advance(rasters, (n & 1) * STAGE_BYTES);
        mbarrier_wait(full + (n & 1) * 8, n >> 1 & 1);
        float d[PIXELS / 2];
        wgmma_fence();
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++)
                wgmma<float, PIXELS, 0, 0>(d, wgmma_advance(left, tap * TAP_BYTES + k * 32),
                                           wgmma_advance(right, (tap / 3 * RASTER + tap % 3) * PIXEL_BYTES + k * 32),
                                           tap + k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        bar_sync(1 + group, WARPGROUP); // all four warps' products have read the tile
        start(n + 2);

        const tile_coordinate origin = origin_of(a.tiles, tile_of(n));
        const int columns = p.width - origin.x;
        thread_pixels in;
        in.rows = min(p.height - origin.y, SIDE);
        int wide = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int x = c / 2 * 8 + 2 * q + c % 2;
            in.column[c] = x < SIDE && x < columns;
            wide += in.column[c];
        }
        float *const to =
            a.result + ((origin.image * p.height + origin.y) * p.width + origin.x) * (int64_t)p.out_channels + channel;
        // Most tiles have all their rows, and need no comparisons.
        const bool whole = in.rows == SIDE && exists[1];
        if (whole)
            store<true>(to, d, q, in, exists, p);
        else
            store<false>(to, d, q, in, exists, p);
        const float more = (float)(in.rows * wide), share = more > 0.0f ? more / (count + more) : 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (whole)
                add_moments<true>(mean[half], square[half], d, half, in, count, more, share);
            else
                add_moments<false>(mean[half], square[half], d, half, in, count, more, share);
        count += more;
        pixels += in.rows * min(columns, SIDE);
    }
    // Merges the lanes of a channel, then the warpgroups, in a fixed order.
    __shared__ moments of_groups[2][COLUMNS];
    __shared__ int64_t pixels_of[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        moments m = {count, mean[half], square[half]};
#pragma unroll
        for (int lanes = 2; lanes >= 1; lanes /= 2) {
            const moments other = {__shfl_xor_sync(FULL_WARP, m.count, lanes),
                                   __shfl_xor_sync(FULL_WARP, m.mean, lanes),
                                   __shfl_xor_sync(FULL_WARP, m.square, lanes)};
            m = merge(m, other);
        }
        if (q == 0)
            of_groups[group][r + 8 * half] = m;
    }
    if (thread == 0)
        pixels_of[group] = pixels;
    __syncthreads();
    const int own = kind * COLUMNS + threadIdx.x;
    if (threadIdx.x < COLUMNS && own < p.out_channels) {
        const moments m = merge(of_groups[0][threadIdx.x], of_groups[1][threadIdx.x]);
        a.moments.partial[block * p.out_channels + own] = make_float2(m.mean, m.square);
        if (own == 0)
            a.moments.pixels[block] = (double)(pixels_of[0] + pixels_of[1]);
    }
#endif
}

// ---- the gradient of input ----

// dy: two rasters of 32 channels, of which products of 240 pixels read 18 more.
static constexpr int GRADIENT_PIXELS = PIXELS + RASTER, GRADIENT_COLUMNS = 32, GRADIENT_CHUNKS = 2;
static constexpr int GRADIENT_RASTER =
    (2 * RASTER + 2 + GRADIENT_PIXELS) * PIXEL_BYTES / SWIZZLE_ATOM * SWIZZLE_ATOM + SWIZZLE_ATOM;
static constexpr int GRADIENT_STAGE = GRADIENT_CHUNKS * GRADIENT_RASTER;
// Of wgmma's 64 rows 32 channels need half. The others make another tap: of each warp's 16 rows, the first eight have
// tap row 2 (dy's row above) of eight channels and the next tap row 1, one image row apart, so that both end up in one
// thread's registers. Tap row 0 (dy's row below) goes first and alone, and what it adds to the other rows is dropped:
// its descriptor's groups of eight rows are half as far apart as they lie, so that every second one is something else.
static constexpr int PAIRED_BYTES = 64 * PIXEL_BYTES, ALONE_BYTES = GRADIENT_COLUMNS * PIXEL_BYTES;
static constexpr int ALONE = 3 * GRADIENT_CHUNKS * PAIRED_BYTES; // where these begin
static constexpr int GRADIENT_WEIGHT_BYTES = ALONE + 3 * GRADIENT_CHUNKS * ALONE_BYTES;
static constexpr int GRADIENT_BARRIERS = GRADIENT_WEIGHT_BYTES + 2 * GRADIENT_STAGE;
static constexpr int GRADIENT_SHARED_BYTES = GRADIENT_BARRIERS + 2 * 8;

#if defined(CUDA_OPS_HOPPER_CODE)

// Column f of dy's raster is multiplied with tap column 2 - f: [f][chunk of 32 out channels][row][channel].
__device__ __forceinline__ void stage_gradient_weight(uint32_t staged, const wgmma_arguments &a, int first_column)
{
    constexpr int LENGTH = GRADIENT_COLUMNS * TAPS;
    const int line_step = a.problem.in_channels * TAPS;
    const int length = min(a.problem.in_channels - first_column, GRADIENT_COLUMNS) * TAPS;
    const float *const from = a.weight + (int64_t)first_column * TAPS;
#pragma unroll 9
    for (int i = threadIdx.x; i < GRADIENT_CHUNKS * DEPTH * LENGTH / 4; i += 2 * WARPGROUP) {
        const int out = i / (LENGTH / 4), at = i % (LENGTH / 4) * 4, k = out % DEPTH;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (out < a.problem.out_channels && at < length)
            v = *reinterpret_cast<const float4 *>(from + (int64_t)out * line_step + at);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int in = (at + e) / TAPS, tap = (at + e) % TAPS, tap_row = tap / 3;
            const int number = (2 - tap % 3) * GRADIENT_CHUNKS + out / DEPTH;
            const int row = tap_row == 0 ? in : in / 8 * 16 + (tap_row == 1 ? 8 : 0) + in % 8;
            const uint32_t to = staged + (tap_row == 0 ? ALONE + number * ALONE_BYTES : number * PAIRED_BYTES);
            st_shared(to + row * PIXEL_BYTES + (((k >> 2) ^ (row & 7)) << 4) + (k & 3) * 4, cvt_rna_tf32(values[e]));
        }
    }
}

#endif

__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    wgmma_gradient_kernel(const __grid_constant__ CUtensorMap gradients, const __grid_constant__ wgmma_arguments a)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(1024) unsigned char shared[];
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32, q = lane % 4;
    const tiled_problem &p = a.problem;
    const uint32_t weights = shared_address(shared);
    const uint32_t stage = weights + GRADIENT_WEIGHT_BYTES + group * GRADIENT_STAGE;
    const uint32_t full = weights + GRADIENT_BARRIERS + group * 8;
    const int kind = blockIdx.x % a.kinds;
    const int64_t block = blockIdx.x / a.kinds, blocks = gridDim.x / a.kinds;
    if (thread == 0) {
        prefetch_tensormap(&gradients);
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    zero_shared(shared + GRADIENT_WEIGHT_BYTES, 2 * GRADIENT_STAGE);
    fence_proxy_async();
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    const auto tile_of = [&](int n) { return block + ((int64_t)n * 2 + group) * blocks; };
    const auto start = [&](int n) {
        const int64_t tile = tile_of(n);
        if (thread == 0 && tile < a.tiles.count) {
            const tile_coordinate origin = origin_of(a.tiles, tile);
            mbarrier_arrive_expect_tx(full, GRADIENT_CHUNKS * BOX_BYTES);
#pragma unroll
            for (int chunk = 0; chunk < GRADIENT_CHUNKS; chunk++)
                tma_load_4d(stage + chunk * GRADIENT_RASTER, &gradients, full, chunk * DEPTH, origin.x - 1,
                            origin.y - 1, (int)origin.image);
        }
    };
    start(0);
    stage_gradient_weight(weights, a, kind * GRADIENT_COLUMNS);
    fence_proxy_async();
    __syncthreads();

    const int channel = kind * GRADIENT_COLUMNS + thread / 32 * 8 + lane / 4;
    for (int n = 0; tile_of(n) < a.tiles.count; n++) {
        // Uniform anew for each tile: as constants of the loop the descriptors would lie in ordinary registers.
        const uint32_t left = warp_uniform(weights), raster = warp_uniform(stage);
        const uint64_t paired = wgmma_descriptor(left, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
        const uint64_t alone = wgmma_descriptor(left + ALONE, WGMMA_SWIZZLE_128, 4 * PIXEL_BYTES);
        const uint64_t right = wgmma_descriptor(raster, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
        mbarrier_wait(full, n & 1);
        float d[GRADIENT_PIXELS / 2];
        wgmma_fence();
#pragma unroll
        for (int number = 0; number < 3 * GRADIENT_CHUNKS; number++)
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++)
                wgmma<float, GRADIENT_PIXELS, 0, 0>(
                    d, wgmma_advance(alone, number * ALONE_BYTES + k * 32),
                    wgmma_advance(right, number % GRADIENT_CHUNKS * GRADIENT_RASTER +
                                             (2 * RASTER + number / GRADIENT_CHUNKS) * PIXEL_BYTES + k * 32),
                    number + k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < GRADIENT_PIXELS / 2; i += 4)
            d[i + 2] = d[i + 3] = 0.0f;
        wgmma_pin(d);
        wgmma_fence();
#pragma unroll
        for (int number = 0; number < 3 * GRADIENT_CHUNKS; number++)
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++)
                wgmma<float, GRADIENT_PIXELS, 0, 0>(d, wgmma_advance(paired, number * PAIRED_BYTES + k * 32),
                                                    wgmma_advance(right, number % GRADIENT_CHUNKS * GRADIENT_RASTER +
                                                                             number / GRADIENT_CHUNKS * PIXEL_BYTES +
                                                                             k * 32),
                                                    1);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        bar_sync(1 + group, WARPGROUP); // all four warps' products have read the tile
        start(n + 1);

        const tile_coordinate origin = origin_of(a.tiles, tile_of(n));
        const int rows = min(p.height - origin.y, SIDE), columns = min(p.width - origin.x, SIDE);
        const int64_t row_step = (int64_t)p.width * p.in_channels;
        float *const to =
            a.result + ((origin.image * p.height + origin.y) * p.width + origin.x) * (int64_t)p.in_channels + channel;
        if (channel < p.in_channels)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int x = c / 2 * 8 + 2 * q + c % 2;
                float *at = to + x * p.in_channels;
                if (x < columns)
#pragma unroll
                    for (int row = 0; row < SIDE; row++, at += row_step) {
                        const int i = row * 8 + c / 2 * 4 + c % 2;
                        if (row < rows)
                            *at = d[i] + d[i + 8 + 2];
                    }
            }
    }
#endif
}

// ---- launchers ----

bool wgmma_convolve_fits(const tiled_problem &p)
{
    return p.in_channels <= DEPTH && wgmma_fits(p, SHARED_BYTES);
}

bool wgmma_gradient_fits(const tiled_problem &p)
{
    return p.out_channels <= GRADIENT_CHUNKS * DEPTH && wgmma_fits(p, GRADIENT_SHARED_BYTES);
}

int64_t wgmma_convolve_blocks(const tiled_problem &p)
{
    return tiled_blocks(wgmma_tiling_of(p).count, ceil_div(p.out_channels, COLUMNS));
}

static wgmma_arguments arguments_of(const tiled_problem &p, const float *weight, float *result, int64_t kinds)
{
    wgmma_arguments a = {};
    a.problem = p;
    a.tiles = wgmma_tiling_of(p);
    a.kinds = (int)kinds;
    a.weight = weight;
    a.result = result;
    return a;
}

static cuda_ops_status launch(void (*kernel)(CUtensorMap, wgmma_arguments), int shared_bytes, const float *source,
                              bool rounds, int channels, const wgmma_arguments &a, cudaStream_t stream)
{
    const int64_t blocks = tiled_blocks(a.tiles.count, a.kinds) * a.kinds;
    CUtensorMap map;
    if (blocks > INT32_MAX || !make_raster_map(&map, source, rounds, a.problem, channels))
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(kernel, shared_bytes);
    launch_dependent(kernel, (unsigned int)blocks, 2 * WARPGROUP, shared_bytes, stream, map, a);
    return launch_status();
}

cuda_ops_status wgmma_convolve_forward(float *conv_output, batch_moments moments, const float *input,
                                       const float *weight, const tiled_problem &p, cudaStream_t stream)
{
    wgmma_arguments a = arguments_of(p, weight, conv_output, ceil_div(p.out_channels, COLUMNS));
    a.moments = moments;
    return launch(wgmma_convolve_kernel, SHARED_BYTES, input, true, p.in_channels, a, stream);
}

cuda_ops_status wgmma_convolve_backward(float *grad_input, const float *gradient, const float *weight,
                                        const tiled_problem &p, cudaStream_t stream)
{
    const wgmma_arguments a = arguments_of(p, weight, grad_input, ceil_div(p.in_channels, GRADIENT_COLUMNS));
    return launch(wgmma_gradient_kernel, GRADIENT_SHARED_BYTES, gradient, false, p.out_channels, a, stream);
}
