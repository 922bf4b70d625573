// In which order a grid takes the blocks of all heads where none of them waits for another.
#ifndef CUDA_OPS_ATTENTION_SM90_SECTIONS_H
#define CUDA_OPS_ATTENTION_SM90_SECTIONS_H

#include <cuda_runtime.h>
#include <stdint.h>

// Heads go by sections, those of which what every block reads is in the L2 together: of `heads` ones as few sections as
// have no more than `fit` each, all alike but for the last, since the blocks of a short last one would be too few for
// all multiprocessors.
static inline int heads_of_section(int64_t heads, int64_t fit)
{
    const int64_t sections = fit < 1 ? heads : (heads + fit - 1) / fit;
    return (int)((heads + sections - 1) / sections);
}

// A section's heads side by side, the first block of each head first.
struct BlockOfHead {
    int number, head;
};

__host__ __device__ __forceinline__ BlockOfHead block_of_head(int place, int blocks, int heads, int section)
{
    const int first = place / (section * blocks) * section, from = place - first * blocks;
    const int width = section < heads - first ? section : heads - first;
    return {from / width, first + from % width};
}

#endif
