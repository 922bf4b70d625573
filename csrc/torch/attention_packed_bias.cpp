// attention_packed_bias for PyTorch: the gradient of the bias of a projection to queries, keys and values.
#include "cuda_ops/attention_packed_bias.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"

namespace cuda_ops
{

static Tensor attention_packed_bias(const Tensor &grad_qkv, const Tensor &grad_next_bias, const Tensor &next_weight)
{
    const char *const op = "attention_packed_bias";
    TORCH_CHECK(grad_qkv.dim() == 5 && grad_qkv.size(2) == 3, op,
                ": expected grad_qkv to have shape [batch, length, 3, heads, head_dim], got ", grad_qkv.sizes());
    const cuda_ops_dtype dtype = check_dtype(op, "grad_qkv", grad_qkv);
    const at::ScalarType sums_dtype = is_half(dtype) ? at::kFloat : grad_qkv.scalar_type();
    TORCH_CHECK(grad_next_bias.scalar_type() == sums_dtype, op, ": expected grad_next_bias to be ",
                c10::getDtypeNames(sums_dtype).first, ", got ", c10::getDtypeNames(grad_next_bias.scalar_type()).first);
    check_like(op, "next_weight", next_weight, "grad_qkv", grad_qkv);
    check_same_device(op, "grad_next_bias", grad_next_bias, "grad_qkv", grad_qkv);
    const int64_t rows = grad_qkv.size(0) * grad_qkv.size(1), features = grad_qkv.size(3) * grad_qkv.size(4);
    TORCH_CHECK(grad_next_bias.dim() == 1 && next_weight.dim() == 2 && next_weight.size(0) == grad_next_bias.size(0) &&
                    next_weight.size(1) == features,
                op, ": expected next_weight to have shape [", grad_next_bias.numel(), ", ", features, "], got ",
                next_weight.sizes());
    if (!grad_qkv.is_cuda()) {
        const at::AutoDispatchBelowADInplaceOrView below;
        const Tensor query = grad_qkv.select(2, 0).reshape({rows, features}).to(sums_dtype).sum(0);
        return at::cat({query, at::zeros_like(query), at::matmul(grad_next_bias, next_weight.to(sums_dtype))});
    }
    const c10::OptionalDeviceGuard guard(at::device_of(grad_qkv));
    const Tensor g = grad_qkv.contiguous(), sums = grad_next_bias.contiguous(), weight = next_weight.contiguous();
    Tensor grad_bias = empty({3 * features}, sums.options());
    const Tensor workspace = empty_workspace(
        g, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_attention_packed_bias_workspace_cuda(rows, features, dtype)));
    CUDA_OPS_LAUNCH(op, cuda_ops_attention_packed_bias_cuda(
                            grad_bias.data_ptr(), g.const_data_ptr(), sums.const_data_ptr(), weight.const_data_ptr(),
                            workspace.data_ptr(), rows, features, grad_next_bias.size(0), dtype, current_stream(op)));
    return grad_bias;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("attention_packed_bias(Tensor grad_qkv, Tensor grad_next_bias, Tensor next_weight) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "attention_packed_bias", cuda_ops::attention_packed_bias);
    // It is called where no gradients are recorded (cuda_ops/models/_gpt_ops.py).
    library.impl("attention_packed_bias", c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
}
