// The rungs of the teaching ladders for PyTorch: one op for all of them, by the ladder's name and the rung's number. The
// functions that allocate and call it are in cuda_ops/ladder/. On CUDA alone.
#include "cuda_ops/ladder.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "checks.h"

namespace cuda_ops
{

#ifdef CUDA_OPS_WITH_CUDA
static int ladder_dtype(const char *argument, const Tensor &tensor)
{
    switch (tensor.scalar_type()) {
    case at::kByte:
        return CUDA_OPS_LADDER_UINT8;
    case at::kInt:
        return CUDA_OPS_LADDER_INT32;
    case at::kLong:
        return CUDA_OPS_LADDER_INT64;
    default:
        return check_dtype("ladder_rung", argument, tensor);
    }
}

static std::vector<cuda_ops_ladder_tensor> ladder_tensors(const char *argument, at::TensorList tensors)
{
    std::vector<cuda_ops_ladder_tensor> found;
    for (const Tensor &tensor : tensors) {
        check_dim("ladder_rung", argument, tensor, 0, CUDA_OPS_LADDER_DIMS);
        TORCH_CHECK(tensor.is_contiguous() && !tensor.is_neg(), "ladder_rung: expected ", argument,
                    " to be contiguous, got strides ", tensor.strides());
        cuda_ops_ladder_tensor described = {};
        described.data = const_cast<void *>(tensor.const_data_ptr());
        described.dims = static_cast<int>(tensor.dim());
        std::copy(tensor.sizes().begin(), tensor.sizes().end(), described.sizes);
        described.count = tensor.numel();
        described.dtype = ladder_dtype(argument, tensor);
        found.push_back(described);
    }
    return found;
}
#endif

// Calls function(call, a tensor of the call) with the tensors as the C API takes them, on their device.
template <typename Function>
static void with_ladder_call(at::TensorList outputs, at::TensorList inputs, at::ArrayRef<double> scalars,
                             const Function &function)
{
    TORCH_CHECK(!outputs.empty() && outputs[0].is_cuda(), "ladder_rung: expected outputs to be on CUDA, got ",
                outputs.empty() ? "none" : outputs[0].device().str());
    for (const at::TensorList list : {outputs, inputs})
        for (const Tensor &tensor : list)
            check_same_device("ladder_rung", list.data() == outputs.data() ? "outputs" : "inputs", tensor, "outputs[0]",
                              outputs[0]);
#ifdef CUDA_OPS_WITH_CUDA
    const c10::OptionalDeviceGuard guard(at::device_of(outputs[0]));
    const std::vector<cuda_ops_ladder_tensor> out = ladder_tensors("outputs", outputs),
                                              in = ladder_tensors("inputs", inputs);
    cuda_ops_ladder_call call = {};
    call.outputs = out.data();
    call.inputs = in.data();
    call.scalars = scalars.data();
    call.output_count = static_cast<int>(out.size());
    call.input_count = static_cast<int>(in.size());
    call.scalar_count = static_cast<int>(scalars.size());
    function(call, outputs[0]);
#else
    (void)scalars, (void)function;
    current_stream("ladder_rung"); // which says how to get a build with CUDA
#endif
}

// A number that no rung has, where the caller's does not fit.
static int ladder_number(int64_t rung)
{
    return 0 < rung && rung <= std::numeric_limits<int>::max() ? static_cast<int>(rung) : 0;
}

static std::string ladder_refusal(c10::string_view ladder, int64_t rung, at::TensorList outputs, at::TensorList inputs,
                                  at::ArrayRef<double> scalars)
{
    const std::string name(ladder);
    std::string refusal;
    const int number = ladder_number(rung);
    with_ladder_call(outputs, inputs, scalars, [&](const cuda_ops_ladder_call &call, const Tensor &) {
#ifdef CUDA_OPS_WITH_CUDA
        const char *const why_not = cuda_ops_ladder_refusal_cuda(name.c_str(), number, &call);
        refusal = why_not ? why_not : "";
#else
        (void)call, (void)number;
#endif
    });
    return refusal;
}

static void ladder_rung(c10::string_view ladder, int64_t rung, at::TensorList outputs, at::TensorList inputs,
                        at::ArrayRef<double> scalars)
{
    const std::string name(ladder);
    const int number = ladder_number(rung);
    with_ladder_call(outputs, inputs, scalars, [&](const cuda_ops_ladder_call &call, const Tensor &output) {
#ifdef CUDA_OPS_WITH_CUDA
        const char *const why_not = cuda_ops_ladder_refusal_cuda(name.c_str(), number, &call);
        TORCH_CHECK_NOT_IMPLEMENTED(!why_not, "ladder_rung: rung ", rung, " of ", name, ": ", why_not);
        const int64_t bytes = cuda_ops_ladder_workspace_cuda(name.c_str(), number, &call);
        const Tensor workspace = at::empty({bytes}, output.options().dtype(at::kByte));
        cuda_ops_ladder_call full = call;
        full.workspace = workspace.data_ptr();
        check_status("ladder_rung", cuda_ops_ladder_cuda(name.c_str(), number, &full, current_stream("ladder_rung")));
#else
        (void)call, (void)output, (void)number;
#endif
    });
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("ladder_rung(str ladder, int rung, Tensor(a!)[] outputs, Tensor[] inputs, float[] scalars=[]) -> ()");
    library.def("ladder_refusal(str ladder, int rung, Tensor[] outputs, Tensor[] inputs, float[] scalars=[]) -> str");
    CUDA_OPS_IMPLEMENT(library, "ladder_rung", cuda_ops::ladder_rung);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "ladder_rung");
    CUDA_OPS_IMPLEMENT(library, "ladder_refusal", cuda_ops::ladder_refusal);
}
