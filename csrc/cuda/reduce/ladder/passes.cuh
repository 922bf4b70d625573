// How rungs 2 to 5 come from the sums of blocks to one: the same kernel again, over the sums.
#ifndef CUDA_OPS_REDUCE_LADDER_PASSES_CUH
#define CUDA_OPS_REDUCE_LADDER_PASSES_CUH

#include "common/aligned_vector.cuh"
#include "reduce/ladder/rungs.h"

static constexpr int THREADS = 256;

// kernel<<<blocks, THREADS>>>(sums, input, count) leaves in sums[b] the sum of `per_block` elements from b * per_block
// on. Each pass reads what the one before it wrote: two buffers in turn, in the workspace.
template <typename T>
static void reduce_in_passes(const LadderCall &call, int64_t per_block, void (*kernel)(T *, const T *, int64_t))
{
    const T *from = static_cast<const T *>(call.inputs[0].data);
    T *const output = static_cast<T *>(call.outputs[0].data), *const first = static_cast<T *>(call.workspace);
    T *const second = first + ceil_div(call.inputs[0].count, THREADS);
    int64_t count = call.inputs[0].count, blocks;
    for (int pass = 0;; pass++) {
        blocks = count > per_block ? ceil_div(count, per_block) : 1; // of nothing too: the sum is 0
        T *const to = blocks == 1 ? output : pass % 2 == 0 ? first : second;
        kernel<<<(unsigned int)blocks, THREADS, 0, call.stream>>>(to, from, count);
        if (blocks == 1)
            return;
        from = to;
        count = blocks;
    }
}

#endif
