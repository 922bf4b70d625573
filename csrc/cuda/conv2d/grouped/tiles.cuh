// The tiles of conv2d's grouped path in shared memory.
#ifndef CUDA_OPS_CONV2D_GROUPED_TILES_CUH
#define CUDA_OPS_CONV2D_GROUPED_TILES_CUH

#include "common/common.cuh"
#include "conv2d/grouped/problem.h"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

// Where a tile is: its image, and the first row and column of the grid.
struct GroupedPlace {
    int image, v, u;
};
__device__ __forceinline__ GroupedPlace grouped_place(const GroupedTiles &t, int tile)
{
    GroupedPlace place;
    place.image = (int)t.tiles_of_image.of((uint32_t)tile);
    const int in_image = tile - place.image * t.count_of_image, y = (int)t.tiles_x.of((uint32_t)in_image);
    place.v = y * t.tile_height;
    place.u = (in_image - y * t.count_x) * t.tile_width;
    return place;
}

// Of the halo's row 0 at column x, counted in pixels.
__device__ __forceinline__ int grouped_slot(const GroupedTiles &t, int x)
{
    if (t.step_x == 1)
        return x;
    return x % t.step_x * t.slots_of_remainder + x / t.step_x;
}

// Lists the halo's pixels: how far each is from the first in the source, in bytes, and its row and column. Every tile
// has the same, which are divided out once.
template <typename T>
__device__ __forceinline__ void list_halo(const GroupedTiles &t, int2 *halo)
{
    for (int pixel = threadIdx.x; pixel < t.halo_height * t.halo_slots; pixel += blockDim.x) {
        const int row = pixel / t.halo_slots, slot = pixel - row * t.halo_slots;
        const int remainder = slot / t.slots_of_remainder;
        const int column = (slot - remainder * t.slots_of_remainder) * t.step_x + remainder;
        halo[pixel] = make_int2((row * t.width + column) * (int)t.source_pixel * (int)sizeof(T), row << 16 | column);
    }
}

// Copies a tile's halo of the `vectors` first vectors of a slab, by cp.async of all threads of the block. A thread has
// one vector of every so many pixels.
template <typename T>
__device__ __forceinline__ void copy_halo(uint32_t to, const GroupedTiles &t, const int2 *halo, GroupedPlace place,
                                          int first_group, int vectors)
{
    const int first = (int)threadIdx.x / t.slab_vectors, vector = (int)threadIdx.x - first * t.slab_vectors;
    const int at_once = (int)blockDim.x / t.slab_vectors, count = t.halo_height * t.halo_slots;
    if (first >= at_once)
        return;
    const int first_y = place.v * t.step_y + t.start_y, first_x = place.u * t.step_x + t.start_x;
    const char *const source = (const char *)t.source;
    const char *const from = source +
                             ((((int64_t)place.image * t.height + first_y) * t.width + first_x) * t.source_pixel +
                              (int64_t)first_group * t.channels) *
                                 (int)sizeof(T) +
                             vector * 16;
    const bool there = vector < vectors;
    const unsigned int height = (unsigned int)t.height, width = (unsigned int)t.width;
    to += first * t.pixel_bytes + vector * 16;
    const int step = at_once * t.pixel_bytes;
#pragma unroll 4
    for (int pixel = first; pixel < count; pixel += at_once, to += step) {
        const int2 known = halo[pixel];
        // Compared as unsigned: a negative row is too large as well.
        const bool inside = there & ((unsigned int)(first_y + (known.y >> 16)) < height) &
                            ((unsigned int)(first_x + (known.y & 0xffff)) < width); // without branches
        cp_async<16>(to, inside ? from + known.x : source, inside ? 16 : 0);
    }
}

// float's bits rounded to TF32; 16-bit elements as they are.
template <typename T>
__device__ __forceinline__ uint32_t grouped_operand(uint32_t bits)
{
    if constexpr (sizeof(T) == 4)
        return cvt_rna_tf32(__uint_as_float(bits));
    return bits;
}

#endif
