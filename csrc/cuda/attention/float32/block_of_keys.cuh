// What the blocks of backward in float32 do alike, on the CUDA cores and by three products of TF32: they are handed out
// blocks of keys, and add to the gradients of a tile of queries one after the other.
#ifndef CUDA_OPS_ATTENTION_FLOAT32_BLOCK_OF_KEYS_CUH
#define CUDA_OPS_ATTENTION_FLOAT32_BLOCK_OF_KEYS_CUH

#include "attention/float32/float32.h"
#include "ptx/global_memory.cuh"

// Of a tile's queries, in shared memory. Remainders are read where a mask is added.
struct RowsOfWeights {
    float *logsumexp, *delta, *remainder;
};

// The next number, from 0, of the blocks that have begun: a block waits for one before it alone, which therefore runs.
__device__ __forceinline__ uint32_t take_number(uint32_t *handed_out)
{
    __shared__ uint32_t number;
    if (threadIdx.x == 0)
        number = atomicAdd(handed_out, 1u);
    __syncthreads();
    return number;
}

// Until `block` is the next one to add to what the turn is of.
__device__ __forceinline__ void wait_for_turn(const uint32_t *turn, int64_t block)
{
    if (threadIdx.x == 0)
        while (ld_acquire_gpu(turn) != (uint32_t)block)
            ;
    __syncthreads();
}

#endif
