// histogram, rung 6: each lane has counters of its own, in a bank of its own.
//     output[b] = how many i have input[i] == b, for b in 0 ... 255
// Threads: blocks of 1024, which share 32 copies of the counters, 32 KB, one for each lane: counter b of lane l is word
// 32 * b + l, and so in bank l. A warp's additions meet neither in a counter nor in a bank, whatever the elements are;
// lanes of the same number in different warps do share, hence atomics still. At the end a thread adds up a quarter of a
// row, from another place than its neighbours, so that they too meet in no bank. Fixes: every conflict, without looking
// for it. Leaves: one addition in shared memory for each element. Bound by these for uint8, by memory for int32.
#include "histogram/ladder/blocks.cuh"

static constexpr int THREADS = 1024;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    histogram_per_lane_kernel(unsigned int *counts, const T *input, int64_t count)
{
    __shared__ unsigned int of_lanes[BINS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE;
    for (int i = threadIdx.x; i < BINS * WARP_SIZE; i += THREADS)
        of_lanes[0][i] = 0;
    __syncthreads();
    for_each_element(input, count, [&](T bin) {
        if (is_bin(bin))
            atomicAdd(&of_lanes[bin][lane], 1);
    });
    __syncthreads();
    constexpr int QUARTER = BINS * WARP_SIZE / THREADS;
    const int bin = threadIdx.x % BINS, first = threadIdx.x / BINS * QUARTER;
    unsigned int sum = 0;
#pragma unroll
    for (int i = 0; i < QUARTER; i++)
        sum += of_lanes[bin][(first + i + lane) % WARP_SIZE];
    atomicAdd(&counts[bin], sum);
}

cuda_ops_status histogram_per_lane(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_LADDER_UINT8)
        launch_blocks<uint8_t>(call, THREADS, PER_THREAD<uint8_t>, histogram_per_lane_kernel<uint8_t>);
    else
        launch_blocks<int32_t>(call, THREADS, PER_THREAD<int32_t>, histogram_per_lane_kernel<int32_t>);
    return launch_status();
}
