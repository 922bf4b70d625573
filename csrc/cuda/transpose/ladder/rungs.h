// The ladder of transpose: output[j][i] = input[i][j]; elements of 2, 4 and 8 bytes.
#ifndef CUDA_OPS_TRANSPOSE_LADDER_RUNGS_H
#define CUDA_OPS_TRANSPOSE_LADDER_RUNGS_H

#include "ladder/ladder.h"

cuda_ops_status transpose_naive(const LadderCall &call);
cuda_ops_status transpose_tile(const LadderCall &call);
cuda_ops_status transpose_padding(const LadderCall &call);
cuda_ops_status transpose_swizzle(const LadderCall &call);
cuda_ops_status transpose_vectors(const LadderCall &call);
cuda_ops_status transpose_tma(const LadderCall &call);
Answer transpose_tma_supports(const LadderCall &call, const Device &device);

static const LadderRung TRANSPOSE_RUNGS[] = {
    {1, transpose_naive, nullptr, nullptr},   {2, transpose_tile, nullptr, nullptr},
    {3, transpose_padding, nullptr, nullptr}, {4, transpose_swizzle, nullptr, nullptr},
    {5, transpose_vectors, nullptr, nullptr}, {6, transpose_tma, transpose_tma_supports, nullptr},
};

static inline Answer transpose_check(const LadderCall &call)
{
    if (!has_tensors(call, 1, 1) || call.inputs[0].dims != 2 ||
        !has_shape(call.outputs[0], 2, call.inputs[0].sizes[1], call.inputs[0].sizes[0]))
        return no("transpose has one input of two dimensions, and one output of the two exchanged");
    if (call.outputs[0].dtype != call.inputs[0].dtype)
        return no("output and input have to be of one dtype");
    // Of 16 x 16, the smallest that a rung has.
    if (call.inputs[0].count > 0 && (call.inputs[0].sizes[0] / 16 + 1) * (call.inputs[0].sizes[1] / 16 + 1) > INT32_MAX)
        return no("more tiles than a grid has blocks");
    return element_bytes(call.inputs[0]) >= 2 ? YES : no("takes elements of 2, 4 and 8 bytes");
}

#endif
