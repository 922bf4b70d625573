// What rungs 5 and 6 share: a block's shared memory, its barriers, and the thread that fills it by TMA.
#ifndef CUDA_OPS_ATTENTION_LADDER_HOPPER_CUH
#define CUDA_OPS_ATTENTION_LADDER_HOPPER_CUH

#include "attention/ladder/fragment.cuh"
#include "common/tensor_map.h"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// Three warpgroups: a producer, and two consumers with 64 queries each. Keys and values come in blocks of 128, two stages
// of each. A tile lies in columns of 64 elements, SWIZZLE_ROW bytes, which TMA swizzles and wgmma reads.
static constexpr int GROUPS = 2, THREADS = (GROUPS + 1) * WARPGROUP, QUERIES = 64 * GROUPS, KEYS = 128, STAGES = 2;
static constexpr int QUERY_COLUMN = 64 * SWIZZLE_ROW, KEY_COLUMN = KEYS * SWIZZLE_ROW; // bytes
template <int D>
static constexpr int QUERY_BYTES = D / 64 * QUERY_COLUMN; // of a consumer
template <int D>
static constexpr int BLOCK_BYTES = D / 64 * KEY_COLUMN;
template <int D>
static constexpr int SHARED_BYTES =
    GROUPS * QUERY_BYTES<D> + 2 * STAGES * BLOCK_BYTES<D> + (1 + 4 * STAGES) * 8 + SWIZZLE_ATOM;

struct Maps {
    CUtensorMap query, key, value;
};

#if defined(CUDA_OPS_HOPPER_CODE)

// Addresses of tiles, and of barriers: `full` when a tile has come, `empty` when both consumers have read it.
struct Shared {
    uint32_t query, key, value;
    uint32_t query_full, key_full, key_empty, value_full, value_empty; // 8 bytes for each stage
};

template <int D>
__device__ __forceinline__ Shared shared_of_block()
{
    extern __shared__ char memory[];
    Shared s;
    s.query = (shared_address(memory) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    s.key = s.query + GROUPS * QUERY_BYTES<D>, s.value = s.key + STAGES * BLOCK_BYTES<D>;
    s.query_full = s.value + STAGES * BLOCK_BYTES<D>;
    s.key_full = s.query_full + 8, s.key_empty = s.key_full + 8 * STAGES;
    s.value_full = s.key_empty + 8 * STAGES, s.value_empty = s.value_full + 8 * STAGES;
    if (threadIdx.x == 0) {
        mbarrier_init(s.query_full, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(s.key_full + 8 * stage, 1);
            mbarrier_init(s.value_full + 8 * stage, 1);
            mbarrier_init(s.key_empty + 8 * stage, GROUPS);
            mbarrier_init(s.value_empty + 8 * stage, GROUPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    return s;
}

// The block's head, its first query, and how many blocks of keys its queries see. A head's tiles follow each other, so
// that its keys and values stay in the L2; the last queries come first: where they see only keys before them, they take
// longest.
struct Work {
    int head, first_query, blocks;
};
__device__ __forceinline__ Work work_of_block(const AttentionLadder &a)
{
    const int tiles = (a.queries + QUERIES - 1) / QUERIES;
    Work work;
    work.head = blockIdx.x / tiles;
    work.first_query = (tiles - 1 - (int)blockIdx.x % tiles) * QUERIES;
    const int keys = a.causal ? min(a.keys, work.first_query + QUERIES) : a.keys;
    work.blocks = (keys + KEYS - 1) / KEYS;
    return work;
}

// A block of keys or of values into stage i % STAGES, when what was there has been read. Of the i / STAGES-th use of a
// stage its barriers' phases have the parity i / STAGES % 2; the first time there is nothing to wait for.
template <int D>
__device__ __forceinline__ void load_block(uint32_t to, const CUtensorMap *map, uint32_t full, uint32_t empty, int i,
                                           int head)
{
    const int stage = i % STAGES;
    mbarrier_wait(empty + 8 * stage, i / STAGES % 2 ^ 1);
    mbarrier_arrive_expect_tx(full + 8 * stage, BLOCK_BYTES<D>);
    for (int column = 0; column < D / 64; column++)
        tma_load_4d(to + stage * BLOCK_BYTES<D> + column * KEY_COLUMN, map, full + 8 * stage, 64 * column, i * KEYS,
                    head, 0);
}

// One thread. Rows beyond the tensors are read as zeros.
template <int D>
__device__ __forceinline__ void produce(const Shared &s, const Maps &maps, const Work &work)
{
    mbarrier_arrive_expect_tx(s.query_full, GROUPS * QUERY_BYTES<D>);
    for (int box = 0; box < GROUPS * D / 64; box++)
        tma_load_4d(s.query + box * QUERY_COLUMN, &maps.query, s.query_full, box % (D / 64) * 64,
                    work.first_query + box / (D / 64) * 64, work.head, 0);
    for (int i = 0; i < work.blocks; i++) {
        load_block<D>(s.key, &maps.key, s.key_full, s.key_empty, i, work.head);
        load_block<D>(s.value, &maps.value, s.value_full, s.value_empty, i, work.head);
    }
}

// scores = queries times keys^T of stage i % STAGES, by wgmma, both from shared memory. Not waited for.
template <int D>
__device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 2], const Shared &s, int group, int i)
{
    const uint64_t query = wgmma_descriptor(s.query + group * QUERY_BYTES<D>, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t key = wgmma_descriptor(s.key + i % STAGES * BLOCK_BYTES<D>, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    wgmma_forget(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) // 16 elements are 32 bytes on in a row
        wgmma<bf16, KEYS, 0, 0>(scores, wgmma_advance(query, k / 4 * QUERY_COLUMN + k % 4 * 32),
                                wgmma_advance(key, k / 4 * KEY_COLUMN + k % 4 * 32), k > 0);
    wgmma_commit_group();
}
// output += weights, from registers, times the values of stage i % STAGES.
template <int D>
__device__ __forceinline__ void multiply_values(float (&output)[D / 2], uint32_t (&weights)[KEYS / 16][4],
                                                const Shared &s, int i)
{
    const uint64_t value =
        wgmma_descriptor(s.value + i % STAGES * BLOCK_BYTES<D>, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, KEY_COLUMN);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) // 16 keys are 16 rows on
        wgmma<bf16, D, 1>(output, weights[k], wgmma_advance(value, k * 2 * SWIZZLE_ATOM), 1);
    wgmma_commit_group();
}

// Masks the block's scores where some query of the consumer does not see all of its keys. query: the thread's first.
__device__ __forceinline__ void mask_block(float (&scores)[KEYS / 2], const AttentionLadder &a, int first_query,
                                           int query, int i)
{
    if ((i + 1) * KEYS > a.keys || (a.causal && (i + 1) * KEYS > first_query + 1))
        mask_scores(scores, a, query, i * KEYS + threadIdx.x % 4 * 2);
}

__device__ __forceinline__ void release(uint32_t empty, int i)
{
    if (threadIdx.x % WARPGROUP == 0)
        mbarrier_arrive(empty + 8 * (i % STAGES));
}

#endif // CUDA_OPS_HOPPER_CODE

template <int D>
static cuda_ops_status launch_hopper(void (*kernel)(Maps, AttentionLadder), const AttentionLadder &a,
                                     cudaStream_t stream)
{
    const auto layout = [&](int rows) {
        return HeadsLayout{1, a.heads, rows, D, (int64_t)a.heads * rows * D, (int64_t)rows * D, D};
    };
    Maps maps;
    if (!make_heads_map(&maps.query, a.query, CUDA_OPS_BFLOAT16, layout(a.queries), 64) ||
        !make_heads_map(&maps.key, a.key, CUDA_OPS_BFLOAT16, layout(a.keys), KEYS) ||
        !make_heads_map(&maps.value, a.value, CUDA_OPS_BFLOAT16, layout(a.keys), KEYS))
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(kernel, SHARED_BYTES<D>);
    const int64_t blocks = ceil_div(a.queries, QUERIES) * a.heads;
    kernel<<<(unsigned int)blocks, THREADS, SHARED_BYTES<D>, stream>>>(maps, a);
    return launch_status();
}

// What rungs 5 and 6 leave to rung 3: addresses that TMA does not take, and calls with nothing to multiply.
static inline bool hopper_takes(const AttentionLadder &a)
{
    bool takes = a.heads > 0 && a.queries > 0 && a.keys > 0;
    for (const void *pointer : {a.query, a.key, a.value, (const void *)a.output})
        takes = takes && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    return takes;
}

#endif
