// gated: output = f(gate) * value, and grad_gate = grad_output * value * f'(gate), grad_value = grad_output * f(gate), the
// functions being those of cuda_ops/activation_functions.h.
// Maps a thread to 16 bytes (4 floats, 8 halves) of a row (common/row_blocks.cuh); two dense arrays are one row. Bound by
// memory: 3 streams forward, 5 backward; f and its slope share their exponential.
#include "cuda_ops/gated.h"

#include "common/activation_functions.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/row_blocks.cuh"

// A function's form for the element type T, and its slope's.
#define GATE(enumerator, name)                                                                                         \
    struct name##_gate {                                                                                               \
        template <typename T, typename A>                                                                              \
        static __device__ __forceinline__ A of(A x)                                                                    \
        {                                                                                                              \
            if constexpr (sizeof(T) == 2)                                                                              \
                return name##_f16(x);                                                                                  \
            else if constexpr (sizeof(T) == 4)                                                                         \
                return name##_f32(x);                                                                                  \
            else                                                                                                       \
                return name##_f64(x);                                                                                  \
        }                                                                                                              \
        template <typename T, typename A>                                                                              \
        static __device__ __forceinline__ A slope(A x)                                                                 \
        {                                                                                                              \
            if constexpr (sizeof(T) == 2)                                                                              \
                return name##_slope_f16(x);                                                                            \
            else if constexpr (sizeof(T) == 4)                                                                         \
                return name##_slope_f32(x);                                                                            \
            else                                                                                                       \
                return name##_slope_f64(x);                                                                            \
        }                                                                                                              \
    };
CUDA_OPS_GATES(GATE)
#undef GATE

template <typename Gate, typename T>
__global__ void __launch_bounds__(ROW_BLOCK_THREADS)
    gated_forward_kernel(T *output, const T *gate, const T *value, int64_t rows, int64_t cols, int64_t stride,
                         int64_t vectors)
{
    for_rows<T>(rows, cols, vectors, [&](int64_t row, int64_t c, auto none) {
        typedef decltype(none) V;
        const V x = *reinterpret_cast<const V *>(gate + row * stride + c);
        const V v = *reinterpret_cast<const V *>(value + row * stride + c);
        accumulate_type<T> results[V::size];
#pragma unroll
        for (int e = 0; e < V::size; e++)
            results[e] = Gate::template of<T>(element_of(x, e)) * element_of(v, e);
        *reinterpret_cast<V *>(output + row * cols + c) = vector_of<T>(results);
    });
}

template <typename Gate, typename T>
__global__ void __launch_bounds__(ROW_BLOCK_THREADS)
    gated_backward_kernel(T *grad_gate, T *grad_value, const T *grad_output, const T *gate, const T *value,
                          int64_t rows, int64_t cols, int64_t stride, int64_t vectors)
{
    for_rows<T>(rows, cols, vectors, [&](int64_t row, int64_t c, auto none) {
        typedef decltype(none) V;
        const V g = *reinterpret_cast<const V *>(grad_output + row * cols + c);
        const V x = *reinterpret_cast<const V *>(gate + row * stride + c);
        const V v = *reinterpret_cast<const V *>(value + row * stride + c);
        accumulate_type<T> of_gate[V::size], of_value[V::size];
#pragma unroll
        for (int e = 0; e < V::size; e++) {
            of_gate[e] = element_of(g, e) * element_of(v, e) * Gate::template slope<T>(element_of(x, e));
            of_value[e] = element_of(g, e) * Gate::template of<T>(element_of(x, e));
        }
        *reinterpret_cast<V *>(grad_gate + row * stride + c) = vector_of<T>(of_gate);
        *reinterpret_cast<V *>(grad_value + row * stride + c) = vector_of<T>(of_value);
    });
}

template <typename T>
static cuda_ops_status forward(T *output, const T *gate, const T *value, int64_t rows, int64_t cols, int64_t stride,
                               cuda_ops_gate function, cudaStream_t stream)
{
    const RowBlocks l =
        row_blocks<T>(rows, cols, stride, is_aligned_16(output) && is_aligned_16(gate) && is_aligned_16(value));
#define CASE(enumerator, name)                                                                                         \
    case CUDA_OPS_GATE_##enumerator:                                                                                   \
        gated_forward_kernel<name##_gate>                                                                              \
            <<<l.grid, l.block, 0, stream>>>(output, gate, value, rows, cols, stride, l.vectors);                      \
        return launch_status();
    switch (function) {
        CUDA_OPS_GATES(CASE)
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
#undef CASE
}

template <typename T>
static cuda_ops_status backward(T *grad_gate, T *grad_value, const T *grad_output, const T *gate, const T *value,
                                int64_t rows, int64_t cols, int64_t stride, cuda_ops_gate function, cudaStream_t stream)
{
    const RowBlocks l = row_blocks<T>(rows, cols, stride,
                                      is_aligned_16(grad_gate) && is_aligned_16(grad_value) &&
                                          is_aligned_16(grad_output) && is_aligned_16(gate) && is_aligned_16(value));
#define CASE(enumerator, name)                                                                                         \
    case CUDA_OPS_GATE_##enumerator:                                                                                   \
        gated_backward_kernel<name##_gate><<<l.grid, l.block, 0, stream>>>(grad_gate, grad_value, grad_output, gate,   \
                                                                           value, rows, cols, stride, l.vectors);      \
        return launch_status();
    switch (function) {
        CUDA_OPS_GATES(CASE)
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
#undef CASE
}

extern "C" cuda_ops_status cuda_ops_gated_forward_cuda(void *output, const void *gate, const void *value, int64_t rows,
                                                       int64_t cols, int64_t stride, cuda_ops_gate function,
                                                       cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T, return forward((T *)output, (const T *)gate, (const T *)value, rows, cols, stride, function, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_gated_backward_cuda(void *grad_gate, void *grad_value, const void *grad_output,
                                                        const void *gate, const void *value, int64_t rows, int64_t cols,
                                                        int64_t stride, cuda_ops_gate function, cuda_ops_dtype dtype,
                                                        cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward((T *)grad_gate, (T *)grad_value, (const T *)grad_output, (const T *)gate,
                                      (const T *)value, rows, cols, stride, function, stream));
    return CUDA_OPS_SUCCESS;
}
