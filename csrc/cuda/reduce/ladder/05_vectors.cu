// reduce, rung 5: a thread adds up four vectors of 16 bytes before it takes part in the tree.
//     output = sum over i of input[i]
// Threads: blocks of 256, each for a chunk of 4096 floats or 2048 doubles; a thread has four 16-byte loads in flight at
// once. The tree is rung 4's (block_sum). Fixes: the tree, the barrier and the start of a block are shared by 16 times as
// many elements, and a quarter of the load instructions moves four times the bytes, which is what the memory needs to be
// busy. Leaves: the next passes, each a launch that waits for all of the one before, and reads what that has written; and
// at the end of each the GPU runs empty. Bound by memory where the input is large, by launches where it is small.
#include "reduce/ladder/chunk.cuh"
#include "reduce/ladder/passes.cuh"

template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_vectors_kernel(T *sums, const T *input, int64_t count)
{
    __shared__ T scratch[WARP_SIZE];
    const T sum = block_sum(sum_of_chunk(input, blockIdx.x * (int64_t)CHUNK<T>, count), scratch);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

cuda_ops_status reduce_vectors(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        reduce_in_passes<float>(call, CHUNK<float>, reduce_vectors_kernel<float>);
    else
        reduce_in_passes<double>(call, CHUNK<double>, reduce_vectors_kernel<double>);
    return launch_status();
}
