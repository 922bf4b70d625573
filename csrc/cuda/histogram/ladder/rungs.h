// The ladder of histogram: output[b] = how many elements of input are b, for b in 0 ... 255; uint8 and int32. Numbers
// outside are not counted.
#ifndef CUDA_OPS_HISTOGRAM_LADDER_RUNGS_H
#define CUDA_OPS_HISTOGRAM_LADDER_RUNGS_H

#include "ladder/ladder.h"

cuda_ops_status histogram_global_atomics(const LadderCall &call);
cuda_ops_status histogram_shared_atomics(const LadderCall &call);
cuda_ops_status histogram_per_warp(const LadderCall &call);
cuda_ops_status histogram_vectors(const LadderCall &call);
cuda_ops_status histogram_match(const LadderCall &call);
cuda_ops_status histogram_per_lane(const LadderCall &call);

static const LadderRung HISTOGRAM_RUNGS[] = {
    {1, histogram_global_atomics, nullptr, nullptr}, {2, histogram_shared_atomics, nullptr, nullptr},
    {3, histogram_per_warp, nullptr, nullptr},       {4, histogram_vectors, nullptr, nullptr},
    {5, histogram_match, nullptr, nullptr},          {6, histogram_per_lane, nullptr, nullptr},
};

static inline Answer histogram_check(const LadderCall &call)
{
    if (!has_tensors(call, 1, 1) || !has_shape(call.outputs[0], 1, 256) ||
        call.outputs[0].dtype != CUDA_OPS_LADDER_INT32)
        return no("histogram has one input, and one output of 256 elements, int32");
    if (call.inputs[0].count > INT32_MAX)
        return no("counts are of 32 bits: the input has to have less than 2^31 elements");
    const int dtype = call.inputs[0].dtype;
    return dtype == CUDA_OPS_LADDER_UINT8 || dtype == CUDA_OPS_LADDER_INT32 ? YES : no("takes uint8 and int32");
}

#endif
