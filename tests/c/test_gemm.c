#include "gemm.h"

#include "check.h"
#include "cuda_ops/gemm.h"

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

/* The C API: every product of a batch in two blocks, and what it refuses. */
static void check_problem(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b, cuda_ops_dtype dtype)
{
    enum { BATCH = 3 };
    cuda_ops_gemm_problem p = {.m = m, .n = n, .k = k, .batch = BATCH, .alpha = 1, .dtype = dtype};
    p.output_dtype = p.bias_dtype = dtype;
    p.transpose_a = transpose_a, p.transpose_b = transpose_b;
    p.lda = (transpose_a ? m : k) + 1, p.ldb = (transpose_b ? k : n) + 2, p.ldd = n;
    p.stride_a = (transpose_a ? k : m) * p.lda, p.stride_d = m * n;
    const int64_t b_count = (transpose_b ? n : k) * p.ldb; /* one b for all */
    void *a = guarded_numbers(BATCH * p.stride_a, 1, dtype), *b = guarded_numbers(b_count, 2, dtype);
    void *d = guarded_new(BATCH * m * n, dtype);
    void *workspace = aligned_alloc(64, (size_t)cuda_ops_gemm_workspace_cpu());
    CHECK(workspace != NULL, "out of memory");
    for (int64_t index = 0; index < BATCH; index++) {
        const cuda_ops_gemm_block blocks[2] = {{0, m / 2, 0, n}, {m / 2, m, 0, n}};
        for (int i = 0; i < 2; i++)
            CHECK_OK(cuda_ops_gemm_cpu(d, a, b, workspace, &p, index, blocks[i]));
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                double sum = 0, magnitude = 0;
                for (int64_t q = 0; q < k; q++) {
                    const double x = get(a, index * p.stride_a + (transpose_a ? q * p.lda + i : i * p.lda + q), dtype);
                    const double term = x * get(b, transpose_b ? j * p.ldb + q : q * p.ldb + j, dtype);
                    sum += term;
                    magnitude += fabs(term);
                }
                CHECK_NEAR(d, index * m * n + i * n + j, sum, rounding(dtype) * (1 + magnitude), dtype);
            }
    }
    const cuda_ops_gemm_block all = {0, m, 0, n};
    p.activation = CUDA_OPS_GEMM_RELU;
    CHECK(cuda_ops_gemm_cpu(d, a, b, workspace, &p, 0, all) == CUDA_OPS_INVALID_ARGUMENT, "an activation");
    p.activation = CUDA_OPS_GEMM_NONE, p.dtype = CUDA_OPS_FLOAT16;
    CHECK(cuda_ops_gemm_cpu(d, a, b, workspace, &p, 0, all) == CUDA_OPS_UNSUPPORTED_DTYPE, "float16");
    free(workspace);
    guarded_free(a, BATCH * p.stride_a, dtype);
    guarded_free(b, b_count, dtype);
    guarded_free(d, BATCH * m * n, dtype);
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
    const int64_t problems[][3] = {{35, 79, 19}, {1, 1, 1}, {16, 5, 300}};
    FOR_CPU_DTYPES(dtype)
    for (size_t s = 0; s < sizeof(problems) / sizeof(problems[0]); s++)
        for (int flags = 0; flags < 4; flags++)
            check_problem(problems[s][0], problems[s][1], problems[s][2], flags & 1, flags & 2, dtype);
    return 0;
}
