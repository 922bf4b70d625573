// The convolution of conv_bn_relu_pool's tiled path in TF32 on Hopper, by wgmma: forward, with the batch's statistics,
// and as the gradient of input, from dy as the gradient of weight has stored it:
//     y[64 channels][224 pixels] = sum over the nine taps of weight[64][32 of a tap] * image shifted by the tap
//     dx[32 channels][pixels]    = sum over the nine taps of weight[32][64 of a tap] * dy shifted by the tap
// TMA brings tiles of 14 x 14 pixels with their halo, a raster of 16 x 16 pixels of 32 channels: it pads with zeros,
// rounds to TF32 and swizzles, so that eight neighbours are a core matrix and a tap is an offset in the descriptor's
// address. Two of a row's 16 columns of results are masked. Forward a warpgroup has a tile, and of three two store while one
// multiplies; backward of two.
// Bound by the tensor cores (4032 cycles a tile forward, 4800 backward) and the stores (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/tiled_sm80/gradient_sm90.cuh"

#include "common/value.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

static constexpr int COLUMNS = 64, TAP_BYTES = COLUMNS * PIXEL_BYTES;
static constexpr int STAGE_BYTES = BOX_BYTES + SWIZZLE_ATOM; // masked columns read two pixels more
static constexpr int GROUPS = 3;
static constexpr int BARRIERS = TAPS * TAP_BYTES + GROUPS * STAGE_BYTES, SHARED_BYTES = BARRIERS + GROUPS * 8;

struct wgmma_arguments {
    tiled_problem problem;
    wgmma_tiling tiles;
    int kinds; // groups of the result's channels
    const float *weight;
    float *result;
    batch_moments moments;
    window_maxima maxima;
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The weights, rounded, to [tap][channel][in channel], swizzled as wgmma wants it; zeros where there are none.
__device__ __forceinline__ void stage_weight(uint32_t staged, const wgmma_arguments &a, int first_column)
{
    const int in_channels = a.problem.in_channels, length = in_channels * TAPS;
    const float *const from = a.weight + (int64_t)first_column * length;
    const int columns = min(a.problem.out_channels - first_column, COLUMNS);
#pragma unroll 9
    for (int i = threadIdx.x; i < COLUMNS * DEPTH * TAPS / 4; i += GROUPS * WARPGROUP) {
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

// Stores the maxima of a thread's windows in two channels, each times its sign, and their positions. `first`: the offset
// of the tile's first window in the first channel. WHOLE: all rows of windows and both channels exist.
template <bool WHOLE>
__device__ __forceinline__ void store_maxima(const window_maxima &to, int64_t first, const float (&d)[PIXELS / 2],
                                             const float (&sign)[2], int q, int rows, int columns,
                                             const bool (&exists)[2], const tiled_problem &p)
{
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int x = c * 4 + q;
        int64_t at = first + x * p.out_channels;
        if (x < columns)
#pragma unroll
            for (int row = 0; row < SIDE / 2; row++, at += (int64_t)p.pooled_width * p.out_channels)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (WHOLE || (row < rows && exists[half])) {
                        const float *const y = d + row * 16 + c * 4 + half * 2; // and 1, 8 and 9 on
                        float raw = y[0], best = raw * sign[half];
                        int position = 0;
#pragma unroll
                        for (int e = 1; e < 4; e++) {
                            const float value = y[e / 2 * 8 + e % 2], z = value * sign[half];
                            if (z > best || z != z) { // NaN propagates, as in PyTorch
                                best = z;
                                raw = value;
                                position = e;
                            }
                        }
                        to.maximum[at + half * 8] = raw;
                        to.argmax[at + half * 8] = (uint8_t)position;
                    }
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

__global__ void __launch_bounds__(GROUPS *WARPGROUP, 1)
    wgmma_convolve_kernel(const __grid_constant__ CUtensorMap images, const __grid_constant__ wgmma_arguments a)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(1024) unsigned char shared[];
    // warp_uniform tells the compiler so, and descriptors stay in uniform registers.
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32, r = thread / 32 * 16 + lane / 4, q = lane % 4;
    const tiled_problem &p = a.problem;
    const uint32_t weights = shared_address(shared);
    const uint32_t stage = weights + TAPS * TAP_BYTES + group * STAGE_BYTES, full = weights + BARRIERS + group * 8;
    const int kind = blockIdx.x % a.kinds;
    const int64_t block = blockIdx.x / a.kinds, blocks = gridDim.x / a.kinds;
    if (thread == 0) {
        prefetch_tensormap(&images);
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    // The thread that begins a tile is the one that has made its barrier, and all others wait for them behind the
    // __syncthreads below. But its warp does both by uniform instructions, of which racecheck takes the first for other
    // lanes' (a write and a read of the barrier without anything between them); the lanes meet, so that it need not.
    __syncwarp();
    st_shared(stage + BOX_BYTES + thread * 8, 0);
    st_shared(stage + BOX_BYTES + thread * 8 + 4, 0);
    wait_for_predecessor();
    release_successor();
    const auto tile_of = [&](int n) { return block + ((int64_t)n * GROUPS + group) * blocks; };
    const auto start = [&](int n) {
        const int64_t tile = tile_of(n);
        if (thread == 0 && tile < a.tiles.count) {
            const tile_coordinate origin = origin_of(a.tiles, tile);
            mbarrier_arrive_expect_tx(full, BOX_BYTES);
            tma_load_4d(stage, &images, full, 0, origin.x - 1, origin.y - 1, (int)origin.image);
        }
    };
    start(0);
    stage_weight(weights, a, kind * COLUMNS);
    fence_proxy_async();
    __syncthreads();

    const int channel = kind * COLUMNS + r;
    const bool exists[2] = {channel < p.out_channels, channel + 8 < p.out_channels};
    const uint64_t left = wgmma_descriptor(weights, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
    const uint64_t raster = wgmma_descriptor(stage, WGMMA_SWIZZLE_128, 8 * PIXEL_BYTES);
    float sign[2]; // of scale
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const cuda_ops_norm_parameters &norm = a.maxima.norm;
        const double gamma =
            norm.weight && exists[half] ? load_value(norm.weight, norm.dtype, channel + half * 8) : 1.0;
        sign[half] = gamma < 0.0 ? -1.0f : gamma == 0.0 ? 0.0f : 1.0f;
    }
    float count = 0.0f, mean[2] = {0.0f, 0.0f}, square[2] = {0.0f, 0.0f};
    int64_t pixels = 0;
    for (int n = 0; tile_of(n) < a.tiles.count; n++) {
        mbarrier_wait(full, n & 1);
        float d[PIXELS / 2];
        wgmma_fence();
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++)
                wgmma<float, PIXELS, 0, 0>(d, wgmma_advance(left, tap * TAP_BYTES + k * 32),
                                           wgmma_advance(raster, (tap / 3 * RASTER + tap % 3) * PIXEL_BYTES + k * 32),
                                           tap + k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        bar_sync(1 + group, WARPGROUP); // all four warps' products have read the tile
        start(n + 1);

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
        const int pooled_y = origin.y / 2, pooled_x = origin.x / 2;
        const int64_t first =
            ((origin.image * p.pooled_height + pooled_y) * p.pooled_width + pooled_x) * (int64_t)p.out_channels +
            channel;
        const int window_rows = p.pooled_height - pooled_y;
        const int window_columns = min(p.pooled_width - pooled_x, SIDE / 2);
        if (whole) {
            store<true>(to, d, q, in, exists, p);
            store_maxima<true>(a.maxima, first, d, sign, q, window_rows, window_columns, exists, p);
        } else {
            store<false>(to, d, q, in, exists, p);
            store_maxima<false>(a.maxima, first, d, sign, q, window_rows, window_columns, exists, p);
        }
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
    __shared__ moments of_groups[GROUPS][COLUMNS];
    __shared__ int64_t pixels_of[GROUPS];
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
        moments m = of_groups[0][threadIdx.x];
        int64_t all = pixels_of[0];
#pragma unroll
        for (int i = 1; i < GROUPS; i++) {
            m = merge(m, of_groups[i][threadIdx.x]);
            all += pixels_of[i];
        }
        a.moments.partial[block * p.out_channels + own] = make_float2(m.mean, m.square);
        if (own == 0)
            a.moments.pixels[block] = (double)all;
    }
#endif
}

// ---- the gradient of input ----

static constexpr int GRADIENT_BARRIERS = GRADIENT_WEIGHT_BYTES + 2 * GRADIENT_STAGE;
static constexpr int GRADIENT_SHARED_BYTES = GRADIENT_BARRIERS + 2 * 8;

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
    stage_gradient_weight(weights, a.weight, p, kind * GRADIENT_COLUMNS);
    fence_proxy_async();
    __syncthreads();

    const int channel = kind * GRADIENT_COLUMNS + thread / 32 * 8 + lane / 4;
    for (int n = 0; tile_of(n) < a.tiles.count; n++) {
        mbarrier_wait(full, n & 1);
        float d[GRADIENT_PIXELS / 2];
        multiply_gradient(d, weights, stage, lane);
        bar_sync(1 + group, WARPGROUP); // all four warps' products have read the tile
        start(n + 1);

        store_gradient(a.result, d, p, origin_of(a.tiles, tile_of(n)), channel, q);
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
                              bool rounds, int channels, int threads, const wgmma_arguments &a, cudaStream_t stream)
{
    const int64_t blocks = tiled_blocks(a.tiles.count, a.kinds) * a.kinds;
    CUtensorMap map;
    if (blocks > INT32_MAX || !make_raster_map(&map, source, rounds, a.problem, channels))
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(kernel, shared_bytes);
    launch_dependent(kernel, (unsigned int)blocks, threads, shared_bytes, stream, map, a);
    return launch_status();
}

cuda_ops_status wgmma_convolve_forward(float *conv_output, batch_moments moments, const window_maxima &maxima,
                                       const float *input, const float *weight, const tiled_problem &p,
                                       cudaStream_t stream)
{
    wgmma_arguments a = arguments_of(p, weight, conv_output, ceil_div(p.out_channels, COLUMNS));
    a.moments = moments;
    a.maxima = maxima;
    return launch(wgmma_convolve_kernel, SHARED_BYTES, input, true, p.in_channels, GROUPS * WARPGROUP, a, stream);
}

cuda_ops_status wgmma_convolve_backward(float *grad_input, const float *gradient, const float *weight,
                                        const tiled_problem &p, cudaStream_t stream)
{
    const wgmma_arguments a = arguments_of(p, weight, grad_input, ceil_div(p.in_channels, GRADIENT_COLUMNS));
    return launch(wgmma_gradient_kernel, GRADIENT_SHARED_BYTES, gradient, false, p.out_channels, 2 * WARPGROUP, a,
                  stream);
}
