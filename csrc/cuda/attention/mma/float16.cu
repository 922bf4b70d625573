// attention's mma path for float16.
#include "attention/mma/kernel.cuh"

cuda_ops_status attention_mma_float16(AttentionProduct product, int head, const MmaAttention &work, int64_t blocks,
                                      cudaStream_t stream)
{
    return launch_mma_attention<__half>(product, head, work, blocks, stream);
}
