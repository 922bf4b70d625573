// movmatrix (sm_75): a matrix of 8 x 8 elements of 16 bits in a warp's registers, lane 4 i + j with elements 2 j and 2 j + 1
// of row i, becomes its transpose, which lies there alike.
#ifndef CUDA_OPS_PTX_MOVMATRIX_CUH
#define CUDA_OPS_PTX_MOVMATRIX_CUH

#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t row)
{
    uint32_t column = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
#else
    (void)row;
#endif
    return column;
}

#endif
