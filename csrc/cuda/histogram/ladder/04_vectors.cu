// histogram, rung 4: 16 bytes a load, two of them in flight.
//     output[b] = how many i have input[i] == b, for b in 0 ... 255
// Threads: as in rung 3; a load brings 16 bytes, or 4 numbers of 32 bits, instead of one. Fixes: the loop around each
// element, and the wait for each: 32 bytes of a thread are under way at once. Leaves: a warp's 32 additions go to 32 banks
// at random, of which the busiest gets three or four; if all elements are alike they are one. Bound by memory for int32,
// by these conflicts for uint8, of which memory brings four times as many.
#include "histogram/ladder/blocks.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;

template <typename T>
__global__ void __launch_bounds__(THREADS) histogram_vectors_kernel(unsigned int *counts, const T *input, int64_t count)
{
    __shared__ unsigned int of_warps[WARPS][BINS];
    unsigned int *const mine = of_warps[threadIdx.x / WARP_SIZE];
    for (int i = threadIdx.x; i < WARPS * BINS; i += THREADS)
        of_warps[0][i] = 0;
    __syncthreads();
    for_each_element(input, count, [&](T bin) {
        if (is_bin(bin))
            atomicAdd(&mine[bin], 1);
    });
    __syncthreads();
    unsigned int sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        sum += of_warps[warp][threadIdx.x];
    atomicAdd(&counts[threadIdx.x], sum);
}

cuda_ops_status histogram_vectors(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_LADDER_UINT8)
        launch_blocks<uint8_t>(call, THREADS, PER_THREAD<uint8_t>, histogram_vectors_kernel<uint8_t>);
    else
        launch_blocks<int32_t>(call, THREADS, PER_THREAD<int32_t>, histogram_vectors_kernel<int32_t>);
    return launch_status();
}
