// relu: output = max(input, 0), grad_input = grad_output where output > 0, else 0; elementwise.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop; the tail, and misaligned arrays, go element
// by element. Bound by memory: 2 streams forward, 3 backward. The comparisons are written such that NaN falls on the
// side on which PyTorch has it: it is kept forward, and passes the gradient on backward.
#include "cuda_ops/relu.h"

#include "common/common.cuh"

static constexpr int THREADS = 256;

template <typename T>
__device__ __forceinline__ T relu_element(T input)
{
    typedef accumulate_type<T> A;
    return load_as_accumulate(input) <= A(0) ? store_from_accumulate<T>(A(0)) : input;
}

template <typename T>
__device__ __forceinline__ T relu_grad_element(T grad_output, T output)
{
    typedef accumulate_type<T> A;
    return load_as_accumulate(output) <= A(0) ? store_from_accumulate<T>(A(0)) : grad_output;
}

// `vectors` is how many 16-byte pieces the arrays are read in: count / vector16<T>::size, or 0 when misaligned.
template <typename T>
__global__ void relu_forward_kernel(T *output, const T *input, int64_t count, int64_t vectors)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> x = reinterpret_cast<const vector16<T> *>(input)[v];
        vector16<T> y;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            y.element[e] = relu_element(x.element[e]);
        reinterpret_cast<vector16<T> *>(output)[v] = y;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        output[i] = relu_element(input[i]);
}

template <typename T>
__global__ void relu_backward_kernel(T *grad_input, const T *grad_output, const T *output, int64_t count,
                                     int64_t vectors)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> g = reinterpret_cast<const vector16<T> *>(grad_output)[v];
        const vector16<T> y = reinterpret_cast<const vector16<T> *>(output)[v];
        vector16<T> x;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            x.element[e] = relu_grad_element(g.element[e], y.element[e]);
        reinterpret_cast<vector16<T> *>(grad_input)[v] = x;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        grad_input[i] = relu_grad_element(grad_output[i], output[i]);
}

template <typename T>
static cuda_ops_status relu_forward(T *output, const T *input, int64_t count, cudaStream_t stream)
{
    const int64_t vectors = is_aligned_16(output) && is_aligned_16(input) ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    relu_forward_kernel<<<grid, THREADS, 0, stream>>>(output, input, count, vectors);
    return launch_status();
}

template <typename T>
static cuda_ops_status relu_backward(T *grad_input, const T *grad_output, const T *output, int64_t count,
                                     cudaStream_t stream)
{
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output) && is_aligned_16(output);
    const int64_t vectors = aligned ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    relu_backward_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, output, count, vectors);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_relu_forward_cuda(void *output, const void *input, int64_t count,
                                                      cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return relu_forward((T *)output, (const T *)input, count, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_relu_backward_cuda(void *grad_input, const void *grad_output, const void *output,
                                                       int64_t count, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return relu_backward((T *)grad_input, (const T *)grad_output, (const T *)output, count, stream));
    return CUDA_OPS_SUCCESS;
}
