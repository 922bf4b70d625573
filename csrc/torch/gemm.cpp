// gemm for PyTorch: what matmul and linear share, and one rung of the ladder by its number (0: the fastest known), for
// the lesson, the tests and `python -m cuda_ops bench gemm`.
#include "gemm.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_workspace.h"
#include "cuda_ops/gemm_ladder.h"

namespace cuda_ops
{

// Two matrices, or, with most_dims 3, two batches of them.
static cuda_ops_dtype check_operands(const char *op, const Tensor &a, const Tensor &b, int64_t most_dims = 2)
{
    const cuda_ops_dtype dtype = check_dtype(op, "a", a);
    check_like(op, "b", b, "a", a);
    check_dim(op, "a", a, 2, most_dims);
    check_dim(op, "b", b, a.dim(), a.dim());
    TORCH_CHECK(a.size(-1) == b.size(-2) && (a.dim() == 2 || a.size(0) == b.size(0)), op,
                ": expected b to have as many rows as a has columns, ", a.size(-1), ", got shape ", b.sizes());
    return dtype;
}

// How a matrix is stored: row by row, or as its transpose; neither, and it has to be copied.
struct MatrixLayout {
    bool known, transposed;
    int64_t pitch, stride; // between rows as they are stored, and between matrices
};

static MatrixLayout layout_of(const Tensor &matrix)
{
    if (matrix.numel() == 0) // whose strides mean nothing, and contiguous() leaves them
        return {true, false, std::max<int64_t>(1, matrix.size(-1)), 0};
    const int64_t stride = matrix.dim() == 3 && matrix.size(0) > 1 ? matrix.stride(0) : 0;
    if (!matrix.is_neg())
        for (int transposed = 0; transposed < 2; transposed++) {
            const int row = transposed - 2, column = -1 - transposed;
            const int64_t width = matrix.size(column), least = std::max<int64_t>(1, width);
            const int64_t pitch = matrix.size(row) > 1 ? matrix.stride(row) : least;
            if ((matrix.stride(column) == 1 || width <= 1) && pitch >= least)
                return {true, transposed != 0, pitch, stride};
        }
    return {false, false, 0, 0};
}

Tensor with_layout(const Tensor &matrix)
{
    return layout_of(matrix).known ? matrix : matrix.contiguous();
}

// TMA's, which a path on CUDA makes copies for.
static bool is_unaligned(const void *matrix)
{
    return reinterpret_cast<uintptr_t>(matrix) % 16 != 0;
}

cuda_ops_gemm_problem problem_of(const Tensor &a, const Tensor &b, cuda_ops_dtype dtype)
{
    const MatrixLayout left = layout_of(a), right = layout_of(b);
    cuda_ops_gemm_problem problem =
        dense_problem(a.size(-2), b.size(-1), a.size(-1), left.transposed, right.transposed, dtype);
    problem.lda = left.pitch;
    problem.ldb = right.pitch;
    if (a.dim() == 3) {
        problem.batch = a.size(0);
        problem.stride_a = left.stride;
        problem.stride_b = right.stride;
        problem.stride_d = problem.m * problem.n;
    }
    problem.unaligned_a = is_unaligned(a.const_data_ptr());
    problem.unaligned_b = is_unaligned(b.const_data_ptr());
    return problem;
}

cuda_ops_gemm_problem dense_problem(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b,
                                    cuda_ops_dtype dtype)
{
    cuda_ops_gemm_problem problem = {};
    problem.m = m;
    problem.n = n;
    problem.k = k;
    problem.batch = 1;
    problem.lda = transpose_a ? m : k;
    problem.ldb = transpose_b ? k : n;
    problem.ldd = n;
    problem.alpha = 1;
    problem.transpose_a = transpose_a;
    problem.transpose_b = transpose_b;
    problem.dtype = problem.output_dtype = problem.bias_dtype = dtype;
    problem.allow_tf32 = dtype == CUDA_OPS_FLOAT32 && at::globalContext().allowTF32CuBLAS();
    return problem;
}

#ifdef CUDA_OPS_WITH_CUDA
int forced_gemm_path(const char *op)
{
    const char *const value = std::getenv("CUDA_OPS_GEMM_PATH");
    if (!value || !*value)
        return CUDA_OPS_GEMM_FASTEST;
    std::string names;
    for (int number = 1; number < 100; number++)
        if (const char *const name = cuda_ops_gemm_path_name_cuda(number)) {
            if (std::strcmp(name, value) == 0)
                return number;
            names += names.empty() ? name : std::string(", ") + name;
        }
    TORCH_CHECK(false, op, ": expected CUDA_OPS_GEMM_PATH to be one of ", names, ", got ", value);
}

static cuda_ops_status launch_gemm(const Tensor &d, const void *a, const void *b, const void *bias,
                                   const cuda_ops_gemm_problem &problem, int path, cuda_ops_stream stream)
{
    const Tensor workspace = at::empty({cuda_ops_gemm_workspace_cuda(&problem, path)}, d.options().dtype(at::kByte));
    return cuda_ops_gemm_cuda(d.data_ptr(), a, b, bias, workspace.data_ptr(), &problem, path, stream);
}

void check_forced_gemm(const char *op, int path, cuda_ops_status status, const Tensor &d,
                       const cuda_ops_gemm_problem &problem)
{
    TORCH_CHECK_NOT_IMPLEMENTED(path == CUDA_OPS_GEMM_FASTEST || status != CUDA_OPS_INVALID_ARGUMENT, op,
                                ": CUDA_OPS_GEMM_PATH=", cuda_ops_gemm_path_name_cuda(path),
                                " cannot do this product on this device: m ", problem.m, ", n ", problem.n, ", k ",
                                problem.k, ", ", problem.transpose_a ? "T" : "N", problem.transpose_b ? "T" : "N", ", ",
                                d.scalar_type(), problem.allow_tf32 ? " (TF32 allowed)" : "");
}

cuda_ops_status gemm_cuda(const char *op, const Tensor &d, const void *a, const void *b, const void *bias,
                          const cuda_ops_gemm_problem &of_sizes)
{
    const int path = forced_gemm_path(op);
    cuda_ops_gemm_problem problem = of_sizes;
    problem.unaligned_a = is_unaligned(a);
    problem.unaligned_b = is_unaligned(b);
    const cuda_ops_status status = launch_gemm(d, a, b, bias, problem, path, current_stream(op));
    check_forced_gemm(op, path, status, d, problem);
    return status;
}
#endif

static bool is_c_rung(int64_t rung)
{
    return CUDA_OPS_GEMM_C_NAIVE <= rung && rung <= CUDA_OPS_GEMM_C_THREADS;
}

static bool gemm_rung_runs(const Tensor &a, const Tensor &b, int64_t rung, bool allow_tf32)
{
    const cuda_ops_dtype dtype = check_operands("gemm_rung", a, b);
    if (!a.is_cuda())
        return is_c_rung(rung);
#ifdef CUDA_OPS_WITH_CUDA
    const c10::OptionalDeviceGuard guard(at::device_of(a));
    cuda_ops_gemm_problem problem = problem_of(with_layout(a), with_layout(b), dtype);
    problem.allow_tf32 = allow_tf32;
    return cuda_ops_gemm_path_cuda(&problem, static_cast<int>(rung)) == rung;
#else
    (void)dtype, (void)allow_tf32;
    return false;
#endif
}

#ifdef CUDA_OPS_WITH_CUDA
static cuda_ops_status gemm_rung_cuda(const Tensor &d, const Tensor &a, const Tensor &b, cuda_ops_dtype dtype, int rung,
                                      bool allow_tf32)
{
    cuda_ops_gemm_problem problem = problem_of(a, b, dtype);
    problem.allow_tf32 = allow_tf32;
    return launch_gemm(d, a.const_data_ptr(), b.const_data_ptr(), nullptr, problem, rung, current_stream("gemm_rung"));
}
#endif

static Tensor gemm_rung(const Tensor &a, const Tensor &b, int64_t rung, bool allow_tf32)
{
    const cuda_ops_dtype dtype = check_operands("gemm_rung", a, b);
    const c10::OptionalDeviceGuard guard(at::device_of(a));
    Tensor d = at::empty({a.size(0), b.size(1)}, a.options());
    if (a.is_cuda()) {
        (void)allow_tf32;
        CUDA_OPS_LAUNCH("gemm_rung",
                        gemm_rung_cuda(d, with_layout(a), with_layout(b), dtype, static_cast<int>(rung), allow_tf32));
        return d;
    }
    TORCH_CHECK(rung == CUDA_OPS_GEMM_FASTEST || is_c_rung(rung),
                "gemm_rung: expected rung to be 31 to 35 on the CPU, got ", rung);
    if (d.numel() == 0)
        return d;
    const Tensor left = a.contiguous(), right = b.contiguous();
    const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
    const int number = rung == CUDA_OPS_GEMM_FASTEST ? (int)CUDA_OPS_GEMM_C_THREADS : static_cast<int>(rung);
    // Only the last one is cut into rows for several threads; half a million multiply-adds wake another.
    const int64_t work = std::max<int64_t>(1, n * k);
    const int64_t grain = number == CUDA_OPS_GEMM_C_THREADS ? std::max<int64_t>(1, (1 << 19) / work) : m;
    parallel_ranges("gemm_rung", m, grain, [&](int64_t begin, int64_t end) {
        void *const workspace = thread_workspace(cuda_ops_gemm_ladder_workspace_cpu(number));
        return cuda_ops_gemm_ladder_cpu(d.data_ptr(), left.const_data_ptr(), right.const_data_ptr(), workspace, m, n, k,
                                        begin, end, number, dtype);
    });
    return d;
}

// A path by a plan of the caller's (gemm.h), for the tests and for benchmarks/tune_gemm.py.
static Tensor gemm_planned(const Tensor &a, const Tensor &b, at::IntArrayRef plan, bool allow_tf32)
{
    const char *const op = "gemm_planned";
    const cuda_ops_dtype dtype = check_operands(op, a, b, 3);
    TORCH_CHECK(plan.size() == 4, op, ": expected plan to be path, tile, splits and swapped, got ", plan.size(),
                " numbers");
    TORCH_CHECK_NOT_IMPLEMENTED(a.is_cuda(), op, ": expected a to be on CUDA, got ", a.device());
    const c10::OptionalDeviceGuard guard(at::device_of(a));
    const Tensor d = a.dim() == 2 ? at::empty({a.size(0), b.size(1)}, a.options())
                                  : at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
#ifdef CUDA_OPS_WITH_CUDA
    const Tensor left = with_layout(a), right = with_layout(b);
    cuda_ops_gemm_problem problem = problem_of(left, right, dtype);
    problem.allow_tf32 = allow_tf32;
    const cuda_ops_gemm_plan chosen{static_cast<int>(plan[0]), static_cast<int>(plan[1]), static_cast<int>(plan[2]),
                                    static_cast<int>(plan[3])};
    const Tensor workspace =
        at::empty({cuda_ops_gemm_planned_workspace_cuda(&problem, &chosen)}, d.options().dtype(at::kByte));
    const cuda_ops_status status =
        cuda_ops_gemm_planned_cuda(d.data_ptr(), left.const_data_ptr(), right.const_data_ptr(), nullptr,
                                   workspace.data_ptr(), &problem, &chosen, current_stream(op));
    TORCH_CHECK_NOT_IMPLEMENTED(status != CUDA_OPS_INVALID_ARGUMENT, op, ": path ", plan[0],
                                " cannot do this product on this device by plan ", plan);
    check_status(op, status);
#else
    (void)dtype, (void)allow_tf32;
#endif
    return d;
}

// The plan that a product of a and b has by itself.
static std::vector<int64_t> gemm_plan(const Tensor &a, const Tensor &b, int64_t path, bool allow_tf32)
{
    const char *const op = "gemm_plan";
    const cuda_ops_dtype dtype = check_operands(op, a, b, 3);
    TORCH_CHECK_NOT_IMPLEMENTED(a.is_cuda(), op, ": expected a to be on CUDA, got ", a.device());
#ifdef CUDA_OPS_WITH_CUDA
    const c10::OptionalDeviceGuard guard(at::device_of(a));
    cuda_ops_gemm_problem problem = problem_of(with_layout(a), with_layout(b), dtype);
    problem.allow_tf32 = allow_tf32;
    cuda_ops_gemm_plan plan = {};
    check_status(op, cuda_ops_gemm_plan_cuda(&plan, &problem, static_cast<int>(path)));
    return {plan.path, plan.tile, plan.splits, plan.swapped};
#else
    (void)dtype, (void)path, (void)allow_tf32;
    return {};
#endif
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("gemm_rung(Tensor a, Tensor b, int rung, *, bool allow_tf32=False) -> Tensor");
    library.def("gemm_rung_runs(Tensor a, Tensor b, int rung, *, bool allow_tf32=False) -> bool");
    library.def("gemm_planned(Tensor a, Tensor b, int[] plan, *, bool allow_tf32=False) -> Tensor");
    library.def("gemm_plan(Tensor a, Tensor b, int path=0, *, bool allow_tf32=False) -> int[]");
    CUDA_OPS_IMPLEMENT(library, "gemm_rung", cuda_ops::gemm_rung);
    CUDA_OPS_IMPLEMENT(library, "gemm_planned", cuda_ops::gemm_planned);
    CUDA_OPS_IMPLEMENT(library, "gemm_plan", cuda_ops::gemm_plan);
    CUDA_OPS_IMPLEMENT(library, "gemm_rung_runs", cuda_ops::gemm_rung_runs);
}
