// attention's backward of rows of 129 to 256 elements on Hopper, float16: see backward_wide_bfloat16.cu.
#include "attention/sm90/backward_wide.cuh"

cuda_ops_status attention_sm90_backward_wide_float16(const AttentionCall &call)
{
    return launch_backward_wide_of<__half>(call);
}
