// softmax and log_softmax as their launchers get them, and the paths that have files of their own. (row and
// thread_group are in common/softmax.cuh.)
#ifndef CUDA_OPS_SOFTMAX_PATHS_H
#define CUDA_OPS_SOFTMAX_PATHS_H

#include "common/paths.h"

// One pass; a is output or grad_input, b input or grad_output, c backward's output.
struct SoftmaxCall {
    bool log, backward;
    void *a;
    const void *b, *c;
    void *workspace;
    int64_t columns, cols, inner;
    double scale; // of grad_input
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

// The longest rows that registers hold, a block's and those of the largest cluster, in vectors of 16 bytes.
static constexpr int MOST_CLUSTER = 8;
static constexpr int64_t MOST_OF_BLOCK = 4096, MOST_OF_CLUSTER = MOST_CLUSTER * MOST_OF_BLOCK;

static inline int64_t row_vectors(const SoftmaxCall &call)
{
    return call.cols * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2) / 16;
}

// A row, wherever it starts, in the registers of a part of a warp, a warp or a block (register_rows.cu).
Answer softmax_unaligned_row_supports(const SoftmaxCall &call, const Device &device);
Answer softmax_unaligned_row_is_fast(const SoftmaxCall &call, const Device &device);
cuda_ops_status softmax_unaligned_row(const SoftmaxCall &call, const Device &device);

// A row in the registers of a cluster of blocks (register_rows.cu).
Answer softmax_cluster_supports(const SoftmaxCall &call, const Device &device);
Answer softmax_cluster_is_fast(const SoftmaxCall &call, const Device &device);
cuda_ops_status softmax_cluster(const SoftmaxCall &call, const Device &device);

// Columns in parts, for two kernels (split.cu).
#define SOFTMAX_SPLIT_KERNELS                                                                                          \
    "softmax_states_kernel softmax_forward_parts_kernel softmax_sums_kernel softmax_backward_parts_kernel"
Answer softmax_split_supports(const SoftmaxCall &call, const Device &device);
Answer softmax_split_is_fast(const SoftmaxCall &call, const Device &device);
int64_t softmax_split_workspace(const SoftmaxCall &call, const Device &device);
cuda_ops_status softmax_split(const SoftmaxCall &call, const Device &device);

#endif
