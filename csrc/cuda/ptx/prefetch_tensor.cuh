// cp.async.bulk.prefetch.tensor (sm_90): the box that a TMA copy (ptx/tma.cuh) would load comes to the L2.
#ifndef CUDA_OPS_PTX_PREFETCH_TENSOR_CUH
#define CUDA_OPS_PTX_PREFETCH_TENSOR_CUH

#include <cuda.h> // CUtensorMap; nothing of the driver is linked

__device__ __forceinline__ void tma_prefetch_3d(const CUtensorMap *map, int inner, int outer, int batch)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(inner), "r"(outer),
                 "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap *map, int inner, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(inner), "r"(row),
                 "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch_5d(const CUtensorMap *map, int inner, int row, int head, int end, int wrap)
{
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(inner),
                 "r"(row), "r"(head), "r"(end), "r"(wrap)
                 : "memory");
}

#endif
