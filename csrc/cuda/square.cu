// square: output = input^2, grad_input = 2 * input * grad_output, elementwise.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop (common/elementwise.cuh). Bound by memory: 2
// streams forward, 3 backward.
#include "cuda_ops/square.h"

#include "common/common.cuh"
#include "common/elementwise.cuh"

template <typename T>
struct square_forward {
    __device__ __forceinline__ T operator()(T input) const
    {
        const accumulate_type<T> x = load_as_accumulate(input);
        return store_from_accumulate<T>(x * x);
    }
};

template <typename T>
struct square_backward {
    __device__ __forceinline__ T operator()(T grad_output, T input) const
    {
        typedef accumulate_type<T> A;
        return store_from_accumulate<T>(A(2) * load_as_accumulate(input) * load_as_accumulate(grad_output));
    }
};

extern "C" cuda_ops_status cuda_ops_square_forward_cuda(void *output, const void *input, int64_t count,
                                                        cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return elementwise(square_forward<T>(), stream, count, (T *)output, (const T *)input));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_square_backward_cuda(void *grad_input, const void *grad_output, const void *input,
                                                         int64_t count, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return elementwise(square_backward<T>(), stream, count, (T *)grad_input, (const T *)grad_output,
                                         (const T *)input));
    return CUDA_OPS_SUCCESS;
}
