// gemm, narrow path: float16.
#include "gemm/narrow/columns.cuh"
#include "gemm/narrow/outer.cuh"
#include "gemm/narrow/rows.cuh"

cuda_ops_status gemm_narrow_rows_float16(const NarrowRows &work, GemmDevice device, cudaStream_t stream)
{
    return launch_rows<__half>(work, device, stream);
}

cuda_ops_status gemm_narrow_columns_float16(const NarrowColumns &work, int64_t splits, int64_t pieces,
                                            cudaStream_t stream)
{
    return launch_columns<__half>(work, splits, pieces, stream);
}

cuda_ops_status gemm_narrow_outer_float16(const NarrowOuter &work, GemmDevice device, cudaStream_t stream)
{
    return launch_outer<__half>(work, device, stream);
}
