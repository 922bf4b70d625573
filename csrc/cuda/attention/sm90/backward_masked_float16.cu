// attention's backward on Hopper, float16, with a boolean mask; see backward_bfloat16.cu.
#include "attention/sm90/backward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_backward_masked_float16(const AttentionCall &call, const Device &device)
{
    return call.problem.dropout != 0 ? launch_backward_of<__half, true, false, BOOLEAN_MASK>(call, device)
                                     : launch_backward_of<__half, false, false, BOOLEAN_MASK>(call, device);
}
