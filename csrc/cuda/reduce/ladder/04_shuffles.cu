// reduce, rung 4: the lanes of a warp read each other's registers.
//     output = sum over i of input[i]
// Threads: one for each element. __shfl_down_sync hands lane x the value of lane x + half: five of them add a warp up,
// without shared memory. It carries one number for each warp, and the first warp adds those. Fixes: 256 numbers through
// shared memory at 8 levels become 8 numbers, once, and one barrier. Leaves: a thread loads 4 bytes, adds, and is done;
// far more goes into starting blocks, and into the tree, than into memory. Bound by instructions for each element.
#include "reduce/ladder/passes.cuh"

template <typename T>
__device__ __forceinline__ T sum_of_warp(T sum)
{
#pragma unroll
    for (int half = WARP_SIZE / 2; half > 0; half /= 2)
        sum += __shfl_down_sync(FULL_WARP, sum, half);
    return sum; // lane 0's is the whole
}

template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_shuffles_kernel(T *sums, const T *input, int64_t count)
{
    constexpr int WARPS = THREADS / WARP_SIZE;
    __shared__ T of_warps[WARPS];
    const int x = threadIdx.x;
    const int64_t i = global_thread_index();
    T sum = sum_of_warp(i < count ? input[i] : T(0));
    if (x % WARP_SIZE == 0)
        of_warps[x / WARP_SIZE] = sum;
    __syncthreads();
    if (x >= WARP_SIZE)
        return;
    sum = sum_of_warp(x < WARPS ? of_warps[x] : T(0));
    if (x == 0)
        sums[blockIdx.x] = sum;
}

cuda_ops_status reduce_shuffles(const LadderCall &call)
{
    if (call.inputs[0].dtype == CUDA_OPS_FLOAT32)
        reduce_in_passes<float>(call, THREADS, reduce_shuffles_kernel<float>);
    else
        reduce_in_passes<double>(call, THREADS, reduce_shuffles_kernel<double>);
    return launch_status();
}
