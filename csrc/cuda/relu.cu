// relu: output = max(input, 0), grad_input = grad_output where output > 0, else 0; elementwise.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop (common/elementwise.cuh). Bound by memory: 2
// streams forward, 3 backward. The comparisons are written such that NaN falls on the side on which PyTorch has it: it
// is kept forward, and passes the gradient on backward.
#include "cuda_ops/relu.h"

#include "common/common.cuh"
#include "common/elementwise.cuh"

template <typename T>
struct relu_forward {
    __device__ __forceinline__ T operator()(T input) const
    {
        typedef accumulate_type<T> A;
        return load_as_accumulate(input) <= A(0) ? store_from_accumulate<T>(A(0)) : input;
    }
};

template <typename T>
struct relu_backward {
    __device__ __forceinline__ T operator()(T grad_output, T output) const
    {
        typedef accumulate_type<T> A;
        return load_as_accumulate(output) <= A(0) ? store_from_accumulate<T>(A(0)) : grad_output;
    }
};

extern "C" cuda_ops_status cuda_ops_relu_forward_cuda(void *output, const void *input, int64_t count,
                                                      cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return elementwise(relu_forward<T>(), stream, count, (T *)output, (const T *)input));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_relu_backward_cuda(void *grad_input, const void *grad_output, const void *output,
                                                       int64_t count, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return elementwise(relu_backward<T>(), stream, count, (T *)grad_input, (const T *)grad_output,
                                         (const T *)output));
    return CUDA_OPS_SUCCESS;
}
