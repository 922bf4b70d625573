/* The losses of an element and its target, and their derivatives by each: one text for C and CUDA.
 *
 * Included once for each precision, after activation_functions.h and with what that is included with, and
 *     FN(logarithm)(x)
 * FN(name)(x, t, pos, p) is the loss of the element x and the target t, pos the weight of a positive target and p the
 * loss's parameter; FN(name_by_input) and FN(name_by_target) are its derivatives. Not every loss has every argument.
 * NaN and infinities give what PyTorch's formulas give. */

CUDA_OPS_FUNCTION REAL FN(mse)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return (x - t) * (x - t);
}
CUDA_OPS_FUNCTION REAL FN(mse_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return (REAL)2 * (x - t);
}

CUDA_OPS_FUNCTION REAL FN(l1)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return FN(absolute)(x - t);
}
CUDA_OPS_FUNCTION REAL FN(l1_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    const REAL d = x - t;
    return d > (REAL)0 ? (REAL)1 : d < (REAL)0 ? (REAL)-1 : (REAL)0;
}

/* Half a square below p, divided by it; above it the distance. */
CUDA_OPS_FUNCTION REAL FN(smooth_l1)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos;
    const REAL z = FN(absolute)(x - t);
    return z < p ? (REAL)0.5 * z * z / p : z - (REAL)0.5 * p;
}
CUDA_OPS_FUNCTION REAL FN(smooth_l1_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos;
    const REAL d = x - t;
    return d >= p ? (REAL)1 : d <= -p ? (REAL)-1 : d / p;
}

CUDA_OPS_FUNCTION REAL FN(huber)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos;
    const REAL z = FN(absolute)(x - t);
    return z < p ? (REAL)0.5 * z * z : p * (z - (REAL)0.5 * p);
}
CUDA_OPS_FUNCTION REAL FN(huber_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos;
    const REAL d = x - t;
    return d >= p ? p : d <= -p ? -p : d;
}

/* log(1 + e^-|x|): what log(1 + e^-x) is beyond -x, or beyond 0. */
CUDA_OPS_FUNCTION REAL FN(softplus_beyond)(REAL x)
{
    return FN(log1p_of_fraction)(FN(exponential)(-FN(absolute)(x)));
}
CUDA_OPS_FUNCTION REAL FN(softplus_of_negative)(REAL x)
{
    const REAL beyond = FN(softplus_beyond)(x);
    return x < (REAL)0 ? beyond - x : beyond;
}

/* Binary cross-entropy of a logit: -pos t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)). */
CUDA_OPS_FUNCTION REAL FN(bce)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)p;
    return ((REAL)1 - t) * x + ((pos - (REAL)1) * t + (REAL)1) * FN(softplus_of_negative)(x);
}
CUDA_OPS_FUNCTION REAL FN(bce_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)p;
    return ((pos - (REAL)1) * t + (REAL)1) * FN(sigmoid)(x) - pos * t;
}
/* log(1 - sigmoid(x)) - pos log(sigmoid(x)), of which what may be infinite, or is most of it, stands in one product:
 * (pos - 1) log(1 + e^-x) - x would lose a small pos where x is negative, and be infinity - infinity at its end. */
CUDA_OPS_FUNCTION REAL FN(bce_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)t, (void)p;
    const REAL beyond = FN(softplus_beyond)(x), rest = (pos - (REAL)1) * beyond;
    return x < (REAL)0 ? (beyond == (REAL)0 ? (REAL)0 : rest) - pos * x : rest - x;
}

/* Kullback and Leibler's divergence, of a logarithm x and a probability t: t (log(t) - x), 0 log(0) being 0. */
CUDA_OPS_FUNCTION REAL FN(kl)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return (t == (REAL)0 ? (REAL)0 : t * FN(logarithm)(t)) - t * x;
}
CUDA_OPS_FUNCTION REAL FN(kl_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)x, (void)pos, (void)p;
    return -t;
}
CUDA_OPS_FUNCTION REAL FN(kl_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return FN(logarithm)(t) + t / t - x; /* NaN at 0, as in PyTorch */
}

/* The same by the logarithm of that probability. */
CUDA_OPS_FUNCTION REAL FN(kl_of_log)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return FN(exponential)(t) * (t - x);
}
CUDA_OPS_FUNCTION REAL FN(kl_of_log_by_input)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)x, (void)pos, (void)p;
    return -FN(exponential)(t);
}
CUDA_OPS_FUNCTION REAL FN(kl_of_log_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    (void)pos, (void)p;
    return FN(exponential)(t) * (t - x + (REAL)1);
}

/* A distance's derivative by the target is that by the input, turned. */
CUDA_OPS_FUNCTION REAL FN(mse_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    return -FN(mse_by_input)(x, t, pos, p);
}
CUDA_OPS_FUNCTION REAL FN(l1_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    return -FN(l1_by_input)(x, t, pos, p);
}
CUDA_OPS_FUNCTION REAL FN(smooth_l1_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    return -FN(smooth_l1_by_input)(x, t, pos, p);
}
CUDA_OPS_FUNCTION REAL FN(huber_by_target)(REAL x, REAL t, REAL pos, REAL p)
{
    return -FN(huber_by_input)(x, t, pos, p);
}
