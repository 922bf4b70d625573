// What the paths of batch_norm share: how one is called. batch_norm.cu holds the table.
#ifndef CUDA_OPS_BATCH_NORM_PATHS_H
#define CUDA_OPS_BATCH_NORM_PATHS_H

#include <cuda_runtime.h>

#include "common/paths.h"
#include "cuda_ops/batch_norm.h"

// One pass as a launcher gets it; batch_norm.cu has checked that there is something to do.
struct NormCall {
    cuda_ops_batch_norm_pass pass;
    bool wants_output;                   // forward: output, backward: grad_input; else the values by channel alone
    void *output;                        // forward
    double *new_mean, *new_variance;     // forward in training
    cuda_ops_running_statistics running; // the same
    void *grad_input, *grad_weight, *grad_bias;
    void *workspace;
    const void *grad_output, *input, *weight, *bias;
    const cuda_ops_batch_norm_epilogue *epilogue; // of batch_norm_act, else NULL
    void *grad_sum;                               // its backward: see cuda_ops_batch_norm_act_backward_cuda
    const void *grad_added;                       // the same
    const void *mean, *variance;                  // that are given: backward, and forward with running statistics
    int64_t outer, channels, inner;
    double eps;
    cuda_ops_dtype dtype, parameter_dtype, statistics_dtype;
    cudaStream_t stream;
};

static constexpr Answer NORM_ADDS_TO_RESIDUALS = {"adds up two gradients only where there is a residual"};

// Neighbouring channels in the shared memory of one block, backward (batch_norm/groups.cu).
Answer batch_norm_groups_supports(const NormCall &call, const Device &device);
Answer batch_norm_groups_is_fast(const NormCall &call, const Device &device);
cuda_ops_status batch_norm_groups(const NormCall &call, const Device &device);

// A channel in the shared memory of one block (batch_norm/resident.cu).
Answer batch_norm_resident_supports(const NormCall &call, const Device &device);
cuda_ops_status batch_norm_resident(const NormCall &call, const Device &device);

// Channels innermost, in few rows of whole vectors, a tile of them in the shared memory of a cluster of blocks
// (batch_norm/cluster.cu).
Answer batch_norm_cluster_supports(const NormCall &call, const Device &device);
cuda_ops_status batch_norm_cluster(const NormCall &call, const Device &device);

// Channels innermost, in rows of whole vectors (batch_norm/rows.cu).
Answer batch_norm_rows_supports(const NormCall &call, const Device &device);
int64_t batch_norm_rows_workspace(const NormCall &call, const Device &device);
cuda_ops_status batch_norm_rows(const NormCall &call, const Device &device);

// A channel split among blocks (batch_norm/split.cu).
int64_t batch_norm_split_workspace(const NormCall &call, const Device &device);
cuda_ops_status batch_norm_split(const NormCall &call, const Device &device);

#endif
