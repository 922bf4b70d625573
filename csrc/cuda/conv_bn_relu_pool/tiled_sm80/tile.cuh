// What the files of conv_bn_relu_pool's tiled path share: the problem, the layout of tiles in shared memory, and the
// loaders. tiled.cu describes the path.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM80_TILE_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM80_TILE_CUH

#include "conv_bn_relu_pool/paths.h"

#include "common/common.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/shared_memory.cuh"

// A tile in shared memory is a raster of pixels, each with DEPTH channels (128 bytes) side by side. Its eight 16-byte
// vectors are swizzled: their index is xored with the pixel's column. Eight neighbours in a row are then read without
// bank conflicts, by ldmatrix (a vector each) as well as with channels as columns (four pixels, two vectors each).
static constexpr int DEPTH = 32, PIXEL_BYTES = DEPTH * 4;
static constexpr int SLOT_THREADS = 128; // a slot: four warps with a tile of their own
static constexpr int TILE_COLUMNS = 16;
static constexpr int RASTER_COLUMNS = TILE_COLUMNS + 2, RASTER_ROW_BYTES = RASTER_COLUMNS * PIXEL_BYTES;

struct tiled_problem {
    int64_t batch;
    int in_channels, out_channels, height, width, pooled_height, pooled_width;
    bool tf32;                                // operands may be rounded to TF32
    bool wgmma, wgmma_gradient, wgmma_weight; // then by wgmma: forward; the gradients of input and of weight
    bool wgmma_backward;                      // both gradients in one kernel, where both are wanted
    bool winograd; // else float32 products may be made by Winograd's F(2x2, 3x3), and winograd_fits
};

// Images cut into tiles of `rows` x TILE_COLUMNS pixels.
struct tiling {
    int64_t count;
    int rows, across, down; // of a tile; tiles of an image
};

struct tile_coordinate {
    int64_t image;
    int y, x; // the first output pixel
};

static inline tiling tiling_of(const tiled_problem &p, int rows)
{
    tiling t;
    t.rows = rows;
    t.across = (int)ceil_div(p.width, TILE_COLUMNS);
    t.down = (int)ceil_div(p.height, rows);
    t.count = p.batch * t.across * t.down;
    return t;
}

__device__ __forceinline__ tile_coordinate coordinate_of(const tiling &t, int64_t tile)
{
    tile_coordinate origin;
    if (t.across == 1 && t.down == 1) { // a 64-bit division takes a hundred instructions
        origin.image = tile;
        origin.y = origin.x = 0;
        return origin;
    }
    const int64_t row = tile / t.across;
    origin.x = (int)(tile - row * t.across) * TILE_COLUMNS;
    origin.image = row / t.down;
    origin.y = (int)(row - origin.image * t.down) * t.rows;
    return origin;
}

// Blocks of each of `kinds` for `work` units: one block a multiprocessor. Sums are split by it, so that results repeat
// bitwise on one kind of device.
static inline int64_t tiled_blocks(int64_t work, int64_t kinds)
{
    const int processors = current_device().multiprocessors;
    const int64_t blocks = processors / kinds > 0 ? processors / kinds : 1;
    return blocks < work ? blocks : work;
}

// ---- The launchers of the other files ------------------------------------------------------------------------------

// dy = scale * dz + slope * y + offset, by channel.
struct gradient_source {
    const float *conv_output, *grad_pooled; // channels_last, both
    const uint8_t *argmax;
    const float *scale, *slope, *offset;
    float *made; // where the gradient of weight stores dy, channels_last and rounded, for that of input; or NULL
};

struct batch_moments { // of each block: mean and sum of squared differences by channel, and the number of pixels
    float2 *partial;   // [blocks][out_channels]
    double *pixels;    // [blocks]
};

// Where wgmma_convolve_forward stores the windows' maxima, least values where `norm`'s weight is negative, and their
// positions: what is largest when normalised is known before the statistics are.
struct window_maxima {
    float *maximum;  // channels_last, both
    uint8_t *argmax; // before relu
    cuda_ops_norm_parameters norm;
};

static constexpr int CONVOLVE_ROWS = 14, WEIGHT_ROWS = 7;

int64_t tiled_convolve_blocks(const tiled_problem &p, bool backward);
int tiled_convolve_shared_bytes(int slots);
// `maxima` are stored where p.wgmma is set.
cuda_ops_status tiled_convolve_forward(float *conv_output, batch_moments moments, const window_maxima &maxima,
                                       const float *input, const float *weight, const tiled_problem &p,
                                       cudaStream_t stream);
// Launched right behind tiled_weight_gradient, with which it may overlap; nothing is left to do where that has made both.
cuda_ops_status tiled_convolve_backward(float *grad_input, const gradient_source &source, const float *weight,
                                        const tiled_problem &p, cudaStream_t stream);
// A block of the gradient of weight makes WEIGHT_OUT x WEIGHT_IN channels of all nine taps, WEIGHT_VECTORS of four.
static constexpr int WEIGHT_OUT = 64, WEIGHT_IN = 32, WEIGHT_VECTORS = 9 * WEIGHT_OUT * WEIGHT_IN / 4;
int64_t tiled_weight_workspace(const tiled_problem &p); // bytes of partial
// Where p.wgmma_backward is set, and grad_input not NULL, this makes both.
cuda_ops_status tiled_weight_gradient(float4 *partial, float *grad_input, const gradient_source &source,
                                      const float *input, const float *weight, const tiled_problem &p,
                                      cudaStream_t stream);
cuda_ops_status tiled_weight_sum(float *grad_weight, const float4 *partial, const tiled_problem &p,
                                 cudaStream_t stream);

// convolve_sm90.cu and backward_weight_sm90.cu: TF32 by wgmma, which tiled_... above takes where p.wgmma... are set.
bool wgmma_convolve_fits(const tiled_problem &p);
bool wgmma_gradient_fits(const tiled_problem &p);
int64_t wgmma_convolve_blocks(const tiled_problem &p);
cuda_ops_status wgmma_convolve_forward(float *conv_output, batch_moments moments, const window_maxima &maxima,
                                       const float *input, const float *weight, const tiled_problem &p,
                                       cudaStream_t stream);
cuda_ops_status wgmma_convolve_backward(float *grad_input, const float *gradient, const float *weight,
                                        const tiled_problem &p, cudaStream_t stream);
bool wgmma_weight_fits(const tiled_problem &p);
int64_t wgmma_weight_tiles(const tiled_problem &p);
cuda_ops_status wgmma_weight_gradient(float4 *partial, const gradient_source &source, const float *input,
                                      const tiled_problem &p, int64_t blocks, cudaStream_t stream);
bool wgmma_backward_fits(const tiled_problem &p);
// Both gradients: tiled_weight_gradient's and tiled_convolve_backward's.
cuda_ops_status wgmma_backward(float *grad_input, float4 *partial, const gradient_source &source, const float *input,
                               const float *weight, const tiled_problem &p, int64_t blocks, cudaStream_t stream);

// winograd.cu: the same by Winograd's algorithm, which tiled_... above takes where p.winograd is set.
bool winograd_fits(const tiled_problem &p);
int64_t winograd_convolve_blocks(const tiled_problem &p, bool backward);
cuda_ops_status winograd_convolve_forward(float *conv_output, batch_moments moments, const float *input,
                                          const float *weight, const tiled_problem &p, cudaStream_t stream);
cuda_ops_status winograd_convolve_backward(float *grad_input, const float *gradient, const float *weight,
                                           const tiled_problem &p, cudaStream_t stream);
int64_t winograd_weight_groups(const tiled_problem &p); // of tiles, to be shared among blocks
cuda_ops_status winograd_weight_gradient(float4 *partial, const gradient_source &source, const float *input,
                                         const tiled_problem &p, int64_t blocks, cudaStream_t stream);

// ---- Device functions ----------------------------------------------------------------------------------------------

// Mean and sum of squared differences of `count` values.
struct moments {
    float count, mean, square;
};

// Merges two sets by the formula of Chan, Golub and LeVeque.
__device__ __forceinline__ moments merge(const moments &x, const moments &y)
{
    const float count = x.count + y.count, share = count > 0.0f ? y.count / count : 0.0f, delta = y.mean - x.mean;
    return {count, x.mean + delta * share, x.square + y.square + delta * delta * x.count * share};
}

// Where backward_weight.cu's float32 sums of a tap, and of four in channels from `in` on, lie among a block's vectors.
__device__ __forceinline__ int weight_vector(int tap, int out, int in)
{
    return (tap * 4 + out % 4) * SLOT_THREADS + out / 4 * (WEIGHT_IN / 4) + in / 4;
}

// Tensor cores truncate: without this the bits beyond TF32 would be cut off, not rounded.
__device__ __forceinline__ float round_to_tf32(float value)
{
    return __uint_as_float(cvt_rna_tf32(value));
}

template <bool TF32>
__device__ __forceinline__ float4 rounded(float4 v)
{
    if constexpr (TF32)
        return make_float4(round_to_tf32(v.x), round_to_tf32(v.y), round_to_tf32(v.z), round_to_tf32(v.w));
    return v;
}

__device__ __forceinline__ void slot_barrier(int slot)
{
    bar_sync<SLOT_THREADS>(slot + 1);
}

__device__ __forceinline__ void zero_shared(unsigned char *shared, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        *reinterpret_cast<float4 *>(shared + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// The part of a raster along one axis that is loaded for every tile: all of it, or, where one tile spans the image, the
// image, whose padding was zeroed once.
struct raster_range {
    int begin, count;
};
__device__ __forceinline__ raster_range range_of(int tiles, int extent, int raster)
{
    if (tiles == 1)
        return {1, extent};
    return {0, raster};
}

// start_raster copies a raster of ROWS rows, the first of them above the tile's, from `input` (channels_last), DEPTH
// channels from `channel` on; finish_raster waits for it and rounds. A thread has one vector of a column and walks down
// the rows; it finishes the vectors that it started, so that no barrier is needed between the two.
template <int ROWS>
__device__ __forceinline__ raster_range raster_rows(const tiled_problem &p, const tiling &t)
{
    // Rasters of WEIGHT_ROWS are always loaded whole, as those of images with several tiles must be.
    return range_of(ROWS == CONVOLVE_ROWS + 2 ? t.down : 2, p.height, ROWS);
}

__device__ __forceinline__ uint32_t raster_address(uint32_t raster, int row, int column, int vector)
{
    return raster + (row * RASTER_COLUMNS + column) * PIXEL_BYTES + ((vector ^ (column & 7)) << 4);
}

template <int ROWS>
__device__ __forceinline__ void start_raster(uint32_t raster, const float *input, const tiled_problem &p,
                                             const tiling &t, const tile_coordinate &origin, int channels, int channel,
                                             int thread)
{
    const raster_range rows = raster_rows<ROWS>(p, t), columns = range_of(t.across, p.width, RASTER_COLUMNS);
    const int c4 = channel + thread % 8 * 4;
    const int64_t row_step = (int64_t)p.width * channels;
    for (int c = columns.begin + thread / 8; c < columns.begin + columns.count; c += SLOT_THREADS / 8) {
        const int y = origin.y + rows.begin - 1, x = origin.x + c - 1;
        const bool exists = (unsigned int)x < (unsigned int)p.width && c4 < channels;
        const float *from = input + ((origin.image * p.height + y) * p.width + x) * channels + c4;
        const uint32_t to = raster_address(raster, rows.begin, c, thread % 8);
#pragma unroll
        for (int i = 0; i < ROWS; i++, from += row_step)
            if (i < rows.count) {
                const bool inside = exists && (unsigned int)(y + i) < (unsigned int)p.height;
                cp_async<16>(to + i * RASTER_ROW_BYTES, inside ? from : input, inside ? 16 : 0);
            }
    }
}

template <int ROWS, bool TF32>
__device__ __forceinline__ void finish_raster(uint32_t raster, const tiled_problem &p, const tiling &t, int thread)
{
    cp_async_wait_group<0>();
    if constexpr (TF32) {
        const raster_range rows = raster_rows<ROWS>(p, t), columns = range_of(t.across, p.width, RASTER_COLUMNS);
        for (int c = columns.begin + thread / 8; c < columns.begin + columns.count; c += SLOT_THREADS / 8) {
            const uint32_t at = raster_address(raster, rows.begin, c, thread % 8);
            // Several loads before the stores, to overlap their latencies.
            constexpr int TOGETHER = 4;
#pragma unroll
            for (int i = 0; i < ROWS; i += TOGETHER) {
                float4 values[TOGETHER];
#pragma unroll
                for (int e = 0; e < TOGETHER; e++)
                    if (i + e < ROWS && i + e < rows.count)
                        values[e] = ld_shared_v4_f32(at + (i + e) * RASTER_ROW_BYTES);
#pragma unroll
                for (int e = 0; e < TOGETHER; e++)
                    if (i + e < ROWS && i + e < rows.count)
                        st_shared_v4_f32(at + (i + e) * RASTER_ROW_BYTES, rounded<true>(values[e]));
            }
        }
    }
}

// Makes dy, the gradient of the convolution's output, while loading: `start` copies y to shared memory, and in `finish`
// each thread replaces the vectors that it copied by dy, so that no barrier is needed between the two. A thread takes 4
// channels of whole windows and keeps their pooled gradient and argmax in registers.
//   HALO: pixels around the tile; ROWS, COLUMNS: of the raster; VECTORS: of 4 channels, in rasters of 8
//   PAIRED: of the two pixels in a window's row, the first's slot holds the first two channels of both pixels, the
//   second's the other two: that is the register layout of mma.sync's fragments with pixels as k
template <int HALO, int ROWS, int COLUMNS, int VECTORS, bool PAIRED>
struct gradient_loader {
    static constexpr int WINDOWS = HALO ? (ROWS / 2 + 1) * (COLUMNS / 2 + 1) : ((ROWS + 1) / 2) * ((COLUMNS + 1) / 2);
    static_assert(!PAIRED || (HALO == 0 && COLUMNS % 2 == 0), "whole pairs of pixels");
    static constexpr int UNITS = (WINDOWS * VECTORS + SLOT_THREADS - 1) / SLOT_THREADS;
    static constexpr int RASTER_BYTES = ROWS * COLUMNS * PIXEL_BYTES;
    float4 grad[UNITS];
    uint32_t argmax[UNITS];
    tile_coordinate origin;
    int channel;

    struct window_range {
        int first_row, rows, first_column, columns;
    };

    static __device__ __forceinline__ window_range windows(const tiled_problem &p, const tiling &t,
                                                           const tile_coordinate &origin)
    {
        window_range w;
        const bool whole_rows = HALO && t.down == 1;
        w.first_row = whole_rows ? 0 : (origin.y - HALO) >> 1;
        w.rows = whole_rows ? (p.height + 1) / 2 : ((origin.y - HALO + ROWS - 1) >> 1) - w.first_row + 1;
        w.first_column = t.across == 1 ? 0 : (origin.x - HALO) >> 1;
        w.columns = t.across == 1 ? (p.width + 1) / 2 : ((origin.x - HALO + COLUMNS - 1) >> 1) - w.first_column + 1;
        return w;
    }

    // action(i, window row, window column) for the thread's windows; with up to 8 columns a thread stays in one column.
    template <typename Action>
    static __device__ __forceinline__ void for_windows(const window_range &w, int thread, Action action)
    {
        constexpr int GROUPS = SLOT_THREADS / VECTORS;
        const int group = thread / VECTORS, width = w.columns <= 8 ? 8 : w.columns;
        // Steps to the thread's next window, of which `right` may carry into the next row.
        const int down = GROUPS / width, right = GROUPS - down * width;
        int row = group / width, column = group - row * width;
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (row < w.rows && column < w.columns)
                action(i, w.first_row + row, w.first_column + column);
            row += down;
            column += right;
            if (column >= width) {
                column -= width;
                row++;
            }
        }
    }

    // The two pixels of a window in one of its rows: shared-memory addresses, and whether they are in bounds.
    struct pixel_pair {
        uint32_t at[2]; // in shared memory
        bool in_raster[2], in_image[2];
    };

    __device__ __forceinline__ pixel_pair pixels(uint32_t raster, const tiled_problem &p, int thread, int window_row,
                                                 int window_column, int half) const
    {
        const int vector = thread % VECTORS, y = 2 * window_row + half, r = y - origin.y + HALO;
        const uint32_t row = raster + vector / 8 * RASTER_BYTES + r * (COLUMNS * PIXEL_BYTES);
        pixel_pair pair;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int x = 2 * window_column + e, c = x - origin.x + HALO;
            pair.in_raster[e] = (unsigned int)r < (unsigned int)ROWS && (unsigned int)c < (unsigned int)COLUMNS;
            pair.in_image[e] = (unsigned int)y < (unsigned int)p.height && (unsigned int)x < (unsigned int)p.width;
            pair.at[e] = row + c * PIXEL_BYTES + ((vector % 8 ^ (c & 7)) << 4);
        }
        return pair;
    }

    __device__ __forceinline__ void start(uint32_t raster, const gradient_source &s, const tiled_problem &p,
                                          const tiling &t, const tile_coordinate &at, int first_channel, int thread)
    {
        origin = at;
        channel = first_channel + thread % VECTORS * 4;
        if (channel >= p.out_channels)
            return; // finish writes zeros
        const int64_t pooled = origin.image * p.pooled_height * p.pooled_width * p.out_channels + channel;
        const float *const y_of = s.conv_output + origin.image * p.height * p.width * p.out_channels + channel;
        for_windows(windows(p, t, origin), thread, [&](int i, int row, int column) {
            const bool inside = (unsigned int)row < (unsigned int)p.pooled_height &&
                                (unsigned int)column < (unsigned int)p.pooled_width;
            const int64_t window = pooled + (int64_t)(row * p.pooled_width + column) * p.out_channels;
            grad[i] = inside ? __ldg(reinterpret_cast<const float4 *>(s.grad_pooled + window))
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            argmax[i] = inside ? __ldg(reinterpret_cast<const uint32_t *>(s.argmax + window)) : 0xffffffffu;
            const float *from = y_of + (int64_t)(2 * row * p.width + 2 * column) * p.out_channels;
#pragma unroll
            for (int half = 0; half < 2; half++, from += (int64_t)p.width * p.out_channels) {
                const pixel_pair pair = pixels(raster, p, thread, row, column, half);
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (pair.in_raster[e] && pair.in_image[e])
                        cp_async<16>(pair.at[e], from + e * p.out_channels, 16);
            }
        });
    }

    template <bool TF32>
    __device__ __forceinline__ void finish(uint32_t raster, const gradient_source &s, const tiled_problem &p,
                                           const tiling &t, int thread) const
    {
        const bool exists = channel < p.out_channels;
        // Reloaded rather than kept from `start`: registers are scarce, and these are in the cache.
        const int from = exists ? channel : 0;
        const float4 scale = __ldg(reinterpret_cast<const float4 *>(s.scale + from));
        const float4 slope = __ldg(reinterpret_cast<const float4 *>(s.slope + from));
        const float4 offset = __ldg(reinterpret_cast<const float4 *>(s.offset + from));
        cp_async_wait_group<0>();
        for_windows(windows(p, t, origin), thread, [&](int i, int row, int column) {
            const float4 dz =
                make_float4(scale.x * grad[i].x, scale.y * grad[i].y, scale.z * grad[i].z, scale.w * grad[i].w);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Few branches, and loads before stores: bound by latency, and PAIRED mixes the two pixels.
                const pixel_pair pair = pixels(raster, p, thread, row, column, half);
                float4 v[2] = {};
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (pair.in_raster[e])
                        v[e] = ld_shared_v4_f32(pair.at[e]);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const auto make = [&](int byte, float value, float z, float by, float to_add) {
                        const float dy = fmaf(by, value, to_add);
                        return (argmax[i] >> (8 * byte) & 255) == (uint32_t)(2 * half + e) ? dy + z : dy;
                    };
                    const float4 dy =
                        make_float4(make(0, v[e].x, dz.x, slope.x, offset.x), make(1, v[e].y, dz.y, slope.y, offset.y),
                                    make(2, v[e].z, dz.z, slope.z, offset.z), make(3, v[e].w, dz.w, slope.w, offset.w));
                    v[e] = exists && pair.in_image[e] ? rounded<TF32>(dy) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                if (PAIRED) {
                    const float4 a = v[0], b = v[1];
                    v[0] = make_float4(a.x, a.y, b.x, b.y);
                    v[1] = make_float4(a.z, a.w, b.z, b.w);
                }
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (pair.in_raster[e])
                        st_shared_v4_f32(pair.at[e], v[e]);
            }
        });
    }
};

#endif
