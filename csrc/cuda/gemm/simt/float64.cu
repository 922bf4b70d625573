// gemm, simt path in float64: see gemm/simt/simt.cu. A thread makes 8 x 4. One tile, copied element by element: from
// Ampere on the mma path takes float64, and GPUs before have a 32nd of float32's rate.
#include "gemm/simt/kernel.cuh"
#include "gemm/simt/parts.h"

typedef SimtTile<4, 2, 1, 4, 8, 4, 16, 2, 1> Tile; // 128 x 64, within the 64 KB of Turing
static const SimtChoice CHOICES[] = {{Tile::M, Tile::N, 1, 1, Tile::THROUGH_SHARED}};

int64_t gemm_simt_float64_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return simt_workspace<Tile>(problem, simt_plan(CHOICES, problem, device).splits);
}

cuda_ops_status gemm_simt_float64(const GemmCall &call, GemmDevice device)
{
    return simt_launch<double, Tile, 1>(call, simt_plan(CHOICES, call.problem, device).splits);
}
