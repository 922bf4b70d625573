#include "gemm.h"

#include "check.h"

/* Element (row, column) of a matrix that lies in its array with a leading dimension wider than it needs. */
typedef struct matrix {
    void *data;
    int64_t rows, columns, row_stride, column_stride, count;
} matrix;

static matrix matrix_new(int64_t rows, int64_t columns, bool transposed, uint64_t seed, cuda_ops_dtype dtype)
{
    const int64_t padding = 3;
    matrix m = {.rows = rows, .columns = columns};
    m.row_stride = transposed ? 1 : columns + padding;
    m.column_stride = transposed ? rows + padding : 1;
    m.count = (transposed ? columns : rows) * (transposed ? rows + padding : columns + padding);
    m.data = guarded_numbers(m.count, seed, dtype);
    return m;
}

static double at(const matrix *m, int64_t row, int64_t column, cuda_ops_dtype dtype)
{
    return get(m->data, row * m->row_stride + column * m->column_stride, dtype);
}

static void check_gemm(int64_t m, int64_t n, int64_t k, bool a_transposed, bool b_transposed, bool accumulate,
                       cuda_ops_dtype dtype)
{
    matrix a = matrix_new(m, k, a_transposed, 1, dtype), b = matrix_new(k, n, b_transposed, 2, dtype);
    matrix output = matrix_new(m, n, false, 3, dtype), before = matrix_new(m, n, false, 3, dtype);
    void *workspace = aligned_alloc(64, GEMM_WORKSPACE_BYTES);
    CHECK(workspace != NULL, "out of memory");
    memset(workspace, 0xff, GEMM_WORKSPACE_BYTES); /* NaN, should it be read before it is written */
    if (dtype == CUDA_OPS_FLOAT32)
        cuda_ops_gemm_f32(output.data, output.row_stride, a.data, a.row_stride, a.column_stride, b.data, b.row_stride,
                          b.column_stride, m, n, k, accumulate, workspace);
    else
        cuda_ops_gemm_f64(output.data, output.row_stride, a.data, a.row_stride, a.column_stride, b.data, b.row_stride,
                          b.column_stride, m, n, k, accumulate, workspace);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = accumulate ? at(&before, i, j, dtype) : 0, magnitude = fabs(sum);
            for (int64_t p = 0; p < k; p++) {
                const double term = at(&a, i, p, dtype) * at(&b, p, j, dtype);
                sum += term;
                magnitude += fabs(term);
            }
            CHECK_NEAR(output.data, i * output.row_stride + j, sum, rounding(dtype) * (1 + magnitude), dtype);
        }
        /* The padding between the rows is not the kernel's. */
        for (int64_t j = n; j < output.row_stride && i * output.row_stride + j < output.count; j++)
            CHECK(at(&output, i, j, dtype) == at(&before, i, j, dtype), "padding of row %lld", (long long)i);
    }
    free(workspace);
    guarded_free(a.data, a.count, dtype);
    guarded_free(b.data, b.count, dtype);
    guarded_free(output.data, output.count, dtype);
    guarded_free(before.data, before.count, dtype);
}

int main(void)
{
    /* One element, sizes that no tile divides (35, 79, 19), less and more than a tile, no sum at all, nothing at all;
     * k over and under any blocking of it. */
    const int64_t sizes[][3] = {{1, 1, 1},    {35, 79, 19},  {16, 16, 16}, {7, 130, 65}, {65, 1, 33},
                                {1, 100, 64}, {17, 33, 700}, {5, 4, 0},    {0, 4, 5},    {4, 0, 5}};
    FOR_CPU_DTYPES(dtype)
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (int flags = 0; flags < 8; flags++)
            check_gemm(sizes[s][0], sizes[s][1], sizes[s][2], flags & 1, flags & 2, flags & 4, dtype);
    return 0;
}
