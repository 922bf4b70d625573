// reduce, rung 3: rung 2, whose last levels are one warp's own affair, written out.
//     output = sum over i of input[i]
// Threads: one for each element. From 64 elements on the first warp goes on alone, without a loop, and waits for its own
// lanes only (__syncwarp). They no longer run in lockstep by themselves, as they did before Volta: without that barrier a
// lane may read what its neighbour has not written yet. Fixes: 3 barriers of the block instead of 9. Leaves: every
// addition goes through shared memory, a store, a barrier and a load. Bound by that latency.
#include "reduce/ladder/passes.cuh"

template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_unrolled_warp_kernel(T *sums, const T *input, int64_t count)
{
    __shared__ T tile[THREADS];
    const int x = threadIdx.x;
    const int64_t i = global_thread_index();
    tile[x] = i < count ? input[i] : T(0);
    __syncthreads();
#pragma unroll
    for (int half = THREADS / 2; half > WARP_SIZE; half /= 2) {
        if (x < half)
            tile[x] += tile[x + half];
        __syncthreads();
    }
    if (x >= WARP_SIZE)
        return;
    T sum = tile[x] + tile[x + WARP_SIZE];
#pragma unroll
    for (int half = WARP_SIZE / 2; half > 0; half /= 2) {
        tile[x] = sum;
        __syncwarp();
        sum += tile[x + half]; // of the upper lanes' sums, which have no partner, nothing is used any more
        __syncwarp();
    }
    if (x == 0)
        sums[blockIdx.x] = sum;
}

cuda_ops_status reduce_unrolled_warp(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        reduce_in_passes<float>(call, THREADS, reduce_unrolled_warp_kernel<float>);
    else
        reduce_in_passes<double>(call, THREADS, reduce_unrolled_warp_kernel<double>);
    return launch_status();
}
