/* add2 on the CPU: output = input + other. Bound by memory: three streams. */
#ifndef REAL

#include "cuda_ops/add2.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "add2.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "add2.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#include "add2.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_add2_forward_cpu(void *output, const void *input, const void *other, int64_t begin,
                                          int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        add2_forward_f32(output, input, other, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        add2_forward_f64(output, input, other, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        add2_forward_bf16(output, input, other, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/stored.h"

CUDA_OPS_SIMD static void FN(add2_forward)(STORED *output, const STORED *input, const STORED *other, int64_t begin,
                                           int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        output[i] = STORE(LOAD(input[i]) + LOAD(other[i]));
}

#endif
