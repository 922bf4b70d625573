// The kernel that all ops share under the Autograd keys; autograd.h describes the derivatives that it follows.
#include "autograd.h"

#include "checks.h"
#include "derivatives.h"
#include "rounded_parameters.h"
#include "vmap.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fw_primal.h>
#include <ATen/ops/add.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace cuda_ops
{

using namespace autograd;

using at::Tensor;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;

namespace
{

const Tensor &undefined_tensor()
{
    static const Tensor undefined;
    return undefined;
}

// The tensor in an argument that is one or None.
const Tensor &tensor_of(const IValue &value)
{
    return value.isTensor() ? value.toTensor() : undefined_tensor();
}

IValue value_of(const IValue &value, Attribute attribute)
{
    if (attribute == Attribute::TENSOR) // no tensor
        return value;
    if (!value.isTensor())
        return IValue();
    const Tensor &tensor = value.toTensor();
    switch (attribute) {
    case Attribute::SIZE:
        return IValue(tensor.sym_sizes());
    case Attribute::PLANE:
        return IValue(tensor.sym_sizes().slice(static_cast<size_t>(tensor.dim()) - 2));
    case Attribute::STRIDE:
        return IValue(tensor.sym_strides());
    case Attribute::DTYPE:
        return IValue(static_cast<int64_t>(tensor.scalar_type()));
    case Attribute::CHANNELS_LAST_1D: {
        const at::NoGradGuard no_grad;
        return IValue(tensor.unsqueeze(2).suggest_memory_format() == at::MemoryFormat::ChannelsLast);
    }
    default:
        return IValue(tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast);
    }
}

// The node of one call in the graph.
struct DerivativesNode : public Node {
    explicit DerivativesNode(const Derivatives *op) : op(op)
    {
    }

    std::string name() const override
    {
        return op->node_name;
    }

    void release_variables() override
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_released = true;
        for (SavedVariable &tensor : tensors)
            tensor.reset_data();
    }

    bool wants(const Derivative &derivative) const
    {
        for (const int target : derivative.targets)
            if (task_should_compute_output(static_cast<size_t>(target)))
                return true;
        return false;
    }

    variable_list apply(variable_list &&grads) override
    {
        // As in PyTorch's own nodes: the engine may run one in two threads where a graph is used twice.
        const std::lock_guard<std::mutex> lock(mutex_);
        TORCH_CHECK(!is_released, torch::autograd::ERR_BACKWARD_TWICE);
        variable_list results(op->arguments.size());
        for (const Derivative &derivative : op->derivatives)
            if (wants(derivative))
                run(derivative, grads, results);
        return results;
    }

    void run(const Derivative &derivative, const variable_list &grads, variable_list &results)
    {
        const Call &call = derivative.call();
        bool takes_gradient = false, has_gradient = false;
        for (const Source &source : call.sources)
            if (source.kind == Kind::GRADIENT) {
                takes_gradient = true;
                has_gradient |= grads[source.index].defined();
            }
        if (takes_gradient && !has_gradient)
            return;
        if (!call.op) {
            results[derivative.targets[0]] = argument(derivative, call.sources[0], grads).toTensor();
            return;
        }
        Stack stack;
        stack.reserve(std::max<size_t>(call.sources.size(), derivative.targets.size()));
        for (const Source &source : call.sources)
            stack.push_back(argument(derivative, source, grads));
        // Backward runs in the dtypes of forward, wherever it is called.
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        call.op->callBoxed(&stack);
        if (stack.size() == 1 && stack[0].isTensorList()) { // an op that returns the wanted ones alone
            const auto list = stack[0].toTensorVector();
            size_t next = 0;
            for (const int target : derivative.targets)
                if (task_should_compute_output(static_cast<size_t>(target)))
                    results[target] = list.at(next++);
            return;
        }
        for (size_t i = 0; i < derivative.targets.size(); i++)
            if (task_should_compute_output(static_cast<size_t>(derivative.targets[i])) && stack[i].isTensor())
                results[derivative.targets[i]] = std::move(stack[i]).toTensor();
    }

    IValue argument(const Derivative &derivative, const Source &source, const variable_list &grads)
    {
        if (source.condition >= 0 && !task_should_compute_output(static_cast<size_t>(source.condition)))
            return IValue();
        switch (source.kind) {
        case Kind::LITERAL:
            return source.literal;
        case Kind::WANTED: {
            c10::List<bool> wanted;
            for (const int target : derivative.targets)
                wanted.push_back(task_should_compute_output(static_cast<size_t>(target)));
            return IValue(std::move(wanted));
        }
        case Kind::WANTS:
            return IValue(task_should_compute_output(static_cast<size_t>(source.index)));
        case Kind::GRADIENT: {
            Tensor grad = grads[source.index];
            if (!grad.defined()) {
                if (source.is_optional)
                    return IValue();
                grad = input_metadata(static_cast<size_t>(source.index)).zeros_like();
            }
            return source.attribute == Attribute::TENSOR             ? IValue(std::move(grad))
                   : source.attribute == Attribute::MATRIX_TRANSPOSE ? IValue(grad.mT())
                                                                     : value_of(IValue(grad), source.attribute);
        }
        default:
            break;
        }
        if (source.is_value)
            return values[source.slot];
        const bool is_output = source.kind == Kind::RETURN;
        Tensor tensor = tensors[source.slot].unpack(is_output ? shared_from_this() : nullptr);
        if (!tensor.defined())
            return IValue();
        return IValue(source.attribute == Attribute::MATRIX_TRANSPOSE ? tensor.mT() : std::move(tensor));
    }

    const Derivatives *op;
    std::vector<SavedVariable> tensors;
    std::vector<IValue> values;
    bool is_released = false;
};

// The kernel under the Autograd keys.
class AutogradKernel final : public c10::OperatorKernel
{
  public:
    explicit AutogradKernel(std::vector<std::string> texts) : texts(std::move(texts))
    {
    }

    void operator()(const OperatorHandle &op, DispatchKeySet keys, Stack *stack)
    {
        // Not before the first call, since the ops of the derivatives may be registered later than this one.
        std::call_once(parsed, [&] { derivatives = parse_derivatives(op, texts); });
        const size_t first = stack->size() - op.schema().arguments().size();
        const IValue *const arguments = stack->data() + first;
        bool requires_grad = false, has_tangent = false;
        for (const int index : derivatives.arguments)
            if (const Tensor &tensor = tensor_of(arguments[index]); tensor.defined()) {
                requires_grad |= tensor.requires_grad();
                has_tangent |= tensor._fw_grad(0).defined();
            }
        for (const int index : derivatives.constants)
            if (const Tensor &tensor = tensor_of(arguments[index]); tensor.defined()) {
                TORCH_CHECK(!tensor.requires_grad(), display_name(op), ": not differentiable with respect to ",
                            op.schema().arguments()[index].name(), ", which requires grad");
                TORCH_CHECK(!tensor._fw_grad(0).defined(), display_name(op), ": not differentiable with respect to ",
                            op.schema().arguments()[index].name(), ", which has a tangent");
            }
        if (has_tangent) {
            run_with_tangents(op, keys, stack);
            return;
        }
        run(op, keys, stack, requires_grad, [] {});
    }

  private:
    // The call, recorded if it is to be. set_tangents is called when its results are on the stack: before they are
    // saved for backward, which keeps their tangents with them.
    template <typename SetTangents>
    void run(const OperatorHandle &op, DispatchKeySet keys, Stack *stack, bool requires_grad,
             const SetTangents &set_tangents)
    {
        const size_t first = stack->size() - op.schema().arguments().size();
        const IValue *const arguments = stack->data() + first;
        requires_grad &= at::GradMode::is_enabled();
        if (derivatives.written >= 0)
            torch::autograd::check_inplace(tensor_of(arguments[derivatives.written]), requires_grad);
        if (!requires_grad) {
            {
                const at::AutoDispatchBelowADInplaceOrView guard;
                op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
            }
            set_tangents();
            return;
        }
        const std::shared_ptr<DerivativesNode> node(new DerivativesNode(&derivatives), torch::autograd::deleteNode);
        torch::autograd::edge_list edges;
        edges.reserve(derivatives.arguments.size());
        for (const int index : derivatives.arguments) {
            const Tensor &tensor = tensor_of(arguments[index]);
            edges.push_back(tensor.defined() ? torch::autograd::impl::gradient_edge(tensor) : torch::autograd::Edge());
        }
        node->set_next_edges(std::move(edges));
        c10::SmallVector<bool, 8> wanted;
        for (size_t target = 0; target < derivatives.arguments.size(); target++)
            wanted.push_back(node->should_compute_output(target));
        save_arguments(*node, arguments, wanted);
        const Tensor written = derivatives.written >= 0 ? tensor_of(arguments[derivatives.written]) : Tensor();
        {
            const at::AutoDispatchBelowADInplaceOrView guard;
            op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
        }
        if (written.defined())
            torch::autograd::rebase_history(written, node);
        const IValue *const results = stack->data() + first;
        for (const int index : derivatives.returns)
            torch::autograd::set_history(tensor_of(results[index]), node);
        set_tangents();
        save_returns(*node, results, written, wanted);
    }

    // The call, and the tangents of what it returns.
    void run_with_tangents(const OperatorHandle &op, DispatchKeySet keys, Stack *stack)
    {
        const size_t count = op.schema().arguments().size(), first = stack->size() - count;
        // By copies: the call takes its arguments from the stack. Formulas take primal values, without tangents.
        std::vector<IValue> primals(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
        std::vector<Tensor> tangents(count);
        bool requires_grad = false;
        for (const int index : derivatives.arguments)
            if (const Tensor tensor = tensor_of(primals[index]); tensor.defined()) {
                requires_grad |= tensor.requires_grad();
                tangents[index] = tensor._fw_grad(0);
                if (!tangents[index].defined())
                    continue;
                bool is_known = false;
                for (const Tangent &tangent : derivatives.tangents)
                    is_known |= has(tangent.arguments, index);
                TORCH_CHECK_NOT_IMPLEMENTED(is_known, display_name(op), ": forward-mode derivatives by ",
                                            op.schema().arguments()[index].name(), " are not supported");
                primals[index] = IValue(tensor._fw_primal(0));
            }
        TORCH_CHECK_NOT_IMPLEMENTED(derivatives.written < 0, display_name(op),
                                    ": forward-mode derivatives in place are not supported");
        run(op, keys, stack, requires_grad, [&] { set_tangents(op, stack, first, primals, tangents); });
    }

    void set_tangents(const OperatorHandle &op, Stack *stack, size_t first, const std::vector<IValue> &primals,
                      const std::vector<Tensor> &tangents) const
    {
        std::vector<Tensor> sums(op.schema().returns().size());
        for (const Tangent &tangent : derivatives.tangents) {
            bool is_needed = false;
            for (const int index : tangent.arguments)
                is_needed |= tangents[index].defined();
            if (!is_needed)
                continue;
            Stack call;
            for (const Source &source : tangent.call.sources) {
                const IValue value = source.kind == Kind::LITERAL       ? source.literal
                                     : source.kind == Kind::RETURN      ? (*stack)[first + source.index]
                                     : source.kind != Kind::TANGENT     ? primals[source.index]
                                     : tangents[source.index].defined() ? IValue(tangents[source.index])
                                                                        : IValue();
                call.push_back(source.attribute == Attribute::TENSOR || !value.isTensor() ? value
                               : source.attribute == Attribute::MATRIX_TRANSPOSE ? IValue(value.toTensor().mT())
                                                                                 : value_of(value, source.attribute));
            }
            tangent.call.op->callBoxed(&call);
            for (size_t i = 0; i < tangent.results.size(); i++) {
                const Tensor term = std::move(call[i]).toTensor();
                Tensor &sum = sums[tangent.results[i]];
                sum = sum.defined() ? sum + term : term;
            }
        }
        for (size_t i = 0; i < sums.size(); i++)
            if (sums[i].defined())
                (*stack)[first + i].toTensor()._set_fw_grad(sums[i], 0, false);
    }

    static bool is_needed(const Slot &slot, const c10::SmallVector<bool, 8> &wanted)
    {
        for (const int target : slot.targets)
            if (wanted[static_cast<size_t>(target)])
                return true;
        return false;
    }

    void save_arguments(DerivativesNode &node, const IValue *arguments, const c10::SmallVector<bool, 8> &wanted) const
    {
        node.tensors.resize(derivatives.tensors.size());
        node.values.resize(derivatives.values.size());
        for (size_t i = 0; i < derivatives.tensors.size(); i++) {
            const Slot &slot = derivatives.tensors[i];
            if (slot.kind == Kind::ARGUMENT && is_needed(slot, wanted))
                if (const Tensor &tensor = tensor_of(arguments[slot.index]); tensor.defined())
                    // What the op is about to write over is copied, which is part of the graph.
                    node.tensors[i] = SavedVariable(slot.index == derivatives.written ? tensor.clone() : tensor, false);
        }
        for (size_t i = 0; i < derivatives.values.size(); i++) {
            const Slot &slot = derivatives.values[i];
            if (slot.kind == Kind::ARGUMENT && is_needed(slot, wanted))
                node.values[i] = value_of(arguments[slot.index], slot.attribute);
        }
    }

    void save_returns(DerivativesNode &node, const IValue *results, const Tensor &written,
                      const c10::SmallVector<bool, 8> &wanted) const
    {
        const auto returned = [&](int index) -> const Tensor & {
            return written.defined() ? written : tensor_of(results[index]);
        };
        for (size_t i = 0; i < derivatives.tensors.size(); i++) {
            const Slot &slot = derivatives.tensors[i];
            if (slot.kind == Kind::RETURN && is_needed(slot, wanted))
                if (const Tensor &tensor = returned(slot.index); tensor.defined())
                    node.tensors[i] = SavedVariable(tensor, true, written.defined() && written.is_view());
        }
        for (size_t i = 0; i < derivatives.values.size(); i++) {
            const Slot &slot = derivatives.values[i];
            if (slot.kind == Kind::RETURN && is_needed(slot, wanted))
                node.values[i] = value_of(IValue(returned(slot.index)), slot.attribute);
        }
    }

    std::vector<std::string> texts;
    std::once_flag parsed;
    Derivatives derivatives;
};

// The kernel under the Autocast keys.
class AutocastKernel final : public c10::OperatorKernel
{
  public:
    AutocastKernel(Autocast policy, c10::DeviceType device) : policy(policy), device(device)
    {
    }

    void operator()(const OperatorHandle &op, DispatchKeySet, Stack *stack)
    {
        const c10::impl::ExcludeDispatchKeyGuard guard(
            at::autocast::get_autocast_dispatch_key_from_device_type(device));
        const at::ScalarType dtype = policy == Autocast::FLOAT32 || policy == Autocast::FLOAT32_ON_CUDA
                                         ? at::kFloat
                                         : at::autocast::get_autocast_dtype(device);
        const size_t count = op.schema().arguments().size(), first = stack->size() - count;
        for (size_t i = first; i < stack->size(); i++) {
            IValue &argument = (*stack)[i];
            if (!argument.isTensor())
                continue;
            const Tensor &tensor = argument.toTensor();
            if (tensor.is_floating_point() && tensor.scalar_type() != at::kDouble)
                argument = IValue(autocast_argument(tensor, dtype, device));
            if (policy == Autocast::INPUT_ONLY)
                break;
        }
        op.callBoxed(stack);
    }

  private:
    Autocast policy;
    c10::DeviceType device;
};

} // namespace

// Of all ops, for cuda_ops::derivatives.
static std::map<std::string, std::vector<std::string>> &all_derivatives()
{
    static std::map<std::string, std::vector<std::string>> texts;
    return texts;
}

bool is_differentiated_further(at::TensorList tensors)
{
    if (at::GradMode::is_enabled())
        return true;
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const Tensor &tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); });
}

void register_derivatives(torch::Library &library, const char *name, std::initializer_list<const char *> derivatives)
{
    std::vector<std::string> texts(derivatives.begin(), derivatives.end());
    all_derivatives()[name] = texts;
    library.impl(name, torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunctor(
                                                                       std::make_unique<AutogradKernel>(texts))));
    for (const std::string &text : texts)
        for (const std::string &op : called_ops(text))
            register_vmap(library, op.c_str());
}

void register_autocast(torch::Library &library, const char *name, Autocast policy)
{
    const bool cuda_alone = policy == Autocast::FLOAT32_ON_CUDA;
    for (const c10::DeviceType device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
        if (cuda_alone && device == c10::DeviceType::CPU)
            continue;
        library.impl(name, torch::dispatch(at::autocast::get_autocast_dispatch_key_from_device_type(device),
                                           torch::CppFunction::makeFromBoxedFunctor(
                                               std::make_unique<AutocastKernel>(policy, device))));
    }
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("derivatives(str op) -> str[]", [](std::string op) {
        const auto &all = cuda_ops::all_derivatives();
        const auto found = all.find(op);
        return found == all.end() ? std::vector<std::string>() : found->second;
    });
}
