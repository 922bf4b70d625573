// Rows that blocks of a two-dimensional grid share: a block has one row or several, a thread 16 bytes of a row at a time in
// a grid-stride loop; a row's last elements, and rows that do not begin at multiples of 16 bytes, go element by element.
#ifndef CUDA_OPS_COMMON_ROW_BLOCKS_CUH
#define CUDA_OPS_COMMON_ROW_BLOCKS_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int ROW_BLOCK_THREADS = 256;

// Calls function(row, c, none) for the elements c to c + SIZE - 1 of a row, `none` being an aligned_vector of SIZE
// without a value. vectors: of a row; 0 where they are not aligned.
template <typename T, typename F>
__device__ __forceinline__ void for_rows(int64_t rows, int64_t cols, int64_t vectors, F function)
{
    typedef vector16<T> V;
    const int64_t x = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < rows;
         row += (int64_t)gridDim.y * blockDim.y) {
        for (int64_t v = x; v < vectors; v += step)
            function(row, v * V::size, V());
        for (int64_t c = vectors * V::size + x; c < cols; c += step)
            function(row, c, aligned_vector<T, 1>());
    }
}

struct RowBlocks {
    int64_t vectors;
    dim3 grid, block;
};

// Rows of `cols` elements, `stride` apart in some of the arrays and cols in the others; aligned: all arrays are.
template <typename T>
static inline RowBlocks row_blocks(int64_t rows, int64_t cols, int64_t stride, bool aligned)
{
    constexpr int SIZE = vector16<T>::size;
    // Where there are several rows, each is to begin at a multiple of 16 bytes.
    const bool vectors = aligned && (rows == 1 || (cols % SIZE == 0 && stride % SIZE == 0));
    RowBlocks blocks = {vectors ? cols / SIZE : 0, {}, {}};
    const int64_t items = vectors && cols >= SIZE ? cols / SIZE : cols;
    unsigned int width = WARP_SIZE;
    while (width < ROW_BLOCK_THREADS && width < items)
        width *= 2;
    blocks.block = dim3(width, ROW_BLOCK_THREADS / width);
    blocks.grid = dim3(clamp_grid(ceil_div(items, width)), clamp_grid(ceil_div(rows, blocks.block.y)));
    return blocks;
}

#endif
