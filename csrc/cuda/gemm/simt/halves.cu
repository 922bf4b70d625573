// gemm, simt path in fp16 and bf16: see gemm/simt/simt.cu. Elements are widened to float32 on their way to shared
// memory, by loads and stores of one element each: for devices without tensor cores for a dtype.
#include "gemm/simt/kernel.cuh"
#include "gemm/simt/parts.h"

typedef SimtTile<2, 2, 2, 4, 8, 8, 16, 2, 2> Tile; // 64 x 128
static const SimtChoice CHOICES[] = {{Tile::M, Tile::N, 0.8, 1, Tile::THROUGH_SHARED}};

int64_t gemm_simt_halves_workspace(const cuda_ops_gemm_problem &problem, GemmDevice device)
{
    return simt_workspace<Tile>(problem, simt_plan(CHOICES, problem, device).splits);
}

cuda_ops_status gemm_simt_halves(const GemmCall &call, GemmDevice device)
{
    const int64_t splits = simt_plan(CHOICES, call.problem, device).splits;
    return call.problem.dtype == CUDA_OPS_FLOAT16 ? simt_launch<__half, Tile, 1>(call, splits)
                                                  : simt_launch<__nv_bfloat16, Tile, 1>(call, splits);
}
