// reduce, rung 7: two kernels again, of which the second is there before the first has ended.
//     output = sum over i of input[i]
// Threads: the first kernel is rung 6's, less the counting, with four times as many blocks, so that none walks on for long
// while others have ended; the second is one block of 1024, which adds up the sums in the order of the blocks. It is
// launched as dependent on the first (Hopper; before, it follows as any kernel does): it starts while that still runs, and
// waits, with its threads in place, until all blocks have ended and what they wrote can be seen. Fixes: no counter, and so
// no memset before it; no fence and no atomic in each block; nothing to start between the two kernels. Leaves: what a
// launch costs the host, twice. Bound by memory, from some megabytes on.
#include "common/launch.cuh"
#include "reduce/ladder/chunk.cuh"
#include "reduce/ladder/rungs.h"

static constexpr int THREADS = 256, FINAL_THREADS = 1024;

template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_chunks_kernel(T *sums, const T *input, int64_t count)
{
    __shared__ T scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor(); // it may start as soon as there is room for it
    T sum = 0;
    for (int64_t first = blockIdx.x * (int64_t)CHUNK<T>; first < count; first += gridDim.x * (int64_t)CHUNK<T>)
        sum += sum_of_chunk(input, first, count);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(FINAL_THREADS) reduce_sums_kernel(T *output, const T *sums, int count)
{
    __shared__ T scratch[WARP_SIZE];
    wait_for_predecessor(); // until all sums have been written
    release_successor();
    T sum = 0;
    for (int i = threadIdx.x; i < count; i += FINAL_THREADS)
        sum += sums[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        *output = sum;
}

template <typename T>
static void launch(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    T *const output = static_cast<T *>(call.outputs[0].data), *const sums = static_cast<T *>(call.workspace);
    const unsigned int blocks = blocks_for_chunks(reduce_chunks_kernel<T>, input.count, 4);
    launch_dependent(reduce_chunks_kernel<T>, blocks, THREADS, 0, call.stream, blocks == 1 ? output : sums,
                     static_cast<const T *>(input.data), input.count);
    if (blocks > 1)
        launch_dependent(reduce_sums_kernel<T>, 1, FINAL_THREADS, 0, call.stream, output, sums, (int)blocks);
}

cuda_ops_status reduce_dependent_launch(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        launch<float>(call);
    else
        launch<double>(call);
    return launch_status();
}
