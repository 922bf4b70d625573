// What softmax and log_softmax (LOG) compute of an element, and of a column's largest element and sum of exponentials.
#ifndef CUDA_OPS_SOFTMAX_ARITHMETIC_CUH
#define CUDA_OPS_SOFTMAX_ARITHMETIC_CUH

#include "common/thread_group.cuh"

// What an exponential is divided by, as a factor, or its logarithm. NaN where an element is +inf.
template <bool LOG, typename A>
__device__ __forceinline__ A softmax_divisor(log_sum_exp<A> state)
{
    if constexpr (LOG)
        return log_of_sum(state);
    else
        return state.maximum == A(CUDART_INF) ? A(CUDART_NAN) : A(1) / state.sum;
}

// In a column of -inf alone the subtraction of the maximum gives NaN.
template <bool LOG, typename T>
__device__ __forceinline__ accumulate_type<T> softmax_of(accumulate_type<T> x, accumulate_type<T> maximum,
                                                         accumulate_type<T> divisor)
{
    if constexpr (LOG)
        return (x - maximum) - divisor;
    else
        return exp_for<T>(x - maximum) * divisor;
}

// What the gradient sums up, and the gradient.
template <bool LOG, typename A>
__device__ __forceinline__ A softmax_summand(A grad_output, A output)
{
    return LOG ? grad_output : grad_output * output;
}

template <bool LOG, typename T>
__device__ __forceinline__ accumulate_type<T> softmax_gradient(accumulate_type<T> grad_output,
                                                               accumulate_type<T> output, accumulate_type<T> sum,
                                                               accumulate_type<T> scale)
{
    if constexpr (LOG)
        return grad_output - exp_for<T>(output) * sum;
    else
        return output * (grad_output - sum) * scale;
}

#endif
