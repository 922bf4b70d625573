// gemm, mma path: bfloat16.
#include "gemm/mma/kernel.cuh"

cuda_ops_status gemm_mma_bfloat16(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned,
                                  cudaStream_t stream)
{
    return launch_mma_sync<__nv_bfloat16>(work, p, aligned, stream);
}
