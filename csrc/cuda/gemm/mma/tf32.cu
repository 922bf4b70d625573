// gemm, mma path: TF32.
#include "gemm/mma/kernel.cuh"

cuda_ops_status gemm_mma_tf32(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned, cudaStream_t stream)
{
    return launch_mma_sync<float>(work, p, aligned, stream);
}
