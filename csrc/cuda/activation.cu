// activation: output = f(input), and grad_input = grad_output * f'(saved), the functions being those of
// cuda_ops/activation_functions.h; elementwise, a kernel for each function.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop (common/elementwise.cuh); halves are computed
// with in float and go in and out by pairs. Bound by memory: 2 streams forward, 3 backward, some 12 to 40 instructions
// an element beside them.
#include "cuda_ops/activation.h"

#include "common/activation_functions.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/elementwise.cuh"

// A function's or slope's form for the element type T. Not every one has every parameter.
#define FUNCTION(enumerator, name, arguments)                                                                          \
    struct name {                                                                                                      \
        template <typename T, typename A>                                                                              \
        static __device__ __forceinline__ A of(A x, A first, A second, A third)                                        \
        {                                                                                                              \
            (void)first, (void)second, (void)third;                                                                    \
            if constexpr (sizeof(T) == 2)                                                                              \
                return name##_f16 arguments;                                                                           \
            else if constexpr (sizeof(T) == 4)                                                                         \
                return name##_f32 arguments;                                                                           \
            else                                                                                                       \
                return name##_f64 arguments;                                                                           \
        }                                                                                                              \
    };
namespace function
{
CUDA_OPS_ACTIVATIONS(FUNCTION)
}
namespace slope
{
CUDA_OPS_ACTIVATION_SLOPES(FUNCTION)
}
#undef FUNCTION

template <typename Function, typename T>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    activation_forward_kernel(T *output, const T *input, int64_t count, int64_t vectors, accumulate_type<T> first,
                              accumulate_type<T> second, accumulate_type<T> third)
{
    const T *const inputs[] = {input};
    wait_for_predecessor();
    release_successor();
    for_elements(output, inputs, count, vectors, [&](int64_t, const auto &x, auto &y) {
        accumulate_type<T> values[y.size];
#pragma unroll
        for (int e = 0; e < y.size; e++)
            values[e] = Function::template of<T>(element_of(x[0], e), first, second, third);
        y = vector_of<T>(values);
    });
}

template <typename Slope, typename T>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    activation_backward_kernel(T *grad_input, const T *grad_output, const T *saved, int64_t count, int64_t vectors,
                               accumulate_type<T> first, accumulate_type<T> second)
{
    const T *const inputs[] = {grad_output, saved};
    wait_for_predecessor();
    release_successor();
    for_elements(grad_input, inputs, count, vectors, [&](int64_t, const auto &x, auto &y) {
        accumulate_type<T> values[y.size];
#pragma unroll
        for (int e = 0; e < y.size; e++)
            values[e] =
                element_of(x[0], e) * Slope::template of<T>(element_of(x[1], e), first, second, accumulate_type<T>(0));
        y = vector_of<T>(values);
    });
}

template <typename T>
static cuda_ops_status forward(T *output, const T *input, int64_t count, cuda_ops_activation function, double first,
                               double second, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const int64_t vectors = vectors_of(count, (const T *)output, input);
    const unsigned int grid = elementwise_grid(count, vectors);
#define CASE(enumerator, name, arguments)                                                                              \
    case CUDA_OPS_ACTIVATION_##enumerator:                                                                             \
        launch_dependent(activation_forward_kernel<function::name, T>, dim3(grid), dim3(ELEMENTWISE_THREADS), 0,       \
                         stream, output, input, count, vectors, (A)first, (A)second, (A)(1 / first));                  \
        return launch_status();
    switch (function) {
        CUDA_OPS_ACTIVATIONS(CASE)
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
#undef CASE
}

template <typename T>
static cuda_ops_status backward(T *grad_input, const T *grad_output, const T *saved, int64_t count,
                                cuda_ops_activation function, double first, double second, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const int64_t vectors = vectors_of(count, (const T *)grad_input, grad_output, saved);
    const unsigned int grid = elementwise_grid(count, vectors);
#define CASE(enumerator, name, arguments)                                                                              \
    case CUDA_OPS_ACTIVATION_##enumerator:                                                                             \
        launch_dependent(activation_backward_kernel<slope::name, T>, dim3(grid), dim3(ELEMENTWISE_THREADS), 0, stream, \
                         grad_input, grad_output, saved, count, vectors, (A)first, (A)second);                         \
        return launch_status();
    switch (function) {
        CUDA_OPS_ACTIVATION_SLOPES(CASE)
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
#undef CASE
}

extern "C" cuda_ops_status cuda_ops_activation_forward_cuda(void *output, const void *input, int64_t count,
                                                            cuda_ops_activation function, double first, double second,
                                                            cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return forward((T *)output, (const T *)input, count, function, first, second, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_activation_backward_cuda(void *grad_input, const void *grad_output,
                                                             const void *saved, int64_t count,
                                                             cuda_ops_activation function, double first, double second,
                                                             cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward((T *)grad_input, (const T *)grad_output, (const T *)saved, count, function, first,
                                      second, stream));
    return CUDA_OPS_SUCCESS;
}
