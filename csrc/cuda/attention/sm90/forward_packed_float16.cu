// attention's forward on Hopper of packed sequences, float16; see forward_packed_bfloat16.cu.
#include "attention/sm90/forward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_forward_packed_float16(const AttentionCall &call, const Device &device)
{
    return launch_forward_of<__half, false, true>(call, device);
}
