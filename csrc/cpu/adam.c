/* adam on the CPU: one pass over a range of one parameter, where PyTorch's foreach takes a dozen. Bound by memory: 4
 * streams read and 3 written, with amsgrad 5 and 4. The choices are made outside of the loops, so that each loop is
 * plain arithmetic for the compiler to vectorise, square root and quotient included. */
#ifndef REAL

#include "cuda_ops/adam.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#include "adam.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "adam.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_adam_cpu(void *param, void *grad, void *exp_avg, void *exp_avg_sq, void *max_exp_avg_sq,
                                  double step, double grad_scale, const cuda_ops_adam_options *options, int64_t begin,
                                  int64_t end, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        adam_f32(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, grad_scale, options, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        adam_f64(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, grad_scale, options, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* What a step's elements have in common. */
typedef struct {
    REAL sign, decay, l2, beta1, fresh1, beta2, fresh2, eps, size, factor;
    bool small_fresh1;
} FN(adam_scalars);

/* with_l2 and amsgrad are constants wherever this is inlined. */
CUDA_OPS_INLINE void FN(adam_loop)(REAL *restrict param, const REAL *restrict grad, REAL *restrict exp_avg,
                                   REAL *restrict exp_avg_sq, REAL *restrict max_exp_avg_sq, const FN(adam_scalars) s,
                                   int64_t begin, int64_t end, const bool with_l2, const bool amsgrad)
{
    /* exp_avg += fresh1 * (g - exp_avg), in the form of torch.lerp, by which infinities differ: from the nearer end. */
    const REAL weight = s.small_fresh1 ? s.fresh1 : -s.beta1;
    for (int64_t i = begin; i < end; i++) {
        const REAL before = exp_avg[i];
        REAL g = s.sign * grad[i], v = exp_avg_sq[i];
        if (with_l2)
            g += s.l2 * param[i];
        const REAL m = (s.small_fresh1 ? before : g) + weight * (g - before);
        v = s.beta2 * v + s.fresh2 * g * g;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        if (amsgrad) {
            const REAL largest = max_exp_avg_sq[i];
            v = v > largest || v != v ? v : largest;
            max_exp_avg_sq[i] = v;
        }
        param[i] = param[i] * s.decay - s.size * (m / ((REAL)sqrt(v) * s.factor + s.eps));
    }
}

CUDA_OPS_SIMD static void FN(adam)(REAL *param, REAL *grad, REAL *exp_avg, REAL *exp_avg_sq, REAL *max_exp_avg_sq,
                                   double step, double grad_scale, const cuda_ops_adam_options *options, int64_t begin,
                                   int64_t end)
{
    const FN(adam_scalars) s = {
        .sign = options->maximize ? (REAL)-1 : (REAL)1,
        .decay = options->decoupled ? (REAL)(1 - options->lr * options->weight_decay) : (REAL)1,
        .l2 = (REAL)options->weight_decay,
        .beta1 = (REAL)options->beta1,
        .fresh1 = (REAL)(1 - options->beta1),
        .beta2 = (REAL)options->beta2,
        .fresh2 = (REAL)(1 - options->beta2),
        .eps = (REAL)options->eps,
        .size = (REAL)(options->lr / (1 - pow(options->beta1, step))),
        .factor = (REAL)(1 / sqrt(1 - pow(options->beta2, step))),
        .small_fresh1 = 1 - options->beta1 < 0.5,
    };
    if (grad_scale != 1)
        for (int64_t i = begin; i < end; i++)
            grad[i] /= (REAL)grad_scale;
    const bool with_l2 = options->weight_decay != 0 && !options->decoupled;
    if (with_l2 && options->amsgrad)
        FN(adam_loop)(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, s, begin, end, true, true);
    else if (with_l2)
        FN(adam_loop)(param, grad, exp_avg, exp_avg_sq, NULL, s, begin, end, true, false);
    else if (options->amsgrad)
        FN(adam_loop)(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, s, begin, end, false, true);
    else
        FN(adam_loop)(param, grad, exp_avg, exp_avg_sq, NULL, s, begin, end, false, false);
}

#endif
