// matmul for PyTorch: the product of two matrices, or of a batch of pairs of them. Other shapes, and broadcasting, are
// views that cuda_ops/ops/matmul.py makes; gradients are products again, of transposed views, which need no copy.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "checks.h"
#include "cpu_workspace.h"
#include "gemm.h"
#include "linear.h"

namespace cuda_ops
{

// The longer side of D is cut, since each thread packs all of the other operand; the products of a batch lie end to
// end.
static void matmul_cpu(const Tensor &output, const Tensor &a, const Tensor &b, const cuda_ops_gemm_problem &problem)
{
    const bool by_rows = problem.m >= problem.n;
    const int64_t lines = by_rows ? problem.m : problem.n, other = by_rows ? problem.n : problem.m;
    const int64_t grain = std::max<int64_t>(1, PRODUCT_GRAIN / std::max<int64_t>(1, other * problem.k));
    parallel_ranges("matmul", problem.batch * lines, grain, [&](int64_t begin, int64_t end) {
        void *const workspace = thread_workspace(cuda_ops_matmul_workspace_cpu());
        cuda_ops_status status = CUDA_OPS_SUCCESS;
        while (begin < end && status == CUDA_OPS_SUCCESS) {
            const int64_t index = begin / lines, first = begin - index * lines;
            const int64_t last = std::min(lines, first + end - begin);
            const cuda_ops_gemm_block block = by_rows ? cuda_ops_gemm_block{first, last, 0, problem.n}
                                                      : cuda_ops_gemm_block{0, problem.m, first, last};
            status = cuda_ops_matmul_cpu(output.data_ptr(), a.const_data_ptr(), b.const_data_ptr(), workspace, &problem,
                                         index, block);
            begin += last - first;
        }
        return status;
    });
}

static Tensor matmul_forward(const Tensor &input, const Tensor &other)
{
    const cuda_ops_dtype dtype = check_dtype("matmul", "input", input);
    check_like("matmul", "other", other, "input", input);
    check_dim("matmul", "input", input, 2, 3);
    check_dim("matmul", "other", other, input.dim(), input.dim());
    TORCH_CHECK(input.size(-1) == other.size(-2) && (input.dim() == 2 || input.size(0) == other.size(0)),
                "matmul: expected other to have as many rows as input has columns, ", input.size(-1),
                ", got input of shape ", input.sizes(), " and other of shape ", other.sizes());
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor a = with_layout(input), b = with_layout(other);
    Tensor output = input.dim() == 2 ? at::empty({a.size(0), b.size(1)}, a.options())
                                     : at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
    if (output.numel() == 0)
        return output;
    const cuda_ops_gemm_problem problem = problem_of(a, b, dtype);
    if (a.is_cuda())
        CUDA_OPS_LAUNCH("matmul",
                        gemm_cuda("matmul", output, a.const_data_ptr(), b.const_data_ptr(), nullptr, problem));
    else
        matmul_cpu(output, a, b, problem);
    return output;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("matmul_forward(Tensor input, Tensor other) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "matmul_forward", cuda_ops::matmul_forward);
}
