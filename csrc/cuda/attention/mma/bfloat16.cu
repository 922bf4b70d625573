// attention's mma path for bfloat16.
#include "attention/mma/kernel.cuh"

cuda_ops_status attention_mma_bfloat16(AttentionProduct product, int head, const MmaAttention &work, int64_t blocks,
                                       cudaStream_t stream)
{
    return launch_mma_attention<__nv_bfloat16>(product, head, work, blocks, stream);
}
