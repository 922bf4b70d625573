// A boolean mask as the sm90 path's kernels read it: a bit a key, in words of 32, of the queries, heads and batches that
// the mask has of its own.
#ifndef CUDA_OPS_ATTENTION_SM90_MASK_H
#define CUDA_OPS_ATTENTION_SM90_MASK_H

#include "attention/paths.h"

// What a kernel's instance does with a mask (added_mask.cuh has the last one).
enum MaskWay { NO_MASK, BOOLEAN_MASK, ADDED_MASK };

struct MaskBits {
    const uint32_t *words;
    int64_t batch, head; // words from one to the next; 0 where all have the same
    int row;
#if defined(__CUDACC__)
    // Those of a batch and head.
    __device__ __forceinline__ const uint32_t *of(int all_head, int heads) const
    {
        const int number = all_head / heads;
        return words + number * batch + (all_head - number * heads) * head;
    }
#endif
};

// Bytes of the words, which are whole 128 keys a row; 0 without such a mask.
int64_t attention_sm90_mask_bytes(const cuda_ops_attention &problem);
// Fills them in at `room`, aligned to 16 bytes, and says where they are.
cuda_ops_status attention_sm90_mask(MaskBits &mask, void *room, const AttentionCall &call);

#endif
