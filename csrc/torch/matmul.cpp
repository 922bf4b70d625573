// matmul for PyTorch: the product of two matrices, or of a batch of pairs of them. Other shapes, and broadcasting, are
// views of these; gradients are products again, of transposed views, which need no copy.
#include <algorithm>
#include <optional>

#include "autograd.h"
#include "checks.h"
#include "cpu_workspace.h"
#include "empty.h"
#include "gemm.h"
#include "linear.h"
#include "vmap.h"

namespace cuda_ops
{

// The longer side of D is cut, since each thread packs all of the other operand; the products of a batch lie end to
// end.
static void matmul_cpu(const Tensor &output, const Tensor &a, const Tensor &b, const cuda_ops_gemm_problem &problem)
{
    const bool by_rows = problem.m >= problem.n;
    const int64_t lines = by_rows ? problem.m : problem.n, batch = problem.batch;
    const int64_t elements = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n;
    const int64_t grain = product_grain(batch * lines, batch * problem.m * problem.n * problem.k, batch * elements);
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
    Tensor output = input.dim() == 2 ? empty({a.size(0), b.size(1)}, a.options())
                                     : empty({a.size(0), a.size(1), b.size(2)}, a.options());
    if (output.numel() == 0)
        return output;
    if (has_half_product(a)) {
        half_product("matmul", output, a, b);
        return output;
    }
    if (a.is_cpu() && dtype == CUDA_OPS_BFLOAT16) {
        const Tensor sums = empty(output.sizes(), output.options().dtype(at::kFloat));
        for (int64_t i = 0; a.dim() == 3 && i < a.size(0); i++)
            bfloat16_product("matmul", sums.select(0, i), a.select(0, i), b.select(0, i));
        if (a.dim() == 2)
            bfloat16_product("matmul", sums, a, b);
        return output.copy_(sums);
    }
    if (is_cpu_half(a))
        return in_float32(matmul_forward, a, b).to(a.scalar_type());
    const cuda_ops_gemm_problem problem = problem_of(a, b, dtype);
    if (a.is_cuda())
        CUDA_OPS_LAUNCH("matmul",
                        gemm_cuda("matmul", output, a.const_data_ptr(), b.const_data_ptr(), nullptr, problem));
    else
        matmul_cpu(output, a, b, problem);
    return output;
}

// The shape that two lists of dimensions broadcast to, if they do.
static std::optional<c10::SymDimVector> broadcast(c10::SymIntArrayRef a, c10::SymIntArrayRef b)
{
    if (a.size() < b.size())
        std::swap(a, b);
    c10::SymDimVector sizes(a.begin(), a.end());
    for (size_t i = 0; i < b.size(); i++) {
        c10::SymInt &size = sizes[sizes.size() - 1 - i];
        const c10::SymInt &other = b[b.size() - 1 - i];
        if (size == 1)
            size = other;
        else if (other != 1 && other != size)
            return std::nullopt;
    }
    return sizes;
}

static c10::SymInt product_of(c10::SymIntArrayRef sizes)
{
    c10::SymInt product = 1;
    for (const c10::SymInt &size : sizes)
        product = product * size;
    return product;
}

// torch.matmul's shapes.
static Tensor matmul(const Tensor &input, const Tensor &other)
{
    static const auto op = registered_op<decltype(matmul_forward)>("cuda_ops::matmul_forward");
    if (input.dim() == other.dim() &&
        (input.dim() == 2 || (input.dim() == 3 && input.sym_size(0) == other.sym_size(0))))
        return op.call(input, other);
    for (const auto &[name, tensor] : {std::pair<const char *, const Tensor &>{"input", input}, {"other", other}})
        TORCH_CHECK(tensor.dim() > 0, "matmul: expected ", name, " to have at least 1 dimension, got a scalar");
    TORCH_CHECK(input.sym_size(-1) == other.sym_size(std::max<int64_t>(other.dim() - 2, 0)),
                "matmul: expected other to have as many rows as input has columns, ", input.sym_size(-1),
                ", got input of shape ", input.sym_sizes(), " and other of shape ", other.sym_sizes());
    Tensor a = input.dim() == 1 ? input.unsqueeze(0) : input, b = other.dim() == 1 ? other.unsqueeze(1) : other;
    const c10::SymInt rows = a.sym_size(-2), depth = a.sym_size(-1), columns = b.sym_size(-1);
    c10::SymDimVector shape;
    if (b.dim() == 2) { // all rows of all matrices of a are those of one
        const auto batch = a.sym_sizes().slice(0, static_cast<size_t>(a.dim() - 2));
        shape.append(batch.begin(), batch.end());
        if (a.dim() > 2)
            a = a.reshape_symint({product_of(batch) * rows, depth});
    } else {
        const std::optional<c10::SymDimVector> batch =
            broadcast(a.sym_sizes().slice(0, static_cast<size_t>(a.dim() - 2)),
                      b.sym_sizes().slice(0, static_cast<size_t>(b.dim() - 2)));
        TORCH_CHECK(batch, "matmul: expected the dimensions before the last two to broadcast, got input of shape ",
                    input.sym_sizes(), " and other of shape ", other.sym_sizes());
        shape = *batch;
        const c10::SymInt count = product_of(*batch);
        // A matrix that all products share is not copied: its stride is 0.
        const auto spread = [&](const Tensor &matrices, const c10::SymInt &height, const c10::SymInt &width) {
            c10::SymDimVector sizes = *batch;
            sizes.append({height, width});
            return matrices.expand_symint(sizes).reshape_symint({count, height, width});
        };
        a = spread(a, rows, depth);
        b = spread(b, depth, columns);
    }
    if (input.dim() > 1)
        shape.push_back(rows);
    if (other.dim() > 1)
        shape.push_back(columns);
    return op.call(a, b).reshape_symint(shape);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("matmul(Tensor input, Tensor other) -> (Tensor output)", cuda_ops::matmul);
    library.def("matmul_forward(Tensor input, Tensor other) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "matmul_forward", cuda_ops::matmul_forward);
    CUDA_OPS_VMAP(library, "matmul_forward", "input[=2], other or input*, other*");
    cuda_ops::register_kernels_of_all_ops(library, "matmul");
    CUDA_OPS_AUTOCAST(library, "matmul", LOWER_PRECISION);
    CUDA_OPS_DERIVATIVES(
        library, "matmul_forward",
        {"input: matmul_forward(grad_output, other.mT)", "other: matmul_forward(input.mT, grad_output)",
         "output <- matmul_forward(tangent_input, other)", "output <- matmul_forward(input, tangent_other)"});
}
