// gemm by mma.sync, its paths mma and direct: every storage order, pitch, stride and address, batches, splits of k, and
// the epilogue.
#include "cases.h"
#include "gemm/mma/kernel.cuh"
#include "gemm/paths.h"

using namespace emulation;

// float64 has kernels of its own, which are not compiled here.
GemmPlan gemm_mma_float64_plan(const cuda_ops_gemm_problem &, GemmDevice)
{
    return {};
}
int64_t gemm_mma_float64_workspace(const cuda_ops_gemm_problem &, GemmDevice)
{
    return 0;
}
cuda_ops_status gemm_mma_float64(const MmaWork &, const cuda_ops_gemm_problem &, bool, int, cudaStream_t)
{
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

// Nor are direct's on the CUDA cores, nor the choice.
cuda_ops_status gemm_direct_float32(const GemmCall &, GemmDevice, const GemmPlan &)
{
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
cuda_ops_status gemm_direct_float64(const GemmCall &, GemmDevice, const GemmPlan &)
{
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
GemmPlan gemm_direct_plan(const cuda_ops_gemm_problem &, GemmDevice)
{
    return {GEMM_DIRECT, 0, 1 << random_in(0, 3), 0, 8};
}

// An operand that is stored rows x columns, with NaN in the gaps.
struct Operand {
    Array array;
    int64_t pitch, stride;

    Operand(int64_t rows, int64_t columns, int64_t batch, cuda_ops_dtype dtype)
    {
        pitch = columns + (one_in(2) ? 0 : random_in(1, 9));
        stride = batch == 1 || one_in(4) ? 0 : rows * pitch + (one_in(2) ? 0 : random_in(1, 9));
        array = Array((stride > 0 ? batch - 1 : 0) * stride + (rows - 1) * pitch + columns, dtype).random();
        for (int64_t i = 0; i < array.count; i++)
            if ((stride > 0 ? i % stride : i) % pitch >= columns || (stride > 0 && i % stride >= rows * pitch))
                set(array.data, i, NAN, dtype);
    }
};

static double activated(double x, int activation)
{
    switch (activation) {
    case CUDA_OPS_GEMM_RELU:
        return fmax(x, 0);
    case CUDA_OPS_GEMM_RELU6:
        return fmin(fmax(x, 0), 6);
    case CUDA_OPS_GEMM_SILU:
        return x / (1 + exp(-x));
    case CUDA_OPS_GEMM_HARDSWISH:
        return x * fmin(fmax(x + 3, 0), 6) / 6;
    case CUDA_OPS_GEMM_GELU:
        return x / 2 * (1 + erf(x / sqrt(2.0)));
    case CUDA_OPS_GEMM_GELU_TANH:
        return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
    default:
        return x;
    }
}

static void gemm(int64_t number)
{
    static constexpr cuda_ops_dtype KINDS[] = {CUDA_OPS_BFLOAT16, CUDA_OPS_FLOAT16, CUDA_OPS_FLOAT32};
    cuda_ops_gemm_problem p = {};
    p.dtype = p.output_dtype = p.bias_dtype = KINDS[random_below(3)];
    const bool long_k = one_in(4); // which is split
    p.m = random_size(long_k ? 20 : 150), p.n = random_size(long_k ? 20 : 150), p.k = long_k ? 600 : random_size(90);
    p.batch = one_in(2) ? 1 : 2;
    p.transpose_a = one_in(2), p.transpose_b = one_in(2);
    p.alpha = 1;
    p.allow_tf32 = 1;
    p.activation = one_in(2) ? (cuda_ops_gemm_activation)random_in(CUDA_OPS_GEMM_RELU, CUDA_OPS_GEMM_HARDSWISH)
                             : CUDA_OPS_GEMM_NONE;
    Operand a(p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.batch, p.dtype);
    Operand b(p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.batch, p.dtype);
    p.lda = a.pitch, p.stride_a = a.stride, p.ldb = b.pitch, p.stride_b = b.stride;
    p.ldd = p.n, p.stride_d = p.m * p.n;
    const Array bias = Array(p.n, p.dtype).random(), d = Array(p.batch * p.m * p.n, p.dtype);
    const GemmDevice device = {90, 3, 227 << 10};
    void *const workspace = device_memory((size_t)gemm_mma_workspace(p, device), 0);
    const bool direct = one_in(2);
    describe("case %lld: %s %lld x %lld x %lld x %lld, %s%s, pitches %lld and %lld, strides %lld and %lld, dtype %d",
             (long long)number, direct ? "direct" : "mma", (long long)p.batch, (long long)p.m, (long long)p.n,
             (long long)p.k, p.transpose_a ? "T" : "N", p.transpose_b ? "T" : "N", (long long)p.lda, (long long)p.ldb,
             (long long)p.stride_a, (long long)p.stride_b, p.dtype);
    const GemmCall call = {d.data, a.array.data, b.array.data, bias.data, workspace, p, nullptr};
    expect_success(direct ? gemm_direct(call, device) : gemm_mma(call, device));
    for (int64_t matrix = 0; matrix < p.batch; matrix++)
        for (int64_t i = 0; i < p.m; i++)
            for (int64_t j = 0; j < p.n; j++) {
                double sum = bias[j], magnitude = fabs(sum);
                for (int64_t k = 0; k < p.k; k++) {
                    const double term = a.array[matrix * a.stride + (p.transpose_a ? k * p.lda + i : i * p.lda + k)] *
                                        b.array[matrix * b.stride + (p.transpose_b ? j * p.ldb + k : k * p.ldb + j)];
                    sum += term, magnitude += fabs(term);
                }
                sum = activated(sum, p.activation);
                expect_near("d", matrix * p.stride_d + i * p.ldd + j, d[matrix * p.stride_d + i * p.ldd + j], sum,
                            rounding_of(p.dtype) * fabs(sum) + 2e-5 * magnitude);
            }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "gemm_mma", gemm);
}
