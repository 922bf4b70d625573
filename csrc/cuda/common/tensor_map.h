// Tensor maps: TMA's descriptors of tensors (ptx/tma.cuh). Made on the host, passed to kernels by value.
#ifndef CUDA_OPS_COMMON_TENSOR_MAP_H
#define CUDA_OPS_COMMON_TENSOR_MAP_H

#include <cuda.h> // CUtensorMap; nothing of the driver is linked
#include <stdint.h>

#include "cuda_ops/core.h"

// A map of `batch` row-major matrices of outer x inner elements, rows `pitch` apart, matrices `stride`, in elements,
// divided into boxes of box_outer x box_inner. box_inner is 128 bytes (SWIZZLE_ROW) or half of it, and swizzled over as
// much. Elements out of bounds read as zero and are not written. False where TMA cannot do it (see map_possible), or
// the driver is too old.
bool make_map(CUtensorMap *map, const void *matrix, cuda_ops_dtype dtype, bool round_to_tf32, int64_t inner,
              int64_t outer, int64_t batch, int64_t pitch, int64_t stride, int box_inner, int box_outer);
// A map of [batch][head][row][element] of 16 bits, any strides (in elements, multiples of 8; those of a dimension of one
// do not matter), in boxes of `box_rows` rows of SWIZZLE_ROW bytes, swizzled over as much. Out of bounds as above.
struct HeadsLayout {
    int64_t batch, heads, rows, elements;
    int64_t batch_stride, head_stride, row_stride;
};
bool heads_map_possible(const HeadsLayout &layout, const void *tensor);
bool make_heads_map(CUtensorMap *map, const void *tensor, cuda_ops_dtype dtype, const HeadsLayout &layout,
                    int box_rows);
// A map of packed sequences: [row][head][element] of 16 bits, of which a sequence has the rows before `end`. A box of
// rows from the i-th of its `length` rows on has the coordinates (element, PACKED_ROWS - length + i, head, end,
// PACKED_ROWS). What is beyond the sequence is out of bounds, whoever's rows follow. Any strides as above; the layout's
// batch does not count.
static constexpr int PACKED_ROWS = 1 << 30;
bool packed_map_possible(const HeadsLayout &layout, const void *tensor);
bool make_packed_map(CUtensorMap *map, const void *tensor, cuda_ops_dtype dtype, const HeadsLayout &layout,
                     int box_rows);
// An im2col map of channels_last images. It walks a grid of grid_height x grid_width pixels of every image, the first
// at (start_y, start_x), `step` apart, row by row and image by image; pixels out of bounds read as zero. A load takes
// `pixels` of them and of each `channels` channels, SWIZZLE_ROW bytes or half of it. False as above, or where a number
// exceeds the mode's bits.
struct PixelGrid {
    int64_t images, height, width, channels; // of the input
    int64_t grid_height, grid_width;
    int64_t start_y, start_x, step_y, step_x;
};
bool pixel_map_possible(const PixelGrid &grid, const void *images, int64_t element_size);
bool make_pixel_map(CUtensorMap *map, const void *images, cuda_ops_dtype dtype, bool round_to_tf32,
                    const PixelGrid &grid, int channels, int pixels);
// The same of some of a pixel's channels, whose pixels are `pixel_stride` elements apart, a multiple of 16 bytes.
bool make_group_pixel_map(CUtensorMap *map, const void *images, cuda_ops_dtype dtype, bool round_to_tf32,
                          const PixelGrid &grid, int64_t pixel_stride, int channels, int pixels);
// A map of channels_last images in boxes of box_height x box_width pixels, which may begin out of bounds, and of each
// box_channels channels, SWIZZLE_ROW bytes, swizzled over as much. Out of bounds as above. False as above.
bool make_image_map(CUtensorMap *map, const void *images, cuda_ops_dtype dtype, bool round_to_tf32, int64_t batch,
                    int64_t height, int64_t width, int64_t channels, int box_height, int box_width, int box_channels);
// TMA wants addresses and pitches in multiples of 16 bytes, and sizes below 2^31 or so.
bool map_possible(const void *matrix, int64_t element_size, int64_t inner, int64_t outer, int64_t batch, int64_t pitch,
                  int64_t stride);

#endif
