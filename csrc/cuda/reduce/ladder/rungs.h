// The ladder of reduce: output = sum over all i of input[i], float32 and float64.
#ifndef CUDA_OPS_REDUCE_LADDER_RUNGS_H
#define CUDA_OPS_REDUCE_LADDER_RUNGS_H

#include "ladder/ladder.h"

cuda_ops_status reduce_global_atomics(const LadderCall &call);
cuda_ops_status reduce_shared_tree(const LadderCall &call);
cuda_ops_status reduce_unrolled_warp(const LadderCall &call);
cuda_ops_status reduce_shuffles(const LadderCall &call);
cuda_ops_status reduce_vectors(const LadderCall &call);
cuda_ops_status reduce_last_block(const LadderCall &call);
cuda_ops_status reduce_dependent_launch(const LadderCall &call);
int64_t reduce_passes_workspace(const LadderCall &call);
int64_t reduce_last_block_workspace(const LadderCall &call);

static const LadderRung REDUCE_RUNGS[] = {
    {1, reduce_global_atomics, nullptr, nullptr},
    {2, reduce_shared_tree, nullptr, reduce_passes_workspace},
    {3, reduce_unrolled_warp, nullptr, reduce_passes_workspace},
    {4, reduce_shuffles, nullptr, reduce_passes_workspace},
    {5, reduce_vectors, nullptr, reduce_passes_workspace},
    {6, reduce_last_block, nullptr, reduce_last_block_workspace},
    {7, reduce_dependent_launch, nullptr, reduce_last_block_workspace},
};

static inline Answer reduce_check(const LadderCall &call)
{
    if (!has_tensors(call, 1, 1) || call.outputs[0].count != 1)
        return no("reduce has one output, of one element, and one input");
    const int dtype = call.inputs[0].dtype;
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return no("takes float32 and float64");
    return call.outputs[0].dtype == dtype ? YES : no("output and input have to be of one dtype");
}

#endif
