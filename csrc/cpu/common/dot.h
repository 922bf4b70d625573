/* A dot product, in DOT_LANES sums that the compiler makes vectors of. Included in each pass of a file that defines REAL
 * and FN (common.h), as activation_functions.h is; so it has no include guard. */
#ifndef DOT_LANES
#define DOT_LANES 16
#endif

CUDA_OPS_INLINE REAL FN(dot)(const REAL *a, const REAL *b, int64_t count)
{
    REAL lanes[DOT_LANES] = {0}, total = 0;
    int64_t i = 0;
    for (; i + DOT_LANES <= count; i += DOT_LANES)
        for (int64_t e = 0; e < DOT_LANES; e++)
            lanes[e] += a[i + e] * b[i + e];
    for (; i < count; i++)
        total += a[i] * b[i];
    for (int64_t e = 0; e < DOT_LANES; e++)
        total += lanes[e];
    return total;
}
