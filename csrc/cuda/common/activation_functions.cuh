// cuda_ops/activation_functions.h on the device: name_f16, name_f32 and name_f64 for float that becomes a half, float
// and double. What float calls goes by the special function unit where its error, mended by a step of Newton's, is
// below float's; divisions have no slow path to diverge on, since no divisor is near 0 or infinity.
#ifndef CUDA_OPS_COMMON_ACTIVATION_FUNCTIONS_CUH
#define CUDA_OPS_COMMON_ACTIVATION_FUNCTIONS_CUH

#include "ptx/arithmetic.cuh"

#define CUDA_OPS_FUNCTION __device__ __forceinline__

CUDA_OPS_FUNCTION float absolute_f16(float x)
{
    return fabsf(x);
}
CUDA_OPS_FUNCTION float copy_sign_f16(float magnitude, float sign)
{
    return copysignf(magnitude, sign);
}
CUDA_OPS_FUNCTION float exponential_f16(float x)
{
    return ex2_approx_ftz(x * 1.4426950409f);
}
// The difference from 1 has no digits left near 0, where three terms of the series are enough.
CUDA_OPS_FUNCTION float expm1_of_negative_f16(float x)
{
    const float series = fmaf(x * x, fmaf(x, 0.16666667f, 0.5f), x);
    return x > -0.05f ? series : exponential_f16(x) - 1.0f;
}
CUDA_OPS_FUNCTION float bell_f16(float x)
{
    return ex2_approx_ftz(x * x * -0.72134752f);
}
CUDA_OPS_FUNCTION float quotient_f16(float a, float b)
{
    return a * rcp_approx_ftz(b);
}

CUDA_OPS_FUNCTION float absolute_f32(float x)
{
    return fabsf(x);
}
CUDA_OPS_FUNCTION float copy_sign_f32(float magnitude, float sign)
{
    return copysignf(magnitude, sign);
}
CUDA_OPS_FUNCTION float exponential_f32(float x)
{
    return expf(x);
}
CUDA_OPS_FUNCTION float expm1_of_negative_f32(float x)
{
    return expm1f(x);
}
// What x * x leaves of the square is so small that e^-that is 1 less half of it.
CUDA_OPS_FUNCTION float bell_f32(float x)
{
    const float square = x * x, rest = fmaf(x, x, -square), bell = expf(-0.5f * square);
    return fmaf(bell, -0.5f * rest, bell);
}
CUDA_OPS_FUNCTION float quotient_f32(float a, float b)
{
    const float inverse = rcp_approx_ftz(b), q = a * inverse;
    return fmaf(fmaf(-q, b, a), inverse, q);
}

CUDA_OPS_FUNCTION double absolute_f64(double x)
{
    return fabs(x);
}
CUDA_OPS_FUNCTION double copy_sign_f64(double magnitude, double sign)
{
    return copysign(magnitude, sign);
}
CUDA_OPS_FUNCTION double exponential_f64(double x)
{
    return exp(x);
}
CUDA_OPS_FUNCTION double expm1_of_negative_f64(double x)
{
    return expm1(x);
}
CUDA_OPS_FUNCTION double bell_f64(double x)
{
    const double square = x * x, rest = fma(x, x, -square), bell = exp(-0.5 * square);
    return fma(bell, -0.5 * rest, bell);
}
CUDA_OPS_FUNCTION double quotient_f64(double a, double b)
{
    return a / b;
}

#define REAL float
#define FN(name) name##_f16
#define PRECISION 16
#include "cuda_ops/activation_functions.h"
#undef FN
#undef PRECISION
#define FN(name) name##_f32
#define PRECISION 32
#include "cuda_ops/activation_functions.h"
#undef REAL
#undef FN
#undef PRECISION
#define REAL double
#define FN(name) name##_f64
#define PRECISION 64
#include "cuda_ops/activation_functions.h"
#undef REAL
#undef FN
#undef PRECISION

#endif
