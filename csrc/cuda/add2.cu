// add2: output = input + other, elementwise.
// Maps one thread to 16 bytes (4 floats, 8 halves) in a grid-stride loop (common/elementwise.cuh). Bound by memory: 3
// streams.
#include "cuda_ops/add2.h"

#include "common/common.cuh"
#include "common/elementwise.cuh"

template <typename T>
struct add2_forward {
    __device__ __forceinline__ T operator()(T input, T other) const
    {
        return store_from_accumulate<T>(load_as_accumulate(input) + load_as_accumulate(other));
    }
};

extern "C" cuda_ops_status cuda_ops_add2_forward_cuda(void *output, const void *input, const void *other, int64_t count,
                                                      cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T,
        return elementwise(add2_forward<T>(), stream, count, (T *)output, (const T *)input, (const T *)other));
    return CUDA_OPS_SUCCESS;
}
