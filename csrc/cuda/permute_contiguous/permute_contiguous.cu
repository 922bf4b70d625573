// permute_contiguous: output[i0, i1, ...] = input[i0 * stride0 + i1 * stride1 + ...].
//
// Where rows stay rows, a thread copies four vectors of 16 bytes. Else the dimension that is contiguous in input, `k`, and
// the last one of output, `j`, are transposed through shared memory, with 32 KB of a block in flight: by squares of vectors
// where all rows are whole vectors, by windows on them where they are not, and where one of the two is short and next to
// the other, by whole runs (permutation.cuh). What is left goes by single elements. Bound by memory: one read, one write.
#include "permute_contiguous/permutation.cuh"

static constexpr int COPIES = 4;
static constexpr int NARROW = 8; // shorter ones would leave most of a tile empty

// Element v of output, or the vector, where all but the last dimension's strides are multiples of one. d: in vectors.
template <typename V>
__global__ void __launch_bounds__(PERMUTE_THREADS)
    permute_rows_kernel(V *output, const V *input, int64_t count, const __grid_constant__ Dimensions d)
{
    wait_for_predecessor();
    release_successor();
    const int64_t step = (int64_t)gridDim.x * PERMUTE_THREADS * COPIES;
    for (int64_t v = (int64_t)blockIdx.x * PERMUTE_THREADS * COPIES + threadIdx.x; v < count; v += step) {
        V x[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (v + i * PERMUTE_THREADS < count)
                x[i] = input[offsets_of(d, v + i * PERMUTE_THREADS).in];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (v + i * PERMUTE_THREADS < count)
                output[v + i * PERMUTE_THREADS] = x[i];
    }
}

// `elements` of V, which the last dimension's neighbours are where there are several.
template <typename V>
static cuda_ops_status launch_rows(void *output, const void *input, const cuda_ops_permutation &p, int64_t elements,
                                   cudaStream_t stream)
{
    Dimensions d = {};
    int64_t count = 1;
    for (int i = 0; i < p.dims; i++) {
        const int64_t size = i == p.dims - 1 ? p.sizes[i] / elements : p.sizes[i];
        d.add(size, i == p.dims - 1 ? p.strides[i] : p.strides[i] / elements, 0);
        count *= size;
    }
    d.small = count < INT32_MAX;
    launch_dependent(permute_rows_kernel<V>, dim3(clamp_grid(ceil_div(count, PERMUTE_THREADS * COPIES))),
                     dim3(PERMUTE_THREADS), 0, stream, (V *)output, (const V *)input, count, d);
    return launch_status();
}

static cuda_ops_status permute(void *output, const void *input, const cuda_ops_permutation &p, int element_bytes,
                               cudaStream_t stream)
{
    const int size = 16 / element_bytes, last = p.dims - 1;
    const bool in_aligned = is_aligned_16(input), out_aligned = is_aligned_16(output);
    if (p.strides[last] == 1) {
        bool vectors = in_aligned && out_aligned && p.sizes[last] % size == 0;
        for (int i = 0; i < last; i++)
            vectors = vectors && p.strides[i] % size == 0;
        if (vectors)
            return launch_rows<uint4>(output, input, p, size, stream);
    }
    int k = 0; // the dimension that is contiguous in input
    for (int i = 1; i < last; i++)
        if (p.strides[i] < p.strides[k])
            k = i;
    if (p.strides[last] != 1 && p.dims > 1 && p.strides[k] == 1) {
        int64_t out[CUDA_OPS_PERMUTE_DIMS], step = 1;
        for (int i = last; i >= 0; i--)
            out[i] = step, step *= p.sizes[i];
        Transposition t = {};
        t.k_size = p.sizes[k], t.k_out = out[k], t.j_size = p.sizes[last], t.j_in = p.strides[last], t.batch = 1;
        t.extent = 1;
        t.reads_vectors = in_aligned && t.k_size % size == 0;
        t.writes_vectors = out_aligned && t.j_size % size == 0; // every other dimension's step is a multiple of it
        for (int i = 0; i < p.dims; i++) {
            t.extent += (p.sizes[i] - 1) * p.strides[i];
            t.reads_vectors = t.reads_vectors && (i == k || p.strides[i] % size == 0);
            if (i == k || i == last)
                continue;
            t.others.add(p.sizes[i], p.strides[i], out[i]);
            t.batch *= p.sizes[i];
        }
        t.others.small = t.batch < INT32_MAX;
        const bool joined = t.j_size < t.k_size ? t.k_out == t.j_size : t.j_in == t.k_size;
        cuda_ops_status status = CUDA_OPS_INVALID_ARGUMENT; // there are too many tiles
        if (t.k_size >= NARROW && t.j_size >= NARROW)
            status = (t.reads_vectors && t.writes_vectors ? permute_squares : permute_windows)(output, input, t,
                                                                                               element_bytes, stream);
        else if (joined)
            status = permute_narrow(output, input, t, element_bytes, stream);
        if (status != CUDA_OPS_INVALID_ARGUMENT)
            return status;
    }
    CUDA_OPS_DISPATCH_BYTES(element_bytes, T, return launch_rows<T>(output, input, p, 1, stream));
    return CUDA_OPS_INVALID_ARGUMENT;
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
    return permute(output, input, p, element_bytes, stream);
}
