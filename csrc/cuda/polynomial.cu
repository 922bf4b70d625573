// polynomial: output = p(input), grad_input = grad_output * p'(input), elementwise, by Horner's rule.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop (common/elementwise.cuh). The coefficients are
// an argument of the kernel, so that they come from the constant cache and nothing is copied to the device. Bound by
// memory up to some ten coefficients: 2 streams forward, 3 backward.
#include "cuda_ops/polynomial.h"

#include "common/common.cuh"
#include "common/elementwise.cuh"

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
struct polynomial_forward {
    polynomial<accumulate_type<T>> p;
    __device__ __forceinline__ T operator()(T input) const
    {
        return store_from_accumulate<T>(evaluate(p, load_as_accumulate(input)));
    }
};

template <typename T>
struct polynomial_backward {
    polynomial<accumulate_type<T>> derivative;
    __device__ __forceinline__ T operator()(T grad_output, T input) const
    {
        return store_from_accumulate<T>(load_as_accumulate(grad_output) *
                                        evaluate(derivative, load_as_accumulate(input)));
    }
};

template <typename A>
static polynomial<A> polynomial_of(const double *coefficients, int64_t count)
{
    polynomial<A> p = {};
    for (int64_t k = 0; k < count; k++)
        p.coefficient[k] = (A)coefficients[k];
    p.count = (int)count;
    return p;
}

template <typename A>
static polynomial<A> derivative_of(const double *coefficients, int64_t count)
{
    polynomial<A> derivative = {};
    for (int64_t k = 1; k < count; k++)
        derivative.coefficient[k - 1] = (A)((double)k * coefficients[k]);
    // The derivative of a constant is the constant 0: one coefficient, like p itself.
    derivative.count = count > 1 ? (int)count - 1 : 1;
    return derivative;
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
    CUDA_OPS_DISPATCH(dtype, T, {
        const polynomial_forward<T> op = {polynomial_of<accumulate_type<T>>(coefficients, coefficient_count)};
        return elementwise(op, stream, count, (T *)output, (const T *)input);
    });
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
    CUDA_OPS_DISPATCH(dtype, T, {
        const polynomial_backward<T> op = {derivative_of<accumulate_type<T>>(coefficients, coefficient_count)};
        return elementwise(op, stream, count, (T *)grad_input, (const T *)grad_output, (const T *)input);
    });
    return CUDA_OPS_SUCCESS;
}
