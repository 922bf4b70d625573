// add2 for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/add2.h"

#include <ATen/ExpandUtils.h>

#include "autograd.h"
#include "checks.h"
#include "elements.h"
#include "empty.h"
#include "vmap.h"

namespace cuda_ops
{

static bool broadcasts(at::IntArrayRef a, at::IntArrayRef b)
{
    for (size_t i = 1; i <= std::min(a.size(), b.size()); i++)
        if (a[a.size() - i] != b[b.size() - i] && a[a.size() - i] != 1 && b[b.size() - i] != 1)
            return false;
    return true;
}

static Tensor add2_forward(const Tensor &input, const Tensor &other)
{
    const cuda_ops_dtype dtype = check_dtype("add2", "input", input);
    check_like("add2", "other", other, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    if (input.sizes() != other.sizes()) {
        TORCH_CHECK(broadcasts(input.sizes(), other.sizes()),
                    "add2: expected other to have a shape that broadcasts with that of input, ", input.sizes(),
                    ", got ", other.sizes());
        const std::vector<int64_t> sizes = at::infer_size(input.sizes(), other.sizes());
        return add2_forward(input.expand(sizes), other.expand(sizes));
    }
    const Tensor a = dense(input);
    const Tensor b = dense_like(other, a);
    Tensor output = empty_like_dense(a);
    if (a.numel() == 0)
        return output;
    if (a.is_cuda())
        CUDA_OPS_LAUNCH("add2", cuda_ops_add2_forward_cuda(output.data_ptr(), a.const_data_ptr(), b.const_data_ptr(),
                                                           a.numel(), dtype, current_stream("add2")));
    else
        parallel_stored_elements("add2", a.numel(), dtype, cuda_ops_add2_forward_cpu, writes(output), reads(a),
                                 reads(b));
    return output;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("add2_forward(Tensor input, Tensor other) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "add2_forward", cuda_ops::add2_forward);
    CUDA_OPS_VMAP(library, "add2_forward", "input, other");
    // Autograd sums the gradient of a broadcast addend, as for PyTorch's own add.
    CUDA_OPS_DERIVATIVES(library, "add2_forward",
                         {"input: grad_output", "other: grad_output",
                          "output <- aten::expand(tangent_input, output.size, false)",
                          "output <- aten::expand(tangent_other, output.size, false)"});
}
