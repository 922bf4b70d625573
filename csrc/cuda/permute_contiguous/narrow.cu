// permute_contiguous of a few rows that are interleaved, output[k][j] of j < 8 (NCHW images of three channels to NHWC), and
// back: of k < 8. On one side a block's elements are one run, on the other `narrow` runs, all of which it has in shared
// memory as they came, by vectors of 16 bytes from the multiple of 16 bytes before their first element on; it stores them by
// vectors too, and at both ends of a run by single elements. Bound by memory: one read, one write.
#include "permute_contiguous/permutation.cuh"

// `length` of the long dimension, a multiple of a vector; `vectors` of a row with its ends.
struct Chunk {
    int narrow, length, vectors;
    Divisor by_narrow, by_vectors;
};

// A run of `count` elements: those before its first whole vector, and its vectors.
struct Run {
    int head, vectors;
};
template <typename T>
__device__ __forceinline__ Run run_of(const T *place, int count)
{
    constexpr int V = vector16<T>::size;
    const int until = -phase_of(place) & (V - 1), head = until < count ? until : count;
    return {head, (count - head) / V};
}

template <typename T, bool INTERLEAVES>
__global__ void __launch_bounds__(PERMUTE_THREADS, 4)
    permute_narrow_kernel(T *output, const T *input, const __grid_constant__ Transposition t, const Tiles tiles,
                          const Chunk chunk)
{
    constexpr int V = vector16<T>::size;
    typedef vector16<T> Vector;
    // Where one run is taken apart, every eighth vector is followed by a gap, since its readers are `narrow` vectors apart.
    __shared__ __align__(16) Vector shared[TILE_VECTORS + TILE_VECTORS / 8];
    const T *const elements = shared[0].element, *const end = input + t.extent;
    const int n = chunk.narrow;
    wait_for_predecessor();
    release_successor();
    for (int number = blockIdx.x; number < tiles.count; number += gridDim.x) {
        const TilePlace place = place_of(tiles, number);
        const Offsets at = offsets_of(t.others, place.batch);
        const int64_t first = (int64_t)(INTERLEAVES ? place.k : place.j) * chunk.length;
        const int64_t left = (INTERLEAVES ? t.k_size : t.j_size) - first;
        const int length = (int)(left < chunk.length ? left : chunk.length);
        const T *const from = input + at.in + (INTERLEAVES ? first : first * n);
        T *const to = output + at.out + (INTERLEAVES ? first * n : first);
        const int loads = INTERLEAVES ? n * chunk.vectors : (n * length + phase_of(from) + V - 1) / V;
#pragma unroll
        for (int i = 0; i < PERMUTE_VECTORS; i++) {
            const int vector = threadIdx.x + i * PERMUTE_THREADS;
            const int row = INTERLEAVES ? quotient(vector, chunk.by_vectors) : 0;
            const T *const begin = from + row * t.j_in;
            const int k = (vector - row * chunk.vectors) * V - phase_of(begin);
            if (vector < loads && (!INTERLEAVES || k < length))
                fetch(&shared[INTERLEAVES ? vector : vector + vector / 8], begin + k, input, end);
        }
        cp_async_wait_all();
        __syncthreads();
        if constexpr (INTERLEAVES) {
            const int base = phase_of(from), step = (int)t.j_in & (V - 1), count = length * n;
            const auto element = [&](int k, int j) {
                return elements[j * chunk.vectors * V + k + ((base + j * step) & (V - 1))];
            };
            const Run run = run_of(to, count);
            for (int v = threadIdx.x; v < run.vectors; v += PERMUTE_THREADS) {
                const int i = run.head + v * V;
                int k = quotient(i, chunk.by_narrow), j = i - k * n;
                Vector y;
#pragma unroll
                for (int e = 0; e < V; e++) {
                    y.element[e] = element(k, j);
                    if (++j == n)
                        j = 0, k++;
                }
                *reinterpret_cast<Vector *>(to + i) = y;
            }
            // The ends, of less than a vector each.
            const int tail = run.head + run.vectors * V + ((int)threadIdx.x - V);
            const int i = threadIdx.x < V ? (int)threadIdx.x : tail;
            if ((int)threadIdx.x < run.head || (threadIdx.x >= V && tail < count)) {
                const int k = quotient(i, chunk.by_narrow);
                to[i] = element(k, i - k * n);
            }
        } else {
            const int phase = phase_of(from);
            const auto element = [&](int k, int j) {
                const int i = j * n + k + phase;
                return elements[i + i / (8 * V) * V];
            };
            for (int i = threadIdx.x; i < n * chunk.vectors; i += PERMUTE_THREADS) {
                const int k = quotient(i, chunk.by_vectors), v = i - k * chunk.vectors;
                T *const row = to + k * t.k_out;
                const Run run = run_of(row, length);
                const int j = run.head + v * V;
                if (v >= run.vectors)
                    continue;
                Vector y;
#pragma unroll
                for (int e = 0; e < V; e++)
                    y.element[e] = element(k, j + e);
                *reinterpret_cast<Vector *>(row + j) = y;
            }
            // The ends: 2 V threads a row, 16 rows at the most.
            const int k = threadIdx.x / (2 * V), place_in_ends = threadIdx.x % (2 * V);
            if (k < n) {
                T *const row = to + k * t.k_out;
                const Run run = run_of(row, length);
                const int j = place_in_ends < V ? place_in_ends : run.head + run.vectors * V + place_in_ends - V;
                if (place_in_ends < V ? j < run.head : j < length)
                    row[j] = element(k, j);
            }
        }
        __syncthreads(); // before the next chunk overwrites this one
    }
}

template <typename T>
static cuda_ops_status launch(T *output, const T *input, const Transposition &t, cudaStream_t stream)
{
    constexpr int V = vector16<T>::size;
    const bool interleaves = t.j_size < t.k_size;
    const int64_t narrow = interleaves ? t.j_size : t.k_size, size = interleaves ? t.k_size : t.j_size;
    Chunk chunk = {};
    chunk.narrow = (int)narrow;
    // A row that does not begin at a multiple of 16 bytes has a vector more. Short ones are cut into equal chunks.
    const int64_t most = (TILE_VECTORS / narrow - 1) * V, chunks = ceil_div(size, most);
    chunk.length = (int)(ceil_div(ceil_div(size, chunks), V) * V);
    chunk.vectors = chunk.length / V + 1;
    chunk.by_narrow = make_divisor((uint32_t)narrow), chunk.by_vectors = make_divisor((uint32_t)chunk.vectors);
    Tiles tiles;
    if (!make_tiles(&tiles, t.batch, interleaves ? ceil_div(size, chunk.length) : 1,
                    interleaves ? 1 : ceil_div(size, chunk.length)))
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(interleaves ? permute_narrow_kernel<T, true> : permute_narrow_kernel<T, false>,
                     dim3(clamp_grid(tiles.count)), dim3(PERMUTE_THREADS), 0, stream, output, input, t, tiles, chunk);
    return launch_status();
}

cuda_ops_status permute_narrow(void *output, const void *input, const Transposition &t, int element_bytes,
                               cudaStream_t stream)
{
    CUDA_OPS_DISPATCH_BYTES(element_bytes, T, return launch((T *)output, (const T *)input, t, stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}
