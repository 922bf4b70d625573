// What all of cumsum's kernels have in common: blocks, the vectors of a thread, and how these come to shared memory.
#ifndef CUDA_OPS_CUMSUM_CHUNK_CUH
#define CUDA_OPS_CUMSUM_CHUNK_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/cp_async.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
static constexpr int HELD = 8; // vectors of a thread
static constexpr int CHUNK_BYTES = THREADS * HELD * 16;

template <typename V>
__device__ __forceinline__ void copy_to_shared(V *to, const void *from)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async_16(shared_address(to), from);
#else
    *to = *(const V *)from;
#endif
}

template <typename T, int COUNT>
__device__ __forceinline__ void reverse_vector(aligned_vector<T, COUNT> &v)
{
#pragma unroll
    for (int e = 0; e < COUNT / 2; e++) {
        const T first = v.element[e];
        v.element[e] = v.element[COUNT - 1 - e];
        v.element[COUNT - 1 - e] = first;
    }
}

#endif
