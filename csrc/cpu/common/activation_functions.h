/* cuda_ops/activation_functions.h for the C kernels. Included in each pass of a file that defines REAL and FN (common.h),
 * and PRECISION, which ends here; so it has no include guard. */
#include "common/exponential.h"

#ifndef CUDA_OPS_FUNCTION
#define CUDA_OPS_FUNCTION CUDA_OPS_INLINE
#endif

CUDA_OPS_INLINE REAL FN(absolute)(REAL x)
{
    return sizeof(REAL) == sizeof(float) ? (REAL)fabsf((float)x) : (REAL)fabs(x);
}

CUDA_OPS_INLINE REAL FN(copy_sign)(REAL magnitude, REAL sign)
{
    return sizeof(REAL) == sizeof(float) ? (REAL)copysignf((float)magnitude, (float)sign)
                                         : (REAL)copysign(magnitude, sign);
}

CUDA_OPS_INLINE REAL FN(quotient)(REAL a, REAL b)
{
    return a / b;
}

#if PRECISION == 16
/* All that the functions take the exponential of is at most 0. */
CUDA_OPS_INLINE REAL FN(exponential)(REAL x)
{
    return exponential_within_f32(x, ROUGHLY_NO_MORE_THAN_0);
}

CUDA_OPS_INLINE REAL FN(expm1_of_negative)(REAL x)
{
    return expm1_of_negative_f32(x);
}

CUDA_OPS_INLINE REAL FN(bell)(REAL x)
{
    return FN(exponential)((REAL)-0.5 * x * x);
}
#else
/* The square of the upper half of x's bits is exact, and what it leaves of x^2 is a number of its own. */
CUDA_OPS_INLINE REAL FN(bell)(REAL x)
{
#if PRECISION == 32
    uint32_t bits;
    const uint32_t upper = 0xfffff000u;
#else
    uint64_t bits;
    const uint64_t upper = 0xfffffffff8000000u;
#endif
    REAL high;
    memcpy(&bits, &x, sizeof bits);
    bits &= upper;
    memcpy(&high, &bits, sizeof high);
    return FN(exponential_of_sum)((REAL)-0.5 * high * high, (REAL)-0.5 * (x - high) * (x + high));
}
#endif

#include "cuda_ops/activation_functions.h"

#undef PRECISION
