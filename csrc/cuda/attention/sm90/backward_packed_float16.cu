// attention's backward on Hopper of packed sequences, float16; see backward_packed_bfloat16.cu.
#include "attention/sm90/backward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_backward_packed_float16(const AttentionCall &call, const Device &device)
{
    return launch_backward_of<__half, false, true>(call, device);
}
