// How kernels of normalisations divide rows of channels among blocks and threads, where channels are innermost in
// memory and rows of them whole vectors of 16 bytes: a thread keeps to one vector of the rows and walks down them.
#ifndef CUDA_OPS_BATCH_NORM_ROW_PARTITION_CUH
#define CUDA_OPS_BATCH_NORM_ROW_PARTITION_CUH

#include "common/common.cuh"

static constexpr int THREADS = 256;
// Vectors of a row that a block takes at most.
static constexpr int MOST_LANES = 32;
// Rows that a thread has in flight.
static constexpr int ROWS = 4;
// Blocks of a reduction: four on each of an H200's multiprocessors, if there is work for them.
static constexpr int64_t WANTED_BLOCKS = 528;
// Rows whose values a thread adds up in float at most.
static constexpr int64_t LONGEST_SUM = 64;

// A tile is `lanes` neighbouring vectors of all rows, a split `step` rows of it. A block has one split of one tile,
// `groups` rows at a time; the threads that are left over rest.
struct RowsPartition {
    int lanes, groups;
    int64_t tiles, splits, step;
};

static RowsPartition partition_of(int64_t outer, int64_t channels, int size)
{
    const int64_t vectors = channels / size;
    RowsPartition p;
    p.tiles = ceil_div(vectors, MOST_LANES);
    p.lanes = (int)ceil_div(vectors, p.tiles);
    p.groups = THREADS / p.lanes;
    const int64_t round = p.groups * ROWS; // so that only the last split has less than whole rounds
    const int64_t wanted = ceil_div(WANTED_BLOCKS, p.tiles), longest = p.groups * LONGEST_SUM;
    const int64_t rows = ceil_div(outer, wanted) < longest ? ceil_div(outer, wanted) : longest;
    p.step = ceil_div(rows, round) * round;
    p.splits = ceil_div(outer, p.step);
    return p;
}

// A thread's place: its vector of each row, the first of its rows and the end of its split's.
struct Place {
    int lane, group;
    int64_t vector, row, end;
    bool inside;
};

__device__ __forceinline__ Place place_of(const RowsPartition &p, int64_t outer, int64_t vectors)
{
    Place at;
    at.lane = (int)threadIdx.x % p.lanes, at.group = (int)threadIdx.x / p.lanes;
    const int64_t split = blockIdx.x / p.tiles;
    at.vector = blockIdx.x % p.tiles * p.lanes + at.lane;
    at.row = split * p.step + at.group;
    at.end = split * p.step + p.step < outer ? split * p.step + p.step : outer;
    at.inside = at.group < p.groups && at.vector < vectors;
    return at;
}

template <typename A, int SIZE>
__device__ __forceinline__ void load_values(A (&values)[SIZE], const A *from)
{
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        values[e] = from[e];
}

#endif
