/* Indices of 32 or 64 bits, whose width is known at run time, as the CPU's kernels read them. */
#ifndef CUDA_OPS_CPU_COMMON_INDICES_H
#define CUDA_OPS_CPU_COMMON_INDICES_H

#include "common/common.h"

CUDA_OPS_INLINE int64_t index_at(const void *indices, int index_bytes, int64_t i)
{
    return index_bytes == 4 ? ((const int32_t *)indices)[i] : ((const int64_t *)indices)[i];
}

/* What a call of the kernels of float and double that go by indices is refused for. */
CUDA_OPS_INLINE cuda_ops_status check_indexed(int index_bytes, cuda_ops_dtype dtype)
{
    if (index_bytes != 4 && index_bytes != 8)
        return CUDA_OPS_INVALID_ARGUMENT;
    return dtype == CUDA_OPS_FLOAT32 || dtype == CUDA_OPS_FLOAT64 ? CUDA_OPS_SUCCESS : CUDA_OPS_UNSUPPORTED_DTYPE;
}

#endif
