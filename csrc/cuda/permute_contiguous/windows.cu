// permute_contiguous of rows that begin and end anywhere.
// A block has a tile of 2048 vectors of 16 bytes in shared memory: rows of input, each from the multiple of 16 bytes before
// its first element on, so that only whole vectors are loaded; where an element lies follows from its row's phase. Output
// is written by whole vectors too: each of its rows has a window of its own, that begins at such a multiple, and for which
// the tile has V rows of input more than it writes. At the ends of rows single elements are stored. Bound by memory: one read, of which
// a sixteenth comes from the L2 cache again, and one write.
#include "permute_contiguous/permutation.cuh"

static constexpr int LEAST_PIECE_BITS = 2;

// A tile has `pieces` of a row of input, and writes `width` elements of it, and `height` of output's.
struct Window {
    int piece_bits, width, height, halo;
};

template <typename T>
__global__ void __launch_bounds__(PERMUTE_THREADS, 4)
    permute_windows_kernel(T *output, const T *input, const __grid_constant__ Transposition t, const Tiles tiles,
                           const Window window)
{
    constexpr int V = vector16<T>::size, V_BITS = V == 8 ? 3 : V == 4 ? 2 : 1;
    typedef vector16<T> Vector;
    // [row of input][piece], with a gap of a vector behind every V rows: threads which write neighbouring vectors of output
    // read rows V apart, and so from different banks.
    __shared__ __align__(16) Vector shared[TILE_VECTORS + (TILE_VECTORS >> LEAST_PIECE_BITS) / V];
    const T *const elements = shared[0].element;
    const int bits = window.piece_bits, pieces = 1 << bits, rows = TILE_VECTORS >> bits;
    const int step = (int)t.j_in & (V - 1); // from the phase of a row to that of the next
    const T *const end = input + t.extent;
    wait_for_predecessor();
    release_successor();
    for (int number = blockIdx.x; number < tiles.count; number += gridDim.x) {
        const TilePlace place = place_of(tiles, number);
        const Offsets at = offsets_of(t.others, place.batch);
        const int64_t k0 = (int64_t)place.k * window.width, j0 = (int64_t)place.j * window.height;
        const int width = (int)(t.k_size - k0 < window.width ? t.k_size - k0 : window.width);
        const T *const from = input + at.in + k0 + (j0 - window.halo) * t.j_in; // the tile's first row
        {
            const int piece = threadIdx.x & (pieces - 1);
            int row = threadIdx.x >> bits;
            const T *line = from + row * t.j_in;
            const int64_t lines = (PERMUTE_THREADS >> bits) * t.j_in;
#pragma unroll 4
            for (int i = 0; i < PERMUTE_VECTORS; i++) {
                const int64_t j = j0 - window.halo + row;
                const int k = piece * V - phase_of(line);
                if (j >= 0 && j < t.j_size && k < width)
                    fetch(&shared[(row << bits) + (row >> V_BITS) + piece], line + k, input, end);
                row += PERMUTE_THREADS >> bits, line += lines;
            }
        }
        cp_async_wait_all();
        __syncthreads();
        // A warp has eight neighbouring vectors of four rows of output.
        const int vectors = (rows - window.halo) / V, group_bits = rows / V <= 8 ? 0 : 31 - __clz(rows / V / 8);
        const int lane = threadIdx.x % WARP_SIZE, last = (int)(t.j_size - j0 < rows ? t.j_size - j0 : rows);
        for (int unit = threadIdx.x / WARP_SIZE; (unit >> group_bits) * 4 < width;
             unit += PERMUTE_THREADS / WARP_SIZE) {
            const int k = (unit >> group_bits) * 4 + lane / 8, v = (unit & ((1 << group_bits) - 1)) * 8 + lane % 8;
            T *const to = output + at.out + (k0 + k) * t.k_out + j0;
            const int first = v * V - phase_of(to); // in the tile, where output's vector begins
            if (k >= width || v >= vectors || first >= last || j0 + first <= -V)
                continue;
            int r = first + window.halo, phase = phase_of(from + r * t.j_in);
            const T *row = elements + (r << (bits + V_BITS)) + k;
            Vector y;
#pragma unroll
            for (int e = 0; e < V; e++) {
                y.element[e] = row[(r & -V) + phase]; // r / V gaps
                r++, row += pieces * V, phase = (phase + step) & (V - 1);
            }
            if (j0 + first >= 0 && first + V <= last)
                *reinterpret_cast<Vector *>(to + first) = y;
            else
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (j0 + first + e >= 0 && first + e < last)
                        to[first + e] = y.element[e];
        }
        __syncthreads(); // before the next tile overwrites this one
    }
}

template <typename T>
static cuda_ops_status launch(T *output, const T *input, const Transposition &t, cudaStream_t stream)
{
    constexpr int V = vector16<T>::size;
    const int overhang = t.reads_vectors ? 0 : V;
    Window window = {};
    window.halo = t.writes_vectors ? 0 : V;
    // 16 pieces, fewer where k is shorter, more where j is.
    window.piece_bits = LEAST_PIECE_BITS;
    while (window.piece_bits < 4 && (V << window.piece_bits) - overhang < t.k_size)
        window.piece_bits++;
    while (window.piece_bits < 6 && (V << window.piece_bits) - overhang < t.k_size &&
           (TILE_VECTORS >> (window.piece_bits + 1)) - window.halo >= t.j_size + window.halo)
        window.piece_bits++;
    window.width = (V << window.piece_bits) - overhang;
    window.height = (TILE_VECTORS >> window.piece_bits) - window.halo;
    Tiles tiles;
    // A window may begin V - 1 elements before its tile, so that the last one may lack as many.
    if (!make_tiles(&tiles, t.batch, ceil_div(t.k_size, window.width),
                    ceil_div(t.j_size + (window.halo ? V - 1 : 0), window.height)))
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(permute_windows_kernel<T>, dim3(clamp_grid(tiles.count)), dim3(PERMUTE_THREADS), 0, stream, output,
                     input, t, tiles, window);
    return launch_status();
}

cuda_ops_status permute_windows(void *output, const void *input, const Transposition &t, int element_bytes,
                                cudaStream_t stream)
{
    CUDA_OPS_DISPATCH_BYTES(element_bytes, T, return launch((T *)output, (const T *)input, t, stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}
