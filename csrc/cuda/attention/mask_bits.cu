// attention's sm90 path, boolean masks: to bits, once a call, so that the kernel has two or four words for the 64 or 128
// keys of a row, and reads no more of it for each head that shares the mask. Bound by memory.
#include "attention/sm90/mask.h"

#include "common/common.cuh"

static constexpr int THREADS = 256;

struct MaskWork {
    const uint8_t *mask;
    uint32_t *words;
    int64_t mask_batch, mask_head, mask_row, mask_column;
    int64_t heads, queries, keys, row; // of the words: heads and queries that differ, words of a row
    int64_t count;                     // words
};

// A warp makes four words of a row: each lane has a key of each.
__global__ void __launch_bounds__(THREADS) attention_sm90_mask_kernel(const __grid_constant__ MaskWork work)
{
    wait_for_predecessor();
    release_successor();
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t groups = work.row / 4;
    for (int64_t at = global_thread_index() / WARP_SIZE; at < work.count / 4; at += global_thread_count() / WARP_SIZE) {
        const int64_t line = at / groups, first = (at - line * groups) * 128 + lane;
        const int64_t query = line % work.queries, all_head = line / work.queries;
        const int64_t head = all_head % work.heads, batch = all_head / work.heads;
        const uint8_t *const mask = work.mask + batch * work.mask_batch + head * work.mask_head + query * work.mask_row;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t key = first + 32 * i;
            words[i] = key < work.keys ? mask[key * work.mask_column] : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = __ballot_sync(FULL_WARP, words[i] != 0);
        if (lane == 0)
            *reinterpret_cast<uint4 *>(work.words + 4 * at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

static MaskWork work_of(const cuda_ops_attention &p)
{
    MaskWork work = {};
    work.mask = (const uint8_t *)p.mask;
    work.mask_batch = p.mask_batch, work.mask_head = p.mask_head;
    work.mask_row = p.mask_row, work.mask_column = p.mask_column;
    work.heads = p.mask_head ? p.heads : 1;
    work.queries = p.mask_row ? p.queries : 1;
    work.keys = p.keys;
    work.row = ceil_div(p.keys, 128) * 4;
    work.count = (p.mask_batch ? p.batch : 1) * work.heads * work.queries * work.row;
    return work;
}

int64_t attention_sm90_mask_bytes(const cuda_ops_attention &problem)
{
    return problem.mask_kind == CUDA_OPS_ATTENTION_MASK_BOOLEAN ? work_of(problem).count * 4 : 0;
}

cuda_ops_status attention_sm90_mask(MaskBits &mask, void *room, const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    MaskWork work = work_of(p);
    work.words = (uint32_t *)room;
    mask.words = work.words;
    mask.row = p.mask_row ? (int)work.row : 0;
    mask.head = p.mask_head ? work.queries * work.row : 0;
    mask.batch = p.mask_batch ? work.heads * work.queries * work.row : 0;
    attention_sm90_mask_kernel<<<clamp_grid(ceil_div(work.count / 4, THREADS / WARP_SIZE)), THREADS, 0, call.stream>>>(
        work);
    return launch_status();
}
