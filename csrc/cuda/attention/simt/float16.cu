// attention's simt path for float16.
#include "attention/simt/kernel.cuh"

cuda_ops_status attention_simt_float16(const AttentionCall &call)
{
    return launch_attention<__half>(call);
}
