// gemm, simt path in float32, all tiles but the largest: see gemm/simt/simt.cu.
#include "gemm/simt/float32.cuh"

cuda_ops_status gemm_simt_small(const GemmCall &call, int tile, bool vectors, int64_t splits)
{
    if (!vectors)
        return simt_launch<float, Small, 1>(call, splits);
    switch (tile) {
    case SMALL:
        return simt_launch<float, Small, 4>(call, splits);
    case TALL:
        return simt_launch<float, Tall, 4>(call, splits);
    case MIDDLE:
        return simt_launch<float, Middle, 4>(call, splits);
    case SQUARE:
        return simt_launch<float, Square, 4>(call, splits);
    default:
        return simt_launch<float, Tiny, 4>(call, splits);
    }
}
