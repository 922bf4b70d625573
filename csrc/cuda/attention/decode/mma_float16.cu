// attention's decode path on the tensor cores for float16.
#include "attention/decode/mma_kernel.cuh"

cuda_ops_status decode_mma_float16(int head, const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    return launch_decode_mma<__half>(head, work, blocks, stream);
}

int decode_mma_float16_blocks(int head)
{
    return decode_mma_blocks<__half>(head);
}
