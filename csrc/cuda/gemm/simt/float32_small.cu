// gemm, rung 10 in float32 where D is not large: see gemm/simt/simt.cu.
#include "gemm/simt/float32.cuh"

cuda_ops_status gemm_simt_small(const GemmCall &call, int tile, bool vectors, int64_t pieces)
{
    if (!vectors)
        return simt_launch<float, Small, 1>(call, pieces);
    switch (tile) {
    case SMALL:
        return simt_launch<float, Small, 4>(call, pieces);
    case TALL:
        return simt_launch<float, Tall, 4>(call, pieces);
    case MIDDLE:
        return simt_launch<float, Middle, 4>(call, pieces);
    case SQUARE:
        return simt_launch<float, Square, 4>(call, pieces);
    default:
        return simt_launch<float, Tiny, 4>(call, pieces);
    }
}
