// attention's path by three products in TF32 for one in float32: what its files share.
#ifndef CUDA_OPS_ATTENTION_MMA_3XTF32_H
#define CUDA_OPS_ATTENTION_MMA_3XTF32_H

#include "attention/dropout.cuh"
#include "attention/float32/float32.h"

// float32 on the tensor cores of sm_80, and later ones where they are as fast: aligned rows of up to 128 elements,
// backward 64 (mma_3xtf32.cu).
Answer attention_mma_3xtf32_supports(const AttentionCall &call, const Device &device);
Answer attention_mma_3xtf32_is_fast(const AttentionCall &call, const Device &device);
int64_t attention_mma_3xtf32_workspace(const AttentionCall &call, const Device &device);
cuda_ops_status attention_mma_3xtf32(const AttentionCall &call, const Device &device);

struct Mma3xTf32Work : Float32Work {
    DropoutWork dropout;
    bool simple; // scores are scaled products of the keys seen, with a boolean mask or none
    bool masked; // the same with a mask, which add_mask takes
};

static constexpr int MMA_3XTF32_MOST_COLUMNS = 64; // of a row, backward

// Shared memory of a block, and the launches; is_wide: rows of more than 64 elements.
int attention_mma_3xtf32_forward_bytes(bool is_wide);
int attention_mma_3xtf32_backward_bytes();
cuda_ops_status attention_mma_3xtf32_forward(const Mma3xTf32Work &work, bool is_wide, cudaStream_t stream);
cuda_ops_status attention_mma_3xtf32_backward(const Mma3xTf32Work &work, cudaStream_t stream);

#endif
