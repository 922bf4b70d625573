// permute_contiguous: output[i0, i1, ...] = input[i0 * stride0 + i1 * stride1 + ...].
//
// Where rows stay rows, a thread copies 16 bytes of one. Else the dimension that is contiguous in input, `k`, and the last
// one of output, `j`, are transposed in tiles through shared memory: 128 bytes of input's rows times 128 bytes of
// output's. A tile lies in shared memory as it was read, in pieces of 16 bytes that are swapped by j (xor), so that both
// sides are free of bank conflicts, and both read and write memory by 16 bytes, whatever the element's size. Bound by
// memory: one read, one write.
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "cuda_ops/permute_contiguous.h"

static constexpr int THREADS = 256;
static constexpr int PIECES = 8; // of 16 bytes, across a tile on either side

// The offset in input of an index into some of the dimensions, the last of them fastest.
struct Dimensions {
    int count;
    int64_t sizes[CUDA_OPS_PERMUTE_DIMS], in[CUDA_OPS_PERMUTE_DIMS], out[CUDA_OPS_PERMUTE_DIMS];
};

struct Offsets {
    int64_t in, out;
};

__device__ __forceinline__ Offsets offsets_of(const Dimensions &d, int64_t index)
{
    Offsets at = {0, 0};
    for (int i = d.count - 1; i > 0; i--) {
        // (64-bit division takes four times as many instructions.)
        const bool is_small = ((uint64_t)index | (uint64_t)d.sizes[i]) >> 32 == 0;
        const int64_t rest = is_small ? (int64_t)((uint32_t)index / (uint32_t)d.sizes[i]) : index / d.sizes[i];
        const int64_t mine = index - rest * d.sizes[i];
        at.in += mine * d.in[i], at.out += mine * d.out[i];
        index = rest;
    }
    if (d.count > 0)
        at.in += index * d.in[0], at.out += index * d.out[0];
    return at;
}

// Vector v of output, where all but the last dimension's strides are multiples of a vector. d: in vectors.
template <typename V>
__global__ void __launch_bounds__(THREADS)
    permute_rows_kernel(V *output, const V *input, int64_t count, const __grid_constant__ Dimensions d)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t v = global_thread_index(); v < count; v += global_thread_count())
        output[v] = input[offsets_of(d, v).in];
}

// k: `k_size` neighbours in input, `k_out` apart in output; j: `j_size` neighbours in output, `j_in` apart in input.
struct Transposition {
    int64_t k_size, k_out, j_size, j_in, k_tiles, j_tiles, batch;
    bool reads_vectors, writes_vectors;
};

// A block's tile has `TILE` of j, and REPEAT times TILE of k, so that it always has 512 vectors of 16 bytes to read.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    permute_tiles_kernel(T *output, const T *input, const Transposition t, const __grid_constant__ Dimensions others)
{
    constexpr int SIZE = 16 / (int)sizeof(T), TILE = PIECES * SIZE, REPEAT = 64 / TILE;
    typedef aligned_vector<T, SIZE> V;
    // [k / TILE][j][piece of k, swapped by j]: element e of piece p of row j is element (p ^ j / SIZE % PIECES) * SIZE + e.
    __shared__ __align__(16) T shared[REPEAT][TILE][TILE];
    const auto place = [](int j, int k) { return ((k / SIZE) ^ (j / SIZE)) * SIZE + k % SIZE; };
    wait_for_predecessor();
    release_successor();
    for (int64_t work = blockIdx.x; work < t.batch * t.j_tiles * t.k_tiles; work += gridDim.x) {
        const int64_t tile = work / t.k_tiles, k0 = work % t.k_tiles * (TILE * REPEAT), j0 = tile % t.j_tiles * TILE;
        const Offsets at = offsets_of(others, tile / t.j_tiles);
        const T *const from = input + at.in + k0 + j0 * t.j_in;
        T *const to = output + at.out + k0 * t.k_out + j0;
        const int width = (int)(t.k_size - k0 < TILE * REPEAT ? t.k_size - k0 : TILE * REPEAT);
        const int height = (int)(t.j_size - j0 < TILE ? t.j_size - j0 : TILE);
        if (t.reads_vectors) {
            constexpr int ROW = PIECES * REPEAT, LOADS = TILE * ROW / THREADS; // vectors of a row, of a thread
            V x[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int j = (int)(threadIdx.x + i * THREADS) / ROW, k = (int)(threadIdx.x + i * THREADS) % ROW * SIZE;
                if (j < height && k < width)
                    x[i] = *reinterpret_cast<const V *>(from + j * t.j_in + k);
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int j = (int)(threadIdx.x + i * THREADS) / ROW, k = (int)(threadIdx.x + i * THREADS) % ROW * SIZE;
                if (j < height && k < width)
                    *reinterpret_cast<V *>(&shared[k / TILE][j][place(j, k % TILE)]) = x[i];
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < TILE * TILE * REPEAT; i += THREADS) {
                const int j = i / (TILE * REPEAT), k = i % (TILE * REPEAT);
                if (j < height && k < width)
                    shared[k / TILE][j][place(j, k % TILE)] = from[j * t.j_in + k];
            }
        }
        __syncthreads();
        if (t.writes_vectors) {
            constexpr int STORES = TILE * REPEAT * PIECES / THREADS;
#pragma unroll
            for (int i = 0; i < STORES; i++) {
                const int k = (int)(threadIdx.x + i * THREADS) / PIECES;
                const int j = (int)(threadIdx.x + i * THREADS) % PIECES * SIZE;
                if (k < width && j < height) {
                    V y;
#pragma unroll
                    for (int e = 0; e < SIZE; e++)
                        y.element[e] = shared[k / TILE][j + e][place(j + e, k % TILE)];
                    *reinterpret_cast<V *>(to + k * t.k_out + j) = y;
                }
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < TILE * TILE * REPEAT; i += THREADS) {
                const int k = i / TILE, j = i % TILE;
                if (k < width && j < height)
                    to[k * t.k_out + j] = shared[k / TILE][j][place(j, k % TILE)];
            }
        }
        __syncthreads(); // before the next tile overwrites this one
    }
}

template <typename V>
static void launch_rows(void *output, const void *input, const cuda_ops_permutation &p, int64_t elements,
                        cudaStream_t stream)
{
    Dimensions d = {};
    d.count = p.dims;
    int64_t count = 1;
    for (int i = 0; i < p.dims; i++) {
        const bool last = i == p.dims - 1;
        d.sizes[i] = last ? p.sizes[i] / elements : p.sizes[i];
        d.in[i] = last ? 1 : p.strides[i] / elements;
        count *= d.sizes[i];
    }
    launch_dependent(permute_rows_kernel<V>, dim3(clamp_grid(ceil_div(count, THREADS))), dim3(THREADS), 0, stream,
                     (V *)output, (const V *)input, count, d);
}

template <typename T>
static cuda_ops_status permute(void *output, const void *input, const cuda_ops_permutation &p, cudaStream_t stream)
{
    constexpr int SIZE = 16 / (int)sizeof(T);
    const int last = p.dims - 1;
    bool aligned = is_aligned_16(input) && is_aligned_16(output); // rows that stay rows
    for (int i = 0; i < last; i++)
        aligned = aligned && p.strides[i] % SIZE == 0;
    if (p.strides[last] == 1) {
        if (aligned && p.sizes[last] % SIZE == 0)
            launch_rows<uint4>(output, input, p, SIZE, stream);
        else
            launch_rows<T>(output, input, p, 1, stream);
        return launch_status();
    }
    int k = 0; // the dimension that is contiguous in input, or next to being so
    for (int i = 1; i < last; i++)
        if (p.strides[i] < p.strides[k])
            k = i;
    // Element by element where input is not dense, and where a tile would be all but empty.
    if (p.dims < 2 || p.strides[k] != 1 || (p.dims < CUDA_OPS_PERMUTE_DIMS && (p.sizes[k] < 8 || p.sizes[last] < 8))) {
        cuda_ops_permutation elements = p;
        if (p.dims == CUDA_OPS_PERMUTE_DIMS)
            return CUDA_OPS_INVALID_ARGUMENT;
        elements.sizes[p.dims] = elements.strides[p.dims] = 1, elements.dims++;
        launch_rows<T>(output, input, elements, 1, stream);
        return launch_status();
    }
    int64_t out[CUDA_OPS_PERMUTE_DIMS], step = 1;
    for (int i = last; i >= 0; i--)
        out[i] = step, step *= p.sizes[i];
    constexpr int TILE = PIECES * SIZE, REPEAT = 64 / TILE;
    Transposition t = {};
    t.k_size = p.sizes[k], t.k_out = out[k], t.j_size = p.sizes[last], t.j_in = p.strides[last];
    t.k_tiles = ceil_div(t.k_size, TILE * REPEAT), t.j_tiles = ceil_div(t.j_size, TILE), t.batch = 1;
    t.reads_vectors = is_aligned_16(input) && t.k_size % SIZE == 0;
    t.writes_vectors =
        is_aligned_16(output) && t.j_size % SIZE == 0; // every other dimension's step is a multiple of it
    Dimensions others = {};
    for (int i = 0; i < p.dims; i++) {
        t.reads_vectors = t.reads_vectors && (i == k || p.strides[i] % SIZE == 0);
        if (i == k || i == last)
            continue;
        others.sizes[others.count] = p.sizes[i], others.in[others.count] = p.strides[i],
        others.out[others.count] = out[i];
        others.count++;
        t.batch *= p.sizes[i];
    }
    launch_dependent(permute_tiles_kernel<T>, dim3(clamp_grid(t.batch * t.j_tiles * t.k_tiles)), dim3(THREADS), 0,
                     stream, (T *)output, (const T *)input, t, others);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_permute_contiguous_cuda(void *output, const void *input,
                                                            const cuda_ops_permutation *permutation, int element_bytes,
                                                            cuda_ops_stream stream)
{
    cuda_ops_permutation p = *permutation;
    if (p.dims < 0 || p.dims > CUDA_OPS_PERMUTE_DIMS)
        return CUDA_OPS_INVALID_ARGUMENT;
    for (int i = 0; i < p.dims; i++)
        if (p.sizes[i] == 0)
            return CUDA_OPS_SUCCESS;
    if (p.dims == 0)
        p.dims = 1, p.sizes[0] = p.strides[0] = 1;
    switch (element_bytes) {
    case 2:
        return permute<uint16_t>(output, input, p, stream);
    case 4:
        return permute<uint32_t>(output, input, p, stream);
    case 8:
        return permute<uint64_t>(output, input, p, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
