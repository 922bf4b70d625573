// reduce, rung 2: a block adds its 256 elements in shared memory, as a tree; then the same over the sums of the blocks.
//     output = sum over i of input[i]
// Threads: one for each element; at each of 8 levels half as many add a neighbour's half to theirs, the lower ones, so
// that whole warps fall idle. Fixes: no two threads write one address, and the order of the additions is always the same.
// Leaves: 9 barriers of the whole block for 256 elements, and at the last five levels one warp works, or a part of it,
// while the others wait for it. Bound by barriers, and by the latency of shared memory between them.
#include "reduce/ladder/passes.cuh"

template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_shared_tree_kernel(T *sums, const T *input, int64_t count)
{
    __shared__ T tile[THREADS];
    const int x = threadIdx.x;
    const int64_t i = global_thread_index();
    tile[x] = i < count ? input[i] : T(0);
    __syncthreads();
#pragma unroll 1 // rung 3 unrolls it
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (x < half)
            tile[x] += tile[x + half];
        __syncthreads();
    }
    if (x == 0)
        sums[blockIdx.x] = tile[0];
}

int64_t reduce_passes_workspace(const LadderCall &call)
{
    return 2 * ceil_div(call.inputs[0].count, THREADS) * element_bytes(call.inputs[0]);
}

cuda_ops_status reduce_shared_tree(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        reduce_in_passes<float>(call, THREADS, reduce_shared_tree_kernel<float>);
    else
        reduce_in_passes<double>(call, THREADS, reduce_shared_tree_kernel<double>);
    return launch_status();
}
