// gemm, narrow path: bfloat16.
#include "gemm/narrow/columns.cuh"
#include "gemm/narrow/outer.cuh"
#include "gemm/narrow/rows.cuh"

cuda_ops_status gemm_narrow_rows_bfloat16(const NarrowRows &work, GemmDevice device, cudaStream_t stream)
{
    return launch_rows<__nv_bfloat16>(work, device, stream);
}

cuda_ops_status gemm_narrow_columns_bfloat16(const NarrowColumns &work, int64_t splits, int64_t pieces,
                                             cudaStream_t stream)
{
    return launch_columns<__nv_bfloat16>(work, splits, pieces, stream);
}

cuda_ops_status gemm_narrow_outer_bfloat16(const NarrowOuter &work, GemmDevice device, cudaStream_t stream)
{
    return launch_outer<__nv_bfloat16>(work, device, stream);
}
