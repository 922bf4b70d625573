// Tensor maps of attention's tensors, for a batch or for packed sequences, and copies of boxes by them.
#ifndef CUDA_OPS_ATTENTION_SM90_MAPS_H
#define CUDA_OPS_ATTENTION_SM90_MAPS_H

#include "attention/paths.h"
#include "common/tensor_map.h"
#include "ptx/prefetch_tensor.cuh"
#include "ptx/tma.cuh"

// A tensor of a call: [heads][rows][elements] of each of the batch, or of all sequences.
static inline HeadsLayout layout_of(const cuda_ops_attention &p, int64_t heads, int64_t rows, int64_t elements,
                                    const cuda_ops_attention_strides &strides)
{
    return {p.batch, heads, rows, elements, strides.batch, strides.head, strides.row};
}
static inline HeadsLayout query_layout(const cuda_ops_attention &p, int64_t elements,
                                       const cuda_ops_attention_strides &strides)
{
    return layout_of(p, p.heads, p.sequences.query_starts ? p.sequences.query_rows : p.queries, elements, strides);
}
static inline HeadsLayout key_layout(const cuda_ops_attention &p, int64_t elements,
                                     const cuda_ops_attention_strides &strides)
{
    return layout_of(p, p.key_heads, p.sequences.query_starts ? p.sequences.key_rows : p.keys, elements, strides);
}

template <bool PACKED>
static inline bool make_rows_map(CUtensorMap *map, const void *tensor, cuda_ops_dtype dtype, const HeadsLayout &layout,
                                 int box_rows)
{
    return PACKED ? make_packed_map(map, tensor, dtype, layout, box_rows)
                  : make_heads_map(map, tensor, dtype, layout, box_rows);
}

// Where rows are: of this batch, or of a sequence of so many rows that ends at `end`.
template <bool PACKED>
struct RowsPlace;
template <>
struct RowsPlace<false> {
    int batch;
};
template <>
struct RowsPlace<true> {
    int end, before; // before: what the map's window has before the first row

    __device__ __forceinline__ RowsPlace(int first, int length) : end(first + length), before(PACKED_ROWS - length)
    {
    }
};

__device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column, int row,
                                          int head, const RowsPlace<false> &place)
{
    tma_load_4d(to, map, barrier, column, row, head, place.batch);
}
__device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column, int row,
                                          int head, const RowsPlace<true> &place)
{
    tma_load_5d(to, map, barrier, column, place.before + row, head, place.end, PACKED_ROWS);
}
__device__ __forceinline__ void prefetch_rows(const CUtensorMap *map, int column, int row, int head,
                                              const RowsPlace<false> &place)
{
    tma_prefetch_4d(map, column, row, head, place.batch);
}
__device__ __forceinline__ void prefetch_rows(const CUtensorMap *map, int column, int row, int head,
                                              const RowsPlace<true> &place)
{
    tma_prefetch_5d(map, column, place.before + row, head, place.end, PACKED_ROWS);
}
__device__ __forceinline__ void store_rows(const CUtensorMap *map, uint32_t from, int column, int row, int head,
                                           const RowsPlace<false> &place)
{
    tma_store_4d(map, from, column, row, head, place.batch);
}
__device__ __forceinline__ void store_rows(const CUtensorMap *map, uint32_t from, int column, int row, int head,
                                           const RowsPlace<true> &place)
{
    tma_store_5d(map, from, column, place.before + row, head, place.end, PACKED_ROWS);
}

#endif
