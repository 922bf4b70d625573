/* clip_grad_norm on the CPU: partial sums over ranges of the gradients, and their scaling. Bound by memory: one stream
 * read, and one read and written. Sums run over at most SUM_BLOCK elements in REAL before they go into a double. */
#ifndef REAL

#include "cuda_ops/clip_grad_norm.h"

#include "common/common.h"

enum { SUM_BLOCK = 1024 };

#define REAL float
#define FN(name) name##_f32
#include "clip_grad_norm.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "clip_grad_norm.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_grad_norm_partial_cpu(double *partial, const void *grad, double norm_type, int64_t begin,
                                               int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        *partial = grad_norm_partial_f32(grad, norm_type, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        *partial = grad_norm_partial_f64(grad, norm_type, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

double cuda_ops_grad_norm_cpu(const double *partials, int64_t count, double norm_type)
{
    double total = 0;
    for (int64_t i = 0; i < count; i++)
        if (norm_type != INFINITY)
            total += partials[i];
        else
            total = partials[i] > total || partials[i] != partials[i] ? partials[i] : total;
    return norm_type == INFINITY || norm_type == 1 ? total : norm_type == 2 ? sqrt(total) : pow(total, 1 / norm_type);
}

double cuda_ops_clip_factor_cpu(double norm, double max_norm)
{
    const double factor = max_norm / (norm + 1e-6);
    return factor > 1 ? 1 : factor; /* NaN stays */
}

cuda_ops_status cuda_ops_clip_grad_cpu(void *grad, double factor, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (factor == 1)
        return CUDA_OPS_SUCCESS;
    if (dtype == CUDA_OPS_FLOAT32)
        clip_grad_f32(grad, (float)factor, begin, end);
    else
        clip_grad_f64(grad, factor, begin, end);
    return CUDA_OPS_SUCCESS;
}

#else

/* A NaN is passed over by the comparisons, and looked for beside them. */
CUDA_OPS_INLINE double FN(largest)(const REAL *grad, int64_t begin, int64_t end)
{
    REAL largest = 0;
    bool is_nan = false;
#pragma omp simd reduction(max : largest) reduction(| : is_nan)
    for (int64_t i = begin; i < end; i++) {
        const REAL x = grad[i] < 0 ? -grad[i] : grad[i];
        largest = x > largest ? x : largest;
        is_nan |= x != x;
    }
    return is_nan ? (double)NAN : (double)largest;
}

CUDA_OPS_SIMD static double FN(grad_norm_partial)(const REAL *grad, double norm_type, int64_t begin, int64_t end)
{
    if (norm_type == INFINITY)
        return FN(largest)(grad, begin, end);
    double sum = 0;
    if (norm_type != 1 && norm_type != 2) {
        for (int64_t i = begin; i < end; i++)
            sum += pow(fabs((double)grad[i]), norm_type);
        return sum;
    }
    for (int64_t first = begin; first < end; first += SUM_BLOCK) {
        const int64_t last = min_i64(first + SUM_BLOCK, end);
        REAL block = 0;
        if (norm_type == 2) {
#pragma omp simd reduction(+ : block)
            for (int64_t i = first; i < last; i++)
                block += grad[i] * grad[i];
        } else {
#pragma omp simd reduction(+ : block)
            for (int64_t i = first; i < last; i++)
                block += grad[i] < 0 ? -grad[i] : grad[i];
        }
        sum += block;
    }
    return sum;
}

CUDA_OPS_SIMD static void FN(clip_grad)(REAL *grad, REAL factor, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        grad[i] *= factor;
}

#endif
