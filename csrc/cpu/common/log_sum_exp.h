/* The largest element and the log of the sum of exponentials of columns of an [outer, cols, inner] array: what
 * log_softmax and cross_entropy have in common. Included in each pass of a file that defines REAL and FN (common.h), so
 * that it has no include guard.
 *
 * With inner == 1 a column is a row in memory and SIMD lanes go along it, unless it is shorter than they are; else lanes go
 * along neighbouring columns.
 * Sums run over at most SUM_BLOCK elements in REAL before they go into a double, so that long rows stay accurate.
 */

#ifndef CUDA_OPS_CPU_LOG_SUM_EXP_ONCE
#define CUDA_OPS_CPU_LOG_SUM_EXP_ONCE
enum {
    LANES = 16, /* floats in the widest register there is */
    SUM_BLOCK = 1024,
    TILE = 64 /* columns that are computed together, with their intermediate values on the stack */
};

/* The columns from `column` on that lie side by side in memory, at most TILE and not beyond `end`. */
CUDA_OPS_INLINE int64_t tile_columns(int64_t column, int64_t end, int64_t inner)
{
    const int64_t left = inner == 1 ? end - column : min_i64(end - column, inner - column % inner);
    return min_i64(left, TILE);
}

/* Offset of a column's first element. */
CUDA_OPS_INLINE int64_t column_offset(int64_t column, int64_t cols, int64_t inner)
{
    return column / inner * cols * inner + column % inner;
}
#endif

/* Up to LANES elements from x, padded with -inf, which changes neither the maximum nor the sum. */
CUDA_OPS_INLINE void FN(padded_lanes)(REAL *lanes, const REAL *x, int64_t count)
{
    for (int l = 0; l < LANES; l++)
        lanes[l] = l < count ? x[l] : -(REAL)INFINITY;
}

/* The comparisons ignore a NaN; it reaches the result through the sum. In a row of -inf alone, or with a +inf, the
 * difference of equal infinities makes the sum NaN, as in PyTorch. */
CUDA_OPS_INLINE void FN(row_log_sum_exp)(const REAL *x, int64_t cols, REAL *maximum, REAL *log_sum)
{
    const int64_t whole = cols - cols % LANES;
    REAL largest = -(REAL)INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < cols; c++)
        largest = x[c] > largest ? x[c] : largest;

    double sum = 0;
    for (int64_t first = 0; first < whole; first += SUM_BLOCK) {
        const int64_t last = min_i64(first + SUM_BLOCK, whole);
        REAL block = 0;
#pragma omp simd reduction(+ : block)
        for (int64_t c = first; c < last; c++)
            block += FN(exponential)(x[c] - largest);
        sum += block;
    }
    if (whole < cols) {
        REAL tail[LANES], block = 0;
        FN(padded_lanes)(tail, x + whole, cols - whole);
#pragma omp simd reduction(+ : block)
        for (int l = 0; l < LANES; l++)
            block += FN(exponential)(tail[l] - largest);
        sum += block;
    }
    *maximum = largest;
    *log_sum = (REAL)log(sum);
}

/* The same for `count` columns side by side, whose elements are `inner` apart. */
CUDA_OPS_INLINE void FN(tile_log_sum_exp)(const REAL *x, int64_t cols, int64_t inner, int64_t count, REAL *maximum,
                                          REAL *log_sum)
{
    double sum[TILE];
    REAL block[TILE];
    for (int64_t i = 0; i < count; i++) {
        maximum[i] = -(REAL)INFINITY;
        sum[i] = 0;
    }
    for (int64_t c = 0; c < cols; c++)
        for (int64_t i = 0; i < count; i++)
            maximum[i] = x[c * inner + i] > maximum[i] ? x[c * inner + i] : maximum[i];
    for (int64_t first = 0; first < cols; first += SUM_BLOCK) {
        const int64_t last = min_i64(first + SUM_BLOCK, cols);
        for (int64_t i = 0; i < count; i++)
            block[i] = 0;
        for (int64_t c = first; c < last; c++)
            for (int64_t i = 0; i < count; i++)
                block[i] += FN(exponential)(x[c * inner + i] - maximum[i]);
        for (int64_t i = 0; i < count; i++)
            sum[i] += block[i];
    }
    for (int64_t i = 0; i < count; i++)
        log_sum[i] = (REAL)log(sum[i]);
}

CUDA_OPS_INLINE void FN(columns_log_sum_exp)(const REAL *x, int64_t cols, int64_t inner, int64_t count, REAL *maximum,
                                             REAL *log_sum)
{
    if (inner == 1 && cols < LANES) {
        REAL columns[LANES * TILE];
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < cols; c++)
                columns[c * TILE + i] = x[i * cols + c];
        FN(tile_log_sum_exp)(columns, cols, TILE, count, maximum, log_sum);
    } else if (inner == 1)
        for (int64_t i = 0; i < count; i++)
            FN(row_log_sum_exp)(x + i * cols, cols, maximum + i, log_sum + i);
    else
        FN(tile_log_sum_exp)(x, cols, inner, count, maximum, log_sum);
}

/* output = factor * exp((x - maximum) - log_sum) along a row: the softmax term of a gradient. */
CUDA_OPS_INLINE void FN(row_softmax)(REAL *output, const REAL *x, int64_t cols, REAL factor, REAL maximum, REAL log_sum)
{
    const int64_t whole = cols - cols % LANES;
#pragma omp simd
    for (int64_t c = 0; c < whole; c++)
        output[c] = factor * FN(exponential)((x[c] - maximum) - log_sum);
    if (whole < cols) {
        REAL tail[LANES];
        FN(padded_lanes)(tail, x + whole, cols - whole);
#pragma omp simd
        for (int l = 0; l < LANES; l++)
            tail[l] = factor * FN(exponential)((tail[l] - maximum) - log_sum);
        for (int64_t c = whole; c < cols; c++)
            output[c] = tail[c - whole];
    }
}
