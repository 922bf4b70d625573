// gemm, mma path: float16.
#include "gemm/mma/kernel.cuh"

cuda_ops_status gemm_mma_float16(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned, cudaStream_t stream)
{
    return launch_mma_sync<__half>(work, p, aligned, stream);
}
