// permute_contiguous of rows that are whole vectors on both sides.
// A thread reads V vectors of V elements, one below the other: a square, which it turns in registers by naming them in
// another order, and has eight vectors in flight (one square of 2 bytes an element, four of 8). A block has 256 threads and
// a tile of 32 KB, `across` squares along k, whose rows come to lie in shared memory as output has them; vectors are
// swapped (xor) so that neither side meets bank conflicts. Bound by memory: one read, one write.
#include "permute_contiguous/permutation.cuh"

// Which vectors of a row are swapped: those that eight neighbouring threads write, `across` of them along k, meet
// different banks, and so do eight neighbours of a row.
__device__ __forceinline__ int swap_of(int x, int across_bits)
{
    return (across_bits < 3 ? x << (3 - across_bits) : x) & 7;
}

template <typename T>
__global__ void __launch_bounds__(PERMUTE_THREADS, 4)
    permute_squares_kernel(T *output, const T *input, const __grid_constant__ Transposition t, const Tiles tiles,
                           int across_bits)
{
    constexpr int V = vector16<T>::size, SQUARES = PERMUTE_VECTORS / V;
    typedef vector16<T> Vector;
    __shared__ __align__(16) Vector shared[TILE_VECTORS]; // [k][vector of j]
    const int across = 1 << across_bits, down = PERMUTE_THREADS >> across_bits,
              row_bits = 11 - across_bits -
                         (V == 8   ? 3
                          : V == 4 ? 2
                                   : 1);
    static_assert(TILE_VECTORS == 1 << 11, "a tile has across * V rows of output");
    const int x = threadIdx.x & (across - 1), y = threadIdx.x >> across_bits;
    wait_for_predecessor();
    release_successor();
    for (int number = blockIdx.x; number < tiles.count; number += gridDim.x) {
        const TilePlace place = place_of(tiles, number);
        const Offsets at = offsets_of(t.others, place.batch);
        const int64_t k0 = (int64_t)place.k * (across * V), j0 = (int64_t)place.j * (down * SQUARES * V);
        const int64_t k_left = t.k_size - k0, j_left = t.j_size - j0; // no square is cut by an edge
        const T *const from = input + at.in + k0 + x * V + (j0 + y * V) * t.j_in;
        Vector square[SQUARES][V];
#pragma unroll
        for (int s = 0; s < SQUARES; s++)
            if (x * V < k_left && (y + s * down) * V < j_left)
#pragma unroll
                for (int r = 0; r < V; r++)
                    square[s][r] = *reinterpret_cast<const Vector *>(from + (s * down * V + r) * t.j_in);
#pragma unroll
        for (int s = 0; s < SQUARES; s++)
#pragma unroll
            for (int r = 0; r < V; r++) {
                Vector turned;
#pragma unroll
                for (int e = 0; e < V; e++)
                    turned.element[e] = square[s][e].element[r];
                shared[((x * V + r) << row_bits) + ((y + s * down) ^ swap_of(x, across_bits))] = turned;
            }
        __syncthreads();
        T *const to = output + at.out + k0 * t.k_out + j0;
#pragma unroll
        for (int i = 0; i < PERMUTE_VECTORS; i++) {
            const int vector = threadIdx.x + i * PERMUTE_THREADS, k = vector >> row_bits;
            const int j = vector & ((1 << row_bits) - 1);
            if (k < k_left && j * V < j_left)
                *reinterpret_cast<Vector *>(to + k * t.k_out + j * V) =
                    shared[(k << row_bits) + (j ^ swap_of(k / V, across_bits))];
        }
        __syncthreads(); // before the next tile overwrites this one
    }
}

template <typename T>
static cuda_ops_status launch(T *output, const T *input, const Transposition &t, cudaStream_t stream)
{
    constexpr int V = vector16<T>::size, SQUARES = PERMUTE_VECTORS / V;
    // 16 squares along k, fewer where k is shorter, more where j is: 8 vectors of j remain.
    int across_bits = 0;
    while (across_bits < 4 && (V << across_bits) < t.k_size)
        across_bits++;
    const int most = V == 8 ? 5 : V == 4 ? 6 : 7;
    while (across_bits < most && (V << across_bits) < t.k_size &&
           (PERMUTE_THREADS >> (across_bits + 1)) * SQUARES * V >= t.j_size)
        across_bits++;
    Tiles tiles;
    if (!make_tiles(&tiles, t.batch, ceil_div(t.k_size, V << across_bits),
                    ceil_div(t.j_size, (PERMUTE_THREADS >> across_bits) * SQUARES * V)))
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(permute_squares_kernel<T>, dim3(clamp_grid(tiles.count)), dim3(PERMUTE_THREADS), 0, stream, output,
                     input, t, tiles, across_bits);
    return launch_status();
}

cuda_ops_status permute_squares(void *output, const void *input, const Transposition &t, int element_bytes,
                                cudaStream_t stream)
{
    CUDA_OPS_DISPATCH_BYTES(element_bytes, T, return launch((T *)output, (const T *)input, t, stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}
