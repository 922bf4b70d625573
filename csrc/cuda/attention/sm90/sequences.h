// Packed sequences on Hopper: what the kernels are told of them, and which tile is whose. All of it is made on the
// device by one block (sequences.cu), into the workspace, since the host does not know the lengths.
#ifndef CUDA_OPS_ATTENTION_SM90_SEQUENCES_H
#define CUDA_OPS_ATTENTION_SM90_SEQUENCES_H

#include "attention/sm90/band.h"

// One sequence. A tensor's rows before first_query and first_key are other sequences', or nobody's. first_block: the
// first of its blocks of queries among those of all sequences (backward).
struct alignas(16) PackedSequence {
    Band band;
    int first_query, first_key, first_block;
};

// A tile of queries, or in backward of keys, of whatever head: the `number`-th of a sequence.
struct alignas(8) PackedTile {
    int sequence, number;
};

// Tiles times heads, in sections of so many heads.
struct alignas(16) PackedSchedule {
    Schedule schedule;
    int section, tiles;
};

// As a kernel gets it. Tiles that take longer come first, and a sequence's tiles of keys in ascending order.
struct PackedWork {
    const PackedSequence *sequences;
    const PackedTile *tiles;
    const PackedSchedule *schedule;
    const int *blocks; // of each block of queries the sequence, -1: no sequence's (backward)
    int query_rows;
};

// A sequence's blocks of queries begin where those of the rows before it can have ended: at most `size` - 1 rows of a
// block are beyond a sequence. So there are never more than this, and no number depends on how long others are.
CUDA_OPS_HOST_DEVICE int64_t packed_blocks(int64_t rows, int64_t sequences, int64_t size)
{
    return rows / size + sequences;
}

// The work's place in a workspace of attention_sm90_sequences_bytes(), aligned to 16.
PackedWork attention_sm90_sequences_at(void *workspace, const AttentionCall &call);
int64_t attention_sm90_sequences_bytes(const AttentionCall &call);

// Fills it in for tiles of so many queries (forward 192 or 128, backward 128 or 64) and 128 keys. grid: of the kernel
// that walks over the tiles. section: how many heads are walked together if these are tiles enough for every block.
cuda_ops_status attention_sm90_sequences(const PackedWork &work, const AttentionCall &call, int queries, int64_t grid,
                                         int64_t section);

#endif
