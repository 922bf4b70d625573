// ldmatrix and stmatrix (sm_90): matrices of 8 rows of 16 bytes between shared memory and the registers of a
// warp, as mma.sync's operands lie there. Lane 8 m + i gives the address of row i of matrix m (a multiple of 16), and
// lane 4 i + j holds word j of row i: elements 2 j and 2 j + 1 of 16 bits, or one of 32. With .trans (16 bits alone)
// the rows in memory are the columns of the matrix: lane 4 i + j holds rows 2 j and 2 j + 1 of column i. Of x2, lanes 0
// to 15 give the addresses. The kernels that take ldmatrix have tensor cores of sm_80; before, it does nothing.
#ifndef CUDA_OPS_PTX_LDMATRIX_CUH
#define CUDA_OPS_PTX_LDMATRIX_CUH

#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&m)[4], uint32_t address)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
#else
    (void)m, (void)address;
#endif
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&m)[4], uint32_t address)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
#else
    (void)m, (void)address;
#endif
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t &m0, uint32_t &m1, uint32_t address)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m0), "=r"(m1)
                 : "r"(address)
                 : "memory");
#else
    (void)m0, (void)m1, (void)address;
#endif
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t &m0, uint32_t &m1, uint32_t address)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m0), "=r"(m1)
                 : "r"(address)
                 : "memory");
#else
    (void)m0, (void)m1, (void)address;
#endif
}

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t m0, uint32_t m1)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1)
                 : "memory");
}

#endif
