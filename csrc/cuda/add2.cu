// add2: output = input + other, elementwise.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop; the tail, and misaligned arrays, go element
// by element. Bound by memory: 3 streams.
#include "cuda_ops/add2.h"

#include "common/common.cuh"

static constexpr int THREADS = 256;

template <typename T>
__device__ __forceinline__ T add2_element(T input, T other)
{
    return store_from_accumulate<T>(load_as_accumulate(input) + load_as_accumulate(other));
}

// `vectors` is how many 16-byte pieces the arrays are read in: count / vector16<T>::size, or 0 when misaligned.
template <typename T>
__global__ void add2_forward_kernel(T *output, const T *input, const T *other, int64_t count, int64_t vectors)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> a = reinterpret_cast<const vector16<T> *>(input)[v];
        const vector16<T> b = reinterpret_cast<const vector16<T> *>(other)[v];
        vector16<T> sum;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            sum.element[e] = add2_element(a.element[e], b.element[e]);
        reinterpret_cast<vector16<T> *>(output)[v] = sum;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        output[i] = add2_element(input[i], other[i]);
}

template <typename T>
static cuda_ops_status add2_forward(T *output, const T *input, const T *other, int64_t count, cudaStream_t stream)
{
    const bool aligned = is_aligned_16(output) && is_aligned_16(input) && is_aligned_16(other);
    const int64_t vectors = aligned ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    add2_forward_kernel<<<grid, THREADS, 0, stream>>>(output, input, other, count, vectors);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_add2_forward_cuda(void *output, const void *input, const void *other, int64_t count,
                                                      cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return add2_forward((T *)output, (const T *)input, (const T *)other, count, stream));
    return CUDA_OPS_SUCCESS;
}
