// transpose, rung 2: through a tile in shared memory, which is read by rows and written by rows.
//     output[j][i] = input[i][j]
// Threads: blocks of 32 x 8 for a tile of 32 x 32. The block brings 32 pieces of rows of input into shared memory, waits,
// and writes 32 pieces of rows of output; it is the tile that is read down its columns. Fixes: memory sees whole lines on
// both sides. Leaves: a column of the tile lies in one bank of shared memory, or, of 2-byte elements, in two, so that a
// warp's read takes 32 passes instead of one. Bound by these bank conflicts.
#include "transpose/ladder/tile.cuh"

template <typename T>
__global__ void __launch_bounds__(TILE *LINES)
    transpose_tile_kernel(T *output, const T *input, int64_t rows, int64_t columns)
{
    __shared__ T tile[TILE][TILE];
    const int64_t row = first_row<TILE>(columns), column = first_column<TILE>(columns);
    const int x = threadIdx.x;
#pragma unroll
    for (int y = threadIdx.y; y < TILE; y += LINES)
        if (row + y < rows && column + x < columns)
            tile[y][x] = input[(row + y) * columns + column + x];
    __syncthreads();
#pragma unroll
    for (int y = threadIdx.y; y < TILE; y += LINES)
        if (column + y < columns && row + x < rows)
            output[(column + y) * rows + row + x] = tile[x][y];
}

cuda_ops_status transpose_tile(const LadderCall &call)
{
    DISPATCH_BY_SIZE(call.inputs[0], T, launch_tiles<TILE>(call, dim3(TILE, LINES), transpose_tile_kernel<T>));
    return launch_status();
}
