// What rungs 5 and 6 do before the tree: a thread adds up several elements of a chunk.
#ifndef CUDA_OPS_REDUCE_LADDER_CHUNK_CUH
#define CUDA_OPS_REDUCE_LADDER_CHUNK_CUH

#include "common/aligned_vector.cuh"
#include "common/device.h"

static constexpr int VECTORS = 4; // of 16 bytes, that a thread has in flight

template <typename T>
static constexpr int CHUNK = 256 * VECTORS * vector16<T>::size; // elements, of a block of 256

// The thread's share of the chunk from `first` on; the chunk that the input's end cuts, and an input that is not aligned
// to 16 bytes, element by element.
template <typename T>
__device__ __forceinline__ T sum_of_chunk(const T *input, int64_t first, int64_t count)
{
    constexpr int V = vector16<T>::size;
    T sum = 0;
    if (first + CHUNK<T> <= count && reinterpret_cast<uintptr_t>(input) % 16 == 0) {
        const vector16<T> *const from = reinterpret_cast<const vector16<T> *>(input + first);
        vector16<T> v[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) // all loads before the first addition waits for one
            v[k] = from[k * 256 + threadIdx.x];
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
#pragma unroll
            for (int e = 0; e < V; e++)
                sum += v[k].element[e];
    } else {
        const int64_t end = first + CHUNK<T> < count ? first + CHUNK<T> : count;
        for (int64_t i = first + threadIdx.x; i < end; i += 256)
            sum += input[i];
    }
    return sum;
}

// Of rungs 6 and 7, whose blocks walk over chunks: `waves` times as many as the GPU runs at once; a block for each chunk
// where there are fewer, and one for nothing, whose sum is 0.
static constexpr int64_t MOST_SUMS = 16384;

template <typename T, typename... Parameters>
static unsigned int blocks_for_chunks(void (*kernel)(T *, const T *, int64_t, Parameters...), int64_t count, int waves)
{
    const int64_t chunks = count > 0 ? ceil_div(count, CHUNK<T>) : 1;
    int64_t blocks = waves * (int64_t)current_device().multiprocessors * active_blocks(kernel, 256, 0);
    blocks = blocks < MOST_SUMS ? blocks : MOST_SUMS;
    return (unsigned int)(blocks < chunks ? blocks : chunks);
}

#endif
