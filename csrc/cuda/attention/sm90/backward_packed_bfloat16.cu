// attention's backward on Hopper of packed sequences, bfloat16; see backward_bfloat16.cu, and for how they are packed
// forward_packed_bfloat16.cu. Blocks of queries are numbered throughout all sequences.
#include "attention/sm90/backward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_backward_packed_bfloat16(const AttentionCall &call, const Device &device)
{
    return launch_backward_of<__nv_bfloat16, false, true>(call, device);
}
