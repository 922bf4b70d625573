// A permutation as its kernels get it, and where they are. permute_contiguous.cu chooses: rows that stay rows, or single
// elements (there); few rows that are interleaved, or taken apart (narrow.cu); tiles of whole vectors (squares.cu); tiles
// of any rows (windows.cu).
#ifndef CUDA_OPS_PERMUTE_CONTIGUOUS_PERMUTATION_CUH
#define CUDA_OPS_PERMUTE_CONTIGUOUS_PERMUTATION_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "cuda_ops/permute_contiguous.h"
#include "ptx/cp_async.cuh"

static constexpr int PERMUTE_THREADS = 256;
static constexpr int PERMUTE_VECTORS = 8;                              // of a thread, all in flight
static constexpr int TILE_VECTORS = PERMUTE_THREADS * PERMUTE_VECTORS; // of 16 bytes, 32 KB

struct Offsets {
    int64_t in, out;
};

// Some of the dimensions, the last of them fastest. `small`: there are less than 2^31 indices, which are divided by
// multiplication.
struct Dimensions {
    int count;
    bool small;
    int64_t sizes[CUDA_OPS_PERMUTE_DIMS], in[CUDA_OPS_PERMUTE_DIMS], out[CUDA_OPS_PERMUTE_DIMS];
    Divider by[CUDA_OPS_PERMUTE_DIMS];

    void add(int64_t size, int64_t stride_in, int64_t stride_out)
    {
        sizes[count] = size, in[count] = stride_in, out[count] = stride_out;
        by[count] = divider_by(size < INT32_MAX ? (uint32_t)size : INT32_MAX); // not used where it is larger
        count++;
    }
};

// The offsets of an index into them.
__device__ __forceinline__ Offsets offsets_of(const Dimensions &d, int64_t index)
{
    Offsets at = {0, 0};
    for (int i = d.count - 1; i > 0; i--) {
        const int64_t rest = d.small ? (int64_t)d.by[i].of((uint32_t)index) : index / d.sizes[i];
        const int64_t mine = index - rest * d.sizes[i];
        at.in += mine * d.in[i], at.out += mine * d.out[i];
        index = rest;
    }
    if (d.count > 0)
        at.in += index * d.in[0], at.out += index * d.out[0];
    return at;
}

// k: `k_size` neighbours in input, `k_out` apart in output; j: `j_size` neighbours in output, `j_in` apart in input.
// `others`: the other dimensions, of `batch` indices. Input's elements are those of [0, extent).
struct Transposition {
    int64_t k_size, k_out, j_size, j_in, batch, extent;
    bool reads_vectors, writes_vectors; // all rows of input, or of output, are whole vectors of 16 bytes
    Dimensions others;
};

// Tiles of a batch: k_tiles by j_tiles, neighbours along k first. All in all less than 2^31.
struct Tiles {
    int count, k_tiles, j_tiles;
    Divider by_k, by_j;
};

struct TilePlace {
    int64_t batch;
    int k, j;
};

__device__ __forceinline__ TilePlace place_of(const Tiles &tiles, int number)
{
    const uint32_t rest = tiles.by_k.of((uint32_t)number), batch = tiles.by_j.of(rest);
    return {(int64_t)batch, number - (int)rest * tiles.k_tiles, (int)(rest - batch * (uint32_t)tiles.j_tiles)};
}

// Whether there are so few of them; if so, `tiles`.
static inline bool make_tiles(Tiles *tiles, int64_t batch, int64_t k_tiles, int64_t j_tiles)
{
    if (k_tiles >= INT32_MAX || j_tiles >= INT32_MAX || batch > INT32_MAX / k_tiles / j_tiles)
        return false;
    *tiles = {(int)(batch * k_tiles * j_tiles), (int)k_tiles, (int)j_tiles, divider_by((uint32_t)k_tiles),
              divider_by((uint32_t)j_tiles)};
    return true;
}

// How far a place is from the multiple of 16 bytes before it, in elements.
template <typename T>
__device__ __forceinline__ int phase_of(const T *place)
{
    return (int)(reinterpret_cast<uintptr_t>(place) / sizeof(T)) & (vector16<T>::size - 1);
}

// Sends the vector at `from` to shared memory; of one that is not all between `begin` and `end`, where there may be nothing
// to load, the elements that are. cp_async_wait_all() and a barrier before it is read.
template <typename T>
__device__ __forceinline__ void fetch(vector16<T> *to, const T *from, const T *begin, const T *end)
{
    constexpr int V = vector16<T>::size;
    if (from >= begin && from + V <= end) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
        *to = *reinterpret_cast<const vector16<T> *>(from);
#else
        cp_async_16(shared_address(to), from);
#endif
    } else {
#pragma unroll
        for (int e = 0; e < V; e++)
            if (from + e >= begin && from + e < end)
                to->element[e] = from[e];
    }
}

// Of elements of 2, 4 or 8 bytes.
cuda_ops_status permute_narrow(void *output, const void *input, const Transposition &t, int element_bytes,
                               cudaStream_t stream);
cuda_ops_status permute_squares(void *output, const void *input, const Transposition &t, int element_bytes,
                                cudaStream_t stream);
cuda_ops_status permute_windows(void *output, const void *input, const Transposition &t, int element_bytes,
                                cudaStream_t stream);

#define CUDA_OPS_DISPATCH_BYTES(element_bytes, T, ...)                                                                 \
    switch (element_bytes) {                                                                                           \
    case 2: {                                                                                                          \
        typedef uint16_t T;                                                                                            \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case 4: {                                                                                                          \
        typedef uint32_t T;                                                                                            \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case 8: {                                                                                                          \
        typedef uint64_t T;                                                                                            \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    default:                                                                                                           \
        return CUDA_OPS_UNSUPPORTED_DTYPE;                                                                             \
    }

#endif
