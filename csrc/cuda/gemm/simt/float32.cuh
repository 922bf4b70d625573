// The simt path's tiles in float32.
#ifndef CUDA_OPS_GEMM_SIMT_FLOAT32_CUH
#define CUDA_OPS_GEMM_SIMT_FLOAT32_CUH

#include "gemm/simt/kernel.cuh"
#include "gemm/simt/parts.h"

// For large D: 128 x 128, two blocks of 256 threads an SM. (On Hopper gemm/simt/float32_sm90.cu has a larger tile.)
typedef SimtTile<4, 2, 1, 4, 8, 8, 16, 3, 2> Large;
// Where those are too few: 64 x 128 or 128 x 64 by 256 threads in two groups that split k; or 96 x
// 128, one block an SM.
typedef SimtTile<2, 2, 2, 4, 8, 8, 16, 3, 2, true> Small;
typedef SimtTile<4, 1, 2, 4, 8, 8, 16, 3, 2, true> Tall;
typedef SimtTile<2, 2, 2, 4, 12, 8, 16, 3, 1, true> Middle;
// For many small matrices: 64 x 64 by two warps.
typedef SimtTile<2, 1, 1, 4, 8, 8, 16, 3, 6, true> Square;
// For a D of a few rows or columns: 32 x 64 by four warps that sum a quarter of k each.
typedef SimtTile<1, 1, 4, 4, 8, 8, 16, 3, 4, true> Tiny;

// Their indices in the list of choices (simt.cu).
enum { LARGE, SMALL, TALL, MIDDLE, SQUARE, TINY };

// All tiles but Large. Operands whose rows cannot be copied 16 bytes at a time take Small, whichever is named.
cuda_ops_status gemm_simt_small(const GemmCall &call, int tile, bool vectors, int64_t splits);

#endif
