// Per-channel values, parameters and statistics, whose dtype is known at run time only.
#ifndef CUDA_OPS_COMMON_VALUE_CUH
#define CUDA_OPS_COMMON_VALUE_CUH

#include "common/common.cuh"

// Per-channel values of any dtype, in double. The kernels that use them have a thread or a warp a channel, so that a
// dtype looked up at run time costs nothing, and one instance serves all combinations.
__device__ __forceinline__ double load_value(const void *values, cuda_ops_dtype dtype, int64_t index)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        return ((const double *)values)[index];
    case CUDA_OPS_FLOAT16:
        return (double)__half2float(((const __half *)values)[index]);
    case CUDA_OPS_BFLOAT16:
        return (double)__bfloat162float(((const __nv_bfloat16 *)values)[index]);
    default:
        return (double)((const float *)values)[index];
    }
}

// For values that are loaded some time before their use: float32, the common case, is not converted here, so that
// nothing waits for the load yet.
__device__ __forceinline__ float load_value_early(const void *values, cuda_ops_dtype dtype, int64_t index)
{
    return dtype == CUDA_OPS_FLOAT32 ? ((const float *)values)[index] : (float)load_value(values, dtype, index);
}

__device__ __forceinline__ void store_value(void *values, cuda_ops_dtype dtype, int64_t index, double value)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        ((double *)values)[index] = value;
        break;
    case CUDA_OPS_FLOAT16:
        ((__half *)values)[index] = __float2half_rn((float)value);
        break;
    case CUDA_OPS_BFLOAT16:
        ((__nv_bfloat16 *)values)[index] = __float2bfloat16_rn((float)value);
        break;
    default:
        ((float *)values)[index] = (float)value;
    }
}

// The offset that the values of a channel are taken relative to: the median of three of them, which an outlier (as a
// first value) cannot be. Relative to an outlier all other values would lose their last digits.
template <typename A>
__device__ __forceinline__ A middle_of(A a, A b, A c)
{
    const A low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : (c > high ? high : c);
}

#endif
