/* gemm_ladder: rung 3, d = a b in C on one core, each step mending what bounds the one before.
 *
 *   31  naive       the definition. b is read down its columns: every element is another cache line, and every
 *                   multiply-add waits for the sum before it.
 *   32  loop order  p and j exchanged: the inner loop is contiguous in b and d, and the compiler vectorises it.
 *                   Bound by the loads and stores of d's row, two for each vector multiplied, and by memory once b
 *                   outgrows the cache.
 *   33  blocked     the same over blocks of b that stay in the second-level cache. Still two loads and a store for
 *                   each vector.
 *   34  packed      a micro-tile of d stays in registers over a whole block of p, so that only a and b are loaded,
 *                   which are first packed into panels in the order in which the micro-kernel reads them. Bound by
 *                   arithmetic.
 *   35  threads     what linear runs: gemm.c, with a micro-tile for each instruction set, operands left unpacked
 *                   where packing does not pay, and rows that the caller splits over several cores.
 */
#ifndef REAL

#include "cuda_ops/gemm_ladder.h"

#include "common/common.h"
#include "gemm/single_thread.h"

enum {
    /* 33: 256 rows x 512 columns of b are 512 KB of float. */
    BLOCKED_DEPTH = 256,
    BLOCKED_COLUMNS = 512,
    /* 34: two vectors of 32 bytes, AVX2's width. 6 rows of sums then take 12 of its 16 registers and leave room for two
     * of b and an element of a. */
    PACKED_DEPTH = 256,
    PACKED_VECTOR = 32,
    PACKED_ROWS = 6,
    PACKED_HEIGHT = 96, /* rows of a that are packed at a time */
    PACKED_WIDTH = 16,  /* tiles' widths of b that are */
    PACKED_B_BYTES = PACKED_DEPTH * PACKED_WIDTH * 2 * PACKED_VECTOR,
    PACKED_A_BYTES = PACKED_DEPTH * PACKED_HEIGHT * (int)sizeof(double),
    PACKED_BYTES = PACKED_A_BYTES + PACKED_B_BYTES
};

#define REAL float
#define FN(name) name##_f32
#include "gemm/ladder/03_c.c"

#include "common/undef_real.h"
#define REAL double
#define FN(name) name##_f64
#include "gemm/ladder/03_c.c"

#include "common/undef_real.h"

int64_t cuda_ops_gemm_ladder_workspace_cpu(int rung)
{
    return rung == CUDA_OPS_GEMM_C_PACKED ? PACKED_BYTES : rung == CUDA_OPS_GEMM_C_THREADS ? GEMM_WORKSPACE_BYTES : 0;
}

cuda_ops_status cuda_ops_gemm_ladder_cpu(void *d, const void *a, const void *b, void *workspace, int64_t m, int64_t n,
                                         int64_t k, int64_t begin, int64_t end, int rung, cuda_ops_dtype dtype)
{
    if (m < 0 || n < 0 || k < 0 || begin < 0 || end > m)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rung < CUDA_OPS_GEMM_C_NAIVE || rung > CUDA_OPS_GEMM_C_THREADS)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        rung_f32((float *)d + begin * n, (const float *)a + begin * k, b, workspace, end - begin, n, k, rung);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        rung_f64((double *)d + begin * n, (const double *)a + begin * k, b, workspace, end - begin, n, k, rung);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* 31 */
static void FN(naive)(REAL *d, const REAL *a, const REAL *b, int64_t m, int64_t n, int64_t k)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            REAL sum = 0;
            for (int64_t p = 0; p < k; p++)
                sum += a[i * k + p] * b[p * n + j];
            d[i * n + j] = sum;
        }
}

/* 32 */
CUDA_OPS_SIMD static void FN(loop_order)(REAL *restrict d, const REAL *restrict a, const REAL *restrict b, int64_t m,
                                         int64_t n, int64_t k)
{
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++)
            d[i * n + j] = 0;
        for (int64_t p = 0; p < k; p++) {
            const REAL left = a[i * k + p];
            for (int64_t j = 0; j < n; j++)
                d[i * n + j] += left * b[p * n + j];
        }
    }
}

/* 33 */
CUDA_OPS_SIMD static void FN(blocked)(REAL *restrict d, const REAL *restrict a, const REAL *restrict b, int64_t m,
                                      int64_t n, int64_t k)
{
    for (int64_t i = 0; i < m * n; i++)
        d[i] = 0;
    for (int64_t j0 = 0; j0 < n; j0 += BLOCKED_COLUMNS) {
        const int64_t columns = min_i64(BLOCKED_COLUMNS, n - j0);
        for (int64_t p0 = 0; p0 < k; p0 += BLOCKED_DEPTH) {
            const int64_t p_end = min_i64(p0 + BLOCKED_DEPTH, k);
            for (int64_t i = 0; i < m; i++) {
                REAL *const row = d + i * n + j0;
                for (int64_t p = p0; p < p_end; p++) {
                    const REAL left = a[i * k + p], *const right = b + p * n + j0;
                    for (int64_t j = 0; j < columns; j++)
                        row[j] += left * right[j];
                }
            }
        }
    }
}

/* 34 */
#define LANES ((int)(PACKED_VECTOR / sizeof(REAL)))
#define COLUMNS (2 * LANES)
typedef REAL FN(packed_vector) __attribute__((vector_size(PACKED_VECTOR)));

/* d (a tile of PACKED_ROWS x COLUMNS) (+)= a_panel b_panel. Rows and columns that do not exist are zeros in the panels,
 * and are not stored. */
CUDA_OPS_INLINE void FN(packed_tile)(REAL *d, int64_t d_row, int64_t rows, int64_t columns, const REAL *a,
                                     const REAL *b, int64_t depth, bool add)
{
    FN(packed_vector) sum[PACKED_ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < PACKED_ROWS; i++)
        sum[i][0] = sum[i][1] = (FN(packed_vector)){0};
    for (int64_t p = 0; p < depth; p++) {
        const FN(packed_vector) *const right = (const FN(packed_vector) *)(b + p * COLUMNS);
        const FN(packed_vector) first = right[0], second = right[1];
#pragma GCC unroll 8
        for (int i = 0; i < PACKED_ROWS; i++) {
            sum[i][0] += a[p * PACKED_ROWS + i] * first;
            sum[i][1] += a[p * PACKED_ROWS + i] * second;
        }
    }
    REAL tile[PACKED_ROWS][COLUMNS];
    memcpy(tile, sum, sizeof(tile));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            d[i * d_row + j] = add ? d[i * d_row + j] + tile[i][j] : tile[i][j];
}

/* target[p * width + l] = source[p * step + l * stride], zeros for lines <= l < width. */
CUDA_OPS_INLINE void FN(pack_panel)(REAL *restrict target, int64_t width, const REAL *restrict source, int64_t stride,
                                    int64_t step, int64_t lines, int64_t depth)
{
    for (int64_t p = 0; p < depth; p++)
        for (int64_t l = 0; l < width; l++)
            target[p * width + l] = l < lines ? source[p * step + l * stride] : 0;
}

CUDA_OPS_SIMD static void FN(packed)(REAL *d, const REAL *a, const REAL *b, REAL *packed_b, int64_t m, int64_t n,
                                     int64_t k)
{
    REAL *const packed_a = packed_b + PACKED_B_BYTES / sizeof(REAL);
    const int64_t width = PACKED_WIDTH * COLUMNS;
    if (k == 0)
        memset(d, 0, (size_t)(m * n) * sizeof(REAL));
    for (int64_t j0 = 0; j0 < n; j0 += width)
        for (int64_t p0 = 0; p0 < k; p0 += PACKED_DEPTH) {
            const int64_t columns = min_i64(width, n - j0), depth = min_i64(PACKED_DEPTH, k - p0);
            for (int64_t j = 0; j < columns; j += COLUMNS)
                FN(pack_panel)(packed_b + j * depth, COLUMNS, b + p0 * n + j0 + j, 1, n, min_i64(COLUMNS, columns - j),
                               depth);
            for (int64_t i0 = 0; i0 < m; i0 += PACKED_HEIGHT) {
                const int64_t rows = min_i64(PACKED_HEIGHT, m - i0);
                for (int64_t i = 0; i < rows; i += PACKED_ROWS)
                    FN(pack_panel)(packed_a + i * depth, PACKED_ROWS, a + (i0 + i) * k + p0, k, 1,
                                   min_i64(PACKED_ROWS, rows - i), depth);
                for (int64_t j = 0; j < columns; j += COLUMNS)
                    for (int64_t i = 0; i < rows; i += PACKED_ROWS)
                        FN(packed_tile)(d + (i0 + i) * n + j0 + j, n, min_i64(PACKED_ROWS, rows - i),
                                        min_i64(COLUMNS, columns - j), packed_a + i * depth, packed_b + j * depth,
                                        depth, p0 > 0);
            }
        }
}
#undef LANES
#undef COLUMNS

static void FN(rung)(REAL *d, const REAL *a, const REAL *b, void *workspace, int64_t m, int64_t n, int64_t k, int rung)
{
    if (rung == CUDA_OPS_GEMM_C_NAIVE)
        FN(naive)(d, a, b, m, n, k);
    else if (rung == CUDA_OPS_GEMM_C_LOOP_ORDER)
        FN(loop_order)(d, a, b, m, n, k);
    else if (rung == CUDA_OPS_GEMM_C_BLOCKED)
        FN(blocked)(d, a, b, m, n, k);
    else if (rung == CUDA_OPS_GEMM_C_PACKED)
        FN(packed)(d, a, b, workspace, m, n, k);
    else
        FN(cuda_ops_gemm)(d, n, a, k, 1, b, n, 1, m, n, k, false, workspace);
}

#endif
