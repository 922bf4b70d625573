// What the kernels for the gradients of attention's rows of 129 to 256 elements share on Hopper: tiles of 64 rows in
// columns of 64 elements, and products of them.
#ifndef CUDA_OPS_ATTENTION_SM90_WIDE_CUH
#define CUDA_OPS_ATTENTION_SM90_WIDE_CUH

#include "attention/sm90/band.h"
#include "attention/sm90/fragments.cuh"
#include "attention/sm90/maps.h"
#include "attention/sm90/sections.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"

static constexpr int WIDE_SHARED_BYTES = 232448; // an SM's
// A block of either kernel has a producer's warpgroup and two of consumers.
static constexpr int WIDE_THREADS = 3 * WARPGROUP, WIDE_REGISTERS = 240, WIDE_PRODUCER_REGISTERS = 24;
static constexpr int WIDE_ROWS = 64;                                // of a tile
static constexpr int WIDE_COLUMN = WIDE_ROWS * SWIZZLE_ROW;         // bytes of 64 elements of them: a box of TMA
static constexpr int WIDE_STATISTICS = 2 * WIDE_ROWS * 4;           // of 64 queries: logsumexp * log2(e), and delta
static constexpr int WIDE_TURN_BARRIER = 1, WIDE_STORE_BARRIER = 3; // named barriers: one a consumer warpgroup

struct WideWork {
    const float *statistics; // of each block of 64 queries (statistics_place)
    Band band;
    int heads, key_heads, group, blocks_m;
    int blocks, all_heads, section; // what the grid walks over: blocks of all heads, by sections of heads
    float scale, scale_log2;        // scale * log2(e)
};

// The block's.
struct WideItem {
    int number, batch, head;
};

__device__ __forceinline__ WideItem wide_item(const WideWork &work, int heads)
{
    const BlockOfHead block = block_of_head((int)blockIdx.x, work.blocks, work.all_heads, work.section);
    return {block.number, block.head / heads, block.head % heads};
}

// Barriers of a ring of tiles: one a column, so that products begin with the first, and one for the tile's release.
template <int COLUMNS>
__device__ __forceinline__ uint32_t wide_full(uint32_t barriers, int stage)
{
    return barriers + 8 * (COLUMNS + 1) * stage;
}
template <int COLUMNS>
__device__ __forceinline__ uint32_t wide_empty(uint32_t barriers, int stage)
{
    return wide_full<COLUMNS>(barriers, stage) + 8 * COLUMNS;
}
template <int COLUMNS>
__device__ __forceinline__ void wide_init(uint32_t barriers, int stages)
{
    for (int stage = 0; stage < stages; stage++) {
        for (int column = 0; column < COLUMNS; column++)
            mbarrier_init(wide_full<COLUMNS>(barriers, stage) + 8 * column, 1);
        mbarrier_init(wide_empty<COLUMNS>(barriers, stage), 2 * WARPGROUP / WARP_SIZE);
    }
}
template <int COLUMNS>
static constexpr int WIDE_RING_BYTES = 8 * (COLUMNS + 1);

// A place in a ring, and how often it has been reached.
template <int STAGES>
struct WideStage {
    int index;
    uint32_t phase;

    __device__ __forceinline__ void advance()
    {
        if (++index == STAGES) {
            index = 0;
            phase ^= 1;
        }
    }
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The first HELD columns of a tile as the left operand in registers. From shared memory, products of 64 columns read
// both operands as long as they multiply.
template <int HELD>
__device__ __forceinline__ void wide_hold(uint32_t (&held)[HELD == 0 ? 1 : 4 * HELD][4], uint32_t tile)
{
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP_SIZE, row = thread / WARP_SIZE * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4 * HELD; k++)
        ldmatrix_x4(held[k], tile + k / 4 * WIDE_COLUMN + row * SWIZZLE_ROW + ((k % 4 * 2 + lane / 16) ^ row % 8) * 16);
}

// A tile into its stage of a ring, once that is free. `more`: bytes that come with its first column.
template <int COLUMNS>
__device__ __forceinline__ void wide_load(const CUtensorMap *map, uint32_t tiles, uint32_t ring, int index,
                                          uint32_t phase, int row, int head, const RowsPlace<false> &place,
                                          int more = 0)
{
    const uint32_t full = wide_full<COLUMNS>(ring, index);
    mbarrier_wait(wide_empty<COLUMNS>(ring, index), phase ^ 1);
    for (int column = 0; column < COLUMNS; column++) {
        mbarrier_arrive_expect_tx(full + 8 * column, WIDE_COLUMN + (column == 0 ? more : 0));
        load_rows(tiles + (index * COLUMNS + column) * WIDE_COLUMN, map, full + 8 * column, 64 * column, row, head,
                  place);
    }
}

// d = left (64 x 64 COLUMNS elements, K-major, the first HELD columns in registers) right^T (the same), whose columns
// are waited for one by one.
template <typename T, int COLUMNS, int HELD>
__device__ __forceinline__ void wide_scores(float (&d)[32], const uint32_t (&held)[HELD == 0 ? 1 : 4 * HELD][4],
                                            uint64_t left, uint64_t right, uint32_t right_full, uint32_t phase)
{
    wgmma_forget(d);
    make_opaque(left); // its columns' descriptors, all ahead of the loop, would be more than there are registers for
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        mbarrier_wait(right_full + 8 * column, phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint64_t b = wgmma_advance(right, column * WIDE_COLUMN + k * 32);
            if (column < HELD)
                wgmma<T, 64, 0>(d, held[HELD == 0 ? 0 : (column < HELD ? 4 * column + k : 0)], b, column + k > 0);
            else
                wgmma<T, 64, 0, 0>(d, wgmma_advance(left, column * WIDE_COLUMN + k * 32), b, column + k > 0);
        }
    }
    wgmma_commit_group();
}

// d += left (64 x 64, in registers) right (64 rows of 64 COLUMNS elements).
template <typename T, int COLUMNS>
__device__ __forceinline__ void wide_add(float (&d)[32 * COLUMNS], uint32_t (&left)[4][4], uint64_t right)
{
    wgmma_pin(d);
    wgmma_pin(left);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<T, 64 * COLUMNS, 1>(d, left[k], wgmma_advance(right, k * 2 * SWIZZLE_ATOM), 1);
    wgmma_commit_group();
}

// Whether all of 64 queries from first_query on see all of 64 keys from first_key on: elsewhere each score is asked.
__device__ __forceinline__ bool wide_all_seen(const Band &band, int first_query, int first_key)
{
    return first_key + WIDE_ROWS - 1 <= min(first_query + band.high, band.keys - 1) &&
           first_key >= first_query + WIDE_ROWS - 1 + band.low;
}

// The warpgroups issue their products in turns, so that what one does with its scores runs beside the other's products.
// The first turn is the first warpgroup's.
__device__ __forceinline__ void wide_wait_for_turn(int group)
{
    bar_sync<2 * WARPGROUP>(WIDE_TURN_BARRIER + group);
}
__device__ __forceinline__ void wide_pass_turn(int group)
{
    bar_arrive(WIDE_TURN_BARRIER + (group ^ 1), 2 * WARPGROUP);
}

// A warpgroup's 64 rows of gradients, times `scale`, by way of `place`, in which nothing is read any more.
template <typename T, int COLUMNS>
__device__ __forceinline__ void wide_store(float (&d)[32 * COLUMNS], float scale, uint32_t place, int group,
                                           const CUtensorMap *map, int first_row, int head, int batch)
{
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP_SIZE, lane = thread % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < 32 * COLUMNS; i++)
        d[i] *= scale;
    pack_and_store<T>(place, d, WIDE_COLUMN, 16 * warp + lane % 16, lane);
    fence_proxy_async();
    bar_sync<WARPGROUP>(WIDE_STORE_BARRIER + group);
    if (thread == 0) {
        for (int column = 0; column < COLUMNS; column++)
            store_rows(map, place + column * WIDE_COLUMN, 64 * column, first_row, head, RowsPlace<false>{batch});
        bulk_commit_group();
        bulk_wait_group_read<0>();
    }
}

#endif // CUDA_OPS_HOPPER_CODE

#endif
