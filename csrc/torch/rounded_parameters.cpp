// Parameters in the half that autocast gives them: which of them are rounded together, and how long copies are kept
// (rounded_parameters.h).
#include "rounded_parameters.h"

#include "checks.h"
#include "cuda_ops/round_list.h"
#include "empty.h"
#include "halves.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cuda_ops
{

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::TensorImpl;
using WeakTensor = c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>;

namespace
{

struct Member {
    WeakTensor parameter;
    bool is_used; // since its group was rounded
};

// Parameters that are rounded together, when the first of them is asked for.
struct Group {
    std::vector<std::shared_ptr<Member>> members;
};

struct Copy {
    Tensor rounded;
    Tensor differentiable; // the same memory, whose gradient is the parameter's; undefined until it is asked for
    int64_t version;       // of the parameter when it was rounded, and its memory then
    const void *data;
    cuda_ops_stream stream;
    std::shared_ptr<Member> member;
};

// What was rounded since autocast was entered.
struct Region : public c10::BackendMeta {
    std::unordered_map<const TensorImpl *, Copy> copies;
    std::shared_ptr<Group> last; // to which a parameter is added that no group has foreseen
};

struct Groups {
    std::mutex mutex; // of regions, too
    std::unordered_map<const TensorImpl *, std::pair<WeakTensor, std::shared_ptr<Group>>> by_first;
};

// Never destroyed, as autocast's cache may live longer than what is destroyed at exit.
Groups &all_groups()
{
    static auto *const groups = new Groups;
    return *groups;
}

WeakTensor weak(const Tensor &tensor)
{
    return WeakTensor(tensor.getIntrusivePtr());
}

// Whether calls go past autocast to kernels: nothing traces, batches, differentiates or stands in for what they do.
bool is_plain_call()
{
    const DispatchKeySet usual = c10::autocast_dispatch_keyset | c10::default_included_set;
    return (c10::impl::tls_local_dispatch_key_set().included_ - usual).empty();
}

// Whether it is one of those that autocast keeps casts of, and its elements are in its memory.
bool is_parameter(const Tensor &tensor)
{
    constexpr DispatchKeySet STANDS_IN({DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::Negative,
                                        DispatchKey::Conjugate, DispatchKey::ZeroTensor, DispatchKey::FuncTorchBatched,
                                        DispatchKey::FuncTorchGradWrapper});
    return tensor.scalar_type() == at::kFloat && (tensor.is_cuda() || tensor.is_cpu()) &&
           tensor.layout() == at::kStrided && !tensor.key_set().has_any(STANDS_IN) && tensor.requires_grad() &&
           tensor.is_leaf() && !tensor.is_view() && !tensor.is_inference() && tensor.numel() > 0 &&
           tensor.is_non_overlapping_and_dense() &&
           // Sharded parameters give their memory away, and are none until it is back.
           tensor.storage().nbytes() >= static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * sizeof(float) &&
           !tensor._fw_grad(0).defined();
}

// A tensor that autocast's cache holds from now on until it is cleared; undefined if it keeps none.
Tensor kept_by_autocast()
{
    static const auto *const source = new Tensor([] {
        const c10::InferenceMode normal(false);
        return at::zeros({1}).requires_grad_();
    }());
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::InferenceMode normal(false);
    const Tensor kept = at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), *source, at::kCPU);
    return kept.is_same(*source) || kept.use_count() < 2 ? Tensor() : kept;
}

bool is_current(const Copy &copy, const Tensor &parameter, at::ScalarType dtype, cuda_ops_stream stream)
{
    return copy.rounded.scalar_type() == dtype && copy.version == parameter._version() &&
           copy.data == parameter.const_data_ptr() && copy.stream == stream;
}

// Each rounded, without a gradient and with its strides.
std::vector<Tensor> rounded(const std::vector<Tensor> &parameters, at::ScalarType dtype)
{
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::InferenceMode normal(false); // copies may be used when that is over
    std::vector<Tensor> copies;
    copies.reserve(parameters.size());
    if (!parameters[0].is_cuda()) {
        for (const Tensor &parameter : parameters)
            copies.push_back(at::_to_copy(parameter, parameter.options().dtype(dtype)));
        return copies;
    }
    std::vector<void *> to;
    std::vector<const float *> from;
    std::vector<int64_t> counts;
    for (const Tensor &parameter : parameters) {
        copies.push_back(empty_strided(parameter.sizes(), parameter.strides(), parameter.options().dtype(dtype)));
        to.push_back(copies.back().data_ptr());
        from.push_back(parameter.const_data_ptr<float>());
        counts.push_back(parameter.numel());
    }
    const char *const op = "round_list";
    CUDA_OPS_LAUNCH(op,
                    cuda_ops_round_list_cuda(to.data(), from.data(), counts.data(), static_cast<int64_t>(counts.size()),
                                             check_dtype(op, "dtype", copies[0]), current_stream(op)));
    return copies;
}

// The group that is rounded for `parameter`'s sake, with it; its members that nobody asked for the last time have left.
std::shared_ptr<Group> group_of(Groups &groups, Region &region, const Tensor &parameter)
{
    const TensorImpl *const first = parameter.unsafeGetTensorImpl();
    if (const auto known = groups.by_first.find(first);
        known != groups.by_first.end() && !known->second.first.expired()) {
        region.last = known->second.second;
        auto &members = region.last->members;
        const auto has_left = [](const std::shared_ptr<Member> &member) {
            return !member->is_used || member->parameter.expired();
        };
        members.erase(std::remove_if(members.begin() + 1, members.end(), has_left), members.end());
        for (const std::shared_ptr<Member> &member : members)
            member->is_used = false;
        return region.last;
    }
    if (!region.last) {
        for (auto other = groups.by_first.begin(); other != groups.by_first.end();)
            other = other->second.first.expired() ? groups.by_first.erase(other) : std::next(other);
        region.last = std::make_shared<Group>();
        groups.by_first.erase(first);
        groups.by_first.emplace(first, std::make_pair(weak(parameter), region.last));
    }
    region.last->members.push_back(std::make_shared<Member>(Member{weak(parameter), true}));
    return nullptr;
}

// Rounds the parameter, and those that are going to be asked for after it.
Copy &round(Groups &groups, Region &region, const Tensor &parameter, at::ScalarType dtype, cuda_ops_stream stream)
{
    std::vector<Tensor> parameters{parameter};
    std::vector<std::shared_ptr<Member>> members;
    const std::shared_ptr<Group> foreseen = group_of(groups, region, parameter);
    members.push_back(foreseen ? foreseen->members.front() : region.last->members.back());
    for (size_t i = 1; foreseen && i < foreseen->members.size(); i++) {
        auto pointer = foreseen->members[i]->parameter.lock();
        if (pointer.get() == nullptr)
            continue;
        const Tensor other(std::move(pointer));
        if (other.device() != parameter.device() || !is_parameter(other) ||
            region.copies.count(other.unsafeGetTensorImpl()) > 0)
            continue;
        parameters.push_back(other);
        members.push_back(foreseen->members[i]);
    }
    std::vector<Tensor> copies = rounded(parameters, dtype);
    for (size_t i = 0; i < copies.size(); i++)
        region.copies[parameters[i].unsafeGetTensorImpl()] = {
            std::move(copies[i]),           Tensor(), parameters[i]._version(),
            parameters[i].const_data_ptr(), stream,   members[i]};
    return region.copies[parameter.unsafeGetTensorImpl()];
}

// An alias of `tensor`, so that what is done to one's metadata does not reach the other.
Tensor alias_of(const Tensor &tensor)
{
    return Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

Tensor rounded_parameter(const Tensor &parameter, at::ScalarType dtype, bool is_differentiable)
{
    if (!is_half(dtype) || !at::autocast::is_autocast_cache_enabled() || !is_plain_call() || !is_parameter(parameter))
        return Tensor();
    const Tensor kept = kept_by_autocast();
    if (!kept.defined())
        return Tensor();
    const c10::OptionalDeviceGuard guard(at::device_of(parameter));
    const cuda_ops_stream stream = parameter.is_cuda() ? current_stream("round_list") : cuda_ops_stream();
    Groups &groups = all_groups();
    const std::lock_guard<std::mutex> lock(groups.mutex);
    auto *region = static_cast<Region *>(kept.unsafeGetTensorImpl()->get_backend_meta());
    if (region == nullptr) {
        auto made = c10::make_intrusive<Region>();
        region = made.get();
        kept.unsafeGetTensorImpl()->set_backend_meta(std::move(made));
    }
    const auto found = region->copies.find(parameter.unsafeGetTensorImpl());
    const bool is_there = found != region->copies.end();
    if (is_there && !is_current(found->second, parameter, dtype, stream))
        return Tensor(); // as rare as it is, it is cast by itself
    Copy &copy = is_there ? found->second : round(groups, *region, parameter, dtype, stream);
    copy.member->is_used = true;
    if (!is_differentiable)
        return copy.rounded;
    if (!copy.differentiable.defined()) {
        copy.differentiable = alias_of(copy.rounded);
        // The engine casts gradients to the dtype of what they are for: no node of the graph has to.
        torch::autograd::impl::set_gradient_edge(copy.differentiable, torch::autograd::impl::gradient_edge(parameter));
    }
    return copy.differentiable;
}

} // namespace

Tensor autocast_parameter(const Tensor &parameter, at::ScalarType dtype)
{
    const c10::DeviceType device = parameter.device().type();
    if (!at::autocast::is_autocast_enabled(device) || at::autocast::get_autocast_dtype(device) != dtype)
        return Tensor();
    const Tensor copy = rounded_parameter(parameter, dtype, false);
    return copy.defined() ? alias_of(copy) : copy;
}

Tensor autocast_argument(const Tensor &tensor, at::ScalarType dtype, c10::DeviceType device)
{
    if (tensor.device().type() == device && tensor.scalar_type() == at::kFloat && is_half(dtype)) {
        const Tensor copy = rounded_parameter(tensor, dtype, at::GradMode::is_enabled());
        if (copy.defined())
            return copy;
    }
    return at::autocast::cached_cast(dtype, tensor, device);
}

} // namespace cuda_ops
