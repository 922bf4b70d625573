// Tensor maps: what the copy engine (TMA, ptx/tma.cuh) is told about a tensor. Made on the host, passed to kernels by
// value.
#ifndef CUDA_OPS_COMMON_TENSOR_MAP_H
#define CUDA_OPS_COMMON_TENSOR_MAP_H

#include <cuda.h> // CUtensorMap; nothing of the driver is linked
#include <stdint.h>

#include "cuda_ops/core.h"

// A map of `batch` row-major matrices of outer x inner elements, rows `pitch` apart, matrices `stride`, in elements,
// cut into boxes of box_outer x box_inner. box_inner is 128 bytes (SWIZZLE_ROW) or half of it, and swizzled over as
// much. Elements outside read as zero and are not written. False where the copy engine cannot do it (see map_possible),
// or the driver is too old.
bool make_map(CUtensorMap *map, const void *matrix, cuda_ops_dtype dtype, bool round_to_tf32, int64_t inner,
              int64_t outer, int64_t batch, int64_t pitch, int64_t stride, int box_inner, int box_outer);
// A map of a channels_last picture in the copy engine's im2col mode. It walks a grid of grid_height x grid_width places
// of every image, the first at (start_y, start_x), `step` apart, row by row and image by image; a place may lie outside
// of the picture, where all is zero. A copy takes `pixels` places and of each `channels` channels, SWIZZLE_ROW bytes or
// half of it. False as above, or where a figure is beyond what the mode has bits for.
struct PixelGrid {
    int64_t images, height, width, channels; // of the picture
    int64_t grid_height, grid_width;
    int64_t start_y, start_x, step_y, step_x;
};
bool pixel_map_possible(const PixelGrid &grid, const void *picture, int64_t element_size);
bool make_pixel_map(CUtensorMap *map, const void *picture, cuda_ops_dtype dtype, bool round_to_tf32,
                    const PixelGrid &grid, int channels, int pixels);
// The copy engine wants addresses and pitches in multiples of 16 bytes, and sizes below 2^31 or so.
bool map_possible(const void *matrix, int64_t element_size, int64_t inner, int64_t outer, int64_t batch, int64_t pitch,
                  int64_t stride);

#endif
