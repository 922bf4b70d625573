// What rungs 1 to 4 share: a block of 32 x 8 threads moves a tile of 32 x 32 elements, four a thread.
#ifndef CUDA_OPS_TRANSPOSE_LADDER_TILE_CUH
#define CUDA_OPS_TRANSPOSE_LADDER_TILE_CUH

#include "common/common.cuh"
#include "transpose/ladder/rungs.h"

static constexpr int TILE = 32;
static constexpr int LINES = 8; // of a tile at a time, a warp each

// Elements are moved, not computed with: what counts is their size.
#define DISPATCH_BY_SIZE(tensor, T, ...)                                                                               \
    if (element_bytes(tensor) == 2) {                                                                                  \
        typedef uint16_t T;                                                                                            \
        __VA_ARGS__;                                                                                                   \
    } else if (element_bytes(tensor) == 4) {                                                                           \
        typedef uint32_t T;                                                                                            \
        __VA_ARGS__;                                                                                                   \
    } else {                                                                                                           \
        typedef uint64_t T;                                                                                            \
        __VA_ARGS__;                                                                                                   \
    }

// Where the block's tile begins in an input of so many columns: neighbours along a row are neighbouring blocks.
template <int SIDE>
__device__ __forceinline__ int64_t first_row(int64_t columns)
{
    return blockIdx.x / ceil_div(columns, SIDE) * SIDE;
}
template <int SIDE>
__device__ __forceinline__ int64_t first_column(int64_t columns)
{
    return blockIdx.x % ceil_div(columns, SIDE) * SIDE;
}

// kernel<<<a block for each tile>>>(output, input, rows, columns)
template <int SIDE, typename T>
static void launch_tiles(const LadderCall &call, dim3 block, void (*kernel)(T *, const T *, int64_t, int64_t))
{
    const LadderTensor &input = call.inputs[0];
    const int64_t rows = input.sizes[0], columns = input.sizes[1];
    if (input.count > 0)
        kernel<<<(unsigned int)(ceil_div(rows, SIDE) * ceil_div(columns, SIDE)), block, 0, call.stream>>>(
            static_cast<T *>(call.outputs[0].data), static_cast<const T *>(input.data), rows, columns);
}

#endif
