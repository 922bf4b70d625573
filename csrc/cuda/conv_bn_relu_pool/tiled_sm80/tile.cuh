// What the files of conv_bn_relu_pool's path for float32 share: problem, layout of tiles in shared memory, and the ways
// into it. conv_bn_relu_pool/tiled_sm80/tiled.cu tells how the whole works.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM80_TILE_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM80_TILE_CUH

#include "conv_bn_relu_pool/paths.h"

#include "common/common.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/shared_memory.cuh"

// A tile in shared memory is a raster of pixels, each with DEPTH channels (128 bytes) side by side, whose eight chunks
// of 16 bytes lie in the order of the exclusive or of their number with the pixel's column: eight neighbours in a row
// are then read without meeting a bank twice, whether by ldmatrix (a chunk each) or with channels as columns (four
// pixels, two chunks each).
static constexpr int DEPTH = 32, PIXEL_BYTES = DEPTH * 4;
static constexpr int SLOT_THREADS = 128; // a slot: four warps with a tile of their own
static constexpr int TILE_COLUMNS = 16;
static constexpr int RASTER_COLUMNS = TILE_COLUMNS + 2, RASTER_ROW_BYTES = RASTER_COLUMNS * PIXEL_BYTES;

struct tiled_problem {
    int64_t batch;
    int in_channels, out_channels, height, width, pooled_height, pooled_width;
};

// Pictures cut into tiles of so many rows, and TILE_COLUMNS columns.
struct tiling {
    int64_t count;
    int rows, across, down; // of a tile; tiles of a picture
};

struct tile_place {
    int64_t picture;
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

__device__ __forceinline__ tile_place place_of(const tiling &t, int64_t tile)
{
    tile_place place;
    if (t.across == 1 && t.down == 1) { // divisions of 64 bits take a hundred instructions
        place.picture = tile;
        place.y = place.x = 0;
        return place;
    }
    const int64_t row = tile / t.across;
    place.x = (int)(tile - row * t.across) * TILE_COLUMNS;
    place.picture = row / t.down;
    place.y = (int)(row - place.picture * t.down) * t.rows;
    return place;
}

// How many blocks a kernel has for `work` units, each block being one of `kinds`: one a multiprocessor. The sums are
// cut by it, so that they repeat bit by bit on one kind of device.
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
    const uint8_t *places;
    const float *scale, *slope, *offset;
};

struct batch_moments { // of the blocks, by channel: mean and sum of squared differences; and how many pixels
    float2 *partial;   // [blocks][out_channels]
    double *pixels;    // [blocks]
};

static constexpr int CONVOLVE_ROWS = 14, WEIGHT_ROWS = 7;

int64_t tiled_convolve_blocks(const tiled_problem &p, bool backward);
int tiled_convolve_shared_bytes(int slots);
cuda_ops_status tiled_convolve_forward(float *conv_output, batch_moments moments, const float *input,
                                       const float *weight, const tiled_problem &p, bool tf32, cudaStream_t stream);
// Right behind tiled_weight_gradient, beside which it may run.
cuda_ops_status tiled_convolve_backward(float *grad_input, const gradient_source &source, const float *weight,
                                        const tiled_problem &p, bool tf32, cudaStream_t stream);
int64_t tiled_weight_workspace(const tiled_problem &p); // bytes of partial
cuda_ops_status tiled_weight_gradient(float4 *partial, const gradient_source &source, const float *input,
                                      const tiled_problem &p, bool tf32, cudaStream_t stream);
cuda_ops_status tiled_weight_sum(float *grad_weight, const float4 *partial, const tiled_problem &p, bool tf32,
                                 cudaStream_t stream);

// ---- Device functions ----------------------------------------------------------------------------------------------

// The tensor cores cut off what they do not take.
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

// The part of a raster along one axis that is loaded for every tile. Where one tile spans the picture, that is the
// picture, and the zeros around it are there from the start.
struct raster_range {
    int begin, count;
};
__device__ __forceinline__ raster_range range_of(int tiles, int extent, int raster)
{
    if (tiles == 1)
        return {1, extent};
    return {0, raster};
}

// A raster of ROWS rows, of which the first is the one above the tile's: its pixels from `input` (channels_last),
// DEPTH channels from `channel` on. A thread has a vector of a column, so that on its way down nothing changes but the
// row; its vectors are the same in both functions, so that it has no need to wait for others between them.
template <int ROWS>
__device__ __forceinline__ raster_range raster_rows(const tiled_problem &p, const tiling &t)
{
    // Rows of a tile of WEIGHT_ROWS overlap the next one's, so that the raster is more than the tile.
    return range_of(ROWS == CONVOLVE_ROWS + 2 ? t.down : 2, p.height, ROWS);
}

__device__ __forceinline__ uint32_t raster_place(uint32_t raster, int row, int column, int vector)
{
    return raster + (row * RASTER_COLUMNS + column) * PIXEL_BYTES + ((vector ^ (column & 7)) << 4);
}

template <int ROWS>
__device__ __forceinline__ void start_raster(uint32_t raster, const float *input, const tiled_problem &p,
                                             const tiling &t, const tile_place &place, int channels, int channel,
                                             int thread)
{
    const raster_range rows = raster_rows<ROWS>(p, t), columns = range_of(t.across, p.width, RASTER_COLUMNS);
    const int c4 = channel + thread % 8 * 4;
    const int64_t row_step = (int64_t)p.width * channels;
    for (int c = columns.begin + thread / 8; c < columns.begin + columns.count; c += SLOT_THREADS / 8) {
        const int y = place.y + rows.begin - 1, x = place.x + c - 1;
        const bool exists = (unsigned int)x < (unsigned int)p.width && c4 < channels;
        const float *from = input + ((place.picture * p.height + y) * p.width + x) * channels + c4;
        const uint32_t to = raster_place(raster, rows.begin, c, thread % 8);
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
            const uint32_t at = raster_place(raster, rows.begin, c, thread % 8);
            // Loads before stores, since it is their latency that counts.
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

// The gradient of the convolution's output, made on its way: `start` copies y to where dy will be, and in `finish` each
// thread turns its own vectors into dy, so that it has no need to wait for others between them. A thread takes 4
// channels of whole windows, for which the pooled gradient and the place of the maximum wait in registers.
//   HALO: pixels around the tile; ROWS, COLUMNS: of the raster; VECTORS: of 4 channels, in rasters of 8
//   PAIRED: of the two pixels of a window's row the first's place gets the first two channels of both, the second's the
//   other two: with pixels as depths that is how fragments of mma.sync lie in registers
template <int HALO, int ROWS, int COLUMNS, int VECTORS, bool PAIRED>
struct gradient_loader {
    static constexpr int WINDOWS = HALO ? (ROWS / 2 + 1) * (COLUMNS / 2 + 1) : ((ROWS + 1) / 2) * ((COLUMNS + 1) / 2);
    static_assert(!PAIRED || (HALO == 0 && COLUMNS % 2 == 0), "both pixels or none");
    static constexpr int UNITS = (WINDOWS * VECTORS + SLOT_THREADS - 1) / SLOT_THREADS;
    static constexpr int RASTER_BYTES = ROWS * COLUMNS * PIXEL_BYTES;
    float4 grad[UNITS];
    uint32_t places[UNITS];
    tile_place place;
    int channel;

    struct window_range {
        int first_row, rows, first_column, columns;
    };

    static __device__ __forceinline__ window_range windows(const tiled_problem &p, const tiling &t,
                                                           const tile_place &place)
    {
        window_range w;
        const bool whole_rows = HALO && t.down == 1;
        w.first_row = whole_rows ? 0 : (place.y - HALO) >> 1;
        w.rows = whole_rows ? (p.height + 1) / 2 : ((place.y - HALO + ROWS - 1) >> 1) - w.first_row + 1;
        w.first_column = t.across == 1 ? 0 : (place.x - HALO) >> 1;
        w.columns = t.across == 1 ? (p.width + 1) / 2 : ((place.x - HALO + COLUMNS - 1) >> 1) - w.first_column + 1;
        return w;
    }

    // action(i, window row, window column) for the thread's windows. Of up to 8 columns of windows it keeps to one.
    template <typename Action>
    static __device__ __forceinline__ void for_windows(const window_range &w, int thread, Action action)
    {
        constexpr int GROUPS = SLOT_THREADS / VECTORS;
        const int group = thread / VECTORS, width = w.columns <= 8 ? 8 : w.columns;
        const int down = GROUPS / width, right = GROUPS - down * width; // from one to the next; right may carry
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

    // The two pixels of a window in one of its rows: where they are in the raster, if they are, and in the picture.
    struct pixel_pair {
        uint32_t at[2]; // in shared memory
        bool in_raster[2], in_picture[2];
    };

    __device__ __forceinline__ pixel_pair pixels(uint32_t raster, const tiled_problem &p, int thread, int window_row,
                                                 int window_column, int half) const
    {
        const int vector = thread % VECTORS, y = 2 * window_row + half, r = y - place.y + HALO;
        const uint32_t row = raster + vector / 8 * RASTER_BYTES + r * (COLUMNS * PIXEL_BYTES);
        pixel_pair pair;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int x = 2 * window_column + e, c = x - place.x + HALO;
            pair.in_raster[e] = (unsigned int)r < (unsigned int)ROWS && (unsigned int)c < (unsigned int)COLUMNS;
            pair.in_picture[e] = (unsigned int)y < (unsigned int)p.height && (unsigned int)x < (unsigned int)p.width;
            pair.at[e] = row + c * PIXEL_BYTES + ((vector % 8 ^ (c & 7)) << 4);
        }
        return pair;
    }

    __device__ __forceinline__ void start(uint32_t raster, const gradient_source &s, const tiled_problem &p,
                                          const tiling &t, const tile_place &at, int first_channel, int thread)
    {
        place = at;
        channel = first_channel + thread % VECTORS * 4;
        if (channel >= p.out_channels)
            return; // finish writes zeros
        const int64_t pooled = place.picture * p.pooled_height * p.pooled_width * p.out_channels + channel;
        const float *const y_of = s.conv_output + place.picture * p.height * p.width * p.out_channels + channel;
        for_windows(windows(p, t, place), thread, [&](int i, int row, int column) {
            const bool inside = (unsigned int)row < (unsigned int)p.pooled_height &&
                                (unsigned int)column < (unsigned int)p.pooled_width;
            const int64_t window = pooled + (int64_t)(row * p.pooled_width + column) * p.out_channels;
            grad[i] = inside ? __ldg(reinterpret_cast<const float4 *>(s.grad_pooled + window))
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            places[i] = inside ? __ldg(reinterpret_cast<const uint32_t *>(s.places + window)) : 0xffffffffu;
            const float *from = y_of + (int64_t)(2 * row * p.width + 2 * column) * p.out_channels;
#pragma unroll
            for (int half = 0; half < 2; half++, from += (int64_t)p.width * p.out_channels) {
                const pixel_pair pair = pixels(raster, p, thread, row, column, half);
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (pair.in_raster[e] && pair.in_picture[e])
                        cp_async<16>(pair.at[e], from + e * p.out_channels, 16);
            }
        });
    }

    template <bool TF32>
    __device__ __forceinline__ void finish(uint32_t raster, const gradient_source &s, const tiled_problem &p,
                                           const tiling &t, int thread) const
    {
        const bool exists = channel < p.out_channels;
        // Not kept from `start`: registers are scarcer there than these are far away.
        const int from = exists ? channel : 0;
        const float4 scale = __ldg(reinterpret_cast<const float4 *>(s.scale + from));
        const float4 slope = __ldg(reinterpret_cast<const float4 *>(s.slope + from));
        const float4 offset = __ldg(reinterpret_cast<const float4 *>(s.offset + from));
        cp_async_wait_group<0>();
        for_windows(windows(p, t, place), thread, [&](int i, int row, int column) {
            const float4 dz =
                make_float4(scale.x * grad[i].x, scale.y * grad[i].y, scale.z * grad[i].z, scale.w * grad[i].w);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Few branches, and loads before stores: it is latency that counts, and PAIRED mixes the pixels.
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
                        return (places[i] >> (8 * byte) & 255) == (uint32_t)(2 * half + e) ? dy + z : dy;
                    };
                    const float4 dy =
                        make_float4(make(0, v[e].x, dz.x, slope.x, offset.x), make(1, v[e].y, dz.y, slope.y, offset.y),
                                    make(2, v[e].z, dz.z, slope.z, offset.z), make(3, v[e].w, dz.w, slope.w, offset.w));
                    v[e] = exists && pair.in_picture[e] ? rounded<TF32>(dy) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
