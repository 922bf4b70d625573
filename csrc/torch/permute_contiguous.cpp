// permute_contiguous for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/permute_contiguous.h"

#include <algorithm>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"

namespace cuda_ops
{

// Each dimension once, counted from the beginning.
static std::vector<int64_t> wrapped_permutation(const Tensor &input, at::IntArrayRef dims)
{
    const char *const op = "permute_contiguous";
    const int64_t rank = input.dim();
    TORCH_CHECK(static_cast<int64_t>(dims.size()) == rank, op, ": expected dims to name the ", rank,
                " dimensions of input, got ", dims);
    std::vector<int64_t> wrapped;
    for (const int64_t dim : dims) {
        TORCH_CHECK_INDEX(-rank <= dim && dim < rank, op, ": expected dims to be in [", -rank, ", ", rank - 1,
                          "] for an input of shape ", input.sym_sizes(), ", got ", dim);
        wrapped.push_back(dim < 0 ? dim + rank : dim);
        TORCH_CHECK(std::count(wrapped.begin(), wrapped.end(), wrapped.back()) == 1, op,
                    ": expected dims to name each dimension once, got ", dims);
    }
    return wrapped;
}

static Tensor permute_contiguous_forward(const Tensor &input, at::IntArrayRef dims)
{
    const char *const op = "permute_contiguous";
    check_dtype(op, "input", input);
    const std::vector<int64_t> order = wrapped_permutation(input, dims);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    std::vector<int64_t> sizes, strides;
    for (const int64_t d : order) {
        sizes.push_back(x.size(d));
        strides.push_back(x.stride(d));
    }
    cuda_ops_permutation permutation{};
    if (!cuda_ops_permute_collapse(&permutation, static_cast<int>(sizes.size()), sizes.data(), strides.data()))
        return x.permute(order).clone(at::MemoryFormat::Contiguous); // more dimensions than the kernels take
    Tensor output = empty(sizes, x.options());
    if (x.numel() == 0)
        return output;
    const int bytes = static_cast<int>(x.element_size());
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_permute_contiguous_cuda(output.data_ptr(), x.const_data_ptr(), &permutation, bytes,
                                                             current_stream(op)));
    else
        parallel_ranges(op, x.numel(), ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
            return cuda_ops_permute_contiguous_cpu(output.data_ptr(), x.const_data_ptr(), &permutation, begin, end,
                                                   bytes);
        });
    return output;
}

// A view: nothing is copied.
static Tensor permute_contiguous_backward(const Tensor &grad_output, at::IntArrayRef dims)
{
    const std::vector<int64_t> order = wrapped_permutation(grad_output, dims);
    std::vector<int64_t> inverse(order.size());
    for (size_t i = 0; i < order.size(); i++)
        inverse[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    return grad_output.permute(inverse);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("permute_contiguous_forward(Tensor input, int[] dims) -> (Tensor output)");
    library.def("permute_contiguous_backward(Tensor grad_output, int[] dims) -> Tensor",
                cuda_ops::permute_contiguous_backward);
    CUDA_OPS_IMPLEMENT(library, "permute_contiguous_forward", cuda_ops::permute_contiguous_forward);
    CUDA_OPS_DERIVATIVES(library, "permute_contiguous_forward",
                         {"input: permute_contiguous_backward(grad_output, dims)",
                          "output <- permute_contiguous_forward(tangent_input, dims)"});
}
