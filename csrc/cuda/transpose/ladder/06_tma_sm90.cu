// transpose, rung 6: Hopper's tensor memory accelerator moves the tiles, threads only turn them.
//     output[j][i] = input[i][j]
// Threads: a block of 128 for 2 x 2 tiles of 128 bytes times as many elements, a warp each. One lane asks for the tile
// (cp.async.bulk.tensor), and all wait at an mbarrier for the bytes of the four. TMA permutes as it writes: vector v of row
// r is at v ^ (r % 8). A thread takes two squares of V x V elements out, turns them in registers, and after a barrier puts
// them back where the transposed tile has them; squares go to lanes along diagonals, so that eight lanes meet different
// banks when they read and when they write. One lane sends the tile off. Fixes: addresses, edges and rows of 128 bytes are
// the hardware's affair; no thread waits for a load of its own, so that few of them keep many bytes in flight. Leaves:
// matrices whose rows, in input or output, are no multiple of 16 bytes, which TMA does not take; and a block's load, turn
// and store follow each other, so that it takes several blocks on each SM to keep memory busy. Bound by memory.
#include "common/aligned_vector.cuh"
#include "common/tensor_map.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "transpose/ladder/tile.cuh"

#if defined(CUDA_OPS_SM90A)

static constexpr int PIECES = 8; // vectors of 16 bytes in a row of a tile, 128 bytes
static constexpr int ACROSS = 2; // tiles of a block, either way
static constexpr int GROUP = 32; // threads of a tile
static constexpr int THREADS = GROUP * ACROSS * ACROSS;

template <typename T>
static constexpr int SIDE = PIECES * vector16<T>::size;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    transpose_tma_kernel(const __grid_constant__ CUtensorMap to, const __grid_constant__ CUtensorMap from,
                         int64_t columns)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int V = vector16<T>::size, TILE_BYTES = SIDE<T> * SWIZZLE_ROW;
    typedef vector16<T> Vector;
    // The maps count words of 4 bytes where elements have 8.
    constexpr int WORDS = sizeof(T) == 8 ? 2 : 1;
    __shared__ __align__(SWIZZLE_ATOM) Vector tiles[ACROSS * ACROSS][SIDE<T>][PIECES];
    __shared__ uint64_t arrived;
    const int64_t row = first_row<ACROSS * SIDE<T>>(columns), column = first_column<ACROSS * SIDE<T>>(columns);
    const int mine = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
    const int down = mine / ACROSS * SIDE<T>, right = mine % ACROSS * SIDE<T>;
    const uint32_t barrier = shared_address(&arrived), tile = shared_address(tiles[mine]);
    if (threadIdx.x == 0)
        mbarrier_init_fenced(barrier, ACROSS * ACROSS);
    __syncthreads();
    if (thread == 0) { // beyond the edges TMA reads zeros, and writes nothing
        mbarrier_arrive_expect_tx(barrier, TILE_BYTES);
        tma_load_3d(tile, &from, barrier, (int)(column + right) * WORDS, (int)row + down, 0);
    }
    mbarrier_wait(barrier, 0);
    // Two squares of a thread, both in registers until all threads have theirs.
    const int x = thread % PIECES, y[2] = {thread / PIECES ^ x, (thread + GROUP) / PIECES ^ x};
    Vector square[2][V];
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int r = 0; r < V; r++)
            square[k][r] = tiles[mine][y[k] * V + r][x ^ ((y[k] * V + r) % PIECES)];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int r = 0; r < V; r++) {
            Vector turned;
#pragma unroll
            for (int e = 0; e < V; e++)
                turned.element[e] = square[k][e].element[r];
            tiles[mine][x * V + r][y[k] ^ ((x * V + r) % PIECES)] = turned;
        }
    fence_proxy_async();
    __syncthreads();
    if (thread == 0) {
        tma_store_3d(&to, tile, (int)(row + down) * WORDS, (int)column + right, 0);
        bulk_commit_group();
        bulk_wait_group_read<0>();
    }
#endif
}

template <typename T>
static bool make_tile_map(CUtensorMap *map, const LadderTensor &matrix)
{
    constexpr int WORDS = sizeof(T) == 8 ? 2 : 1;
    return make_map(map, matrix.data, sizeof(T) == 2 ? CUDA_OPS_FLOAT16 : CUDA_OPS_FLOAT32, false,
                    matrix.sizes[1] * WORDS, matrix.sizes[0], 1, matrix.sizes[1] * WORDS, 0, SIDE<T> * WORDS, SIDE<T>);
}

template <typename T>
static cuda_ops_status launch(const LadderCall &call)
{
    const LadderTensor &input = call.inputs[0], &output = call.outputs[0];
    CUtensorMap from, to;
    if (!make_tile_map<T>(&from, input) || !make_tile_map<T>(&to, output))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t blocks = ceil_div(input.sizes[0], ACROSS * SIDE<T>) * ceil_div(input.sizes[1], ACROSS * SIDE<T>);
    transpose_tma_kernel<T><<<(unsigned int)blocks, THREADS, 0, call.stream>>>(to, from, input.sizes[1]);
    return launch_status();
}
#endif

Answer transpose_tma_supports(const LadderCall &call, const Device &device)
{
#if defined(CUDA_OPS_SM90A)
    const LadderTensor &input = call.inputs[0], &output = call.outputs[0];
    const int64_t bytes = element_bytes(input), rows = input.sizes[0], columns = input.sizes[1];
    if (device.capability != 90)
        return NEEDS_90;
    // In words of 4 bytes twice as many as there are elements, where these have 8: at the most, half of what TMA counts.
    return rows < INT32_MAX / 4 && columns < INT32_MAX / 4 &&
                   map_possible(input.data, bytes, columns, rows, 1, columns, 0) &&
                   map_possible(output.data, bytes, rows, columns, 1, rows, 0)
               ? YES
               : no("rows of input or output are no multiple of 16 bytes, or larger than TMA takes");
#else
    (void)call, (void)device;
    return NOT_COMPILED;
#endif
}

cuda_ops_status transpose_tma(const LadderCall &call)
{
#if defined(CUDA_OPS_SM90A)
    switch (element_bytes(call.inputs[0])) {
    case 2:
        return launch<uint16_t>(call);
    case 4:
        return launch<uint32_t>(call);
    default:
        return launch<uint64_t>(call);
    }
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
