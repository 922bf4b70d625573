// TMA (sm_90), cp.async.bulk.tensor: copies boxes of a tensor, described by a CUtensorMap (common/tensor_map.h), to and
// from shared memory, and swizzles them on the way. Elements out of bounds read as zero and are not written.
// Coordinates are in elements, the innermost dimension first. Counted and waited for like the copies of
// ptx/cp_async_bulk.cuh.
#ifndef CUDA_OPS_PTX_TMA_CUH
#define CUDA_OPS_PTX_TMA_CUH

#include <cuda.h> // CUtensorMap; nothing of the driver is linked

#include "ptx/cp_async_bulk.cuh"

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_3d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int inner, int outer,
                                            int batch)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(inner), "r"(outer), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int inner, int row,
                                            int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(inner), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_load_5d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int inner, int row,
                                            int head, int end, int wrap)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(inner), "r"(row), "r"(head), "r"(end), "r"(wrap)
                 : "memory");
}
// Multicast: the same into each block of the cluster whose bit is set in `blocks`, at the same address, counted by its
// own barrier.
__device__ __forceinline__ void tma_load_3d_multicast(uint32_t to, const CUtensorMap *map, uint32_t barrier, int inner,
                                                      int outer, int batch, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(inner), "r"(outer), "r"(batch), "h"(blocks)
                 : "memory");
}

// From an im2col map: pixels in the map's order from (x, y, image) on, each moved by the offsets, a filter tap's
// coordinates; of each pixel the channels from `channel` on.
__device__ __forceinline__ void tma_load_im2col_4d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int channel,
                                                   int x, int y, int image, int offset_x, int offset_y)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(x), "r"(y), "r"(image), "h"((uint16_t)offset_x),
                 "h"((uint16_t)offset_y)
                 : "memory");
}
__device__ __forceinline__ void tma_load_im2col_4d_multicast(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                                             int channel, int x, int y, int image, int offset_x,
                                                             int offset_y, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(x), "r"(y), "r"(image), "h"((uint16_t)offset_x),
                 "h"((uint16_t)offset_y), "h"(blocks)
                 : "memory");
}

// Into the group that bulk_commit_group() closes.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap *map, uint32_t from, int inner, int outer, int batch)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(inner), "r"(outer), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, uint32_t from, int inner, int row, int head,
                                             int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(inner), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_store_5d(const CUtensorMap *map, uint32_t from, int inner, int row, int head,
                                             int end, int wrap)
{
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(from), "r"(inner), "r"(row), "r"(head), "r"(end), "r"(wrap)
                 : "memory");
}

#endif
