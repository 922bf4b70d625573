// gemm's path narrow: long operands of few columns, in every dtype and storage order that it takes, and the sums of
// many splits.
#include "cases.h"
#include "gemm/paths.h"

using namespace emulation;

// At a multiple of 16 bytes, which the path needs.
static Array aligned(int64_t count, cuda_ops_dtype dtype)
{
    Array array;
    array.dtype = dtype, array.count = count;
    array.data = device_memory((size_t)count * (size_t)bytes_of(dtype), 0);
    return array;
}

static void gemm(int64_t number)
{
    static constexpr cuda_ops_dtype KINDS[] = {CUDA_OPS_BFLOAT16, CUDA_OPS_FLOAT16, CUDA_OPS_FLOAT32};
    cuda_ops_gemm_problem p = {};
    p.dtype = p.output_dtype = p.bias_dtype = KINDS[random_below(3)];
    const bool columns = one_in(2); // a long k, else a long m
    const int64_t rows = random_size(700);
    const bool outer = !columns && one_in(3); // a short k, and long rows of D
    p.m = columns || outer ? random_size(70) : rows, p.n = outer ? random_in(257, 1100) : random_size(70);
    p.k = columns ? rows : outer ? random_in(1, p.dtype == CUDA_OPS_FLOAT32 ? 16 : 4) : random_size(70);
    p.batch = 1;
    p.transpose_a = columns || (outer && one_in(2)), p.transpose_b = !columns && one_in(2);
    p.alpha = one_in(2) ? 1 : 0.5;
    p.activation = one_in(2) ? CUDA_OPS_GEMM_RELU : CUDA_OPS_GEMM_NONE;
    p.lda = (p.transpose_a ? p.m : p.k) + (outer && one_in(2) ? random_in(1, 9) : 0);
    p.ldb = (p.transpose_b ? p.k : p.n) + (columns || one_in(2) ? 0 : random_in(1, 9));
    p.ldd = p.n + (outer && one_in(2) ? random_in(1, 9) : 0);
    const Array a = aligned((p.transpose_a ? p.k : p.m) * p.lda, p.dtype).random(), d = aligned(p.m * p.ldd, p.dtype);
    const Array b = aligned((p.transpose_b ? p.n : p.k) * p.ldb, p.dtype).random();
    const Array bias = Array(p.n, p.dtype).random();
    const GemmDevice device = {90, 3, 227 << 10};
    GemmPlan plan = gemm_narrow_plan(p, device);
    if (columns && one_in(2))
        plan.splits = (int)random_in(1, 40);
    void *const workspace = device_memory((size_t)gemm_narrow_planned_workspace(p, plan), 0);
    describe("case %lld: %lld x %lld x %lld, %s%s, pitch %lld, %d splits, dtype %d", (long long)number, (long long)p.m,
             (long long)p.n, (long long)p.k, p.transpose_a ? "T" : "N", p.transpose_b ? "T" : "N", (long long)p.ldb,
             plan.splits, p.dtype);
    const GemmCall call = {d.data, a.data, b.data, bias.data, workspace, p, nullptr};
    expect_success(gemm_narrow_planned(call, device, plan));
    for (int64_t i = 0; i < p.m; i++)
        for (int64_t j = 0; j < p.n; j++) {
            double sum = bias[j], magnitude = fabs(sum);
            for (int64_t k = 0; k < p.k; k++) {
                const double term = p.alpha * a[p.transpose_a ? k * p.lda + i : i * p.lda + k] *
                                    b[p.transpose_b ? j * p.ldb + k : k * p.ldb + j];
                sum += term, magnitude += fabs(term);
            }
            if (p.activation == CUDA_OPS_GEMM_RELU && sum < 0)
                sum = 0;
            expect_near("d", i * p.ldd + j, d[i * p.ldd + j], sum, rounding_of(p.dtype) * fabs(sum) + 1e-5 * magnitude);
        }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "gemm_narrow", gemm);
}
