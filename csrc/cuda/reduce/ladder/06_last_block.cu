// reduce, rung 6: one pass. As many blocks as the GPU runs at once walk over all chunks, and the last one to finish adds
// up what the others have left.
//     output = sum over i of input[i]
// Threads: blocks of 256, a block every gridDim.x-th chunk of rung 5. A block writes its sum, makes it visible
// (__threadfence), and counts itself; who finds that all others have been counted is the last, reads all sums and adds
// them in the order of the blocks, so that the result does not depend on who was last. Fixes: one kernel, whatever
// the size. Leaves: the counter has to be zeroed before, and a memset of 4 bytes takes the GPU as long as a small kernel;
// every block waits for its sum to be seen before it counts itself. Where the second pass of rung 5 is short, and launches
// cost the host nothing (in a CUDA graph), this rung is the slower one. Bound by memory, from some megabytes on.
#include "reduce/ladder/chunk.cuh"
#include "reduce/ladder/rungs.h"

static constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    reduce_last_block_kernel(T *output, const T *input, int64_t count, T *sums, unsigned int *finished)
{
    __shared__ T scratch[WARP_SIZE];
    __shared__ bool is_last;
    T sum = 0;
    for (int64_t first = blockIdx.x * (int64_t)CHUNK<T>; first < count; first += gridDim.x * (int64_t)CHUNK<T>)
        sum += sum_of_chunk(input, first, count);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        __threadfence(); // the sum is there for all who see the count
        is_last = atomicAdd(finished, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last)
        return;
    __threadfence(); // and what is read below is read after the count
    sum = 0;
    for (unsigned int block = threadIdx.x; block < gridDim.x; block += THREADS)
        sum += sums[block];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        *output = sum;
}

int64_t reduce_last_block_workspace(const LadderCall &call)
{
    return 16 + MOST_SUMS * element_bytes(call.inputs[0]); // behind the 16 bytes of the counter
}

template <typename T>
static void launch(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    unsigned int *const finished = static_cast<unsigned int *>(call.workspace);
    const auto kernel = reduce_last_block_kernel<T>;
    cudaMemsetAsync(finished, 0, sizeof(*finished), call.stream);
    kernel<<<blocks_for_chunks(kernel, input.count, 1), THREADS, 0, call.stream>>>(
        static_cast<T *>(call.outputs[0].data), static_cast<const T *>(input.data), input.count,
        reinterpret_cast<T *>(static_cast<char *>(call.workspace) + 16), finished);
}

cuda_ops_status reduce_last_block(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        launch<float>(call);
    else
        launch<double>(call);
    return launch_status();
}
