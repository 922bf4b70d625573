// Values by channel, parameters and statistics, whose dtype is known at run time alone.
#ifndef CUDA_OPS_COMMON_VALUE_CUH
#define CUDA_OPS_COMMON_VALUE_CUH

#include "common/common.cuh"

// Per-channel values of any dtype, in double. The kernels that use them have a thread or a warp for a channel, so that
// a dtype that is looked up at run time costs nothing, and one instance serves all mixes.
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

// For values that are asked for some time before their use: float32, which they mostly are, is not converted here, so
// that nothing waits for it yet.
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

// What the values of a channel are taken relative to: the median of three of them, which a single value far from the
// others (a first one, say) cannot be. Relative to a value that is far off, all others would lose their last digits.
template <typename A>
__device__ __forceinline__ A middle_of(A a, A b, A c)
{
    const A low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : (c > high ? high : c);
}

#endif
