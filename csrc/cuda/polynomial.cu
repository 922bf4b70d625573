// polynomial: output = p(input), grad_input = grad_output * p'(input), elementwise, by Horner's rule.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop; the tail, and misaligned arrays, go element
// by element. The coefficients are an argument of the kernel, so that they come from the constant cache and nothing is
// copied to the device. Bound by memory up to some ten coefficients: 2 streams forward, 3 backward.
#include "cuda_ops/polynomial.h"

#include "common/common.cuh"

static constexpr int THREADS = 256;

template <typename A>
struct polynomial {
    A coefficient[CUDA_OPS_POLYNOMIAL_MAX];
    int count;
};

template <typename A>
__device__ __forceinline__ A evaluate(const polynomial<A> &p, A x)
{
    A value = p.coefficient[p.count - 1];
    for (int k = p.count - 2; k >= 0; k--)
        value = value * x + p.coefficient[k];
    return value;
}

template <typename T>
__device__ __forceinline__ T forward_element(T input, const polynomial<accumulate_type<T>> &p)
{
    return store_from_accumulate<T>(evaluate(p, load_as_accumulate(input)));
}

template <typename T>
__device__ __forceinline__ T backward_element(T grad_output, T input, const polynomial<accumulate_type<T>> &derivative)
{
    return store_from_accumulate<T>(load_as_accumulate(grad_output) * evaluate(derivative, load_as_accumulate(input)));
}

// `vectors` is how many 16-byte pieces the arrays are read in: count / vector16<T>::size, or 0 when misaligned.
template <typename T>
__global__ void polynomial_forward_kernel(T *output, const T *input, int64_t count, int64_t vectors,
                                          const __grid_constant__ polynomial<accumulate_type<T>> p)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> x = reinterpret_cast<const vector16<T> *>(input)[v];
        vector16<T> y;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            y.element[e] = forward_element(x.element[e], p);
        reinterpret_cast<vector16<T> *>(output)[v] = y;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        output[i] = forward_element(input[i], p);
}

template <typename T>
__global__ void polynomial_backward_kernel(T *grad_input, const T *grad_output, const T *input, int64_t count,
                                           int64_t vectors,
                                           const __grid_constant__ polynomial<accumulate_type<T>> derivative)
{
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const vector16<T> g = reinterpret_cast<const vector16<T> *>(grad_output)[v];
        const vector16<T> x = reinterpret_cast<const vector16<T> *>(input)[v];
        vector16<T> y;
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            y.element[e] = backward_element(g.element[e], x.element[e], derivative);
        reinterpret_cast<vector16<T> *>(grad_input)[v] = y;
    }
    for (int64_t i = vectors * vector16<T>::size + global_thread_index(); i < count; i += global_thread_count())
        grad_input[i] = backward_element(grad_output[i], input[i], derivative);
}

template <typename T>
static cuda_ops_status polynomial_forward(T *output, const T *input, int64_t count, const double *coefficients,
                                          int64_t coefficient_count, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    polynomial<A> p = {};
    for (int64_t k = 0; k < coefficient_count; k++)
        p.coefficient[k] = (A)coefficients[k];
    p.count = (int)coefficient_count;
    const int64_t vectors = is_aligned_16(output) && is_aligned_16(input) ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    polynomial_forward_kernel<<<grid, THREADS, 0, stream>>>(output, input, count, vectors, p);
    return launch_status();
}

template <typename T>
static cuda_ops_status polynomial_backward(T *grad_input, const T *grad_output, const T *input, int64_t count,
                                           const double *coefficients, int64_t coefficient_count, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    polynomial<A> derivative = {};
    for (int64_t k = 1; k < coefficient_count; k++)
        derivative.coefficient[k - 1] = (A)((double)k * coefficients[k]);
    // The derivative of a constant is the constant 0: one coefficient, like p itself.
    derivative.count = coefficient_count > 1 ? (int)coefficient_count - 1 : 1;
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output) && is_aligned_16(input);
    const int64_t vectors = aligned ? count / vector16<T>::size : 0;
    const unsigned int grid = clamp_grid(ceil_div(vectors > 0 ? vectors : count, THREADS));
    polynomial_backward_kernel<<<grid, THREADS, 0, stream>>>(grad_input, grad_output, input, count, vectors,
                                                             derivative);
    return launch_status();
}

static bool is_count_valid(int64_t coefficient_count)
{
    return 1 <= coefficient_count && coefficient_count <= CUDA_OPS_POLYNOMIAL_MAX;
}

extern "C" cuda_ops_status cuda_ops_polynomial_forward_cuda(void *output, const void *input, int64_t count,
                                                            const double *coefficients, int64_t coefficient_count,
                                                            cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!is_count_valid(coefficient_count))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T,
        return polynomial_forward((T *)output, (const T *)input, count, coefficients, coefficient_count, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_polynomial_backward_cuda(void *grad_input, const void *grad_output,
                                                             const void *input, int64_t count,
                                                             const double *coefficients, int64_t coefficient_count,
                                                             cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!is_count_valid(coefficient_count))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return polynomial_backward((T *)grad_input, (const T *)grad_output, (const T *)input, count,
                                                 coefficients, coefficient_count, stream));
    return CUDA_OPS_SUCCESS;
}
