// sgd for PyTorch: one step over a list of parameters, in place. Parameters, gradients and momentum buffers may have
// any strides: what does not lie in memory in the order of its parameter goes through a copy.
#include "cuda_ops/sgd.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "elements.h"
#include "parameter_list.h"

namespace cuda_ops
{

// A parameter of the list with its gradient and buffer, as the kernel wants them: dense and in one order.
struct SgdEntry {
    Tensor param, grad, buffer;
};

static SgdEntry prepare(const Tensor &param, const Tensor &grad, const std::optional<Tensor> &buffer)
{
    SgdEntry entry;
    entry.param = dense(param);
    entry.grad = in_order_of(entry.param, grad);
    if (buffer)
        entry.buffer = in_order_of(entry.param, *buffer);
    return entry;
}

static void check_list(const at::TensorList params, const at::TensorList grads, const at::TensorList buffers,
                       const c10::List<bool> &first, double momentum)
{
    const size_t wanted = momentum != 0 ? params.size() : 0;
    TORCH_CHECK(grads.size() == params.size(), "sgd: expected as many grads as params, ", params.size(), ", got ",
                grads.size());
    TORCH_CHECK(buffers.size() == wanted, "sgd: expected ", wanted, " momentum_buffers for ", params.size(),
                " params and momentum ", momentum, ", got ", buffers.size());
    TORCH_CHECK(first.size() == wanted, "sgd: expected ", wanted, " values in first for ", params.size(),
                " params and momentum ", momentum, ", got ", first.size());
    for (size_t i = 0; i < params.size(); i++) {
        check_dtype("sgd", "params", params[i]);
        check_like("sgd", "params", params[i], "params[0]", params[0]);
        check_like("sgd", "grads", grads[i], "params", params[i]);
        check_same_shape("sgd", "grads", grads[i], "params", params[i]);
        if (wanted > 0) {
            check_like("sgd", "momentum_buffers", buffers[i], "params", params[i]);
            check_same_shape("sgd", "momentum_buffers", buffers[i], "params", params[i]);
        }
    }
}

static void sgd_cpu(const std::vector<SgdEntry> &entries, const std::vector<uint8_t> &first,
                    const cuda_ops_sgd_options &options, cuda_ops_dtype dtype)
{
    for (size_t i = 0; i < entries.size(); i++) {
        const SgdEntry &entry = entries[i];
        parallel_stored_elements(
            "sgd", entry.param.numel(), dtype,
            [&](void *param, const void *grad, void *buffer, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_sgd_cpu(param, grad, buffer, first[i], &options, begin, end, type);
            },
            updates(entry.param), reads(entry.grad), first[i] ? writes(entry.buffer) : updates(entry.buffer));
    }
}

#ifdef CUDA_OPS_WITH_CUDA
static cuda_ops_status sgd_cuda(const std::vector<SgdEntry> &entries, const std::vector<uint8_t> &first,
                                const cuda_ops_sgd_options &options, const std::optional<Tensor> &device_lr,
                                cuda_ops_dtype dtype)
{
    std::vector<void *> params, buffers;
    std::vector<const void *> grads;
    std::vector<int64_t> counts;
    for (const SgdEntry &entry : entries) {
        params.push_back(entry.param.data_ptr());
        grads.push_back(entry.grad.const_data_ptr());
        buffers.push_back(entry.buffer.defined() ? entry.buffer.data_ptr() : nullptr);
        counts.push_back(entry.param.numel());
    }
    return cuda_ops_sgd_cuda(params.data(), grads.data(), buffers.data(), counts.data(), first.data(),
                             (int64_t)entries.size(), &options, device_lr ? device_lr->const_data_ptr() : nullptr,
                             device_lr ? check_dtype("sgd", "device_lr", *device_lr) : CUDA_OPS_FLOAT64, dtype,
                             current_stream("sgd"));
}
#endif

static void sgd_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                 const c10::List<bool> &first, const std::optional<Tensor> &device_lr, double lr, double momentum,
                 double dampening, double weight_decay, bool nesterov, bool maximize)
{
    check_list(params, grads, momentum_buffers, first, momentum);
    if (params.empty())
        return;
    const cuda_ops_dtype dtype = check_dtype("sgd", "params", params[0]);
    if (device_lr) {
        check_same_device("sgd", "device_lr", *device_lr, "params", params[0]);
        const at::ScalarType type = device_lr->scalar_type();
        TORCH_CHECK(params[0].is_cuda() && device_lr->numel() == 1 && (type == at::kFloat || type == at::kDouble),
                    "sgd: expected device_lr to be one float32 or float64 on a CUDA device, got ", type, " of shape ",
                    device_lr->sizes(), " on ", device_lr->device());
    }
    const c10::OptionalDeviceGuard guard(at::device_of(params[0]));
    const bool with_buffers = !momentum_buffers.empty();
    std::vector<SgdEntry> entries;
    entries.reserve(params.size());
    std::vector<uint8_t> first_flags(params.size());
    for (size_t i = 0; i < params.size(); i++) {
        entries.push_back(
            prepare(params[i], grads[i], with_buffers ? std::optional<Tensor>(momentum_buffers[i]) : std::nullopt));
        first_flags[i] = with_buffers && first[i];
    }
    const cuda_ops_sgd_options options{lr, momentum, dampening, weight_decay, nesterov, maximize};
    if (params[0].is_cuda())
        CUDA_OPS_LAUNCH("sgd", sgd_cuda(entries, first_flags, options, device_lr, dtype));
    else
        sgd_cpu(entries, first_flags, options, dtype);

    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < params.size(); i++) {
        write_back(params[i], entries[i].param);
        if (with_buffers)
            write_back(momentum_buffers[i], entries[i].buffer);
    }
}

// The step by the gradients that the parameters hold, if they hold any: for the optimizer, whom it spares the making of
// a Python object for each of them. With momentum every parameter has its buffer, from the second step on. The learning
// rate is device_lr for parameters on its device, else its value, or lr without one. False, and nothing is done, where
// a gradient is not dense.
static bool sgd_step_(at::TensorList params, at::TensorList momentum_buffers, const std::optional<Tensor> &device_lr,
                      double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize)
{
    const bool with_buffers = !momentum_buffers.empty();
    TORCH_CHECK(momentum_buffers.size() == (momentum != 0 ? params.size() : 0), "sgd: expected ",
                momentum != 0 ? params.size() : 0, " momentum_buffers for ", params.size(), " params and momentum ",
                momentum, ", got ", momentum_buffers.size());
    static const auto op = registered_op<decltype(sgd_)>("cuda_ops::sgd_");
    struct Alike { // of one device and dtype
        std::vector<Tensor> params, grads, buffers;
    };
    std::vector<Alike> lists;
    for (size_t i = 0; i < params.size(); i++) {
        const Tensor &param = params[i], &grad = param.grad();
        if (!grad.defined())
            continue;
        if (grad.layout() != at::kStrided)
            return false;
        auto alike = std::find_if(lists.begin(), lists.end(), [&](const Alike &list) {
            return list.params[0].device() == param.device() && list.params[0].scalar_type() == param.scalar_type();
        });
        if (alike == lists.end()) {
            alike = lists.insert(alike, Alike{});
            alike->params.reserve(params.size());
            alike->grads.reserve(params.size());
            alike->buffers.reserve(momentum_buffers.size());
        }
        alike->params.push_back(param);
        alike->grads.push_back(grad);
        if (with_buffers)
            alike->buffers.push_back(momentum_buffers[i]);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const Alike &list : lists) {
        const bool readable = device_lr && device_lr->device() == list.params[0].device();
        c10::List<bool> first;
        first.resize(list.buffers.size(), false);
        op.call(list.params, list.grads, list.buffers, first, readable ? device_lr : std::nullopt,
                device_lr && !readable ? device_lr->item<double>() : lr, momentum, dampening, weight_decay, nesterov,
                maximize);
    }
    return true;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, bool[] first, "
                "Tensor? device_lr, float lr, float momentum, float dampening, float weight_decay, bool nesterov, "
                "bool maximize) -> ()");
    library.def("sgd_step_(Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor? device_lr, float lr, "
                "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize) -> bool",
                cuda_ops::sgd_step_);
    CUDA_OPS_IMPLEMENT(library, "sgd_", cuda_ops::sgd_);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "sgd_");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "sgd_step_");
}
