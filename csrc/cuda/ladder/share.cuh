// A row in the registers of the threads that share it: how rungs of softmax and layer_norm hold, load and store it.
// float32, COUNT elements a load: 4, where the row lies at a multiple of 16 bytes and is one long, or 1.
#ifndef CUDA_OPS_LADDER_SHARE_CUH
#define CUDA_OPS_LADDER_SHARE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// Runs the statement with K, the elements of a thread: the fewest by which `threads` threads hold a row, 32 at most.
#define DISPATCH_SHARE(columns, threads, K, ...)                                                                       \
    if ((columns) <= 4 * (threads)) {                                                                                  \
        constexpr int K = 4;                                                                                           \
        __VA_ARGS__;                                                                                                   \
    } else if ((columns) <= 8 * (threads)) {                                                                           \
        constexpr int K = 8;                                                                                           \
        __VA_ARGS__;                                                                                                   \
    } else if ((columns) <= 16 * (threads)) {                                                                          \
        constexpr int K = 16;                                                                                          \
        __VA_ARGS__;                                                                                                   \
    } else {                                                                                                           \
        constexpr int K = 32;                                                                                          \
        __VA_ARGS__;                                                                                                   \
    }

static constexpr int MOST_OF_SHARE = 32; // elements of a thread

// The column of element k of thread number `thread` of `threads`: neighbours have neighbouring columns.
template <int COUNT>
__device__ __forceinline__ int column_of_share(int k, int thread, int threads)
{
    return (k / COUNT * threads + thread) * COUNT + k % COUNT;
}

// Elements beyond the row are `otherwise`.
template <int COUNT, int K>
__device__ __forceinline__ void load_share(float (&share)[K], const float *row, int columns, int thread, int threads,
                                           float otherwise)
{
#pragma unroll
    for (int k = 0; k < K; k += COUNT) {
        const int column = column_of_share<COUNT>(k, thread, threads);
        if constexpr (COUNT == 4) {
            float4 v = make_float4(otherwise, otherwise, otherwise, otherwise);
            if (column < columns)
                v = *reinterpret_cast<const float4 *>(row + column);
            share[k] = v.x, share[k + 1] = v.y, share[k + 2] = v.z, share[k + 3] = v.w;
        } else {
            share[k] = column < columns ? row[column] : otherwise;
        }
    }
}

template <int COUNT, int K>
__device__ __forceinline__ void store_share(float *row, const float (&share)[K], int columns, int thread, int threads)
{
#pragma unroll
    for (int k = 0; k < K; k += COUNT) {
        const int column = column_of_share<COUNT>(k, thread, threads);
        if (column >= columns)
            continue;
        if constexpr (COUNT == 4)
            *reinterpret_cast<float4 *>(row + column) = make_float4(share[k], share[k + 1], share[k + 2], share[k + 3]);
        else
            row[column] = share[k];
    }
}

#endif
