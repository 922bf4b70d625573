// What attention's sm90 kernels share: which keys a query sees, as 32-bit numbers, and what a persistent grid works at.
#ifndef CUDA_OPS_ATTENTION_SM90_BAND_H
#define CUDA_OPS_ATTENTION_SM90_BAND_H

#include "attention/paths.h"
#include "attention/sm90/order.h"

// Sizes are below 2^29 (attention_sm90_supports), so that sums of two such numbers and a tile are ints, and a bound
// beyond all rows is as good as none.
static constexpr int64_t BAND_LIMIT = (int64_t)1 << 29;

CUDA_OPS_HOST_DEVICE Band band_of(const cuda_ops_attention_sequence &s)
{
    const int64_t edge = BAND_LIMIT + 1024;
    int64_t low = -edge, high = edge;
    if (s.window_left < CUDA_OPS_ATTENTION_UNBOUNDED)
        low = s.diagonal - s.window_left;
    if (s.window_right < CUDA_OPS_ATTENTION_UNBOUNDED)
        high = s.diagonal + s.window_right;
    low = low < -edge ? -edge : low > edge ? edge : low;
    high = high < -edge ? -edge : high > edge ? edge : high;
    return {(int)s.queries, (int)s.keys, (int)low, (int)high};
}

// What a persistent grid works at: `total` items in sections of `size` (the last may be shorter), which a block takes in
// ascending order. Within a section the r-th round of items goes to the blocks in order, and where `reversing` every
// other one in reverse, which evens out items that become shorter and shorter. The next section begins at the block at
// which this one would go on.
struct Schedule {
    int total, size, rounds; // rounds of a section
    int reversing;
};

CUDA_OPS_HOST_DEVICE Schedule make_schedule(int64_t total, int64_t size, int64_t blocks, bool reversing)
{
    return {(int)total, (int)size, (int)((size + blocks - 1) / blocks), reversing};
}

// Keys or queries in blocks: `count` of them up to `last`.
struct Blocks {
    int last, count;
};

// Those of `size` keys that queries from `first` to `last` see.
__device__ __forceinline__ Blocks blocks_of_keys(const Band &band, int first, int last, int size)
{
    const int low = max(first + band.low, 0), high = min(last + band.high, band.keys - 1);
    const int last_block = high / size;
    return {last_block, low <= high ? last_block - low / size + 1 : 0};
}

// Where queries are no whole tiles of M, the first one begins so many rows before them, by warpgroups of 64: those that
// have no query idle where there are the fewest keys to be seen, if later queries see more.
CUDA_OPS_HOST_DEVICE int rows_before(int queries, int M)
{
    return ((queries + M - 1) / M * M - queries) / 64 * 64;
}

// The block's item of a round: its section and its number there. False: after the last one. rank < 0: none this round.
__device__ __forceinline__ bool scheduled_item(const Schedule &schedule, int round, int &section, int &rank)
{
    section = round / schedule.rounds;
    const int blocks = gridDim.x, turn = round - section * schedule.rounds, first = section * schedule.size;
    if (section > (schedule.total - 1) / schedule.size)
        return false;
    int place = (int)blockIdx.x - first % blocks;
    place = place < 0 ? place + blocks : place;
    rank = turn * blocks + (schedule.reversing && turn % 2 ? blocks - 1 - place : place);
    if (rank >= min(schedule.size, schedule.total - first))
        rank = -1;
    return true;
}

#endif
