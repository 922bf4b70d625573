// attention's simt path for float32.
#include "attention/simt/kernel.cuh"

cuda_ops_status attention_simt_float32(const AttentionCall &call)
{
    return launch_attention<float>(call);
}
