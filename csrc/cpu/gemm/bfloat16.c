/* bfloat16 x bfloat16 -> float32 on one core, by the widest instruction set that the processor has.
 *
 *   AMX, AVX512-BF16  gemm/tiles.h.
 *   neither           blocks are converted to float32, exactly, and multiplied by gemm/single_thread.h; a matrix of
 *                     contiguous rows times a vector is converted in registers. */
#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/cpu_isa.h"
#include "gemm/single_thread.h"
#include "gemm/tiles.h"

enum {
    /* Of blocks of floats, beside gemm/single_thread.h's own workspace. */
    WIDE_DEPTH = 256,
    WIDE_ROWS = 256,
    WIDE_COLUMNS = 512,
    WIDE_BYTES = (WIDE_ROWS + WIDE_COLUMNS) * WIDE_DEPTH * (int)sizeof(float),
    BF16_WORKSPACE = GEMM_WORKSPACE_BYTES + WIDE_BYTES
};

int64_t cuda_ops_gemm_bf16_workspace(void)
{
    return max_i64(BF16_WORKSPACE, cuda_ops_tiles_workspace());
}

static void clear(float *output, int64_t output_row, int64_t m, int64_t n)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            output[i * output_row + j] = 0;
}

/* target[i * columns + j] = source[i * row + j * column], as floats. */
CUDA_OPS_SIMD static void widen(float *restrict target, const uint16_t *restrict source, int64_t row, int64_t column,
                                int64_t rows, int64_t columns)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            const uint32_t bits = (uint32_t)source[i * row + j * column] << 16;
            memcpy(target + i * columns + j, &bits, sizeof(bits));
        }
}

static void gemm_widened(float *output, int64_t output_row, const uint16_t *a, int64_t a_row, int64_t a_column,
                         const uint16_t *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                         bool accumulate, void *workspace)
{
    float *const wide_a = (float *)((char *)workspace + GEMM_WORKSPACE_BYTES);
    float *const wide_b = wide_a + WIDE_ROWS * WIDE_DEPTH;
    for (int64_t j = 0; j < n; j += WIDE_COLUMNS) {
        const int64_t columns = min_i64(WIDE_COLUMNS, n - j);
        for (int64_t p = 0; p < k; p += WIDE_DEPTH) {
            const int64_t depth = min_i64(WIDE_DEPTH, k - p);
            /* In storage order, so that reads and writes are both contiguous: by rows of b, or by columns. */
            const bool transposed = b_column != 1;
            if (transposed)
                widen(wide_b, b + p * b_row + j * b_column, b_column, b_row, columns, depth);
            else
                widen(wide_b, b + p * b_row + j * b_column, b_row, b_column, depth, columns);
            for (int64_t i = 0; i < m; i += WIDE_ROWS) {
                const int64_t rows = min_i64(WIDE_ROWS, m - i);
                widen(wide_a, a + i * a_row + p * a_column, a_row, a_column, rows, depth);
                cuda_ops_gemm_f32(output + i * output_row + j, output_row, wide_a, depth, 1, wide_b,
                                  transposed ? 1 : columns, transposed ? depth : 1, rows, columns, depth,
                                  accumulate || p > 0, workspace);
            }
        }
    }
}

#if CUDA_OPS_WITH_TARGETS
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")
enum { GEMV_GROUP = 8, GEMV_STEP = 32 }; /* rows whose sums share a vector; elements of a row in a line of the cache */

/* sum[l] += sum over p < GEMV_STEP of rows[l * row + p] * factors[p], p after p. Pairs of neighbours are turned as numbers
 * of 32 bits, so that a vector has a pair of each row: the second of the pair is a float but for its lower half, the
 * first after a shift. */
CUDA_OPS_INLINE __m256 add_products(__m256 sum, const uint16_t *rows, int64_t row, const float *factors)
{
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
#pragma GCC unroll 4
    for (int p = 0; p < GEMV_STEP; p += 8) {
        __m256 x[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
            x[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)(rows + r * row + p))),
                                        _mm_loadu_ps((const float *)(rows + (r + 4) * row + p)), 1);
        const __m256 low01 = _mm256_unpacklo_ps(x[0], x[1]), high01 = _mm256_unpackhi_ps(x[0], x[1]);
        const __m256 low23 = _mm256_unpacklo_ps(x[2], x[3]), high23 = _mm256_unpackhi_ps(x[2], x[3]);
        const __m256 pairs[4] = {_mm256_shuffle_ps(low01, low23, 0x44), _mm256_shuffle_ps(low01, low23, 0xee),
                                 _mm256_shuffle_ps(high01, high23, 0x44), _mm256_shuffle_ps(high01, high23, 0xee)};
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const __m256i pair = _mm256_castps_si256(pairs[q]);
            const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
            const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(factors + p + 2 * q), first, sum);
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(factors + p + 2 * q + 1), second, sum);
        }
    }
    return sum;
}

/* sums[i] = sum over p of rows[i * row + p] * factors[p], for groups * GEMV_GROUP rows. */
CUDA_OPS_INLINE void dot_rows(const int groups, float *sums, const uint16_t *rows, int64_t row, const float *factors,
                              int64_t depth)
{
    __m256 sum[2];
    const int64_t whole = depth / GEMV_STEP * GEMV_STEP;
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++)
        sum[g] = _mm256_setzero_ps();
    for (int64_t p = 0; p < whole; p += GEMV_STEP)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
            sum[g] = add_products(sum[g], rows + g * GEMV_GROUP * row + p, row, factors + p);
    for (int64_t p = whole; p < depth; p++) {
        const __m256 factor = _mm256_broadcast_ss(factors + p);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            float column[GEMV_GROUP];
            for (int l = 0; l < GEMV_GROUP; l++)
                column[l] = widened_bfloat16(rows[(g * GEMV_GROUP + l) * row + p]);
            sum[g] = _mm256_fmadd_ps(factor, _mm256_loadu_ps(column), sum[g]);
        }
    }
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++)
        _mm256_storeu_ps(sums + g * GEMV_GROUP, sum[g]);
}

/* A matrix of contiguous rows times a vector, which is bound by reading the matrix, and so reads it as it is, a few rows to
 * their ends. The sums are those of gemm_widened, bit by bit. */
static void matrix_times_vector(float *output, int64_t output_step, const uint16_t *matrix, int64_t row,
                                const uint16_t *vector, int64_t step, int64_t count, int64_t k, bool accumulate,
                                void *workspace)
{
    enum { MOST = (WIDE_ROWS + WIDE_COLUMNS) * WIDE_DEPTH, ROWS_AT_ONCE = 2 * GEMV_GROUP };
    float *const factors = (float *)((char *)workspace + GEMM_WORKSPACE_BYTES);
    for (int64_t first = 0; first < k; first += MOST) {
        const int64_t length = min_i64(MOST, k - first);
        for (int64_t q = 0; q < length; q++)
            factors[q] = widened_bfloat16(vector[(first + q) * step]);
        for (int64_t i = 0, taken; i < count; i += taken) {
            const bool many = count - i >= ROWS_AT_ONCE;
            taken = min_i64(count - i, many ? ROWS_AT_ONCE : GEMV_GROUP);
            /* There are GEMV_GROUP rows at least: the last ones are summed with some of those before. */
            const int64_t again = many ? 0 : GEMV_GROUP - taken;
            const uint16_t *rows = matrix + (i - again) * row + first;
            float sums[ROWS_AT_ONCE], all[ROWS_AT_ONCE];
            for (int64_t l = 0; l < taken; l++)
                all[again + l] = accumulate || first > 0 ? output[(i + l) * output_step] : 0;
            for (int64_t p = 0; p < length; p += WIDE_DEPTH) {
                const int64_t depth = min_i64(WIDE_DEPTH, length - p);
                if (many)
                    dot_rows(2, sums, rows + p, row, factors + p, depth);
                else
                    dot_rows(1, sums, rows + p, row, factors + p, depth);
                for (int64_t l = again; l < again + taken; l++)
                    all[l] = accumulate || first + p > 0 ? all[l] + sums[l] : sums[l];
            }
            for (int64_t l = 0; l < taken; l++)
                output[(i + l) * output_step] = all[again + l];
        }
    }
}
#pragma GCC pop_options
#endif

void cuda_ops_gemm_bf16(float *output, int64_t output_row, const uint16_t *a, int64_t a_row, int64_t a_column,
                        const uint16_t *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                        bool accumulate, void *workspace)
{
    if (k == 0 && !accumulate)
        clear(output, output_row, m, n);
    if (m == 0 || n == 0 || k == 0)
        return;
    if (cuda_ops_has_tiles(CUDA_OPS_BFLOAT16)) {
        const struct tile_product product = {
            .a = {a, a_row, a_column},
            .b = {b, b_column, b_row},
            .output = {.data = output, .row = output_row, .dtype = CUDA_OPS_FLOAT32, .accumulate = accumulate},
            .m = m,
            .n = n,
            .k = k,
            .dtype = CUDA_OPS_BFLOAT16};
        cuda_ops_multiply_tiles(&product, workspace);
        return;
    }
#if CUDA_OPS_WITH_TARGETS
    const bool has_vectors = cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX2;
    if (has_vectors && m == 1 && b_row == 1 && n >= GEMV_GROUP) {
        matrix_times_vector(output, 1, b, b_column, a, a_column, n, k, accumulate, workspace);
        return;
    }
    if (has_vectors && n == 1 && a_column == 1 && m >= GEMV_GROUP) {
        matrix_times_vector(output, output_row, a, a_row, b, b_row, m, k, accumulate, workspace);
        return;
    }
#endif
    gemm_widened(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
}
