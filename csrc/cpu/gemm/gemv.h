/* Products of a matrix and a vector, for one instruction set and element type (see gemm/kernel.h, which includes it).
 *
 *   output[i * output_step] = sum over p of matrix[i * row + p * column] * vector[p * step]      (or +=)
 *
 * Bound by the reading of the matrix, once. The order of summation is that of the register tiles, p after p and block
 * after block, so that a row has the same bits alone as in a batch. That rules out the usual dot products along
 * contiguous rows, whose lanes are partial sums. Instead:
 *   - contiguous rows are transposed in registers, block by block, so that each lane is a row of its own;
 *   - contiguous columns are multiplied and added to the sums, eight at a time; the sums stay in the cache. */

#define SUMS ((int)(8192 / sizeof(REAL))) /* that stay in the first-level cache */
#define LINE ((int)(64 / sizeof(REAL)))   /* of the cache, in elements */
#define VECTORS 2                         /* at most, that a matrix is multiplied with at once */

/* sums[v * 2 * LANES + l] = sum over p of rows[l * row + p] * factors[v * BLOCK_DEPTH + p], for groups * LANES rows and
 * each of the vectors. Each group lags `lag` lines behind the one before. */
CUDA_OPS_INLINE void FN(dot_rows)(const int groups, const int vectors, REAL *sums, const REAL *restrict rows,
                                  int64_t row, const REAL *restrict factors, int64_t depth, int64_t lag)
{
    FN(lane_vector) sum[2][VECTORS] = {{{0}}};
    const int64_t lines = depth / LINE;
    for (int64_t step = 0; step < lines + (groups - 1) * lag; step++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            const int64_t p = (step - g * lag) * LINE;
            if (p < 0 || p >= lines * LINE)
                continue;
#pragma GCC unroll 4
            for (int v = 0; v < LINE; v += LANES) {
                FN(lane_vector) block[LANES];
                TRANSPOSE_BLOCK(block, rows + g * LANES * row + p + v, row);
#pragma GCC unroll 16
                for (int q = 0; q < LANES; q++)
#pragma GCC unroll 4
                    for (int i = 0; i < vectors; i++)
                        sum[g][i] = MULTIPLY_ADD(factors[i * BLOCK_DEPTH + p + v + q], block[q], sum[g][i]);
            }
        }
    for (int g = 0; g < groups; g++) {
        for (int64_t p = lines * LINE; p < depth; p++) {
            REAL column[LANES];
            for (int l = 0; l < LANES; l++)
                column[l] = rows[(g * LANES + l) * row + p];
            for (int i = 0; i < vectors; i++)
                sum[g][i] = MULTIPLY_ADD(factors[i * BLOCK_DEPTH + p], *(const FN(vector) *)column, sum[g][i]);
        }
        for (int i = 0; i < vectors; i++)
            *(FN(vector) *)(sums + (2 * i + g) * LANES) = sum[g][i];
    }
}

/* For rows that are contiguous, at least LANES of them. */
CUDA_OPS_INLINE void FN(times_vectors_by_rows)(const int vectors, REAL *output, int64_t output_step,
                                               int64_t output_vector, const REAL *matrix, int64_t row,
                                               const REAL *vector, int64_t step, int64_t next_vector, int64_t count,
                                               int64_t k, bool accumulate)
{
    /* Rows a power of two apart map to few cache sets, and so do the lines that the hardware prefetches. Groups of rows
     * that are read at different columns use different sets. */
    const int64_t apart = row * (int64_t)sizeof(REAL) % 4096;
    const int64_t lag = min_i64(apart, 4096 - apart) <= 32 ? 8 : 0;
    const int64_t block_depth = FN(block_depth)(k);
    REAL factors[VECTORS * BLOCK_DEPTH], sums[VECTORS * 2 * LANES];
    for (int64_t p0 = 0; p0 < k; p0 += block_depth) {
        const int64_t depth = min_i64(block_depth, k - p0);
        for (int v = 0; v < vectors; v++)
            for (int64_t p = 0; p < depth; p++)
                factors[v * BLOCK_DEPTH + p] = vector[v * next_vector + (p0 + p) * step];
        for (int64_t i = 0; i < count;) {
            const int groups = count - i >= 2 * LANES ? 2 : 1;
            /* The last rows as a full group, some of whose rows are computed twice, rather than one by one. */
            const int64_t first = min_i64(i, count - groups * LANES);
            const REAL *rows = matrix + first * row + p0;
            if (groups == 2)
                FN(dot_rows)(2, vectors, sums, rows, row, factors, depth, lag);
            else
                FN(dot_rows)(1, vectors, sums, rows, row, factors, depth, lag);
            for (int v = 0; v < vectors; v++)
                for (int64_t j = i; j < first + groups * LANES; j++) {
                    REAL *to = output + v * output_vector + j * output_step;
                    const REAL sum = sums[v * 2 * LANES + j - first];
                    *to = accumulate || p0 > 0 ? *to + sum : sum;
                }
            i = first + groups * LANES;
        }
    }
}

static void FN(times_vector_by_rows)(REAL *output, int64_t output_step, const REAL *matrix, int64_t row,
                                     const REAL *vector, int64_t step, int64_t count, int64_t k, bool accumulate)
{
    FN(times_vectors_by_rows)(1, output, output_step, 0, matrix, row, vector, step, 0, count, k, accumulate);
}

/* Two rows that are multiplied with the transpose of a matrix of contiguous rows: whether it was done here. Tiles of
 * rows would use two of their lanes; transposing in registers is as long for two vectors as for one. */
static bool FN(times_two_vectors)(REAL *output, int64_t output_row, const REAL *matrix, int64_t row,
                                  const REAL *vectors, int64_t vector_row, int64_t step, int64_t count, int64_t k,
                                  bool accumulate)
{
    if (count < LANES)
        return false;
    FN(times_vectors_by_rows)(2, output, 1, output_row, matrix, row, vectors, step, vector_row, count, k, accumulate);
    return true;
}

/* sums[j] += sum over p of columns[p * column + j] * vector[p * step]. There are whole vectors of sums. */
CUDA_OPS_INLINE void FN(add_columns)(const int depth, REAL *restrict sums, const REAL *restrict columns, int64_t column,
                                     const REAL *vector, int64_t step, int64_t count)
{
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        FN(lane_vector) sum = *(const FN(vector) *)(sums + j);
#pragma GCC unroll 8
        for (int p = 0; p < depth; p++)
            sum = MULTIPLY_ADD(vector[p * step], *(const FN(vector) *)(columns + p * column + j), sum);
        *(FN(vector) *)(sums + j) = sum;
    }
    if (j == count)
        return;
    FN(lane_vector) sum = *(const FN(vector) *)(sums + j);
    for (int p = 0; p < depth; p++) {
        REAL rest[LANES] = {0};
        for (int64_t l = 0; l < count - j; l++)
            rest[l] = columns[p * column + j + l];
        sum = MULTIPLY_ADD(vector[p * step], *(const FN(vector) *)rest, sum);
    }
    *(FN(vector) *)(sums + j) = sum;
}

/* For columns that are contiguous. */
static void FN(times_vector_by_columns)(REAL *output, int64_t output_step, const REAL *matrix, int64_t column,
                                        const REAL *vector, int64_t step, int64_t count, int64_t k, bool accumulate)
{
    enum { TOGETHER = 8 };
    const int64_t block_depth = FN(block_depth)(k);
    REAL sums[SUMS];
    for (int64_t i0 = 0; i0 < count; i0 += SUMS) {
        const int64_t rows = min_i64(SUMS, count - i0);
        for (int64_t p0 = 0; p0 < k; p0 += block_depth) {
            const int64_t end = min_i64(k, p0 + block_depth);
            memset(sums, 0, sizeof(sums));
            int64_t p = p0;
            for (; p + TOGETHER <= end; p += TOGETHER)
                FN(add_columns)(TOGETHER, sums, matrix + p * column + i0, column, vector + p * step, step, rows);
            for (; p < end; p++)
                FN(add_columns)(1, sums, matrix + p * column + i0, column, vector + p * step, step, rows);
            for (int64_t i = 0; i < rows; i++) {
                REAL *to = output + (i0 + i) * output_step;
                *to = accumulate || p0 > 0 ? *to + sums[i] : sums[i];
            }
        }
    }
}

/* Whether it was done here. */
static bool FN(times_vector)(REAL *output, int64_t output_step, const REAL *matrix, int64_t row, int64_t column,
                             const REAL *vector, int64_t step, int64_t count, int64_t k, bool accumulate)
{
    if (count < LANES)
        return false;
    if (column == 1)
        FN(times_vector_by_rows)(output, output_step, matrix, row, vector, step, count, k, accumulate);
    else if (row == 1)
        FN(times_vector_by_columns)(output, output_step, matrix, column, vector, step, count, k, accumulate);
    return column == 1 || row == 1;
}

#undef SUMS
#undef LINE
#undef VECTORS
