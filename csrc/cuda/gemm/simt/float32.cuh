// Rung 10's tiles in float32.
#ifndef CUDA_OPS_GEMM_SIMT_FLOAT32_CUH
#define CUDA_OPS_GEMM_SIMT_FLOAT32_CUH

#include "gemm/simt/kernel.cuh"
#include "gemm/simt/parts.h"

// At full size: 128 x 128, two blocks of 256 threads an SM. (On Hopper gemm/simt/float32_sm90.cu has a larger one.)
typedef SimtTile<4, 2, 1, 4, 8, 8, 16, 3, 2> Large;
// Where those are too few: 64 x 128 or 128 x 64 by 256 threads, each half of them summing half of the depths; or
// 96 x 128, which fills an SM alone.
typedef SimtTile<2, 2, 2, 4, 8, 8, 16, 3, 2, true> Small;
typedef SimtTile<4, 1, 2, 4, 8, 8, 16, 3, 2, true> Tall;
typedef SimtTile<2, 2, 2, 4, 12, 8, 16, 3, 1, true> Middle;
// For many small ones: 64 x 64 by two warps.
typedef SimtTile<2, 1, 1, 4, 8, 8, 16, 3, 6, true> Square;
// For a D of a few rows or columns: 32 x 64 by four warps that sum a quarter of the depths each.
typedef SimtTile<1, 1, 4, 4, 8, 8, 16, 3, 4, true> Tiny;

// Their numbers among the choices.
enum { LARGE, SMALL, TALL, MIDDLE, SQUARE, TINY };

// All but Large; of operands whose lines cannot be copied 16 bytes at a time Small, whichever is named.
cuda_ops_status gemm_simt_small(const GemmCall &call, int tile, bool vectors, int64_t pieces);

#endif
