// attention's simt path for float64.
#include "attention/simt/kernel.cuh"

cuda_ops_status attention_simt_float64(const AttentionCall &call)
{
    return launch_attention<double>(call);
}
