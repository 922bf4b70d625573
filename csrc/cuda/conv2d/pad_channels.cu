// to[image][pixel][group][padded] = from[image][pixel][group][channels] or from[image][group][channels][pixel], zeros
// behind a group's channels.
//
// Of channels_last images a thread stores vectors of 16 bytes. They begin at any element of `from`, so that each is cut
// from the two aligned vectors around it, whose second one its neighbour has in the L1 cache. Contiguous images go
// through shared memory by tiles of 64 channels and 64 pixels, vectors of 16 bytes where a channel's pixels are whole
// vectors. Bound by memory.
#include "conv2d/pad_channels.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "common/unaligned_vector.cuh"

static constexpr int THREADS = 256, VECTORS = 2; // of a thread
static constexpr int TILE = 64;

// T: an unsigned integer of the element's size. Rows are a pixel's groups.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_pad_channels_last_kernel(uint4 *to, const T *from, const T *end, uint32_t vectors, uint32_t channels,
                                    uint32_t row_vectors, Divider by_row_vectors)
{
    constexpr int ELEMENTS = 16 / (int)sizeof(T);
    wait_for_predecessor();
    release_successor();
    const T *at[VECTORS];
    VectorsAround around[VECTORS];
    bool whole[VECTORS];
    int left[VECTORS]; // channels of the group from the vector's first on
    const uint32_t first = blockIdx.x * THREADS * VECTORS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) { // all loads before the first use
        const uint32_t index = first + i * THREADS, row = by_row_vectors.of(index);
        const uint32_t channel = (index - row * row_vectors) * ELEMENTS;
        at[i] = from + (int64_t)row * channels + channel;
        left[i] = (int)channels - (int)channel;
        whole[i] = index < vectors && left[i] > 0 && are_readable_around(at[i], from, end);
        around[i] = load_around(at[i], whole[i]);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const uint32_t index = first + i * THREADS;
        if (index >= vectors)
            break;
        union {
            uint4 vector;
            T element[ELEMENTS];
        } values;
        values.vector = cut(around[i]);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            if (e >= left[i])
                values.element[e] = 0;
            else if (!whole[i])
                values.element[e] = at[i][e];
        }
        to[index] = values.vector;
    }
}

// A block takes the tiles of 64 padded channels and 64 pixels of an image one by one. LOAD: pixels at a time.
template <typename T, int LOAD>
__global__ void __launch_bounds__(THREADS)
    conv2d_pad_channels_contiguous_kernel(T *to, const T *from, const __grid_constant__ ChannelPadding p, int64_t tiles)
{
    constexpr int STORE = 16 / (int)sizeof(T);
    typedef aligned_vector<T, LOAD> In;
    typedef aligned_vector<T, STORE> Out;
    constexpr int LOAD_LANES = TILE / LOAD, STORE_LANES = TILE / STORE, LOADS = TILE / (THREADS / LOAD_LANES);
    // Rows four bytes beyond a multiple of the banks.
    __shared__ T tile[TILE][TILE + 4 / sizeof(T)];
    const int pixels = (int)p.pixels, padded = (int)(p.groups * p.padded);
    const int across = (int)ceil_div(p.pixels, TILE), down = (int)ceil_div((int64_t)padded, TILE);
    const int load_x = (int)threadIdx.x % LOAD_LANES * LOAD, load_y = (int)threadIdx.x / LOAD_LANES;
    const int store_x = (int)threadIdx.x % STORE_LANES * STORE, store_y = (int)threadIdx.x / STORE_LANES;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const int64_t image = index / (across * down);
        const int place = (int)(index - image * (across * down));
        const int first_channel = place / across * TILE, first_pixel = place % across * TILE;
        const T *const source = from + image * p.groups * p.channels * p.pixels;
        In in[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int channel = first_channel + load_y + i * (THREADS / LOAD_LANES), pixel = first_pixel + load_x;
            const int group = channel / (int)p.padded, of_group = channel - group * (int)p.padded;
#pragma unroll
            for (int e = 0; e < LOAD; e++)
                in[i].element[e] = 0;
            // A vector is inside or outside as a whole.
            if (channel < padded && of_group < p.channels && pixel < pixels)
                in[i] = *(const In *)(source + (group * p.channels + of_group) * p.pixels + pixel);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++)
#pragma unroll
            for (int e = 0; e < LOAD; e++)
                tile[load_y + i * (THREADS / LOAD_LANES)][load_x + e] = in[i].element[e];
        __syncthreads();
#pragma unroll
        for (int y = store_y; y < TILE; y += THREADS / STORE_LANES) {
            Out out;
#pragma unroll
            for (int e = 0; e < STORE; e++)
                out.element[e] = tile[store_x + e][y];
            if (first_pixel + y < pixels && first_channel + store_x < padded)
                *(Out *)(to + (image * p.pixels + first_pixel + y) * padded + first_channel + store_x) = out;
        }
        __syncthreads();
    }
}

bool conv2d_can_pad_channels(const ChannelPadding &p)
{
    // Also of the indices beside the last vector that the last block's threads begin with.
    const int64_t most = INT32_MAX - THREADS * VECTORS, channels = p.groups * p.padded;
    return channels < most && p.pixels < most && p.images < most / p.pixels &&
           p.images * p.pixels <= 4 * most / channels;
}

template <typename T>
static cuda_ops_status pad_channels(T *to, const T *from, const ChannelPadding &p, cudaStream_t stream)
{
    constexpr int WIDE = 16 / (int)sizeof(T);
    const int64_t rows = p.images * p.pixels * p.groups;
    if (p.channels_last) {
        const int64_t row_vectors = p.padded / WIDE, vectors = rows * row_vectors;
        launch_dependent(conv2d_pad_channels_last_kernel<T>, dim3((unsigned int)ceil_div(vectors, THREADS * VECTORS)),
                         THREADS, 0, stream, (uint4 *)to, from, from + rows * p.channels, (uint32_t)vectors,
                         (uint32_t)p.channels, (uint32_t)row_vectors, divider_by((uint32_t)row_vectors));
        return launch_status();
    }
    const int64_t tiles = p.images * ceil_div(p.pixels, TILE) * ceil_div(p.groups * p.padded, TILE);
    const auto kernel = p.pixels % WIDE == 0 && is_aligned_16(from) ? conv2d_pad_channels_contiguous_kernel<T, WIDE>
                                                                    : conv2d_pad_channels_contiguous_kernel<T, 1>;
    launch_dependent(kernel, dim3(clamp_grid(tiles)), THREADS, 0, stream, to, from, p, tiles);
    return launch_status();
}

cuda_ops_status conv2d_pad_channels(void *to, const void *from, const ChannelPadding &padding, int64_t element_size,
                                    cudaStream_t stream)
{
    return element_size == 4 ? pad_channels((uint32_t *)to, (const uint32_t *)from, padding, stream)
                             : pad_channels((uint16_t *)to, (const uint16_t *)from, padding, stream);
}
