// transpose, rung 4: the tile without padding, its rows permuted.
//     output[j][i] = input[i][j]
// Threads: as in rung 2. Element (y, x) lies at x ^ y of row y: each row is permuted within itself, each in another way,
// so that the elements of a column meet 32 different banks, and so do those of a row. Fixes: the shared memory that
// padding takes, and rows stay where they are: what is permuted in pieces of 16 bytes can be moved by 16 bytes, which
// rung 5 does. Alone it is worth nothing: x ^ y is another instruction for each element, and on an H200 this rung is a
// tenth slower than rung 3. Leaves: one element for each load and store. Bound, as rung 3, by their number in flight.
#include "transpose/ladder/tile.cuh"

template <typename T>
__global__ void __launch_bounds__(TILE *LINES)
    transpose_swizzle_kernel(T *output, const T *input, int64_t rows, int64_t columns)
{
    __shared__ T tile[TILE][TILE];
    const int64_t row = first_row<TILE>(columns), column = first_column<TILE>(columns);
    const int x = threadIdx.x;
#pragma unroll
    for (int y = threadIdx.y; y < TILE; y += LINES)
        if (row + y < rows && column + x < columns)
            tile[y][x ^ y] = input[(row + y) * columns + column + x];
    __syncthreads();
#pragma unroll
    for (int y = threadIdx.y; y < TILE; y += LINES)
        if (column + y < columns && row + x < rows)
            output[(column + y) * rows + row + x] = tile[x][y ^ x];
}

cuda_ops_status transpose_swizzle(const LadderCall &call)
{
    DISPATCH_BY_SIZE(call.inputs[0], T, launch_tiles<TILE>(call, dim3(TILE, LINES), transpose_swizzle_kernel<T>));
    return launch_status();
}
