#include "cuda_ops/gemm_ladder.h"

#include "check.h"

static void check_rung(int rung, int64_t m, int64_t n, int64_t k, cuda_ops_dtype dtype)
{
    void *a = guarded_numbers(m * k, 1, dtype), *b = guarded_numbers(k * n, 2, dtype), *d = guarded_new(m * n, dtype);
    const int64_t bytes = cuda_ops_gemm_ladder_workspace_cpu(rung);
    void *workspace = bytes > 0 ? aligned_alloc(64, (size_t)bytes) : NULL;
    if (workspace)
        memset(workspace, 0xff, (size_t)bytes); /* NaN, should it be read before it is written */
    IN_TWO_PIECES(m, begin, end, cuda_ops_gemm_ladder_cpu(d, a, b, workspace, m, n, k, begin, end, rung, dtype));
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, magnitude = 0;
            for (int64_t p = 0; p < k; p++) {
                const double term = get(a, i * k + p, dtype) * get(b, p * n + j, dtype);
                sum += term;
                magnitude += fabs(term);
            }
            CHECK_NEAR(d, i * n + j, sum, rounding(dtype) * (1 + magnitude), dtype);
        }
    free(workspace);
    guarded_free(a, m * k, dtype);
    guarded_free(b, k * n, dtype);
    guarded_free(d, m * n, dtype);
}

int main(void)
{
    /* One element, sizes that no tile divides, just over every block (96 rows, 256 deep, 512 columns), no sum, nothing.
     */
    const int64_t sizes[][3] = {{1, 1, 1},    {35, 79, 19}, {6, 16, 8}, {97, 33, 257}, {7, 515, 3},
                                {13, 1, 100}, {1, 70, 300}, {5, 4, 0},  {0, 4, 5},     {4, 0, 5}};
    FOR_CPU_DTYPES(dtype)
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (int rung = CUDA_OPS_GEMM_C_NAIVE; rung <= CUDA_OPS_GEMM_C_THREADS; rung++)
            check_rung(rung, sizes[s][0], sizes[s][1], sizes[s][2], dtype);
    float x = 1;
    CHECK_STATUS(cuda_ops_gemm_ladder_cpu(&x, &x, &x, NULL, 1, 1, 1, 0, 1, 30, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_gemm_ladder_cpu(&x, &x, &x, NULL, 1, 1, 1, 0, 1, 36, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(cuda_ops_gemm_ladder_cpu(&x, &x, &x, NULL, 1, 1, 1, 0, 1, 31, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
