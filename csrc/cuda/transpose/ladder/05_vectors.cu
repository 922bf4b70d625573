// transpose, rung 5: 16 bytes at a time, on both sides.
//     output[j][i] = input[i][j]
// Threads: a block of 64 for a tile of 128 bytes times as many elements: 32 x 32 of 4 bytes, 64 x 64 of 2, 16 x 16 of 8.
// A thread reads V vectors of 16 bytes, one below the other: a square of V x V elements, which it transposes in its own
// registers, by naming them in another order. Through shared memory go whole vectors, vector v of row r at v ^ (r / V):
// those that eight lanes write, one in each of eight rows, meet different banks. Fixes: a quarter of the loads and
// stores, each of four times the bytes, so that enough of them are in flight to fill the memory's pipe. Where rows or
// pointers are not aligned to 16 bytes, rung 3 does it. Leaves: every byte passes through registers twice, and threads
// spend most of their instructions on addresses. Bound by memory.
#include "common/aligned_vector.cuh"
#include "transpose/ladder/tile.cuh"

static constexpr int PIECES = 8; // vectors in a row of a tile, 128 bytes

template <typename T>
static constexpr int SIDE = PIECES * vector16<T>::size;

template <typename T>
__global__ void __launch_bounds__(PIECES *PIECES)
    transpose_vectors_kernel(T *output, const T *input, int64_t rows, int64_t columns)
{
    constexpr int V = vector16<T>::size;
    typedef vector16<T> Vector;
    __shared__ Vector tile[SIDE<T>][PIECES]; // of output: its rows are input's columns
    const int x = threadIdx.x % PIECES, y = threadIdx.x / PIECES;
    const int64_t row = first_row<SIDE<T>>(columns), column = first_column<SIDE<T>>(columns);
    const int64_t i = row + y * V,
                  j = column + x * V; // no square is cut by an edge: rows and columns are multiples of V
    if (i < rows && j < columns) {
        Vector square[V];
#pragma unroll
        for (int r = 0; r < V; r++)
            square[r] = *reinterpret_cast<const Vector *>(input + (i + r) * columns + j);
#pragma unroll
        for (int r = 0; r < V; r++) {
            Vector turned;
#pragma unroll
            for (int e = 0; e < V; e++)
                turned.element[e] = square[e].element[r];
            tile[x * V + r][y ^ x] = turned;
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < V; k++) {
        const int r = y + k * PIECES; // a row of output, of which eight lanes write 128 bytes
        if (column + r < columns && row + x * V < rows)
            *reinterpret_cast<Vector *>(output + (column + r) * rows + row + x * V) = tile[r][x ^ (r / V)];
    }
}

template <typename T>
static cuda_ops_status launch(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0];
    constexpr int V = vector16<T>::size;
    if (!is_aligned_16(input.data) || !is_aligned_16(call.outputs[0].data) || input.sizes[0] % V != 0 ||
        input.sizes[1] % V != 0)
        return transpose_padding(call);
    launch_tiles<SIDE<T>>(call, dim3(PIECES * PIECES), transpose_vectors_kernel<T>);
    return launch_status();
}

cuda_ops_status transpose_vectors(const LadderCall &call)
{
    DISPATCH_BY_SIZE(call.inputs[0], T, return launch<T>(call));
}
