// The row of linear_cross_entropy's table for its path sm90.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_SM90_H
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_SM90_H

#include "linear_cross_entropy/problem.cuh"

Answer head_sm90_supports(const HeadCall &call, const Device &device);
Answer head_sm90_is_fast(const HeadCall &call, const Device &device);
int64_t head_sm90_workspace(const HeadCall &call, const Device &device);
cuda_ops_status head_sm90(const HeadCall &call, const Device &device);

#endif
