/* sgd on the CPU: one pass over a range of one parameter. Bound by memory: 2 streams read and 1 written, with momentum
 * 3 and 2. The choices are made outside of the loops, so that each loop is plain arithmetic for the compiler to
 * vectorise. */
#ifndef REAL

#include "cuda_ops/sgd.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "sgd.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "sgd.c"

#include "common/undef_real.h"
#define REAL float
#define FN(name) name##_bf16
#define AS_BFLOAT16
#include "sgd.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_sgd_cpu(void *param, const void *grad, void *buffer, int first,
                                 const cuda_ops_sgd_options *options, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        sgd_f32(param, grad, buffer, first, options, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        sgd_f64(param, grad, buffer, first, options, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        sgd_bf16(param, grad, buffer, first, options, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/stored.h"

/* decay, with_momentum, first and nesterov are constants wherever this is inlined. */
CUDA_OPS_INLINE void FN(sgd_loop)(STORED *restrict param, const STORED *restrict grad, STORED *restrict buffer,
                                  const cuda_ops_sgd_options *options, int64_t begin, int64_t end,
                                  const bool with_decay, const bool with_momentum, const bool first,
                                  const bool nesterov)
{
    const REAL sign = options->maximize ? (REAL)-1 : (REAL)1, lr = (REAL)options->lr;
    const REAL momentum = (REAL)options->momentum, fresh = (REAL)(1 - options->dampening);
    const REAL weight_decay = (REAL)options->weight_decay;
    for (int64_t i = begin; i < end; i++) {
        const REAL x = LOAD(param[i]);
        REAL g = sign * LOAD(grad[i]);
        if (with_decay)
            g += weight_decay * x;
        if (with_momentum) {
            const REAL b = first ? g : momentum * LOAD(buffer[i]) + fresh * g;
            buffer[i] = STORE(b);
            g = nesterov ? g + momentum * b : b;
        }
        param[i] = STORE(x - lr * g);
    }
}

CUDA_OPS_INLINE void FN(sgd_choose)(STORED *param, const STORED *grad, STORED *buffer, int first,
                                    const cuda_ops_sgd_options *options, int64_t begin, int64_t end,
                                    const bool with_decay)
{
    if (options->momentum == 0)
        FN(sgd_loop)(param, grad, buffer, options, begin, end, with_decay, false, false, false);
    else if (first && options->nesterov)
        FN(sgd_loop)(param, grad, buffer, options, begin, end, with_decay, true, true, true);
    else if (first)
        FN(sgd_loop)(param, grad, buffer, options, begin, end, with_decay, true, true, false);
    else if (options->nesterov)
        FN(sgd_loop)(param, grad, buffer, options, begin, end, with_decay, true, false, true);
    else
        FN(sgd_loop)(param, grad, buffer, options, begin, end, with_decay, true, false, false);
}

CUDA_OPS_SIMD static void FN(sgd)(STORED *param, const STORED *grad, STORED *buffer, int first,
                                  const cuda_ops_sgd_options *options, int64_t begin, int64_t end)
{
    if (options->weight_decay != 0)
        FN(sgd_choose)(param, grad, buffer, first, options, begin, end, true);
    else
        FN(sgd_choose)(param, grad, buffer, first, options, begin, end, false);
}

#endif
