// What the rungs of histogram share: their grids, and how a thread meets its elements.
#ifndef CUDA_OPS_HISTOGRAM_LADDER_BLOCKS_CUH
#define CUDA_OPS_HISTOGRAM_LADDER_BLOCKS_CUH

#include "common/aligned_vector.cuh"
#include "common/device.h"
#include "histogram/ladder/rungs.h"

static constexpr int BINS = 256;

// kernel<<<as many blocks as the GPU runs at once, or the input needs>>>(counts, input, count), with the counts zeroed.
template <typename T>
static void launch_blocks(const LadderCall &call, int threads, int64_t per_thread,
                          void (*kernel)(unsigned int *, const T *, int64_t))
{
    const LadderTensor &input = call.inputs[0];
    cudaMemsetAsync(call.outputs[0].data, 0, BINS * sizeof(unsigned int), call.stream);
    if (input.count == 0)
        return;
    const int64_t needed = ceil_div(input.count, threads * per_thread);
    const int64_t most = (int64_t)current_device().multiprocessors * active_blocks(kernel, threads, 0);
    kernel<<<(unsigned int)(needed < most ? needed : most), threads, 0, call.stream>>>(
        static_cast<unsigned int *>(call.outputs[0].data), static_cast<const T *>(input.data), input.count);
}

static constexpr int VECTORS = 2; // of 16 bytes, that a thread has in flight

template <typename T>
static constexpr int PER_THREAD = VECTORS * vector16<T>::size;

// Calls count_one(element) for each of the thread's elements, which it loads by 16 bytes where the input is aligned to as
// many. The lanes of a warp call it together, but for the last ones of the input.
template <typename T, typename CountOne>
__device__ __forceinline__ void for_each_element(const T *input, int64_t count, const CountOne &count_one)
{
    constexpr int V = vector16<T>::size;
    const int64_t step = global_thread_count(), thread = global_thread_index();
    int64_t done = 0;
    if (reinterpret_cast<uintptr_t>(input) % 16 == 0) {
        const vector16<T> *const from = reinterpret_cast<const vector16<T> *>(input);
        const int64_t whole = count / (step * PER_THREAD<T>)*VECTORS * step; // vectors, all threads alike
        for (int64_t i = thread; i < whole; i += VECTORS * step) {
            vector16<T> v[VECTORS];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) // all loads before the first element is counted
                v[k] = from[i + k * step];
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
#pragma unroll
                for (int e = 0; e < V; e++)
                    count_one(v[k].element[e]);
        }
        for (int64_t i = whole + thread; i < count / V; i += step) {
            const vector16<T> v = from[i];
#pragma unroll
            for (int e = 0; e < V; e++)
                count_one(v.element[e]);
        }
        done = count / V * V;
    }
    for (int64_t i = done + thread; i < count; i += step)
        count_one(input[i]);
}

// int32 may hold what is no bin.
template <typename T>
__device__ __forceinline__ bool is_bin(T value)
{
    return sizeof(T) == 1 || (unsigned int)value < BINS;
}

#endif
