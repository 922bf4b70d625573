/* Every instruction set that this machine has, one after the other. Since a set is chosen by name, the last check is
 * that names are looked at. */
#include "cuda_ops/gemm_cpu.h"

#include "check.h"
#include "cuda_ops/cpu_isa.h"

/* APART: neither stride is 1. EXPANDED_*: all rows, or all columns, are the same memory. */
enum layout { BY_ROWS, BY_COLUMNS, APART, EXPANDED_ROWS, EXPANDED_COLUMNS, LAYOUTS };

/* A matrix that lies in its array with a leading dimension wider than it needs; and its values, dense. */
typedef struct matrix {
    void *data;
    double *values;
    int64_t rows, columns, row_stride, column_stride, count;
    size_t size;
} matrix;

static size_t element_size(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? sizeof(uint16_t) : size_of(dtype);
}

static double element(const void *data, int64_t index, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_BFLOAT16)
        return get(data, index, dtype);
    const uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return (double)value;
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
    for (int64_t i = 0; i < m.count; i++) {
        const float value = (float)number(seed * 1000003 + (uint64_t)i);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        if (dtype == CUDA_OPS_BFLOAT16)
            ((uint16_t *)m.data)[i] = (uint16_t)(bits >> 16);
        else
            set(m.data, i, (double)value, dtype);
    }
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

int main(void)
{
    /* One element, sizes that no tile divides (35, 79, 19), no sum at all, nothing at all; rows and columns on either
     * side of what decides about packing, and over a block of each; k over any blocking of it; vectors, of more columns
     * than are summed at once, too. */
    const int64_t sizes[][3] = {{1, 1, 1},     {35, 79, 19},  {16, 16, 16}, {7, 130, 65}, {65, 1, 33},
                                {1, 100, 64},  {17, 33, 700}, {5, 4, 0},    {0, 4, 5},    {4, 0, 5},
                                {70, 290, 9},  {400, 34, 6},  {3, 3100, 5}, {33, 65, 40}, {64, 64, 64},
                                {1, 75, 1100}, {75, 1, 1100}, {1, 2100, 9}, {2100, 1, 9}};
    const cuda_ops_dtype dtypes[] = {CUDA_OPS_FLOAT32, CUDA_OPS_FLOAT64, CUDA_OPS_BFLOAT16};
    for (int d = 0; d < 3; d++) {
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (int layouts = 0; layouts < LAYOUTS * LAYOUTS; layouts++)
                check_gemm(sizes[s][0], sizes[s][1], sizes[s][2], layouts % LAYOUTS, layouts / LAYOUTS, dtypes[d]);
        /* Over a block of a, whole columns of tiles, and a ragged rest of both. */
        check_gemm(530, 72, 512, BY_ROWS, BY_ROWS, dtypes[d]);
    }
    for (cuda_ops_cpu_isa isa = CUDA_OPS_CPU_PORTABLE; isa <= cuda_ops_cpu_isa_widest(); isa++) {
        select_isa(isa);
        FOR_CPU_DTYPES(dtype)
        check_pieces(dtype);
    }
    CHECK_STATUS(cuda_ops_gemm_cpu(NULL, 0, NULL, 0, 0, NULL, 0, 0, 0, 0, 0, 0, NULL, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_gemm_cpu(NULL, 0, NULL, 0, 0, NULL, 0, 0, -1, 0, 0, 0, NULL, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
