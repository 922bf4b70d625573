#include "cuda_ops/gemm.h"

#include "check.h"

/* Every product of a batch in two blocks, and what is refused. */
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
    void *workspace = aligned_alloc(64, (size_t)cuda_ops_matmul_workspace_cpu());
    CHECK(workspace != NULL, "out of memory");
    for (int64_t index = 0; index < BATCH; index++) {
        const cuda_ops_gemm_block blocks[2] = {{0, m / 2, 0, n}, {m / 2, m, 0, n}};
        for (int i = 0; i < 2; i++)
            CHECK_OK(cuda_ops_matmul_cpu(d, a, b, workspace, &p, index, blocks[i]));
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
    CHECK(cuda_ops_matmul_cpu(d, a, b, workspace, &p, 0, all) == CUDA_OPS_INVALID_ARGUMENT, "an activation");
    p.activation = CUDA_OPS_GEMM_NONE, p.dtype = CUDA_OPS_FLOAT16;
    CHECK(cuda_ops_matmul_cpu(d, a, b, workspace, &p, 0, all) == CUDA_OPS_UNSUPPORTED_DTYPE, "float16");
    free(workspace);
    guarded_free(a, BATCH * p.stride_a, dtype);
    guarded_free(b, b_count, dtype);
    guarded_free(d, BATCH * m * n, dtype);
}

int main(void)
{
    const int64_t problems[][3] = {{35, 79, 19}, {1, 1, 1}, {16, 5, 300}};
    FOR_CPU_DTYPES(dtype)
    for (size_t s = 0; s < sizeof(problems) / sizeof(problems[0]); s++)
        for (int flags = 0; flags < 4; flags++)
            check_problem(problems[s][0], problems[s][1], problems[s][2], flags & 1, flags & 2, dtype);
    return 0;
}
