#include "cuda_ops/halves_cpu.h"

#include <math.h>

#include "check.h"

/* Bits of the exponent's bias and of the mantissa. */
typedef struct {
    cuda_ops_dtype dtype;
    int bias, mantissa;
} format;

static const format FORMATS[] = {{CUDA_OPS_FLOAT16, 15, 10}, {CUDA_OPS_BFLOAT16, 127, 7}};

static double value_of(uint16_t half, format f)
{
    const int exponent = (half & 0x7fff) >> f.mantissa, fraction = half & ((1 << f.mantissa) - 1);
    const double sign = half >> 15 ? -1 : 1;
    if (exponent == 2 * f.bias + 1)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - f.bias - f.mantissa);
    return sign * ldexp(fraction + (1 << f.mantissa), exponent - f.bias - f.mantissa);
}

/* The nearest number of the format, of two the one whose last bit is 0: nearbyint does that with multiples of it. */
static double nearest(double x, format f)
{
    if (x == 0 || isnan(x) || isinf(x))
        return x;
    int exponent;
    frexp(x, &exponent);
    const int last = exponent - 1 < 1 - f.bias ? 1 - f.bias - f.mantissa : exponent - 1 - f.mantissa;
    const double rounded = ldexp(nearbyint(ldexp(x, -last)), last);
    const double largest = ldexp(2 - ldexp(1, -f.mantissa), f.bias);
    return fabs(rounded) > largest ? copysign((double)INFINITY, x) : rounded;
}

static bool same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

/* All numbers of the format, and back. */
static void check_all(format f)
{
    enum { COUNT = 65536 };
    uint16_t *const halves = guarded_new(COUNT / 2, CUDA_OPS_FLOAT32), *const back = guarded_new(COUNT / 2, 0);
    float *const wide = guarded_new(COUNT, CUDA_OPS_FLOAT32);
    for (int i = 0; i < COUNT; i++)
        halves[i] = (uint16_t)i;
    CHECK_OK(cuda_ops_widen_cpu(wide, halves, COUNT, f.dtype));
    CHECK_OK(cuda_ops_round_cpu(back, wide, COUNT, f.dtype));
    for (int i = 0; i < COUNT; i++) {
        const double expected = value_of((uint16_t)i, f);
        CHECK(same(wide[i], expected), "0x%04x is %g, expected %g", (unsigned)i, (double)wide[i], expected);
        CHECK(isnan(expected) ? isnan(value_of(back[i], f)) && back[i] >> 15 == i >> 15 : back[i] == i,
              "0x%04x comes back as 0x%04x", (unsigned)i, (unsigned)back[i]);
    }
    guarded_free(halves, COUNT / 2, CUDA_OPS_FLOAT32);
    guarded_free(back, COUNT / 2, CUDA_OPS_FLOAT32);
    guarded_free(wide, COUNT, CUDA_OPS_FLOAT32);
}

/* Floats between two neighbours of the format: the middle, which is a tie, and what is next to it and to them. */
static void check_rounding(format f)
{
    for (uint32_t half = 0; half < 0x7fff; half++)
        for (int sign = 0; sign < 2; sign++) {
            const float low = (float)value_of((uint16_t)half, f);
            const float high = (float)value_of((uint16_t)(half + 1), f);
            const float middle = isfinite(high) ? low / 2 + high / 2 : low;
            float x[] = {low,    nextafterf(low, INFINITY), nextafterf(middle, 0), middle, nextafterf(middle, INFINITY),
                         middle, nextafterf(high, 0)};
            enum { COUNT = sizeof x / sizeof x[0] };
            uint16_t y[COUNT];
            for (int i = 0; i < COUNT; i++)
                x[i] = sign ? -x[i] : x[i];
            CHECK_OK(cuda_ops_round_cpu(y, x, COUNT, f.dtype));
            for (int i = 0; i < COUNT; i++)
                CHECK(same(value_of(y[i], f), nearest(x[i], f)), "%.9g becomes %g, expected %g", (double)x[i],
                      value_of(y[i], f), nearest(x[i], f));
        }
}

/* What is out of range, and NaNs whose bits a cut would take away; as the vectors do it, and the last ones of a row. */
static void check_special(format f)
{
    const uint32_t quiet = 0x7f800001u, signalling = 0xff802000u;
    float special[] = {INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 65519.0f, 65520.0f, 65536.0f, 1e-45f, -1e-45f, 0, -0.0f};
    enum { GIVEN = sizeof special / sizeof special[0], COUNT = GIVEN + 2 };
    for (int count = 1; count < 40; count++) {
        float *const x = guarded_new(count, CUDA_OPS_FLOAT32);
        uint16_t *const y = guarded_new((count + 1) / 2, CUDA_OPS_FLOAT32);
        for (int i = 0; i < count; i++)
            if (i % COUNT < GIVEN)
                x[i] = special[i % COUNT];
            else
                memcpy(&x[i], i % COUNT == GIVEN ? &quiet : &signalling, sizeof x[i]);
        CHECK_OK(cuda_ops_round_cpu(y, x, count, f.dtype));
        for (int i = 0; i < count; i++)
            CHECK(same(value_of(y[i], f), nearest(x[i], f)), "%.9g becomes %g", (double)x[i], value_of(y[i], f));
        guarded_free(x, count, CUDA_OPS_FLOAT32);
        guarded_free(y, (count + 1) / 2, CUDA_OPS_FLOAT32);
    }
}

int main(void)
{
    for (size_t i = 0; i < sizeof FORMATS / sizeof FORMATS[0]; i++) {
        check_all(FORMATS[i]);
        check_rounding(FORMATS[i]);
        check_special(FORMATS[i]);
        CHECK_OK(cuda_ops_widen_cpu(NULL, NULL, 0, FORMATS[i].dtype));
        CHECK_OK(cuda_ops_round_cpu(NULL, NULL, 0, FORMATS[i].dtype));
    }
    CHECK_STATUS(cuda_ops_widen_cpu(NULL, NULL, 1, CUDA_OPS_FLOAT32), CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_round_cpu(NULL, NULL, 1, CUDA_OPS_FLOAT64), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
