// square: output = input^2, grad_input = 2 * input * grad_output, elementwise.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop; the tail, and misaligned arrays, go element
// by element. Bound by memory: 2 streams forward, 3 backward.
#include "cuda_ops/square.h"

#include "common/common.cuh"

static constexpr int THREADS = 256;

template <typename T>
__device__ __forceinline__ T square_element(T input)
{
    const accumulate_type<T> x = load_as_accumulate(input);
    return store_from_accumulate<T>(x * x);
}

template <typename T>
__device__ __forceinline__ T square_grad_element(T grad_output, T input)
{
    typedef accumulate_type<T> A;
    return store_from_accumulate<T>(A(2) * load_as_accumulate(input) * load_as_accumulate(grad_output));
}

// `vectors` is how many 16-byte pieces the arrays are read in: count / vector16<T>::size, or 0 when misaligned.
template <typename T>
__global__ void square_forward_kernel(T *output, const T *input, int64_t count, int64_t vectors)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> x = reinterpret_cast<const vector16<T> *>(input)[v];
        vector16<T> y;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            y.element[e] = square_element(x.element[e]);
        reinterpret_cast<vector16<T> *>(output)[v] = y;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        output[i] = square_element(input[i]);
}

template <typename T>
__global__ void square_backward_kernel(T *grad_input, const T *grad_output, const T *input, int64_t count,
                                       int64_t vectors)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> g = reinterpret_cast<const vector16<T> *>(grad_output)[v];
        const vector16<T> x = reinterpret_cast<const vector16<T> *>(input)[v];
        vector16<T> y;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            y.element[e] = square_grad_element(g.element[e], x.element[e]);
        reinterpret_cast<vector16<T> *>(grad_input)[v] = y;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        grad_input[i] = square_grad_element(grad_output[i], input[i]);
}

template <typename T>
static cuda_ops_status square_forward(T *output, const T *input, int64_t count, cudaStream_t stream)
{
    const int64_t vectors = is_aligned_16(output) && is_aligned_16(input) ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    square_forward_kernel<<<grid, THREADS, 0, stream>>>(output, input, count, vectors);
    return launch_status();
}

template <typename T>
static cuda_ops_status square_backward(T *grad_input, const T *grad_output, const T *input, int64_t count,
                                       cudaStream_t stream)
{
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output) && is_aligned_16(input);
    const int64_t vectors = aligned ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    square_backward_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, input, count, vectors);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_square_forward_cuda(void *output, const void *input, int64_t count,
                                                        cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return square_forward((T *)output, (const T *)input, count, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_square_backward_cuda(void *grad_input, const void *grad_output, const void *input,
                                                         int64_t count, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return square_backward((T *)grad_input, (const T *)grad_output, (const T *)input, count, stream));
    return CUDA_OPS_SUCCESS;
}
