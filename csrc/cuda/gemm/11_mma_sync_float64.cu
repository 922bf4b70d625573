// Rung 11 for float64.
#include "gemm/11_mma_sync.cuh"

cuda_ops_status gemm_mma_sync_float64(const MmaWork &work, const cuda_ops_gemm_problem &p, bool aligned,
                                      cudaStream_t stream)
{
    return launch_mma_sync<double>(work, p, aligned, stream);
}
