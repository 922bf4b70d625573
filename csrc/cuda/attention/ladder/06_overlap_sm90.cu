// attention, rung 6: exponentials run beside products, of the same warpgroup and of the other.
//     output = softmax(scale * query key^T) value
// Threads: as in rung 5, and with the same producer. A consumer issues the scores of block i before it waits for the
// output of block i - 1, whose weights it has: while the tensor cores are at that product, it makes the exponentials of
// block i. And the two consumers issue in turns (ping-pong): a named barrier lets one put both of its products into the
// queue, then the other, so that one's exponentials fall on the other's products instead of on its exponentials. Fixes: the
// tensor cores have work at nearly all times; of the two times, products' and exponentials', the longer one counts, not
// their sum. Leaves: scores, weights and output of one consumer are nearly all of its registers, so that no third fits at
// a head_dim of 128; a block's first product and last store are not hidden, for which the library's kernel lets a block
// go on with the next tile and stores by TMA; a tile that the diagonal cuts is multiplied whole. Bound by the tensor cores,
// and at a head_dim of 64, which has half the products for each exponential, by the exponentials.
#include "attention/ladder/hopper.cuh"
#include "ptx/barrier.cuh"

#if defined(CUDA_OPS_SM90A)

#if defined(CUDA_OPS_HOPPER_CODE)

// Named barriers 1 and 2, a consumer's turn each: who waits for its own is let through when the other has passed.
__device__ __forceinline__ void wait_for_turn(int group)
{
    bar_sync<2 * WARPGROUP>(1 + group);
}
__device__ __forceinline__ void pass_turn(int group)
{
    bar_arrive(1 + (group ^ 1), 2 * WARPGROUP);
}

#endif

template <int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_overlap_kernel(const __grid_constant__ Maps maps, const __grid_constant__ AttentionLadder a)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    const Shared s = shared_of_block<D>();
    const Work work = work_of_block(a);
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            produce<D>(s, maps, work);
        return;
    }
    setmaxnreg_inc<232>();
    const int group = warp_uniform(threadIdx.x / WARPGROUP) - 1, thread = threadIdx.x % WARPGROUP;
    const int first = work.first_query + 64 * group, query = first + thread / WARP_SIZE * 16 + thread % WARP_SIZE / 4;
    const float scale = a.scale * LOG2_E;
    SoftmaxRows rows = rows_without_scores();
    float scores[KEYS / 2], output[D / 2] = {}, factor[2];
    uint32_t weights[KEYS / 16][4];
    if (group == 1)
        pass_turn(group); // consumer 0 begins
    mbarrier_wait(s.query_full, 0);
    mbarrier_wait(s.key_full, 0);
    wait_for_turn(group);
    multiply_keys<D>(scores, s, group, 0);
    pass_turn(group);
    wgmma_wait_group<0>();
    wgmma_pin(scores);
    release(s.key_empty, 0);
    mask_block(scores, a, first, query, 0);
    softmax_scores(scores, rows, factor, scale);
    pack_scores(weights, scores);
    for (int i = 1; i < work.blocks; i++) {
        mbarrier_wait(s.key_full + 8 * (i % STAGES), i / STAGES % 2);
        wait_for_turn(group);
        wgmma_pin(output);
        wgmma_pin(weights);
        multiply_keys<D>(scores, s, group, i);
        mbarrier_wait(s.value_full + 8 * ((i - 1) % STAGES), (i - 1) / STAGES % 2);
        multiply_values<D>(output, weights, s, i - 1);
        pass_turn(group);
        wgmma_wait_group<1>(); // the scores are there, the output is not yet
        wgmma_pin(scores);
        release(s.key_empty, i);
        mask_block(scores, a, first, query, i);
        softmax_scores(scores, rows, factor, scale);
        wgmma_wait_group<0>();
        wgmma_pin(output);
        wgmma_pin(weights);
        release(s.value_empty, i - 1);
        rescale(output, factor);
        pack_scores(weights, scores);
    }
    const int last = work.blocks - 1;
    mbarrier_wait(s.value_full + 8 * (last % STAGES), last / STAGES % 2);
    wgmma_pin(output);
    wgmma_pin(weights);
    multiply_values<D>(output, weights, s, last);
    wgmma_wait_group<0>();
    wgmma_pin(output);
    if (group == 0)
        wait_for_turn(group); // what consumer 1 passed last, so that the barrier ends as it began
    store_rows<D>(a, work.head, output, rows, query);
#endif
}
#endif

cuda_ops_status attention_overlap(const LadderCall &call)
{
#if defined(CUDA_OPS_SM90A)
    const AttentionLadder a = attention_tensors(call);
    if (!hopper_takes(a))
        return attention_online_softmax(call);
    return a.head_dim == 64 ? launch_hopper<64>(attention_overlap_kernel<64>, a, call.stream)
                            : launch_hopper<128>(attention_overlap_kernel<128>, a, call.stream);
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
