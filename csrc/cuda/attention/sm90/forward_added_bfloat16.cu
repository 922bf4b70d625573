// attention's forward on Hopper, bfloat16, with a mask that is added; see forward_bfloat16.cu.
#include "attention/sm90/added_mask.cuh"
#include "attention/sm90/forward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_forward_added_bfloat16(const AttentionCall &call, const Device &device)
{
    return call.problem.dropout != 0 ? launch_forward_of<__nv_bfloat16, true, false, ADDED_MASK>(call, device)
                                     : launch_forward_of<__nv_bfloat16, false, false, ADDED_MASK>(call, device);
}
