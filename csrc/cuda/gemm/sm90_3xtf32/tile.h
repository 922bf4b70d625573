// What the files of the path sm90_3xtf32 share with gemm.cu; gemm/sm90_3xtf32/sm90_3xtf32.cu says what they do.
#ifndef CUDA_OPS_GEMM_SM90_3XTF32_TILE_H
#define CUDA_OPS_GEMM_SM90_3XTF32_TILE_H

#include "gemm/paths.h"

// The copies of B: of each of its matrices that of the upper parts and that of the lower ones, n rows of k, rounded up
// to GROUP, beside one another.
struct SplitOperand {
    const void *from;
    float *to;
    int64_t lines, k, matrices, pitch, stride; // of `from`, which is lines x k, or k x lines where k is not contiguous
    bool k_contiguous;
    bool permuted; // the order along k in which a thread of the kernel loads a K-major A (split_position)
};

static constexpr int SPLIT_GROUP = 32; // of k, a stage of the pipeline

static inline int64_t split_pitch(int64_t k)
{
    return ceil_div(k, SPLIT_GROUP) * SPLIT_GROUP;
}
static inline int64_t split_bytes(const SplitOperand &operand)
{
    return 2 * operand.matrices * operand.lines * split_pitch(operand.k) * (int64_t)sizeof(float);
}
cuda_ops_status split_operand(const SplitOperand &operand, cudaStream_t stream);

// The product of the call as the kernel sees it, with the copies of its B; by A's storage order, a file each.
cuda_ops_status gemm_sm90_3xtf32_k_major(const GemmCall &call, const SplitOperand &b, GemmDevice device,
                                         const GemmPlan &plan);
cuda_ops_status gemm_sm90_3xtf32_mn_major(const GemmCall &call, const SplitOperand &b, GemmDevice device,
                                          const GemmPlan &plan);

#endif
