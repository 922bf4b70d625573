/* bfloat16 x bfloat16 -> float32 on one core, by the widest instruction set that the processor has.
 *
 *   AMX           gemm/tiles.h.
 *   AVX512-BF16   packed operands: eight rows of pairs of a, broadcast, times two vectors of pairs of b.
 *   neither       blocks are converted to float32, exactly, and multiplied by gemm/single_thread.h; a matrix of
 *                 contiguous rows times a vector is converted in registers.
 *
 * A packed panel is 32 rows of a or 32 columns of b: for each step of 32 of depth two tiles of 1 KB, one for each 16
 * rows (of 32 of depth) or columns (16 pairs of depth). Depth, rows and columns that do not exist are zeros. Full panels of a with contiguous rows are read
 * unpacked. */
#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/cpu_isa.h"
#include "gemm/single_thread.h"
#include "gemm/tiles.h"

enum {
    PANEL = 32,               /* rows or columns of a panel, and the depth of a step */
    TILE_SIDE = 16,           /* rows or columns of a tile */
    TILE = TILE_SIDE * PANEL, /* elements of a tile */
    STEP = 2 * TILE,          /* and of both tiles of a panel in a step */
    DEPTH = 512,              /* of a block: a panel has 32 KB, part of the first-level cache */
    ROWS = 256,
    COLUMNS = 1024 /* of a block of a (256 KB) and of b (1 MB): of the second-level cache */
};
enum {
    PACKED_BYTES = (ROWS + COLUMNS) * DEPTH * (int)sizeof(uint16_t),
    /* Without: blocks of floats, and gemm/single_thread.h's own workspace. */
    WIDE_DEPTH = 256,
    WIDE_ROWS = 256,
    WIDE_COLUMNS = 512,
    WIDE_BYTES = (WIDE_ROWS + WIDE_COLUMNS) * WIDE_DEPTH * (int)sizeof(float),
    BF16_WORKSPACE = GEMM_WORKSPACE_BYTES + WIDE_BYTES
};
_Static_assert(PACKED_BYTES <= BF16_WORKSPACE, "the packed blocks fit the workspace");

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

#if CUDA_OPS_WITH_TARGETS && CUDA_OPS_WITH_AVX512_BF16
#define WITH_PAIRS

#pragma GCC push_options
#pragma GCC target("avx2") /* with AVX-512, GCC would spill addresses to mask registers here */

/* Packs a panel of a: row i of a tile is 32 of depth. */
static void pack_rows(uint16_t *restrict target, const uint16_t *restrict a, int64_t a_row, int64_t a_column,
                      int64_t rows, int64_t depth)
{
    for (int64_t p = 0; p < depth; p += PANEL, target += STEP) {
        const int64_t length = min_i64(PANEL, depth - p);
        for (int64_t i = 0; i < PANEL; i++) {
            uint16_t *const to = target + i * PANEL;
            const uint16_t *const from = a + i * a_row + p * a_column;
            if (i >= rows) {
                memset(to, 0, PANEL * sizeof(uint16_t));
            } else if (a_column == 1 && length == PANEL) {
                memcpy(to, from, PANEL * sizeof(uint16_t));
            } else {
                for (int64_t q = 0; q < PANEL; q++)
                    to[q] = q < length ? from[q * a_column] : 0;
            }
        }
    }
}

/* Packs a panel of b: row q of a tile is pair q of the depth, for 16 columns. */
static void pack_columns(uint16_t *restrict target, const uint16_t *restrict b, int64_t b_row, int64_t b_column,
                         int64_t columns, int64_t depth)
{
    for (int64_t p = 0; p < depth; p += PANEL, target += STEP)
        for (int64_t q = 0; q < TILE_SIDE; q++) {
            const uint16_t *const from = b + (p + 2 * q) * b_row;
            const bool first = p + 2 * q < depth, second = p + 2 * q + 1 < depth;
            for (int64_t t = 0; t < 2; t++) {
                uint32_t pairs[TILE_SIDE];
                const uint16_t *const source = from + t * TILE_SIDE * b_column;
                const int64_t count = max_i64(0, min_i64(TILE_SIDE, columns - t * TILE_SIDE));
                if (second && count == TILE_SIDE && b_column == 1) {
                    for (int64_t j = 0; j < TILE_SIDE; j++)
                        pairs[j] = source[j] | (uint32_t)source[b_row + j] << 16;
                } else if (second && count == TILE_SIDE && b_row == 1) {
                    for (int64_t j = 0; j < TILE_SIDE; j++)
                        memcpy(pairs + j, source + j * b_column, sizeof(uint32_t));
                } else {
                    for (int64_t j = 0; j < TILE_SIDE; j++) {
                        const uint32_t low = first && j < count ? source[j * b_column] : 0;
                        pairs[j] = low | (second && j < count ? (uint32_t)source[b_row + j * b_column] << 16 : 0);
                    }
                }
                memcpy(target + t * TILE + q * PANEL, pairs, sizeof(pairs));
            }
        }
}

#pragma GCC pop_options

/* A panel of a, packed or not: the strides of its rows, of its steps and of its two tiles, in elements. */
struct panel {
    const uint16_t *data;
    int64_t row, step, tile;
};

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")
/* A micro-tile of output (32 x 32, rows `row` floats apart) = or, if accumulate, += a panel of a times a panel of b.
 * Only `rows` rows are wanted. */
static void micro_kernel(float *tile, int64_t row, struct panel a, const uint16_t *b, int64_t rows, int64_t steps,
                         bool accumulate)
{
    enum { COUNT = 8 };
    for (int64_t i = 0; i < rows; i += COUNT) {
        __m512 sum[COUNT][2];
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++) {
            sum[r][0] = accumulate ? _mm512_loadu_ps(tile + (i + r) * row) : _mm512_setzero_ps();
            sum[r][1] = accumulate ? _mm512_loadu_ps(tile + (i + r) * row + TILE_SIDE) : _mm512_setzero_ps();
        }
        for (int64_t s = 0; s < steps; s++) {
            const uint16_t *left = a.data + s * a.step + i / TILE_SIDE * a.tile + i % TILE_SIDE * a.row,
                           *right = b + s * STEP;
            for (int q = 0; q < TILE_SIDE; q++, left += 2, right += PANEL) {
                const __m512bh first = (__m512bh)_mm512_loadu_si512(right);
                const __m512bh second = (__m512bh)_mm512_loadu_si512(right + TILE);
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; r++) {
                    int32_t pair;
                    memcpy(&pair, left + r * a.row, sizeof(pair));
                    const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
                    sum[r][0] = _mm512_dpbf16_ps(sum[r][0], factor, first);
                    sum[r][1] = _mm512_dpbf16_ps(sum[r][1], factor, second);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++) {
            _mm512_storeu_ps(tile + (i + r) * row, sum[r][0]);
            _mm512_storeu_ps(tile + (i + r) * row + TILE_SIDE, sum[r][1]);
        }
    }
}
#pragma GCC pop_options

static void gemm_pairs(float *output, int64_t output_row, const uint16_t *a, int64_t a_row, int64_t a_column,
                       const uint16_t *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                       bool accumulate, void *workspace)
{
    uint16_t *const packed_a = workspace, *const packed_b = packed_a + ROWS * DEPTH;
    float edge[PANEL * PANEL] __attribute__((aligned(64)));
    for (int64_t j0 = 0; j0 < n; j0 += COLUMNS) {
        const int64_t columns = min_i64(COLUMNS, n - j0);
        for (int64_t p0 = 0; p0 < k; p0 += DEPTH) {
            const int64_t depth = min_i64(DEPTH, k - p0), steps = (depth + PANEL - 1) / PANEL;
            const bool add = accumulate || p0 > 0;
            for (int64_t j = 0; j < columns; j += PANEL)
                pack_columns(packed_b + j * steps * PANEL, b + p0 * b_row + (j0 + j) * b_column, b_row, b_column,
                             min_i64(PANEL, columns - j), depth);
            for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
                const int64_t rows = min_i64(ROWS, m - i0);
                /* Full panels of contiguous rows need no packing. */
                const int64_t in_place = a_column == 1 && depth % PANEL == 0 ? rows / PANEL * PANEL : 0;
                for (int64_t i = in_place; i < rows; i += PANEL)
                    pack_rows(packed_a + i * steps * PANEL, a + (i0 + i) * a_row + p0 * a_column, a_row, a_column,
                              min_i64(PANEL, rows - i), depth);
                for (int64_t j = 0; j < columns; j += PANEL)
                    for (int64_t i = 0; i < rows; i += PANEL) {
                        const int64_t height = min_i64(PANEL, rows - i), width = min_i64(PANEL, columns - j);
                        float *const target = output + (i0 + i) * output_row + j0 + j;
                        const struct panel left =
                            i < in_place ? (struct panel){a + (i0 + i) * a_row + p0, a_row, PANEL, TILE_SIDE * a_row}
                                         : (struct panel){packed_a + i * steps * PANEL, PANEL, STEP, TILE};
                        const uint16_t *const right = packed_b + j * steps * PANEL;
                        if (height == PANEL && width == PANEL) {
                            micro_kernel(target, output_row, left, right, PANEL, steps, add);
                            continue;
                        }
                        memset(edge, 0, sizeof(edge));
                        for (int64_t r = 0; r < height && add; r++)
                            memcpy(edge + r * PANEL, target + r * output_row, (size_t)width * sizeof(float));
                        micro_kernel(edge, PANEL, left, right, height, steps, add);
                        for (int64_t r = 0; r < height; r++)
                            memcpy(target + r * output_row, edge + r * PANEL, (size_t)width * sizeof(float));
                    }
            }
        }
    }
}
#endif

void cuda_ops_gemm_bf16(float *output, int64_t output_row, const uint16_t *a, int64_t a_row, int64_t a_column,
                        const uint16_t *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                        bool accumulate, void *workspace)
{
    if (k == 0 && !accumulate)
        clear(output, output_row, m, n);
    if (m == 0 || n == 0 || k == 0)
        return;
    if (cuda_ops_has_tiles()) {
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
#ifdef WITH_PAIRS
    if (cuda_ops_cpu_isa_current() == CUDA_OPS_CPU_AVX512_BF16) {
        gemm_pairs(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
        return;
    }
#endif
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
