// The tiles of conv2d's grouped path in shared memory.
#ifndef CUDA_OPS_CONV2D_GROUPED_TILES_CUH
#define CUDA_OPS_CONV2D_GROUPED_TILES_CUH

#include "common/activation.cuh" // pack
#include "common/common.cuh"
#include "common/prefetch.cuh"
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

// What a thread copies of a tile's halo: a vector of a slab, of every so many pixels, which are known from their list.
struct HaloVector {
    int first, at_once, vector; // pixels from the first on
    int y, x;                   // of the halo's first pixel in the source
    const char *source, *from;  // from: this vector of that pixel

    // Without branches; known.x: how far the pixel is from the first. Of one that is not there nothing is read.
    __device__ __forceinline__ void copy(uint32_t to, const GroupedTiles &t, int2 known, bool there) const
    {
        // Compared as unsigned: a negative row is too large as well.
        const bool inside = there & ((unsigned int)(y + (known.y >> 16)) < (unsigned int)t.height) &
                            ((unsigned int)(x + (known.y & 0xffff)) < (unsigned int)t.width);
        cp_async<16>(to, inside ? from + known.x : source, inside ? 16 : 0);
    }
};

template <typename T>
__device__ __forceinline__ HaloVector halo_vector(const GroupedTiles &t, GroupedPlace place, int first_group)
{
    HaloVector v;
    v.first = (int)threadIdx.x / t.slab_vectors;
    v.vector = (int)threadIdx.x - v.first * t.slab_vectors;
    v.at_once = (int)blockDim.x / t.slab_vectors;
    v.y = place.v * t.step_y + t.start_y;
    v.x = place.u * t.step_x + t.start_x;
    v.source = (const char *)t.source;
    v.from = v.source +
             ((((int64_t)place.image * t.height + v.y) * t.width + v.x) * t.source_pixel +
              (int64_t)first_group * t.channels) *
                 (int)sizeof(T) +
             v.vector * 16;
    return v;
}

// Copies a tile's halo of the `vectors` first vectors of a slab, by cp.async of all threads of the block.
template <typename T>
__device__ __forceinline__ void copy_halo(uint32_t to, const GroupedTiles &t, const int2 *halo, GroupedPlace place,
                                          int first_group, int vectors)
{
    const HaloVector v = halo_vector<T>(t, place, first_group);
    const int count = t.halo_height * t.halo_slots, step = v.at_once * t.pixel_bytes;
    if (v.first >= v.at_once)
        return;
    to += v.first * t.pixel_bytes + v.vector * 16;
#pragma unroll 4
    for (int pixel = v.first; pixel < count; pixel += v.at_once, to += step)
        v.copy(to, t, halo[pixel], v.vector < vectors);
}

// Asks for the weights of a slab, which lie one behind the other, while the kernel before still runs.
template <typename T>
__device__ __forceinline__ void prefetch_weights(const GroupedImages &work, int first_group, int groups)
{
    const int64_t of_group = (int64_t)work.weight_outs * work.weight_channels * work.taps;
    prefetch_lines((const T *)work.weight + first_group * of_group, groups * of_group * (int)sizeof(T));
}

// float's bits rounded to TF32; 16-bit elements as they are.
template <typename T>
__device__ __forceinline__ uint32_t grouped_operand(uint32_t bits)
{
    if constexpr (sizeof(T) == 4)
        return cvt_rna_tf32(__uint_as_float(bits));
    return bits;
}

// Of the four lanes that have a row, each with a word of four vectors of 16 bytes: lane t gets vector t.
__device__ __forceinline__ uint4 gather_vector(const uint32_t (&word)[4], int lane)
{
    const bool odd = lane & 1, high = lane & 2;
    const uint32_t low_pair = __shfl_xor_sync(FULL_WARP, odd ? word[0] : word[1], 1);
    const uint32_t high_pair = __shfl_xor_sync(FULL_WARP, odd ? word[2] : word[3], 1);
    const uint32_t a = odd ? low_pair : word[0], b = odd ? word[1] : low_pair;
    const uint32_t c = odd ? high_pair : word[2], d = odd ? word[3] : high_pair;
    const uint32_t x = __shfl_xor_sync(FULL_WARP, high ? a : c, 2), y = __shfl_xor_sync(FULL_WARP, high ? b : d, 2);
    return high ? make_uint4(x, y, c, d) : make_uint4(a, b, x, y);
}

#endif
