// round_list for PyTorch: float32 tensors of one device, each rounded to float16 or bfloat16.
#include "cuda_ops/round_list.h"

#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"

namespace cuda_ops
{

static std::vector<Tensor> round_list(at::TensorList tensors, at::ScalarType dtype)
{
    const char *const op = "round_list";
    TORCH_CHECK(is_half(dtype), op, ": expected dtype to be float16 or bfloat16, got ",
                c10::getDtypeNames(dtype).first);
    std::vector<Tensor> inputs, outputs;
    for (const Tensor &tensor : tensors) {
        TORCH_CHECK(tensor.scalar_type() == at::kFloat, op, ": expected tensors to be float32, got ",
                    c10::getDtypeNames(tensor.scalar_type()).first);
        check_same_device(op, "tensors", tensor, "tensors[0]", tensors[0]);
    }
    if (tensors.empty())
        return outputs;
    if (!tensors[0].is_cuda()) {
        const at::AutoDispatchBelowADInplaceOrView below;
        for (const Tensor &tensor : tensors)
            outputs.push_back(tensor.to(dtype, false, true, at::MemoryFormat::Contiguous));
        return outputs;
    }
    const c10::OptionalDeviceGuard guard(at::device_of(tensors[0]));
    std::vector<void *> to;
    std::vector<const float *> from;
    std::vector<int64_t> counts;
    for (const Tensor &tensor : tensors) {
        inputs.push_back(tensor.contiguous());
        outputs.push_back(empty(tensor.sizes(), tensor.options().dtype(dtype)));
        to.push_back(outputs.back().data_ptr());
        from.push_back(inputs.back().const_data_ptr<float>());
        counts.push_back(tensor.numel());
    }
    CUDA_OPS_LAUNCH(op,
                    cuda_ops_round_list_cuda(to.data(), from.data(), counts.data(), static_cast<int64_t>(counts.size()),
                                             check_dtype(op, "dtype", outputs[0]), current_stream(op)));
    return outputs;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("round_list(Tensor[] tensors, ScalarType dtype) -> Tensor[]");
    CUDA_OPS_IMPLEMENT(library, "round_list", cuda_ops::round_list);
    // It is called where no gradients are recorded (cuda_ops/models/_gpt_ops.py).
    library.impl("round_list", c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
}
