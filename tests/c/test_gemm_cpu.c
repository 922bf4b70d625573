/* Every instruction set that this machine has, one after the other. Since a set is chosen by name, the last check is
 * that names are looked at. */
#include "cuda_ops/gemm_cpu.h"

#include "check.h"
#include "cuda_ops/cpu_isa.h"
#include "cuda_ops/halves_cpu.h"

/* APART: neither stride is 1. EXPANDED_*: all rows, or all columns, are the same memory. */
enum layout { BY_ROWS, BY_COLUMNS, APART, EXPANDED_ROWS, EXPANDED_COLUMNS, LAYOUTS };

/* A matrix that lies in its array with a leading dimension wider than it needs; and its values, dense. */
typedef struct matrix {
    void *data;
    double *values;
    int64_t rows, columns, row_stride, column_stride, count;
    size_t size;
} matrix;

static bool is_half(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 || dtype == CUDA_OPS_FLOAT16;
}

static size_t element_size(cuda_ops_dtype dtype)
{
    return is_half(dtype) ? sizeof(uint16_t) : size_of(dtype);
}

static double element(const void *data, int64_t index, cuda_ops_dtype dtype)
{
    if (!is_half(dtype))
        return get(data, index, dtype);
    float value;
    CHECK_OK(cuda_ops_widen_cpu(&value, (const uint16_t *)data + index, 1, dtype));
    return (double)value;
}

static void set_element(void *data, int64_t index, float value, cuda_ops_dtype dtype)
{
    if (is_half(dtype))
        CHECK_OK(cuda_ops_round_cpu((uint16_t *)data + index, &value, 1, dtype));
    else
        set(data, index, (double)value, dtype);
}

static matrix matrix_new(int64_t rows, int64_t columns, enum layout layout, uint64_t seed, cuda_ops_dtype dtype)
{
    const int64_t padding = 3;
    matrix m = {.rows = rows, .columns = columns, .size = element_size(dtype)};
    const int64_t row_strides[LAYOUTS] = {columns + padding, 1, 2 * columns + padding, 0, 1};
    const int64_t column_strides[LAYOUTS] = {1, rows + padding, 2, 1, 0};
    m.row_stride = row_strides[layout];
    m.column_stride = column_strides[layout];
    m.count = rows > 0 && columns > 0 ? (rows - 1) * m.row_stride + (columns - 1) * m.column_stride + 1 : 0;
    m.data = guarded_bytes(m.count, m.size);
    m.values = calloc((size_t)(rows * columns) + 1, sizeof(double));
    CHECK(m.values != NULL, "out of memory");
    for (int64_t i = 0; i < m.count; i++)
        set_element(m.data, i, (float)number(seed * 1000003 + (uint64_t)i), dtype);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            m.values[i * columns + j] = element(m.data, i * m.row_stride + j * m.column_stride, dtype);
    return m;
}

static void matrix_free(matrix *m)
{
    free(m->values);
    guarded_free_bytes(m->data, m->count, m->size);
}

/* One for all calls, full of NaN, should a kernel read what it has not written. */
static void *workspace_of(cuda_ops_dtype dtype)
{
    static void *workspace;
    static size_t available;
    const size_t bytes = (size_t)cuda_ops_gemm_workspace_cpu(dtype);
    if (bytes > available) {
        free(workspace);
        workspace = aligned_alloc(64, bytes);
        CHECK(workspace != NULL, "out of memory");
        available = bytes;
    }
    memset(workspace, 0xff, bytes);
    return workspace;
}

/* output[rows, columns from (i, j)] of the product. */
static void product(const matrix *output, const matrix *a, const matrix *b, int64_t i, int64_t j, int64_t rows,
                    int64_t columns, bool accumulate, cuda_ops_dtype dtype)
{
    CHECK_OK(cuda_ops_gemm_cpu((char *)output->data + (size_t)(i * output->row_stride + j) * output->size,
                               output->row_stride, (char *)a->data + (size_t)(i * a->row_stride) * a->size,
                               a->row_stride, a->column_stride,
                               (char *)b->data + (size_t)(j * b->column_stride) * b->size, b->row_stride,
                               b->column_stride, rows, columns, a->columns, accumulate, workspace_of(dtype), dtype));
}

static void select_isa(cuda_ops_cpu_isa isa)
{
    CHECK_OK(cuda_ops_cpu_isa_select(cuda_ops_cpu_isa_name(isa)));
    CHECK(cuda_ops_cpu_isa_current() == isa, "set %d", isa);
}

/* Sums of products, and of their magnitudes, as dense as the output. */
static double *reference(const matrix *a, const matrix *b)
{
    const int64_t m = a->rows, n = b->columns;
    double *sums = calloc((size_t)(2 * m * n) + 1, sizeof(double)), *magnitudes = sums + m * n;
    CHECK(sums != NULL, "out of memory");
    for (int64_t i = 0; i < m; i++)
        for (int64_t p = 0; p < a->columns; p++)
            for (int64_t j = 0; j < n; j++) {
                const double term = a->values[i * a->columns + p] * b->values[p * n + j];
                sums[i * n + j] += term;
                magnitudes[i * n + j] += fabs(term);
            }
    return sums;
}

static void check_product(const matrix *a, const matrix *b, const double *sums, bool accumulate, cuda_ops_dtype dtype)
{
    const cuda_ops_dtype result = dtype == CUDA_OPS_BFLOAT16 ? CUDA_OPS_FLOAT32 : dtype;
    const int64_t m = a->rows, n = b->columns;
    const double *magnitudes = sums + m * n;
    matrix output = matrix_new(m, n, BY_ROWS, 3, result), before = matrix_new(m, n, BY_ROWS, 3, result);
    product(&output, a, b, 0, 0, m, n, accumulate, dtype);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            const double first = accumulate ? before.values[i * n + j] : 0;
            CHECK_NEAR(output.data, i * output.row_stride + j, first + sums[i * n + j],
                       rounding(result) * (1 + fabs(first) + magnitudes[i * n + j]), result);
        }
        /* The padding between the rows is not the kernel's. */
        for (int64_t p = i * output.row_stride + n; p < (i + 1) * output.row_stride && p < output.count; p++)
            CHECK(get(output.data, p, result) == get(before.data, p, result), "padding of row %lld", (long long)i);
    }
    matrix_free(&output);
    matrix_free(&before);
}

/* By every instruction set; operands and reference are made once for all of them. */
static void check_gemm(int64_t m, int64_t n, int64_t k, enum layout a_layout, enum layout b_layout,
                       cuda_ops_dtype dtype)
{
    matrix a = matrix_new(m, k, a_layout, 1, dtype), b = matrix_new(k, n, b_layout, 2, dtype);
    double *sums = reference(&a, &b);
    for (cuda_ops_cpu_isa isa = CUDA_OPS_CPU_PORTABLE; isa <= cuda_ops_cpu_isa_widest(); isa++) {
        select_isa(isa);
        check_product(&a, &b, sums, false, dtype);
        check_product(&a, &b, sums, true, dtype);
    }
    free(sums);
    matrix_free(&a);
    matrix_free(&b);
}

/* A block of the product has the same bits computed alone as in the whole, in all storage orders. */
static void check_pieces(cuda_ops_dtype dtype)
{
    const int64_t m = 150, n = 300, k = 500;
    for (int layouts = 0; layouts < LAYOUTS * LAYOUTS; layouts++) {
        matrix a = matrix_new(m, k, layouts % LAYOUTS, 1, dtype), b = matrix_new(k, n, layouts / LAYOUTS, 2, dtype);
        matrix whole = matrix_new(m, n, BY_ROWS, 3, dtype), blocks = matrix_new(m, n, BY_ROWS, 3, dtype);
        product(&whole, &a, &b, 0, 0, m, n, false, dtype);
        /* A row alone, then a few, then more than any limit, columns likewise. */
        const int64_t rows[] = {0, 1, 4, 17, 150}, columns[] = {0, 1, 10, 40, 300};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++)
                product(&blocks, &a, &b, rows[i], columns[j], rows[i + 1] - rows[i], columns[j + 1] - columns[j], false,
                        dtype);
        CHECK(memcmp(whole.data, blocks.data, (size_t)whole.count * whole.size) == 0, "layouts %d", layouts);
        matrix_free(&a);
        matrix_free(&b);
        matrix_free(&whole);
        matrix_free(&blocks);
    }
}

/* Products of halves by tiles: with and without bias, in halves and in float32, whole and in pieces. */
static void check_tiles(int64_t m, int64_t n, int64_t k, enum layout a_layout, enum layout b_layout,
                        cuda_ops_dtype dtype, cuda_ops_dtype result, bool with_bias, bool relu)
{
    matrix a = matrix_new(m, k, a_layout, 1, dtype), b = matrix_new(k, n, b_layout, 2, dtype);
    matrix bias = matrix_new(1, n, BY_ROWS, 4, result);
    matrix output = matrix_new(m, n, BY_ROWS, 3, result), before = matrix_new(m, n, BY_ROWS, 3, result);
    matrix pieces = matrix_new(m, n, BY_ROWS, 3, result);
    void *workspace = aligned_alloc(64, (size_t)cuda_ops_gemm_tiles_workspace_cpu());
    CHECK(workspace != NULL, "out of memory");
    memset(workspace, 0xff, (size_t)cuda_ops_gemm_tiles_workspace_cpu());
    double *sums = reference(&a, &b), *magnitudes = sums + m * n;
    /* A third of the rows and columns, alone. */
    for (int i = -1; i < 9; i++) {
        const int64_t row = i < 0 ? 0 : i / 3 * m / 3, column = i < 0 ? 0 : i % 3 * n / 3;
        const int64_t rows = i < 0 ? m : (i / 3 + 1) * m / 3 - row, columns = i < 0 ? n : (i % 3 + 1) * n / 3 - column;
        const matrix *const to = i < 0 ? &output : &pieces;
        CHECK_OK(
            cuda_ops_gemm_tiles_cpu((char *)to->data + (size_t)(row * to->row_stride + column) * to->size,
                                    to->row_stride, with_bias ? (char *)bias.data + (size_t)column * bias.size : NULL,
                                    (char *)a.data + (size_t)(row * a.row_stride) * a.size, a.row_stride,
                                    a.column_stride, (char *)b.data + (size_t)(column * b.column_stride) * b.size,
                                    b.row_stride, b.column_stride, rows, columns, k, workspace, relu, dtype, result));
    }
    CHECK(memcmp(output.data, pieces.data, (size_t)output.count * output.size) == 0, "pieces of %lld x %lld x %lld",
          (long long)m, (long long)n, (long long)k);
    const double half = result == CUDA_OPS_BFLOAT16 ? 0x1p-8 : result == CUDA_OPS_FLOAT16 ? 0x1p-11 : 0;
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            const double all = sums[i * n + j] + (with_bias ? bias.values[j] : 0), expected = relu ? fmax(all, 0) : all;
            const double got = element(output.data, i * output.row_stride + j, result);
            const double near = half * fabs(expected) + 0x1p-17 * (magnitudes[i * n + j] + 1);
            CHECK(fabs(got - expected) <= near, "%lld, %lld: %g, expected %g", (long long)i, (long long)j, got,
                  expected);
        }
        for (int64_t p = i * output.row_stride + n; p < (i + 1) * output.row_stride && p < output.count; p++)
            CHECK(element(output.data, p, result) == element(before.data, p, result), "padding of row %lld",
                  (long long)i);
    }
    free(sums);
    free(workspace);
    matrix_free(&a);
    matrix_free(&b);
    matrix_free(&bias);
    matrix_free(&output);
    matrix_free(&before);
    matrix_free(&pieces);
}

/* An infinity and NaN reach what they are multiplied with, and nothing else. */
static void check_special_numbers(cuda_ops_dtype dtype)
{
    enum { SIZE = 40, DEPTH = 70 };
    matrix a = matrix_new(SIZE, DEPTH, BY_ROWS, 1, dtype), b = matrix_new(DEPTH, SIZE, BY_ROWS, 2, dtype);
    matrix output = matrix_new(SIZE, SIZE, BY_ROWS, 3, CUDA_OPS_FLOAT32);
    set_element(a.data, 3 * a.row_stride + 5, INFINITY, dtype);
    set_element(a.data, 20 * a.row_stride + 66, NAN, dtype);
    set_element(b.data, 40 * b.row_stride + 33, -INFINITY, dtype);
    set_element(b.data, 5 * b.row_stride + 7, 0, dtype); /* 0 times an infinity */
    void *workspace = aligned_alloc(64, (size_t)cuda_ops_gemm_tiles_workspace_cpu());
    CHECK_OK(cuda_ops_gemm_tiles_cpu(output.data, output.row_stride, NULL, a.data, a.row_stride, 1, b.data,
                                     b.row_stride, 1, SIZE, SIZE, DEPTH, workspace, 0, dtype, CUDA_OPS_FLOAT32));
    for (int64_t i = 0; i < SIZE; i++)
        for (int64_t j = 0; j < SIZE; j++) {
            double sum = 0;
            for (int64_t p = 0; p < DEPTH; p++)
                sum += element(a.data, i * a.row_stride + p, dtype) * element(b.data, p * b.row_stride + j, dtype);
            const double got = element(output.data, i * output.row_stride + j, CUDA_OPS_FLOAT32);
            CHECK(isnan(sum)   ? isnan(got)
                  : isinf(sum) ? got == sum
                               : fabs(got - sum) < 1e-3,
                  "%lld, %lld: %g for %g", (long long)i, (long long)j, got, sum);
        }
    free(workspace);
    matrix_free(&a);
    matrix_free(&b);
    matrix_free(&output);
}

int main(void)
{
    /* One element, sizes that no tile divides (35, 79, 19), no sum at all, nothing at all; rows and columns on either
     * side of what decides about packing, and over a block of each; k over any blocking of it; vectors, of more columns
     * than are summed at once, too. */
    const int64_t sizes[][3] = {{1, 1, 1},     {35, 79, 19},  {16, 16, 16}, {7, 130, 65}, {65, 1, 33},
                                {1, 100, 64},  {17, 33, 700}, {5, 4, 0},    {0, 4, 5},    {4, 0, 5},
                                {70, 290, 9},  {400, 34, 6},  {3, 3100, 5}, {33, 65, 40}, {64, 64, 64},
                                {1, 75, 1100}, {75, 1, 1100}, {1, 2100, 9}, {2100, 1, 9}, {2, 90, 1100}};
    const cuda_ops_dtype dtypes[] = {CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT64, CUDA_OPS_BFLOAT16};
    for (int d = 0; d < 3; d++) {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (int layouts = 0; layouts < LAYOUTS * LAYOUTS; layouts++)
                check_gemm(sizes[s][0], sizes[s][1], sizes[s][2], layouts % LAYOUTS, layouts / LAYOUTS, dtypes[d]);
        /* Over a block of a, whole columns of tiles, and a ragged rest of both. */
        check_gemm(530, 72, 512, BY_ROWS, BY_ROWS, dtypes[d]);
        /* Over a block of b where rows of a come first, and over a block of depth; tiles of every height. */
        check_gemm(55, 700, 384, BY_ROWS, BY_ROWS, dtypes[d]);
        check_gemm(79, 700, 400, BY_COLUMNS, BY_COLUMNS, dtypes[d]);
        check_gemm(43, 700, 384, APART, APART, dtypes[d]);
    }
    for (cuda_ops_cpu_isa isa = CUDA_OPS_CPU_PORTABLE; isa <= cuda_ops_cpu_isa_widest(); isa++) {
        select_isa(isa);
        FOR_CPU_DTYPES(dtype)
        check_pieces(dtype);
        CHECK((cuda_ops_gemm_has_tiles_cpu(CUDA_OPS_FLOAT16) != 0) == (isa == CUDA_OPS_CPU_AMX), "tiles with set %d",
              isa);
        CHECK((cuda_ops_gemm_has_tiles_cpu(CUDA_OPS_BFLOAT16) != 0) == (isa >= CUDA_OPS_CPU_AVX512_BF16),
              "tiles of bfloat16 with set %d", isa);
    }
    /* Sizes on either side of a tile, a micro-tile, a step and a block; by tile registers and by vectors. */
    const int64_t tiles[][3] = {{1, 1, 1},    {3, 3, 0},    {16, 16, 32},  {17, 33, 65},  {70, 5, 40},
                                {5, 150, 96}, {48, 17, 50}, {300, 40, 70}, {40, 520, 33}, {33, 34, 1100}};
    for (cuda_ops_cpu_isa isa = CUDA_OPS_CPU_AVX512_BF16; isa <= cuda_ops_cpu_isa_widest(); isa++) {
        select_isa(isa);
        for (int d = 0; d < 2; d++) {
            const cuda_ops_dtype dtype = d ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
            if (!cuda_ops_gemm_has_tiles_cpu(dtype))
                continue;
            for (size_t s = 0; s < sizeof(tiles) / sizeof(tiles[0]); s++)
                for (int layouts = 0; layouts < LAYOUTS * LAYOUTS; layouts++)
                    check_tiles(tiles[s][0], tiles[s][1], tiles[s][2], layouts % LAYOUTS, layouts / LAYOUTS, dtype,
                                layouts % 2 ? dtype : CUDA_OPS_FLOAT32, layouts % 3 == 0, layouts % 4 == 1);
            check_special_numbers(dtype);
        }
        CHECK_STATUS(cuda_ops_gemm_tiles_cpu(NULL, 0, NULL, NULL, 0, 0, NULL, 0, 0, 0, 0, 0, NULL, 0, CUDA_OPS_FLOAT32,
                                             CUDA_OPS_FLOAT32),
                     CUDA_OPS_UNSUPPORTED_DTYPE);
    }
    CHECK_OK(cuda_ops_cpu_isa_select("portable"));
    CHECK_STATUS(cuda_ops_gemm_tiles_cpu(NULL, 0, NULL, NULL, 0, 0, NULL, 0, 0, 0, 0, 0, NULL, 0, CUDA_OPS_BFLOAT16,
                                         CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_gemm_cpu(NULL, 0, NULL, 0, 0, NULL, 0, 0, 0, 0, 0, 0, NULL, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_gemm_cpu(NULL, 0, NULL, 0, 0, NULL, 0, 0, -1, 0, 0, 0, NULL, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
