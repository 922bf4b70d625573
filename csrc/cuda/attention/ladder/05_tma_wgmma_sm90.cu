// attention, rung 5: Hopper's own instructions, TMA and wgmma, with a producer and consumers.
//     output = softmax(scale * query key^T) value
// Threads: a block of three warpgroups for 128 queries of a head. One thread of the first, the producer, asks TMA for
// blocks of 128 keys and of 128 values, two stages of each, as soon as what was there has been read; mbarriers, full and
// empty, are all that it and the others wait for (hopper.cuh). The two consumers have 64 queries each, and take turns
// with nobody: scores of 64 x 128 by wgmma, both operands from shared memory; softmax in registers as in rung 4; then
// weights, from registers, times values. Registers go to where they are used: 40 for a producer's thread, 232 for a
// consumer's (setmaxnreg). Fixes: products at the full speed of the tensor cores; keys and values are read from shared
// memory once for 64 queries, not for 16; no thread that computes loads, and no barrier holds up the whole block. Leaves:
// in a consumer product, softmax, product follow each other, and each is waited for: the tensor cores are idle during its
// exponentials, unless the other consumer happens to be elsewhere. Bound by that chain: products and exponentials add up.
#include "attention/ladder/hopper.cuh"

#if defined(CUDA_OPS_SM90A)

template <int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_tma_wgmma_kernel(const __grid_constant__ Maps maps, const __grid_constant__ AttentionLadder a)
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
    SoftmaxRows rows = rows_without_scores();
    float scores[KEYS / 2], output[D / 2] = {}, factor[2];
    uint32_t weights[KEYS / 16][4];
    mbarrier_wait(s.query_full, 0);
    for (int i = 0; i < work.blocks; i++) {
        const int stage = i % STAGES, parity = i / STAGES % 2;
        mbarrier_wait(s.key_full + 8 * stage, parity);
        multiply_keys<D>(scores, s, group, i);
        wgmma_wait_group<0>();
        wgmma_pin(scores);
        release(s.key_empty, i);
        mask_block(scores, a, first, query, i);
        softmax_scores(scores, rows, factor, a.scale * LOG2_E);
        rescale(output, factor);
        pack_scores(weights, scores);
        mbarrier_wait(s.value_full + 8 * stage, parity);
        wgmma_pin(output);
        wgmma_pin(weights);
        multiply_values<D>(output, weights, s, i);
        wgmma_wait_group<0>();
        wgmma_pin(output);
        wgmma_pin(weights);
        release(s.value_empty, i);
    }
    store_rows<D>(a, work.head, output, rows, query);
#endif
}
#endif

Answer attention_hopper_supports(const LadderCall &call, const Device &device)
{
#if defined(CUDA_OPS_SM90A)
    const Answer answer = attention_mma_supports(call, device);
    return answer && device.capability != 90 ? NEEDS_90 : answer;
#else
    (void)call, (void)device;
    return NOT_COMPILED;
#endif
}

cuda_ops_status attention_tma_wgmma(const LadderCall &call)
{
#if defined(CUDA_OPS_SM90A)
    const AttentionLadder a = attention_tensors(call);
    if (!hopper_takes(a))
        return attention_online_softmax(call);
    return a.head_dim == 64 ? launch_hopper<64>(attention_tma_wgmma_kernel<64>, a, call.stream)
                            : launch_hopper<128>(attention_tma_wgmma_kernel<128>, a, call.stream);
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
