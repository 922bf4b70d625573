// transpose, rung 1: every thread moves elements from where they are to where they belong.
//     output[j][i] = input[i][j]
// Threads: blocks of 32 x 8 for a tile of 32 x 32. A warp reads 32 neighbours of a row of input, one request of whole
// cache lines, and writes them into 32 rows of output: 32 requests of 4 bytes each. Leaves: memory is written in sectors
// of 32 bytes, of which a warp's store fills an eighth; the caches have to collect the rest from other warps' stores, and
// for large matrices they cannot. Bound by the sectors written.
#include "transpose/ladder/tile.cuh"

template <typename T>
__global__ void __launch_bounds__(TILE *LINES)
    transpose_naive_kernel(T *output, const T *input, int64_t rows, int64_t columns)
{
    const int64_t row = first_row<TILE>(columns) + threadIdx.y, column = first_column<TILE>(columns) + threadIdx.x;
#pragma unroll
    for (int line = 0; line < TILE; line += LINES)
        if (row + line < rows && column < columns)
            output[column * rows + row + line] = input[(row + line) * columns + column];
}

cuda_ops_status transpose_naive(const LadderCall &call)
{
    DISPATCH_BY_SIZE(call.inputs[0], T, launch_tiles<TILE>(call, dim3(TILE, LINES), transpose_naive_kernel<T>));
    return launch_status();
}
