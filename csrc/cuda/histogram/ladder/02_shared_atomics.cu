// histogram, rung 2: a block counts in shared memory, and adds its counts to those in memory once.
//     output[b] = how many i have input[i] == b, for b in 0 ... 255
// Threads: as many blocks of 256 as the GPU runs at once, which walk over the input in a grid-stride loop: with a block
// for each 256 elements there would be as many additions in memory as before. Fixes: atomics go to the SM's own shared
// memory, and only 256 a block to the L2. Leaves: a thread has one element under way at a time, and waits for it; and lanes
// that meet in one of the 32 banks are served one after the other. (Those that meet in one counter are not: the hardware
// adds up the ones of a warp, ATOMS.POPC.INC.) Bound by the latency of loads.
#include "histogram/ladder/blocks.cuh"

static constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    histogram_shared_atomics_kernel(unsigned int *counts, const T *input, int64_t count)
{
    __shared__ unsigned int mine[BINS];
    mine[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const T bin = input[i];
        if (is_bin(bin))
            atomicAdd(&mine[bin], 1);
    }
    __syncthreads();
    atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
}

cuda_ops_status histogram_shared_atomics(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_LADDER_UINT8)
        launch_blocks<uint8_t>(call, THREADS, 1, histogram_shared_atomics_kernel<uint8_t>);
    else
        launch_blocks<int32_t>(call, THREADS, 1, histogram_shared_atomics_kernel<int32_t>);
    return launch_status();
}
