// attention's decode path on the tensor cores for bfloat16.
#include "attention/decode/mma_kernel.cuh"

cuda_ops_status decode_mma_bfloat16(int head, const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    return launch_decode_mma<__nv_bfloat16>(head, work, blocks, stream);
}

int decode_mma_bfloat16_blocks(int head)
{
    return decode_mma_blocks<__nv_bfloat16>(head);
}
