// Winograd's transforms of images: windows of the source to B^T d B, tiles of a gradient to A y A^T, and products to
// tiles of the target, A^T m A + bias (transforms.cuh).
//
// A thread takes one channel of one tile. Threads side by side take channels of channels_last images and tiles of
// contiguous ones, so that whole lines are read and written: of channels_last images both of pixels and of transforms,
// of contiguous ones of transforms, while windows that overlap are found in the L1. Bound by memory: F(4x4) writes or
// reads 36 numbers for 16 of the image, F(2x2) 16 for 4.
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "conv2d/winograd/parts.h"
#include "conv2d/winograd/transforms.cuh"

static constexpr int THREADS = 128;

// A thread's channel, and its tile's first row and column; `offset` is that of its image and channel.
struct Place {
    int channel, y, x;
    int64_t offset;
    bool inside; // not beyond the channels or the tiles
};

template <int STEP, bool CHANNELS_LAST>
__device__ __forceinline__ Place place_of(const WinogradTiles &t, uint32_t index)
{
    const uint32_t slow = t.fastest.of(index);
    const uint32_t fast = index - slow * (uint32_t)(CHANNELS_LAST ? t.padded_channels : t.padded_tiles);
    const uint32_t tile = CHANNELS_LAST ? slow : fast;
    const uint32_t row = t.columns.of(tile), image_row = row + (uint32_t)t.first_row, image = t.rows.of(image_row);
    Place p;
    p.channel = (int)(CHANNELS_LAST ? fast : slow);
    p.y = (int)(image_row - image * t.rows_value) * STEP + t.first_y;
    p.x = (int)(tile - row * t.columns_value) * STEP + t.first_x;
    p.offset = image * t.n_stride + p.channel * t.c_stride;
    p.inside = p.channel < t.channels && tile < (uint32_t)t.tiles;
    return p;
}

// WINDOW: rows and columns that are read.
template <int WINDOW, int POINTS, bool CHANNELS_LAST>
__global__ void __launch_bounds__(THREADS)
    conv2d_winograd_image_kernel(const float *images, const __grid_constant__ WinogradTiles t)
{
    const uint32_t plane = (uint32_t)t.padded_tiles * (uint32_t)t.padded_channels;
    wait_for_predecessor();
    release_successor();
    for (uint32_t index = (uint32_t)global_thread_index(); index < plane; index += (uint32_t)global_thread_count()) {
        const Place at = place_of<POINTS - 2, CHANNELS_LAST>(t, index);
        const float *const window = images + at.offset + at.y * t.y_stride + at.x * t.x_stride;
        float values[WINDOW][WINDOW], points[POINTS][POINTS];
#pragma unroll
        for (int y = 0; y < WINDOW; y++) {
            // Compared as unsigned: a negative row is too large as well.
            const bool row = at.inside && (unsigned int)(at.y + y) < (unsigned int)t.height;
#pragma unroll
            for (int x = 0; x < WINDOW; x++)
                values[y][x] = row && (unsigned int)(at.x + x) < (unsigned int)t.width
                                   ? window[y * t.y_stride + x * t.x_stride]
                                   : 0.0f;
        }
        transform(points, values);
#pragma unroll
        for (int y = 0; y < POINTS; y++)
#pragma unroll
            for (int x = 0; x < POINTS; x++)
                t.transformed[(int64_t)(y * POINTS + x) * plane + index] = points[y][x];
    }
}

// VECTOR: neighbours in a row that are stored at once.
template <int TILE, bool CHANNELS_LAST, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    conv2d_winograd_target_kernel(float *images, const float *bias, const __grid_constant__ WinogradTiles t)
{
    constexpr int POINTS = TILE + 2;
    typedef aligned_vector<float, VECTOR> V;
    const uint32_t plane = (uint32_t)t.padded_tiles * (uint32_t)t.padded_channels;
    wait_for_predecessor();
    release_successor();
    for (uint32_t index = (uint32_t)global_thread_index(); index < plane; index += (uint32_t)global_thread_count()) {
        const Place at = place_of<TILE, CHANNELS_LAST>(t, index);
        if (!at.inside)
            continue;
        float points[POINTS][POINTS], values[TILE][TILE];
#pragma unroll
        for (int y = 0; y < POINTS; y++)
#pragma unroll
            for (int x = 0; x < POINTS; x++)
                points[y][x] = t.transformed[(int64_t)(y * POINTS + x) * plane + index];
        const float add = bias ? bias[at.channel] : 0.0f;
        transform(values, points);
        float *const window = images + at.offset + at.y * t.y_stride + at.x * t.x_stride;
#pragma unroll
        for (int y = 0; y < TILE; y++) {
            if (at.y + y >= t.height)
                break;
#pragma unroll
            for (int x = 0; x < TILE; x += VECTOR) {
                if (at.x + x >= t.width)
                    break;
                V v;
#pragma unroll
                for (int e = 0; e < VECTOR; e++)
                    v.element[e] = values[y][x + e] + add;
                store_vector(reinterpret_cast<V *>(window + y * t.y_stride + x * t.x_stride), v);
            }
        }
    }
}

static dim3 grid_of(const WinogradTiles &t)
{
    return dim3(clamp_grid(ceil_div((int64_t)t.padded_tiles * t.padded_channels, THREADS)));
}

template <int WINDOW, int POINTS>
static cuda_ops_status transform_images(const WinogradTiles &t, const float *images, cudaStream_t stream)
{
    launch_dependent(t.channels_last ? conv2d_winograd_image_kernel<WINDOW, POINTS, true>
                                     : conv2d_winograd_image_kernel<WINDOW, POINTS, false>,
                     grid_of(t), THREADS, 0, stream, images, t);
    return launch_status();
}

cuda_ops_status conv2d_winograd_transform_source(const WinogradTiles &t, const float *source, int tile,
                                                 cudaStream_t stream)
{
    return tile == 4 ? transform_images<6, 6>(t, source, stream) : transform_images<4, 4>(t, source, stream);
}

cuda_ops_status conv2d_winograd_transform_grad(const WinogradTiles &t, const float *grad_output, int tile,
                                               cudaStream_t stream)
{
    return tile == 4 ? transform_images<4, 6>(t, grad_output, stream) : transform_images<2, 4>(t, grad_output, stream);
}

template <int TILE>
static cuda_ops_status transform_target(float *target, const WinogradTiles &t, const float *bias, cudaStream_t stream)
{
    // Tiles begin at multiples of TILE, and so a vector is inside of an image as a whole.
    const auto kernel = t.channels_last ? conv2d_winograd_target_kernel<TILE, true, 1>
                        : t.width % TILE == 0 && is_aligned_16(target)
                            ? conv2d_winograd_target_kernel<TILE, false, TILE>
                        : t.width % 2 == 0 && is_aligned_16(target) ? conv2d_winograd_target_kernel<TILE, false, 2>
                                                                    : conv2d_winograd_target_kernel<TILE, false, 1>;
    launch_dependent(kernel, grid_of(t), THREADS, 0, stream, target, bias, t);
    return launch_status();
}

cuda_ops_status conv2d_winograd_transform_target(float *target, const WinogradTiles &t, const float *bias, int tile,
                                                 cudaStream_t stream)
{
    return tile == 4 ? transform_target<4>(target, t, bias, stream) : transform_target<2>(target, t, bias, stream);
}
