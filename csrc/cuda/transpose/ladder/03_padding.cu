// transpose, rung 3: a column of padding in the tile.
//     output[j][i] = input[i][j]
// Threads: as in rung 2; `TILE + 1` is all that differs. Element (y, x) now lies at word 33 * y + x, and so in bank
// (y + x) % 32: the elements of a column are in 32 different banks, as those of a row are. Fixes: the bank conflicts.
// Leaves: 32 elements of shared memory for nothing, and rows that no longer begin at multiples of 16 bytes, so that
// neither vectors nor TMA could read or write them. Bound by the number of loads and stores in flight: 4 bytes each.
#include "transpose/ladder/tile.cuh"

template <typename T>
__global__ void __launch_bounds__(TILE *LINES)
    transpose_padding_kernel(T *output, const T *input, int64_t rows, int64_t columns)
{
    __shared__ T tile[TILE][TILE + 1];
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

cuda_ops_status transpose_padding(const LadderCall &call)
{
    DISPATCH_BY_SIZE(call.inputs[0], T, launch_tiles<TILE>(call, dim3(TILE, LINES), transpose_padding_kernel<T>));
    return launch_status();
}
