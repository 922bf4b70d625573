// softmax, rung 6: a cluster of eight blocks shares a row, on Hopper.
//     output[r][c] = exp(input[r][c] - max) / sum over c of exp(input[r][c] - max)
// Threads: eight blocks of 512 for each row, of up to 131072 elements in their registers. The blocks of a cluster run
// at once, on neighbouring SMs, and each can read the others' shared memory: after rung 5's merge in each block they
// meet at a barrier of the cluster, read eight pairs of largest element and sum, and merge them. Fixes: rows of a
// vocabulary's size are read once; and a few long rows keep eight times as many SMs busy. Leaves: the barrier of a
// cluster takes longer than a block's, so that rows of up to 16384 go to rung 5; no block may end while others still
// read its shared memory. Bound by memory.
#include "common/aligned_vector.cuh"
#include "ladder/share.cuh"
#include "ptx/cluster.cuh"
#include "softmax/ladder/rungs.h"
#include "softmax/ladder/state.cuh"

#if defined(CUDA_OPS_SM90A)

static constexpr int THREADS = 512, WARPS = THREADS / WARP_SIZE;
static constexpr int BLOCKS = 8; // of a cluster, the most that every Hopper GPU runs

template <int COUNT, int K>
__global__ void __launch_bounds__(THREADS) softmax_cluster_a_row_kernel(float *output, const float *input, int columns)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ SoftmaxState scratch[WARPS], of_block;
    const int lane = threadIdx.x % WARP_SIZE, thread = (int)cluster_ctarank() * THREADS + threadIdx.x;
    const int64_t offset = (int64_t)(blockIdx.x / BLOCKS) * columns;
    float x[K];
    wait_for_predecessor();
    release_successor();
    load_share<COUNT>(x, input + offset, columns, thread, BLOCKS * THREADS, -INFINITY);
    const SoftmaxState of_warp = exponentials_of_warp(x), mine = merged_over_block(of_warp, scratch);
    if (threadIdx.x == 0)
        of_block = mine;
    cluster_sync();
    const SoftmaxState state = merged_over_warp(lane < BLOCKS ? *mapa(&of_block, lane) : state_of_none());
    cluster_arrive_aligned(); // read: the others may end
    const float factor = expf(of_warp.maximum - state.maximum) / state.sum;
#pragma unroll
    for (int k = 0; k < K; k++)
        x[k] *= factor;
    store_share<COUNT>(output + offset, x, columns, thread, BLOCKS * THREADS);
    cluster_wait_aligned();
#endif
}

template <int COUNT, int K>
static void launch(const LadderCall &call)
{
    launch_dependent_clusters(softmax_cluster_a_row_kernel<COUNT, K>, call.inputs[0].sizes[0] * BLOCKS, THREADS, BLOCKS,
                              0, call.stream, static_cast<float *>(call.outputs[0].data),
                              static_cast<const float *>(call.inputs[0].data), (int)call.inputs[0].sizes[1]);
}
#endif

Answer softmax_cluster_a_row_supports(const LadderCall &call, const Device &device)
{
    (void)call;
#if defined(CUDA_OPS_SM90A)
    return device.capability == 90 ? YES : NEEDS_90;
#else
    (void)device;
    return NOT_COMPILED;
#endif
}

cuda_ops_status softmax_cluster_a_row(const LadderCall &call)
{
#if defined(CUDA_OPS_SM90A)
    const LadderTensor &input = call.inputs[0];
    const int64_t columns = input.sizes[1];
    if (input.count == 0 || columns <= MOST_OF_SHARE * THREADS || columns > MOST_OF_SHARE * THREADS * BLOCKS)
        return softmax_block_a_row(call);
    if (columns % 4 == 0 && is_aligned_16(input.data) && is_aligned_16(call.outputs[0].data))
        DISPATCH_SHARE(columns, THREADS * BLOCKS, K, launch<4, K>(call))
    else
        DISPATCH_SHARE(columns, THREADS * BLOCKS, K, launch<1, K>(call))
    return launch_status();
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
