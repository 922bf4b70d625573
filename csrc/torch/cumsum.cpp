// cumsum for PyTorch: checks, the dimensions as the kernels see them, allocation and the choice of backend.
#include "cuda_ops/cumsum.h"

#include <algorithm>
#include <optional>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "vmap.h"

namespace cuda_ops
{

static Tensor cumsum_forward(const Tensor &given, int64_t dim, std::optional<at::ScalarType> dtype, bool reverse)
{
    const char *const op = "cumsum";
    const at::ScalarType to = dtype.value_or(given.scalar_type());
    TORCH_CHECK_NOT_IMPLEMENTED(!dtype || at::isFloatingType(to), op, ": expected dtype to be floating point, got ",
                                to);
    const Tensor input = given.to(to);
    const cuda_ops_dtype type = check_dtype(op, "input", input);
    const int64_t rank = input.dim(), bound = std::max<int64_t>(rank, 1);
    TORCH_CHECK_INDEX(-bound <= dim && dim < bound, op, ": expected dim to be in [", -bound, ", ", bound - 1,
                      "] for an input of shape ", input.sizes(), ", got ", dim);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    Tensor output = empty_like_dense(x);
    if (x.numel() == 0)
        return output;
    // Of a dense tensor a dimension's stride is the number of elements that lie inside of it.
    const int64_t wrapped = dim < 0 ? dim + bound : dim;
    const int64_t cols = rank > 0 ? x.size(wrapped) : 1, inner = cols > 1 ? x.stride(wrapped) : 1;
    const int64_t outer = x.numel() / (cols * inner);
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(cuda_ops_cumsum_workspace_cuda(outer, cols, inner, type), x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_cumsum_cuda(output.data_ptr(), workspace.data_ptr(), x.const_data_ptr(), outer,
                                                 cols, inner, reverse, type, current_stream(op)));
        return output;
    }
    const int64_t units = cuda_ops_cumsum_units_cpu(outer, inner);
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / x.numel());
    parallel_ranges(op, units, grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_cumsum_cpu(output.data_ptr(), x.const_data_ptr(), cols, inner, reverse, begin, end, type);
    });
    return output;
}

static Tensor cumsum_backward(const Tensor &grad_output, int64_t dim, at::ScalarType dtype, bool reverse)
{
    static const auto op = registered_op<decltype(cumsum_forward)>("cuda_ops::cumsum_forward");
    return op.call(grad_output, dim, std::nullopt, !reverse).to(dtype);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("cumsum_forward(Tensor input, int dim, ScalarType? dtype, bool reverse) -> (Tensor output)");
    library.def("cumsum_backward(Tensor grad_output, int dim, ScalarType dtype, bool reverse) -> Tensor",
                cuda_ops::cumsum_backward);
    CUDA_OPS_IMPLEMENT(library, "cumsum_forward", cuda_ops::cumsum_forward);
    CUDA_OPS_VMAP(library, "cumsum_forward", "input[1], dim");
    CUDA_OPS_AUTOCAST(library, "cumsum_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_DERIVATIVES(library, "cumsum_forward",
                         {"input: cumsum_backward(grad_output, dim, input.dtype, reverse)",
                          "output <- cumsum_forward(tangent_input, dim, dtype, reverse)"});
}
