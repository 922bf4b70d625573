// What the files of conv_bn_relu_pool's tiled path for Hopper share: tiles of 14 x 14 pixels, which TMA brings with
// their halo as rasters of 16 x 16.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM80_TILE_SM90_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM80_TILE_SM90_CUH

#include "conv_bn_relu_pool/tiled_sm80/tile.cuh"

#include "common/tensor_map.h"
#include "ptx/wgmma.cuh"

static constexpr int SIDE = 14, RASTER = SIDE + 2;
static constexpr int TAPS = 9, PIXELS = SIDE * RASTER; // of a tile: wgmma's n
static constexpr int BOX_BYTES = RASTER * RASTER * PIXEL_BYTES;

struct wgmma_tiling {
    int across, down; // tiles of an image
    int64_t count;
};

static inline wgmma_tiling wgmma_tiling_of(const tiled_problem &p)
{
    const int across = (int)ceil_div(p.width, SIDE), down = (int)ceil_div(p.height, SIDE);
    return {across, down, p.batch * across * down};
}

// Whether these tiles, narrower than convolve.cu's, are not too many more, and the rest is as wgmma and TMA need it.
static inline bool wgmma_fits(const tiled_problem &p, int shared_bytes)
{
    const Device device = current_device();
    return HAS_SM90A && device.capability == 90 && device.shared_bytes >= shared_bytes + 4096 &&
           p.batch < INT32_MAX - 1024 && 2 * wgmma_tiling_of(p).count <= 3 * tiling_of(p, CONVOLVE_ROWS).count;
}

// A map of images in boxes of a raster.
static inline bool make_raster_map(CUtensorMap *map, const float *images, bool round_to_tf32, const tiled_problem &p,
                                   int channels)
{
    return make_image_map(map, images, CUDA_OPS_FLOAT32, round_to_tf32, p.batch, p.height, p.width, channels, RASTER,
                          RASTER, DEPTH);
}

__device__ __forceinline__ tile_coordinate origin_of(const wgmma_tiling &t, int64_t tile)
{
    tile_coordinate origin = {tile, 0, 0};
    if (t.across > 1 || t.down > 1) {
        const int64_t row = tile / t.across;
        origin.x = (int)(tile - row * t.across) * SIDE;
        origin.image = row / t.down;
        origin.y = (int)(row - origin.image * t.down) * SIDE;
    }
    return origin;
}

#endif
