// The ladder of softmax: output[r][c] = exp(input[r][c] - max) / sum over the row of exp(input[r][c] - max); float32.
#ifndef CUDA_OPS_SOFTMAX_LADDER_RUNGS_H
#define CUDA_OPS_SOFTMAX_LADDER_RUNGS_H

#include "ladder/ladder.h"

cuda_ops_status softmax_three_passes(const LadderCall &call);
cuda_ops_status softmax_two_passes(const LadderCall &call);
cuda_ops_status softmax_warp_a_row(const LadderCall &call);
cuda_ops_status softmax_registers(const LadderCall &call);
cuda_ops_status softmax_block_a_row(const LadderCall &call);
cuda_ops_status softmax_cluster_a_row(const LadderCall &call);
Answer softmax_cluster_a_row_supports(const LadderCall &call, const Device &device);

static const LadderRung SOFTMAX_RUNGS[] = {
    {1, softmax_three_passes, nullptr, nullptr}, {2, softmax_two_passes, nullptr, nullptr},
    {3, softmax_warp_a_row, nullptr, nullptr},   {4, softmax_registers, nullptr, nullptr},
    {5, softmax_block_a_row, nullptr, nullptr},  {6, softmax_cluster_a_row, softmax_cluster_a_row_supports, nullptr},
};

static inline Answer softmax_check(const LadderCall &call)
{
    if (!has_tensors(call, 1, 1) || call.inputs[0].dims != 2 || !same_shape(call.outputs[0], call.inputs[0]))
        return no("softmax has one input of two dimensions, and one output of its shape");
    if (call.inputs[0].dtype != CUDA_OPS_FLOAT32 || call.outputs[0].dtype != CUDA_OPS_FLOAT32)
        return no("takes float32");
    return call.inputs[0].sizes[0] <= INT32_MAX / 8 && call.inputs[0].sizes[1] <= INT32_MAX / 8
               ? YES
               : no("more rows than a grid has clusters, or longer ones");
}

#endif
