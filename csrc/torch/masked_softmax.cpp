// masked_softmax for PyTorch: checks, allocation and the choice of backend. A mask is never expanded in memory: its
// strides go to the kernel, 0 where it is broadcast. Its gradient is in softmax.cpp.
#include "cuda_ops/masked_softmax.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include <optional>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"
#include "softmax_shape.h"

namespace cuda_ops
{

// The mask as the kernel reads it; `kept` holds its memory. The last dimension is the columns, those before it, merged
// where the mask's strides allow, the rows.
static cuda_ops_mask mask_of(Tensor &kept, const Tensor &input, const std::optional<Tensor> &mask, bool is_causal)
{
    cuda_ops_mask result = {};
    result.queries = is_causal ? input.size(-2) : 0;
    if (!mask)
        return result;
    const bool boolean = mask->scalar_type() == at::kBool;
    result.kind = boolean ? CUDA_OPS_MASK_BOOLEAN : CUDA_OPS_MASK_ADDITIVE;
    for (int attempt = 0; attempt < 2; attempt++) {
        kept = attempt == 0 ? mask->resolve_neg() : mask->contiguous();
        const Tensor all = kept.expand(input.sizes());
        const int64_t last = input.dim() - 1;
        result.values = kept.const_data_ptr();
        result.col_stride = input.size(last) == 1 ? 0 : all.stride(last);
        result.dims = 0;
        bool fits = result.col_stride == 0 || result.col_stride == 1;
        for (int64_t d = 0; d < last && fits; d++) {
            const int64_t size = input.size(d), stride = all.stride(d);
            if (size == 1)
                continue;
            if (result.dims > 0 && result.strides[result.dims - 1] == size * stride) {
                result.sizes[result.dims - 1] *= size;
                result.strides[result.dims - 1] = stride;
            } else if (result.dims == CUDA_OPS_MASK_DIMS) {
                fits = false;
            } else {
                result.sizes[result.dims] = size;
                result.strides[result.dims++] = stride;
            }
        }
        if (fits)
            return result;
    }
    // Broadcast along more dimensions, in turns, than the kernel follows.
    kept = mask->expand(input.sizes()).contiguous();
    result.values = kept.const_data_ptr();
    result.dims = 1;
    result.sizes[0] = input.numel() / input.size(-1);
    result.strides[0] = input.size(-1);
    result.col_stride = 1;
    return result;
}

static Tensor masked_softmax_forward(const Tensor &input, const std::optional<Tensor> &mask, double scale,
                                     bool is_causal)
{
    const char *op = "masked_softmax";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    TORCH_CHECK(input.dim() >= (is_causal ? 2 : 1), op, ": expected input to have ", is_causal ? 2 : 1,
                " dimensions at least", is_causal ? " with is_causal" : "", ", got shape ", input.sizes());
    if (mask) {
        check_same_device(op, "mask", *mask, "input", input);
        TORCH_CHECK(mask->scalar_type() == at::kBool || mask->scalar_type() == input.scalar_type(), op,
                    ": expected mask to be bool or of the dtype of input, ",
                    c10::getDtypeNames(input.scalar_type()).first, ", got ",
                    c10::getDtypeNames(mask->scalar_type()).first);
        TORCH_CHECK(at::is_expandable_to(mask->sizes(), input.sizes()), op,
                    ": expected mask to be of a shape that broadcasts to that of input, ", input.sizes(), ", got ",
                    mask->sizes());
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous();
    Tensor output = empty(x.sizes(), x.options());
    if (x.numel() == 0)
        return output;
    Tensor kept;
    const cuda_ops_mask kernel_mask = mask_of(kept, x, widened(mask), is_causal);
    const int64_t cols = x.size(-1), rows = x.numel() / cols;
    if (x.is_cuda()) {
        const Tensor workspace =
            workspace_if_any(x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_masked_softmax_workspace_cuda(rows, cols, dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_masked_softmax_forward_cuda(output.data_ptr(), pointer_to(workspace),
                                                                 x.const_data_ptr(), &kernel_mask, scale, rows, cols,
                                                                 dtype, current_stream(op)));
    } else {
        parallel_rows(
            op, rows, 1, std::max<int64_t>(ELEMENTWISE_GRAIN / 8 / cols, 1), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_masked_softmax_forward_cpu(to, from, &kernel_mask, scale, cols, begin, end, type);
            },
            writes(output, cols), reads(x, cols));
    }
    return output;
}

// By way of the dispatcher, so that they are differentiable further.
static Tensor masked_softmax_gradient(const Tensor &grad_output, const Tensor &output)
{
    static const auto op =
        registered_op<Tensor(const Tensor &, const Tensor &, double)>("cuda_ops::masked_softmax_backward");
    return op.call(grad_output, output, 1.0);
}

// An additive mask's gradient: that of the scores, summed up where the mask was broadcast.
static Tensor masked_softmax_backward_mask(const Tensor &grad_output, const Tensor &output, at::SymIntArrayRef size)
{
    const c10::SymIntArrayRef shape = output.sym_sizes();
    bool fits = size.size() <= shape.size();
    for (size_t i = 1; fits && i <= size.size(); i++)
        fits = size[size.size() - i] == 1 || size[size.size() - i] == shape[shape.size() - i];
    TORCH_CHECK(fits, "masked_softmax_backward_mask: expected size to be one that broadcasts to output's, ", shape,
                ", got ", size);
    return at::sum_to(masked_softmax_gradient(grad_output, output), size);
}

static Tensor masked_softmax_tangent_mask(const Tensor &tangent, const Tensor &output)
{
    return masked_softmax_gradient(tangent.expand_as(output), output);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("masked_softmax_forward(Tensor input, Tensor? mask, float scale, bool is_causal) -> (Tensor output)");
    library.def("masked_softmax_backward_mask(Tensor grad_output, Tensor output, SymInt[] size) -> Tensor",
                cuda_ops::masked_softmax_backward_mask);
    library.def("masked_softmax_tangent_mask(Tensor tangent, Tensor output) -> Tensor",
                cuda_ops::masked_softmax_tangent_mask);
    CUDA_OPS_IMPLEMENT(library, "masked_softmax_forward", cuda_ops::masked_softmax_forward);
    CUDA_OPS_AUTOCAST(library, "masked_softmax_forward", FLOAT32);
    CUDA_OPS_DERIVATIVES(library, "masked_softmax_forward",
                         {"input: masked_softmax_backward(grad_output, output, scale)",
                          "mask: masked_softmax_backward_mask(grad_output, output, mask.size)",
                          "output <- masked_softmax_backward(tangent_input, output, scale)",
                          "output <- masked_softmax_tangent_mask(tangent_mask, output)"});
}
