// histogram, rung 5: lanes that hold the same number find each other, and one of them counts for all.
//     output[b] = how many i have input[i] == b, for b in 0 ... 255
// Threads: as in rung 4, with the counters of a block shared again: __match_any_sync hands each lane the mask of those
// that hold what it holds, and the lowest of them adds their number. Fixes: nothing, on an H200. No two lanes send an
// addition to one counter any more, but those the hardware adds up by itself; and the instruction looks at one number
// after the other, so that it takes longest where all lanes differ. It pays where a group's result is dear to add: a
// returned position, a float, an atomic in memory. Leaves: the conflicts of banks, and the match. Bound by the match.
#include "histogram/ladder/blocks.cuh"

static constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS) histogram_match_kernel(unsigned int *counts, const T *input, int64_t count)
{
    __shared__ unsigned int mine[BINS];
    mine[threadIdx.x] = 0;
    __syncthreads();
    const unsigned int lower = (1u << threadIdx.x % WARP_SIZE) - 1;
    for_each_element(input, count, [&](T bin) {
        // Whoever is here, at the input's end fewer than 32.
        const unsigned int same = __match_any_sync(__activemask(), (int)bin);
        if ((same & lower) == 0 && is_bin(bin))
            atomicAdd(&mine[bin], __popc(same));
    });
    __syncthreads();
    atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
}

cuda_ops_status histogram_match(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_LADDER_UINT8)
        launch_blocks<uint8_t>(call, THREADS, PER_THREAD<uint8_t>, histogram_match_kernel<uint8_t>);
    else
        launch_blocks<int32_t>(call, THREADS, PER_THREAD<int32_t>, histogram_match_kernel<int32_t>);
    return launch_status();
}
