// The kernel that all ops share under the Autograd keys: see autograd.h for what it is told.
#include "autograd.h"

#include "checks.h"

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
#include <cctype>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace cuda_ops
{

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

enum class Kind { LITERAL, ARGUMENT, RETURN, GRADIENT, TANGENT, WANTED, WANTS };
enum class Attribute { TENSOR, MATRIX_TRANSPOSE, SIZE, PLANE, STRIDE, DTYPE, CHANNELS_LAST };

// Where one argument of a gradient's op comes from.
struct Source {
    Kind kind;
    int index = 0; // of the argument or return; of a gradient or a want, among those of differentiable ones
    Attribute attribute = Attribute::TENSOR;
    IValue literal = {};
    int condition = -1;       // the target without whose gradient this is None; -1 without one
    int slot = -1;            // among what a node saves
    bool is_value = false;    // saved as a value, not as a tensor
    bool is_optional = false; // the op takes None for it
};

struct Call {
    std::optional<OperatorHandle> op; // none where the only source is the gradient itself
    std::vector<Source> sources;
};

struct Derivative {
    std::vector<int> targets; // among the differentiable arguments
    std::vector<Call> calls;  // the one for all times, or that for once and that for gradients which are differentiated

    const Call &call() const
    {
        return at::GradMode::is_enabled() ? calls.back() : calls.front();
    }
};

// What the tangents of arguments add to those of returns.
struct Tangent {
    std::vector<int> arguments, results;
    Call call;
};

// What a node saves of the op's arguments and returns, in one slot each.
struct Slot {
    Kind kind;
    int index;
    Attribute attribute;
    std::vector<int> targets; // whose gradients need it, among the differentiable arguments
};

// All that autograd knows of an op.
struct Derivatives {
    std::string node_name;
    std::vector<int> arguments; // that are differentiable: indices in the schema
    std::vector<int> returns;   // likewise; of an op that works in place, `written`
    std::vector<int> constants; // arguments that must have no gradient
    int written = -1;           // the differentiable argument that the op writes into, if it does
    std::vector<Derivative> derivatives;
    std::vector<Slot> tensors, values;
    std::vector<Tangent> tangents;
};

std::string strip(const std::string &text)
{
    const size_t begin = text.find_first_not_of(' ');
    return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

std::vector<std::string> split(const std::string &text, char separator)
{
    std::vector<std::string> parts;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(separator, begin), text.size());
        if (const std::string part = strip(text.substr(begin, end - begin)); !part.empty())
            parts.push_back(part);
        begin = end + 1;
    }
    return parts;
}

bool has(const std::vector<int> &indices, int index)
{
    return std::find(indices.begin(), indices.end(), index) != indices.end();
}

// linear_forward -> LinearBackward, as PyTorch names its nodes.
std::string node_name_of(const std::string &op)
{
    std::string name;
    bool is_first = true;
    for (const std::string &word : split(op, '_')) {
        if (word == "forward")
            continue;
        name += static_cast<char>(std::toupper(word[0])) + word.substr(1);
        is_first = false;
    }
    return is_first ? op : name + "Backward";
}

// Reads the derivatives of one op.
class Parser
{
  public:
    Parser(const OperatorHandle &op, const std::vector<std::string> &lines) : schema(op.schema())
    {
        for (const std::string &line : lines) {
            const size_t colon = line.find(':');
            if (line.find("<-") != std::string::npos)
                tangent_texts.push_back(line);
            else if (colon != std::string::npos && strip(line.substr(colon + 1)) == "not differentiable")
                for (const std::string &name : split(line.substr(0, colon), ','))
                    result.constants.push_back(known_argument(name, line));
            else
                texts.push_back(line);
        }
    }

    Derivatives parse()
    {
        result.node_name = node_name_of(op_name());
        for (const std::string &text : texts) {
            const size_t colon = text.find(':');
            TORCH_INTERNAL_ASSERT(colon != std::string::npos, op_name(), ": no ':' in derivative ", text);
            for (const std::string &name : split(text.substr(0, colon), ','))
                result.arguments.push_back(known_argument(name, text));
        }
        // In the order of the schema, as a Function's gradients are.
        std::sort(result.arguments.begin(), result.arguments.end());
        for (const int index : result.arguments)
            if (const c10::AliasInfo *alias = schema.arguments()[index].alias_info(); alias && alias->isWrite())
                result.written = index;
        find_differentiable_returns();
        for (const std::string &text : texts)
            parse_derivative(text);
        for (const std::string &text : tangent_texts)
            parse_tangent(text);
        return std::move(result);
    }

  private:
    std::string op_name() const
    {
        return schema.name().substr(schema.name().find("::") + 2);
    }

    int argument(const std::string &name) const
    {
        for (size_t i = 0; i < schema.arguments().size(); i++)
            if (schema.arguments()[i].name() == name)
                return static_cast<int>(i);
        return -1;
    }

    int known_argument(const std::string &name, const std::string &text) const
    {
        const int index = argument(name);
        TORCH_INTERNAL_ASSERT(index >= 0, op_name(), ": no argument ", name, " in derivative ", text);
        return index;
    }

    int known_return(const std::string &name, const std::string &text) const
    {
        for (size_t i = 0; i < schema.returns().size(); i++)
            if (return_name(i) == name)
                return static_cast<int>(i);
        TORCH_INTERNAL_ASSERT(false, op_name(), ": no return ", name, " in tangent ", text);
    }

    // The place of an argument among the differentiable ones.
    int differentiable_argument(const std::string &name, const std::string &text) const
    {
        const auto found = std::find(result.arguments.begin(), result.arguments.end(), known_argument(name, text));
        TORCH_INTERNAL_ASSERT(found != result.arguments.end(), op_name(), ": ", name, " has no derivative in ", text);
        return static_cast<int>(found - result.arguments.begin());
    }

    std::string return_name(size_t i) const
    {
        const std::string &name = schema.returns()[i].name();
        return name.empty() && schema.returns().size() == 1 ? "output" : name;
    }

    // The calls of a derivative, "<op>(<sources>)" each.
    static std::vector<std::string> call_texts(const std::string &text)
    {
        const std::string calls = text.substr(text.find(':') + 1);
        const size_t separator = calls.find(" or ");
        if (separator == std::string::npos)
            return {calls};
        return {calls.substr(0, separator), calls.substr(separator + 4)};
    }

    // The sources of a call: between the parentheses, or, without an op, the gradient that it is.
    std::vector<std::string> source_texts(const std::string &text) const
    {
        const size_t open = text.find('('), close = text.rfind(')');
        if (open == std::string::npos)
            return {strip(text)};
        TORCH_INTERNAL_ASSERT(close != std::string::npos, op_name(), ": ", text);
        return split(text.substr(open + 1, close - open - 1), ',');
    }

    void find_differentiable_returns()
    {
        if (result.written >= 0) // what was written is what has a gradient
            return;
        std::vector<std::string> sources;
        for (const std::string &text : texts)
            for (const std::string &call : call_texts(text))
                for (std::string &source : source_texts(call))
                    sources.push_back(std::move(source));
        for (size_t i = 0; i < schema.returns().size(); i++) {
            const std::string name = "grad_" + return_name(i);
            if (argument(name) < 0 && std::find(sources.begin(), sources.end(), name) != sources.end())
                result.returns.push_back(static_cast<int>(i));
        }
    }

    void parse_derivative(const std::string &text)
    {
        Derivative derivative;
        for (const std::string &name : split(text.substr(0, text.find(':')), ','))
            derivative.targets.push_back(differentiable_argument(name, text));
        for (const std::string &call : call_texts(text)) {
            derivative.calls.push_back(parse_call(call, derivative.targets));
            if (!derivative.calls.back().op) {
                TORCH_INTERNAL_ASSERT(derivative.targets.size() == 1 &&
                                          derivative.calls.back().sources[0].kind == Kind::GRADIENT,
                                      op_name(), ": the derivative ", text, " is neither an op nor a gradient");
                continue;
            }
            const auto &returns = derivative.calls.back().op->schema().returns();
            TORCH_INTERNAL_ASSERT(returns.size() >= derivative.targets.size() ||
                                      (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType),
                                  op_name(), ": too few gradients in ", text);
        }
        result.derivatives.push_back(std::move(derivative));
    }

    // `targets`: of the derivative, for which arguments and returns are saved; none for a tangent, which saves nothing.
    Call parse_call(const std::string &text, const std::vector<int> &targets)
    {
        const std::vector<std::string> sources = source_texts(text);
        if (text.find('(') == std::string::npos)
            return {std::nullopt, {parse_source(sources[0], text, targets)}};
        Call call{called_op(text), {}};
        const c10::FunctionSchema &target = call.op->schema();
        TORCH_INTERNAL_ASSERT(sources.size() == target.arguments().size(), op_name(), ": the derivative ", text,
                              " does not fit ", target);
        for (size_t i = 0; i < sources.size(); i++) {
            call.sources.push_back(parse_source(sources[i], text, targets));
            call.sources.back().is_optional = target.arguments()[i].type()->kind() == c10::TypeKind::OptionalType;
        }
        return call;
    }

    static OperatorHandle called_op(const std::string &text)
    {
        const std::string name = strip(text.substr(0, text.find('(')));
        return c10::Dispatcher::singleton().findSchemaOrThrow(
            name.find("::") == std::string::npos ? ("cuda_ops::" + name).c_str() : name.c_str(), "");
    }

    void parse_tangent(const std::string &text)
    {
        const size_t arrow = text.find("<-");
        Tangent tangent{{}, {}, parse_call(text.substr(arrow + 2), {})};
        for (const std::string &name : split(text.substr(0, arrow), ','))
            tangent.results.push_back(known_return(name, text));
        for (const Source &source : tangent.call.sources)
            if (source.kind == Kind::TANGENT)
                tangent.arguments.push_back(source.index);
        TORCH_INTERNAL_ASSERT(!tangent.arguments.empty() && tangent.call.op &&
                                  tangent.results.size() <= tangent.call.op->schema().returns().size(),
                              op_name(), ": unsound tangent ", text);
        result.tangents.push_back(std::move(tangent));
    }

    Source parse_source(const std::string &text, const std::string &derivative, const std::vector<int> &targets)
    {
        if (const size_t condition = text.find(" if "); condition != std::string::npos) {
            const int target = differentiable_argument(strip(text.substr(condition + 4)), derivative);
            TORCH_INTERNAL_ASSERT(has(targets, target), op_name(), ": ", text, " names no target of ", derivative);
            Source source = parse_source(strip(text.substr(0, condition)), derivative, {target});
            source.condition = target;
            return source;
        }
        const bool saved = !targets.empty();
        if (text == "none")
            return {Kind::LITERAL};
        if (text == "true" || text == "false")
            return {Kind::LITERAL, 0, Attribute::TENSOR, IValue(text == "true")};
        if (std::isdigit(text[0]) || text[0] == '-')
            return {Kind::LITERAL, 0, Attribute::TENSOR, IValue(static_cast<int64_t>(std::stoll(text)))};
        if (text[0] == '[') {
            c10::List<bool> flags;
            for (const std::string &flag : split(text.substr(1, text.size() - 2), ' '))
                flags.push_back(flag == "true");
            return {Kind::LITERAL, 0, Attribute::TENSOR, IValue(std::move(flags))};
        }
        if (text == "wanted" && saved)
            return {Kind::WANTED};
        if (text.rfind("wants_", 0) == 0 && saved)
            return {Kind::WANTS, differentiable_argument(text.substr(6), derivative)};
        const size_t dot = text.find('.');
        const std::string name = text.substr(0, dot);
        Source source = named_source(name, derivative);
        if (dot != std::string::npos) {
            static const std::map<std::string, Attribute> attributes{
                {"mT", Attribute::MATRIX_TRANSPOSE}, {"size", Attribute::SIZE},
                {"plane", Attribute::PLANE},         {"stride", Attribute::STRIDE},
                {"dtype", Attribute::DTYPE},         {"channels_last", Attribute::CHANNELS_LAST}};
            const auto found = attributes.find(text.substr(dot + 1));
            TORCH_INTERNAL_ASSERT(found != attributes.end(), op_name(), ": unknown attribute in ", derivative);
            source.attribute = found->second;
        }
        if (source.kind == Kind::ARGUMENT || source.kind == Kind::RETURN) {
            source.is_value = !is_tensor(source) || (source.attribute != Attribute::TENSOR &&
                                                     source.attribute != Attribute::MATRIX_TRANSPOSE);
            source.slot = saved ? slot_for(source, targets) : -1;
        }
        return source;
    }

    Source named_source(const std::string &name, const std::string &derivative) const
    {
        if (const int index = argument(name); index >= 0)
            return {Kind::ARGUMENT, index};
        if (const int index = name.rfind("tangent_", 0) == 0 ? argument(name.substr(8)) : -1; index >= 0)
            return {Kind::TANGENT, index};
        if (result.written >= 0) {
            if (name == "grad_output")
                return {Kind::GRADIENT, 0};
            if (name == "output")
                return {Kind::RETURN, 0};
        }
        for (size_t i = 0; i < schema.returns().size(); i++) {
            if (name == return_name(i))
                return {Kind::RETURN, static_cast<int>(i)};
            if (name == "grad_" + return_name(i)) {
                const auto found = std::find(result.returns.begin(), result.returns.end(), static_cast<int>(i));
                return {Kind::GRADIENT, static_cast<int>(found - result.returns.begin())};
            }
        }
        TORCH_INTERNAL_ASSERT(false, op_name(), ": nothing is called ", name, " in derivative ", derivative);
    }

    bool is_tensor(const Source &source) const
    {
        if (source.kind == Kind::RETURN)
            return true;
        c10::TypePtr type = schema.arguments()[source.index].type();
        if (const auto optional = type->cast<c10::OptionalType>())
            type = optional->getElementType();
        return type->kind() == c10::TypeKind::TensorType;
    }

    int slot_for(const Source &source, const std::vector<int> &targets)
    {
        const Attribute attribute = source.is_value ? source.attribute : Attribute::TENSOR;
        std::vector<Slot> &slots = source.is_value ? result.values : result.tensors;
        for (size_t i = 0; i < slots.size(); i++)
            if (slots[i].kind == source.kind && slots[i].index == source.index && slots[i].attribute == attribute) {
                slots[i].targets.insert(slots[i].targets.end(), targets.begin(), targets.end());
                return static_cast<int>(i);
            }
        slots.push_back({source.kind, source.index, attribute, targets});
        return static_cast<int>(slots.size()) - 1;
    }

    const c10::FunctionSchema &schema;
    std::vector<std::string> texts, tangent_texts;
    Derivatives result;
};

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
        std::call_once(parsed, [&] { derivatives = Parser(op, texts).parse(); });
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
        const at::ScalarType dtype =
            policy == Autocast::FLOAT32 ? at::kFloat : at::autocast::get_autocast_dtype(device);
        const size_t count = op.schema().arguments().size(), first = stack->size() - count;
        for (size_t i = first; i < stack->size(); i++) {
            IValue &argument = (*stack)[i];
            if (!argument.isTensor())
                continue;
            const Tensor &tensor = argument.toTensor();
            if (tensor.is_floating_point() && tensor.scalar_type() != at::kDouble) {
                TORCH_CHECK_NOT_IMPLEMENTED(device != c10::DeviceType::CPU || policy == Autocast::FLOAT32,
                                            display_name(op),
                                            ": autocast on the CPU is not supported (the CPU backend computes in "
                                            "float32 and float64)");
                argument = IValue(at::autocast::cached_cast(dtype, tensor, device));
            }
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
}

void register_autocast(torch::Library &library, const char *name, Autocast policy)
{
    for (const c10::DeviceType device : {c10::DeviceType::CPU, c10::DeviceType::CUDA})
        library.impl(name, torch::dispatch(at::autocast::get_autocast_dispatch_key_from_device_type(device),
                                           torch::CppFunction::makeFromBoxedFunctor(
                                               std::make_unique<AutocastKernel>(policy, device))));
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
