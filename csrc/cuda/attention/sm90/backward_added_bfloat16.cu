// attention's backward on Hopper, bfloat16, with a mask that is added; see backward_bfloat16.cu.
#include "attention/sm90/added_mask.cuh"
#include "attention/sm90/backward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_backward_added_bfloat16(const AttentionCall &call, const Device &device)
{
    return call.problem.dropout != 0 ? launch_backward_of<__nv_bfloat16, true, false, ADDED_MASK>(call, device)
                                     : launch_backward_of<__nv_bfloat16, false, false, ADDED_MASK>(call, device);
}
