// gemm, narrow path: float32.
#include "gemm/narrow/columns.cuh"
#include "gemm/narrow/outer.cuh"
#include "gemm/narrow/rows.cuh"

cuda_ops_status gemm_narrow_rows_float32(const NarrowRows &work, GemmDevice device, cudaStream_t stream)
{
    return launch_rows<float>(work, device, stream);
}

cuda_ops_status gemm_narrow_columns_float32(const NarrowColumns &work, int64_t splits, int64_t pieces,
                                            cudaStream_t stream)
{
    return launch_columns<float>(work, splits, pieces, stream);
}

cuda_ops_status gemm_narrow_outer_float32(const NarrowOuter &work, GemmDevice device, cudaStream_t stream)
{
    return launch_outer<float>(work, device, stream);
}
