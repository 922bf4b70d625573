// attention's simt path for bfloat16.
#include "attention/simt/kernel.cuh"

cuda_ops_status attention_simt_bfloat16(const AttentionCall &call)
{
    return launch_attention<__nv_bfloat16>(call);
}
