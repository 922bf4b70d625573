/* The activation functions and their slopes: one text for C and CUDA, and for whatever applies them on the way.
 *
 * Included once for each precision, like the C kernels' files, with these defined (no include guard):
 *     REAL, FN(name)           the type that is computed in, and a name's form for this precision
 *     PRECISION                bits of the results: 16 (computed in float, rounded to a half afterwards), 32 or 64
 *     CUDA_OPS_FUNCTION        what stands before a function: static inline ...
 * and these functions, to the accuracy of PRECISION:
 *     FN(absolute)(x), FN(copy_sign)(magnitude, sign)
 *     FN(exponential)(x)
 *     FN(expm1_of_negative)(x) e^x - 1 for x <= 0, relative to the result
 *     FN(bell)(x)              e^(-x^2 / 2), relative to the result: by x^2 to more digits than REAL has
 *     FN(quotient)(a, b)       for finite a and b >= 1; with 16 bits for an infinite b too
 *
 * FN(name)(x) is the function, FN(name_slope)(x) what the gradient is multiplied by; where it says `output`, it is taken
 * at the function's value. Nothing here overflows on the way to a result that does not, and no difference of near
 * numbers is taken: exponentials are of -|x|, and Phi(-x) is not 1 - Phi(x). NaN stays; what infinities give is what
 * PyTorch gives: gelu(-inf) is NaN, being -inf * 0. */

/* Phi(-a) / bell(a) for a from 0 to the place where bell(a) is 0: (a + k) times it is a polynomial in 2 a / (a + k),
 * found by Remez' exchange; error 2e-17 of the value for 64 bits, 8e-9 for 32, 2e-5 for 16. */
#if PRECISION == 64
CUDA_OPS_FUNCTION REAL FN(normal_tail)(REAL a)
{
    const REAL inverse = FN(quotient)((REAL)1, a + (REAL)4), u = (a + a) * inverse;
    REAL y = (REAL)-1.196504936040349355e-9;
    y = y * u + (REAL)2.598404616187596607e-8;
    y = y * u - (REAL)2.546536030328580384e-7;
    y = y * u + (REAL)1.495108997845728154e-6;
    y = y * u - (REAL)5.906444029425595065e-6;
    y = y * u + (REAL)0.00001679511476193665642;
    y = y * u - (REAL)0.00003600530501211109226;
    y = y * u + (REAL)0.00005979489932336601387;
    y = y * u - (REAL)0.00007744370271861568175;
    y = y * u + (REAL)0.0000799594255355862835;
    y = y * u - (REAL)0.00006996123036942037423;
    y = y * u + (REAL)0.00003617608097814656003;
    y = y * u + (REAL)1.861389814197947848e-6;
    y = y * u + (REAL)0.000146783042871931465;
    y = y * u - (REAL)0.00001051614202015014818;
    y = y * u - (REAL)0.001701385421901593954;
    y = y * u - (REAL)0.001880066441649145714;
    y = y * u + (REAL)0.02237604444272479642;
    y = y * u + (REAL)0.01846222851101928765;
    y = y * u - (REAL)0.3990380066216965724;
    y = y * u + (REAL)1.308461756786623378;
    y = y * u - (REAL)2.191538243211440113;
    y = y * u + (REAL)2;
    return y * inverse;
}
#elif PRECISION == 32
CUDA_OPS_FUNCTION REAL FN(normal_tail)(REAL a)
{
    const REAL inverse = FN(quotient)((REAL)1, a + (REAL)3.5), u = (a + a) * inverse;
    REAL y = (REAL)0.0001086928346;
    y = y * u - (REAL)0.0005599126895;
    y = y * u + (REAL)7.132105792e-5;
    y = y * u + (REAL)0.002875281567;
    y = y * u + (REAL)0.005404107914;
    y = y * u - (REAL)0.02974158786;
    y = y * u - (REAL)0.08890485812;
    y = y * u + (REAL)0.6736857613;
    y = y * u - (REAL)1.568522746;
    y = y * u + (REAL)1.750000014;
    return y * inverse;
}
#else
/* The same polynomial of degree 5 in powers of 3 / (a + 3): a multiplication less. */
CUDA_OPS_FUNCTION REAL FN(normal_tail)(REAL a)
{
    const REAL s = FN(quotient)((REAL)1, a * (REAL)0.3333333333 + (REAL)1);
    REAL y = (REAL)-0.05251441404;
    y = y * s + (REAL)0.07877082344;
    y = y * s + (REAL)0.09734022134;
    y = y * s + (REAL)0.1079855240;
    y = y * s + (REAL)0.1356503504;
    y = y * s + (REAL)0.1327587460;
    return y * s;
}
#endif

/* log(1 + e) for e from 0 to 1: twice the inverse hyperbolic tangent of e / (2 + e), a series in the square of that. */
CUDA_OPS_FUNCTION REAL FN(log1p_of_fraction)(REAL e)
{
    const REAL s = FN(quotient)(e, e + (REAL)2), square = s * s;
#if PRECISION == 64
    REAL y = (REAL)0.1706006001685033533;
    y = y * square + (REAL)0.08315689574657422521;
    y = y * square + (REAL)0.1211224670976256481;
    y = y * square + (REAL)0.133001029572399428;
    y = y * square + (REAL)0.1538663540578894301;
    y = y * square + (REAL)0.1818173979082590039;
    y = y * square + (REAL)0.222222241116558108;
    y = y * square + (REAL)0.2857142854492763734;
    y = y * square + (REAL)0.4000000000019029857;
    y = y * square + (REAL)0.6666666666666613435;
    y = y * square + (REAL)2;
#elif PRECISION == 32
    REAL y = (REAL)0.24413066;
    y = y * square + (REAL)0.2139325543;
    y = y * square + (REAL)0.2862072112;
    y = y * square + (REAL)0.3999869097;
    y = y * square + (REAL)0.6666667931;
    y = y * square + (REAL)2;
#else
    REAL y = (REAL)0.4529703;
    y = y * square + (REAL)0.66437969;
    y = y * square + (REAL)2.0000144;
#endif
    return y * s;
}

/* |x|, but no more than where bell is 0, since infinity less infinity would be NaN on the way. */
CUDA_OPS_FUNCTION REAL FN(normal_magnitude)(REAL x)
{
    const REAL a = FN(absolute)(x);
#if PRECISION == 16
    return a; /* bell squares it alone */
#else
    const REAL limit = PRECISION == 64 ? (REAL)39 : (REAL)14.5;
    return a > limit ? limit : a;
#endif
}

/* x Phi(x), Phi being the normal distribution's function. */
CUDA_OPS_FUNCTION REAL FN(gelu)(REAL x)
{
    const REAL a = FN(normal_magnitude)(x), beyond = FN(normal_tail)(a) * FN(bell)(a);
    return x * (x < (REAL)0 ? beyond : (REAL)1 - beyond);
}

CUDA_OPS_FUNCTION REAL FN(gelu_slope)(REAL x)
{
    const REAL a = FN(normal_magnitude)(x), bell = FN(bell)(a), beyond = FN(normal_tail)(a) * bell;
    return (x < (REAL)0 ? beyond : (REAL)1 - beyond) + x * bell * (REAL)0.39894228040143267794;
}

/* 1 / (1 + e^-x) by e = e^-|x|, and the other share, which is that of -x. */
CUDA_OPS_FUNCTION REAL FN(sigmoid)(REAL x)
{
    const REAL e = FN(exponential)(-FN(absolute)(x));
    return FN(quotient)(x < (REAL)0 ? e : (REAL)1, (REAL)1 + e);
}

CUDA_OPS_FUNCTION REAL FN(sigmoid_slope)(REAL output)
{
    return output * ((REAL)1 - output);
}

CUDA_OPS_FUNCTION REAL FN(silu)(REAL x)
{
    return x * FN(sigmoid)(x);
}

CUDA_OPS_FUNCTION REAL FN(silu_slope)(REAL x)
{
    const REAL e = FN(exponential)(-FN(absolute)(x)), larger = FN(quotient)((REAL)1, (REAL)1 + e), smaller = e * larger;
    const REAL share = x < (REAL)0 ? smaller : larger, other = x < (REAL)0 ? larger : smaller;
    return share * ((REAL)1 + x * other);
}

/* 1/2 (1 + tanh(u)) is sigmoid(2 u); 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
CUDA_OPS_FUNCTION REAL FN(gelu_tanh)(REAL x)
{
    return x * FN(sigmoid)(x * ((REAL)1.59576912160573071176 + (REAL)0.07135481627260024627 * x * x));
}

CUDA_OPS_FUNCTION REAL FN(gelu_tanh_slope)(REAL x)
{
    const REAL square = x * x, twice = x * ((REAL)1.59576912160573071176 + (REAL)0.07135481627260024627 * square);
    const REAL e = FN(exponential)(-FN(absolute)(twice)), larger = FN(quotient)((REAL)1, (REAL)1 + e);
    const REAL smaller = e * larger, slope = (REAL)1.59576912160573071176 + (REAL)0.21406444881780073882 * square;
    return (x < (REAL)0 ? smaller : larger) + x * smaller * larger * slope;
}

CUDA_OPS_FUNCTION REAL FN(tanh)(REAL x)
{
    const REAL m = FN(expm1_of_negative)((REAL)-2 * FN(absolute)(x));
    return FN(copy_sign)(FN(quotient)(m, m + (REAL)2), x);
}

CUDA_OPS_FUNCTION REAL FN(tanh_slope)(REAL output)
{
    return (REAL)1 - output * output;
}

/* Sums and products, of which one part is 0 or 1, where a choice would be a branch in each element. */
CUDA_OPS_FUNCTION REAL FN(elu)(REAL x, REAL alpha)
{
    return (x > (REAL)0 ? x : (REAL)0) + alpha * FN(expm1_of_negative)(x > (REAL)0 ? (REAL)0 : x);
}

CUDA_OPS_FUNCTION REAL FN(elu_slope)(REAL x, REAL alpha)
{
    return (x <= (REAL)0 ? alpha : (REAL)1) * FN(exponential)(x < (REAL)0 ? x : (REAL)0);
}

/* For alpha >= 0; where the output is near -alpha, the sum has few digits. */
CUDA_OPS_FUNCTION REAL FN(elu_output_slope)(REAL output, REAL alpha)
{
    return output <= (REAL)0 ? output + alpha : (REAL)1;
}

CUDA_OPS_FUNCTION REAL FN(leaky_relu)(REAL x, REAL negative_slope)
{
    return x > (REAL)0 ? x : x * negative_slope;
}

/* Of the input; of the output too, if negative_slope >= 0. */
CUDA_OPS_FUNCTION REAL FN(leaky_relu_slope)(REAL x, REAL negative_slope)
{
    return x > (REAL)0 ? (REAL)1 : negative_slope;
}

/* log(1 + e^(beta x)) / beta, and x where beta x > threshold. */
CUDA_OPS_FUNCTION REAL FN(softplus)(REAL x, REAL beta, REAL threshold, REAL inverse_of_beta)
{
    const REAL z = x * beta, logarithm = FN(log1p_of_fraction)(FN(exponential)(-FN(absolute)(z)));
    return z > threshold ? x : ((z > (REAL)0 ? z : (REAL)0) + logarithm) * inverse_of_beta;
}

CUDA_OPS_FUNCTION REAL FN(softplus_slope)(REAL x, REAL beta, REAL threshold)
{
    const REAL z = x * beta, far = (REAL)10000; /* where sigmoid is 1 */
    return FN(sigmoid)(z > threshold ? far : z);
}

CUDA_OPS_FUNCTION REAL FN(hardtanh)(REAL x, REAL min_val, REAL max_val)
{
    const REAL y = x < min_val ? min_val : x;
    return y > max_val ? max_val : y;
}

CUDA_OPS_FUNCTION REAL FN(hardtanh_slope)(REAL output, REAL min_val, REAL max_val)
{
    return output <= min_val || output >= max_val ? (REAL)0 : (REAL)1;
}

CUDA_OPS_FUNCTION REAL FN(hardsigmoid)(REAL x)
{
    return FN(hardtanh)(x + (REAL)3, (REAL)0, (REAL)6) * (REAL)0.16666666666666666667;
}

CUDA_OPS_FUNCTION REAL FN(hardsigmoid_slope)(REAL x)
{
    return x > (REAL)-3 && x < (REAL)3 ? (REAL)0.16666666666666666667 : (REAL)0;
}

CUDA_OPS_FUNCTION REAL FN(hardswish)(REAL x)
{
    return x * FN(hardsigmoid)(x);
}

CUDA_OPS_FUNCTION REAL FN(hardswish_slope)(REAL x)
{
    const REAL middle = x * (REAL)0.33333333333333333333 + (REAL)0.5;
    return x <= (REAL)-3 ? (REAL)0 : x < (REAL)3 ? middle : (REAL)1;
}

/* x tanh(log(1 + n)), n = e^x, is x (n^2 + 2 n) / (n^2 + 2 n + 2); above 0 both are divided by n^2, so that e = e^-|x| is
 * all that is needed. */
CUDA_OPS_FUNCTION REAL FN(mish)(REAL x)
{
    const REAL e = FN(exponential)(-FN(absolute)(x));
    const REAL above = (REAL)1 + (REAL)2 * e, below = e * (e + (REAL)2);
    const REAL share = x < (REAL)0 ? below : above, rest = x < (REAL)0 ? (REAL)2 : (REAL)2 * e * e;
    return x * FN(quotient)(share, share + rest);
}

CUDA_OPS_FUNCTION REAL FN(mish_slope)(REAL x)
{
    const REAL e = FN(exponential)(-FN(absolute)(x));
    const REAL above = (REAL)1 + (REAL)2 * e, below = e * (e + (REAL)2);
    const REAL share = x < (REAL)0 ? below : above, rest = x < (REAL)0 ? (REAL)2 : (REAL)2 * e * e;
    const REAL inverse = FN(quotient)((REAL)1, share + rest);
    const REAL change = (REAL)4 * e * ((REAL)1 + e) * (x < (REAL)0 ? (REAL)1 : e);
    return inverse * (share + x * change * inverse);
}
