#include "cases.h"

#include "ptx/cvt.cuh"

namespace emulation
{
double get(const void *array, int64_t i, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        return ((const double *)array)[i];
    case CUDA_OPS_FLOAT16:
        return cvt_f32_f16(((const uint16_t *)array)[i]);
    case CUDA_OPS_BFLOAT16:
        return cvt_f32_bf16(((const uint16_t *)array)[i]);
    default:
        return ((const float *)array)[i];
    }
}

void set(void *array, int64_t i, double value, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        ((double *)array)[i] = value;
        break;
    case CUDA_OPS_FLOAT16:
        ((uint16_t *)array)[i] = cvt_rn_f16_f32((float)value);
        break;
    case CUDA_OPS_BFLOAT16:
        ((uint16_t *)array)[i] = cvt_rn_bf16_f32((float)value);
        break;
    default:
        ((float *)array)[i] = (float)value;
    }
}
} // namespace emulation
