// What group_norm's kernels share that take sums first and write the result in a kernel of its own: how a tensor is cut.
//
//   contiguous:     "rows" of `length` neighbouring elements (a group forward, a channel backward), each cut into
//                   segments of `step` elements
//   channels_last:  "columns", the channels, of the `inner` pixels of an image. A block has `tile` vectors of channels
//                   across and `height` pixels down, a power of two, and goes down `step` pixels: one of `splits` parts
//
// Every part leaves its sums in the workspace, and they are added in a fixed order. How a tensor is cut depends on its
// sizes alone, and so do the results.
#ifndef CUDA_OPS_GROUP_NORM_GEOMETRY_CUH
#define CUDA_OPS_GROUP_NORM_GEOMETRY_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "group_norm/paths.h"

static constexpr int THREADS = 256;
static constexpr int IN_FLIGHT = 4;            // pixels that a thread loads at a time
static constexpr int WIDEST_TILE = 64;         // vectors
static constexpr int64_t WANTED_BLOCKS = 1024; // if there is work for them
static constexpr int64_t FEWEST_PIXELS = 8;    // of a thread
static constexpr int64_t LONGEST_SUM = 256;    // pixels of a thread: what it adds in float

struct Columns {
    int64_t images, channels, inner;
    int tile, height;
    int64_t tiles, splits, step;

    __host__ __device__ int64_t blocks() const
    {
        return images * splits * tiles;
    }
};

// `count`: elements of a vector. A workspace is asked for before it is known whether channels fit vectors.
static inline Columns columns_of(const cuda_ops_group_norm_sizes &sizes, int count)
{
    Columns c = {};
    c.images = sizes.images, c.channels = sizes.channels, c.inner = sizes.inner;
    const int64_t width = sizes.channels > count ? sizes.channels / count : 1;
    c.tiles = ceil_div(width, WIDEST_TILE);
    c.tile = (int)ceil_div(width, c.tiles);
    c.height = 1;
    while (2 * c.height * c.tile <= THREADS)
        c.height *= 2;
    const int64_t to_fill = ceil_div(WANTED_BLOCKS, c.images * c.tiles);
    const int64_t useful = ceil_div(c.inner, c.height * FEWEST_PIXELS);
    const int64_t to_stay_short = ceil_div(c.inner, c.height * LONGEST_SUM);
    const int64_t wanted = to_fill < useful ? to_fill : useful;
    c.splits = wanted > to_stay_short ? wanted : to_stay_short;
    c.step = ceil_div(c.inner, c.splits);
    c.splits = ceil_div(c.inner, c.step);
    return c;
}

// Whether channels_last tensors go by vectors of 16 bytes.
template <typename T, typename... Arrays>
static inline bool columns_of_vectors(const cuda_ops_group_norm_sizes &sizes, const Arrays *...arrays)
{
    return sizes.channels % vector16<T>::size == 0 && (is_aligned_16(arrays) && ...);
}

// Where a block's thread is in one of the parts.
struct ColumnPart {
    int64_t image, split, channel, begin, end; // channel: of the thread's vector; pixels [begin, end) of the image
    int down;
    bool inside;
};

template <int COUNT>
__device__ __forceinline__ ColumnPart column_part(const Columns &c, int64_t block)
{
    ColumnPart part;
    part.image = block / (c.splits * c.tiles);
    const int64_t rest = block % (c.splits * c.tiles);
    part.split = rest / c.tiles;
    part.channel = (rest % c.tiles * c.tile + threadIdx.x % c.tile) * COUNT;
    part.down = threadIdx.x / c.tile;
    part.begin = part.split * c.step;
    part.end = part.begin + c.step < c.inner ? part.begin + c.step : c.inner;
    part.inside = part.channel < c.channels;
    return part;
}

// Division of a flat index by a channel's length.
struct PlaneDivider {
    Divider divider;
    int64_t length;
    bool is_small; // indices stay below 2^31

    __device__ __forceinline__ int64_t of(int64_t index) const
    {
        return is_small ? (int64_t)divider.of((uint32_t)index) : index / length;
    }
};

static inline PlaneDivider plane_divider(int64_t count, int64_t length)
{
    const bool is_small = count <= INT32_MAX;
    return {divider_by(is_small ? (uint32_t)length : 1), length, is_small};
}

// Threads that share a sum of `count` values: a power of two up to a warp, or a block.
static inline int lanes_for(int64_t count)
{
    if (count > 8 * WARP_SIZE)
        return THREADS;
    int lanes = 1;
    while (lanes < WARP_SIZE && lanes < count)
        lanes *= 2;
    return lanes;
}

#endif
