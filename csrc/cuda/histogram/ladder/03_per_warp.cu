// histogram, rung 3: each warp has counters of its own.
//     output[b] = how many i have input[i] == b, for b in 0 ... 255
// Threads: as in rung 2; a block of 8 warps has 8 times 256 counters, 8 KB, and adds them up at its end. Fixes: warps no
// longer meet each other. It is what one reads first about histograms, and on an H200 it changes nothing: shared memory
// serves one warp at a time anyway, and it is the loads that rung 2 waits for. Leaves: these loads, and the lanes of one
// warp, which meet in banks as before. Bound by the latency of loads.
#include "histogram/ladder/blocks.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    histogram_per_warp_kernel(unsigned int *counts, const T *input, int64_t count)
{
    __shared__ unsigned int of_warps[WARPS][BINS];
    unsigned int *const mine = of_warps[threadIdx.x / WARP_SIZE];
    for (int i = threadIdx.x; i < WARPS * BINS; i += THREADS)
        of_warps[0][i] = 0;
    __syncthreads();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const T bin = input[i];
        if (is_bin(bin))
            atomicAdd(&mine[bin], 1);
    }
    __syncthreads();
    unsigned int sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        sum += of_warps[warp][threadIdx.x];
    atomicAdd(&counts[threadIdx.x], sum);
}

cuda_ops_status histogram_per_warp(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_LADDER_UINT8)
        launch_blocks<uint8_t>(call, THREADS, 1, histogram_per_warp_kernel<uint8_t>);
    else
        launch_blocks<int32_t>(call, THREADS, 1, histogram_per_warp_kernel<int32_t>);
    return launch_status();
}
