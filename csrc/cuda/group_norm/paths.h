// group_norm's table of paths, which is forward's: what a call is, and the paths' functions. The table is in
// group_norm.cu.
#ifndef CUDA_OPS_GROUP_NORM_PATHS_H
#define CUDA_OPS_GROUP_NORM_PATHS_H

#include "common/paths.h"
#include "cuda_ops/group_norm.h"

// One pass as a launcher gets it; group_norm.cu has checked that there is something to do, and calls sizes contiguous
// where both formats are the same.
struct GroupNormCall {
    // forward
    void *output;
    double *new_mean, *new_variance;
    const void *bias;
    // backward
    void *grad_input, *grad_weight, *grad_bias;
    const void *grad_output;
    const double *mean, *variance;
    // both
    void *workspace;
    const void *input, *weight;
    cuda_ops_group_norm_sizes sizes;
    double eps;
    cuda_ops_dtype dtype, parameter_dtype;
    cudaStream_t stream;

    int64_t rows() const // groups of images
    {
        return sizes.images * sizes.groups;
    }
    int64_t group_channels() const
    {
        return sizes.channels / sizes.groups;
    }
    int64_t cols() const // elements of a group
    {
        return group_channels() * sizes.inner;
    }
};

// Forward of groups that are contiguous rows, each in the registers of a part of a warp, a warp or a block, or of a
// cluster of blocks (rows.cu).
Answer group_norm_registers_supports(const GroupNormCall &call, const Device &device);
Answer group_norm_cluster_supports(const GroupNormCall &call, const Device &device);
cuda_ops_status group_norm_rows(const GroupNormCall &call, const Device &device);
// Forward of all groups: moments first, then the result (split.cu).
int64_t group_norm_split_workspace(const GroupNormCall &call, const Device &device);
cuda_ops_status group_norm_split(const GroupNormCall &call, const Device &device);

// Backward, which has one way (backward.cu).
int64_t group_norm_backward_workspace(const GroupNormCall &call);
cuda_ops_status group_norm_backward(const GroupNormCall &call);

#endif
