/* A row's largest element, its exponentials and their sum: what softmax and masked_softmax have in common. Included in
 * each pass of a file that defines REAL and FN (common.h), after log_sum_exp.h, so that it has no include guard.
 */

/* NaN is passed over by the comparisons; -inf of nothing else. */
CUDA_OPS_INLINE REAL FN(row_maximum)(const REAL *x, int64_t cols)
{
    REAL largest = -(REAL)INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < cols; c++)
        largest = x[c] > largest ? x[c] : largest;
    return largest;
}

/* x *= factor, and the largest of it. */
CUDA_OPS_INLINE REAL FN(row_scaled_maximum)(REAL *x, int64_t cols, REAL factor)
{
    REAL largest = -(REAL)INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < cols; c++) {
        x[c] *= factor;
        largest = x[c] > largest ? x[c] : largest;
    }
    return largest;
}

/* output = exp(x - maximum), which may be in place, and their sum. The difference of equal infinities makes it NaN, and
 * with it what is divided by it. */
CUDA_OPS_INLINE REAL FN(row_exponentials_within)(REAL *output, const REAL *x, int64_t cols, REAL maximum,
                                                 enum exponent_range range)
{
    const int64_t whole = cols - cols % LANES;
    double sum = 0;
    for (int64_t first = 0; first < whole; first += SUM_BLOCK) {
        const int64_t last = min_i64(first + SUM_BLOCK, whole);
        REAL block = 0;
#pragma omp simd reduction(+ : block)
        for (int64_t c = first; c < last; c++) {
            const REAL e = FN(exponential_within)(x[c] - maximum, range);
            output[c] = e;
            block += e;
        }
        sum += block;
    }
    if (whole < cols) {
        REAL tail[LANES], block = 0;
        FN(padded_lanes)(tail, x + whole, cols - whole);
#pragma omp simd
        for (int l = 0; l < LANES; l++)
            tail[l] = FN(exponential_within)(tail[l] - maximum, range);
        for (int64_t c = whole; c < cols; c++) {
            output[c] = tail[c - whole];
            block += tail[c - whole];
        }
        sum += block;
    }
    return (REAL)sum;
}

CUDA_OPS_INLINE REAL FN(row_exponentials)(REAL *output, const REAL *x, int64_t cols, REAL maximum)
{
    return FN(row_exponentials_within)(output, x, cols, maximum, ANY_EXPONENT);
}

CUDA_OPS_INLINE void FN(row_scale)(REAL *output, int64_t cols, REAL factor)
{
    for (int64_t c = 0; c < cols; c++)
        output[c] *= factor;
}
