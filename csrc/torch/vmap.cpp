// The kernel that all ops share under vmap; vmap.h describes the rules that it follows.
#include "vmap.h"

#include <ATen/Context.h>
#include <ATen/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"

namespace cuda_ops
{

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace
{

std::map<std::string, std::string> &vmap_rules()
{
    static std::map<std::string, std::string> rules;
    return rules;
}

const char *const RANDOM = "random ";

enum class Role { WITHOUT_BATCH, IN_FRONT, JOINED };

// What a rule says of an argument.
struct Part {
    Role role = Role::WITHOUT_BATCH;
    int64_t dims = 0; // at least, or exactly
    bool exactly = false;
    int list = -1; // the argument with fewer elements than there are dimensions
};

// A tensor among the arguments of a call.
struct Member {
    size_t argument; // of which it is an element, or the whole
    Tensor value;
    std::optional<int64_t> batch_dim;

    int64_t dim() const
    {
        return value.dim() - (batch_dim ? 1 : 0);
    }
};

class VmapKernel final : public c10::OperatorKernel
{
  public:
    void operator()(const OperatorHandle &op, c10::DispatchKeySet, Stack *stack)
    {
        if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
            // Its only kernel, whatever the key; the ops that it calls meet vmap again.
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
            return;
        }
        std::call_once(has_read, [&] { read_rules(op); });
        const auto layer = at::functorch::maybeCurrentDynamicLayer();
        TORCH_INTERNAL_ASSERT(layer);
        const c10::impl::ExcludeDispatchKeyGuard guard(
            c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode}));
        const size_t first = stack->size() - op.schema().arguments().size();
        std::vector<IValue> arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
        stack->resize(first);
        const std::vector<Member> members = members_of(arguments, layer->layerId());
        const bool has_batch = std::any_of(members.begin(), members.end(),
                                           [](const Member &member) { return member.batch_dim.has_value(); });
        const bool is_random = random >= 0 && arguments[static_cast<size_t>(random)].toDouble() > 0.0;
        if (is_random)
            TORCH_CHECK(layer->randomness() != at::functorch::RandomnessType::Error, display_name(op),
                        ": vmap: called random operation while in randomness error mode. Please either use the 'same' "
                        "or 'different' randomness flags on vmap or perform the randomness operation out of vmap");
        const bool same = layer->randomness() == at::functorch::RandomnessType::Same;
        if (!has_batch && (!is_random || same)) {
            stack->insert(stack->end(), arguments.begin(), arguments.end());
            op.callBoxed(stack);
            return;
        }
        if (layer->batchSize().maybe_as_int() == 0 && !writes(op, arguments)) {
            results_of_nothing(op, arguments, members, layer->layerId(), stack);
            return;
        }
        if (!is_random)
            for (const std::vector<Part> &rule : rules)
                if (fits(rule, op, arguments, members)) {
                    call_once(rule, op, arguments, members, *layer, stack);
                    return;
                }
        TORCH_CHECK_NOT_IMPLEMENTED(!writes(op, arguments), "Batching rule not implemented for ", op.schema().name(),
                                    ", which writes into its arguments; we could not generate a fallback.");
        call_for_each(op, arguments, members, *layer, is_random && same, stack);
    }

  private:
    void read_rules(const OperatorHandle &op)
    {
        const std::string name = op.schema().name().substr(op.schema().name().find("::") + 2);
        const auto found = vmap_rules().find(name);
        if (found == vmap_rules().end())
            return;
        for (const std::string &text : split(found->second, " or ")) {
            std::vector<Part> rule(op.schema().arguments().size());
            for (const std::string &word : split(text, ", "))
                read(op, word, rule);
            rules.push_back(std::move(rule));
        }
    }

    static std::vector<std::string> split(const std::string &text, const std::string &separator)
    {
        std::vector<std::string> parts;
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find(separator, begin), text.size());
            parts.push_back(text.substr(begin, end - begin));
            begin = end + separator.size();
        }
        return parts;
    }

    static int argument_of(const OperatorHandle &op, const std::string &name)
    {
        const auto index = op.schema().argumentIndexWithName(name);
        TORCH_INTERNAL_ASSERT(index, op.schema().name(), ": vmap: no argument ", name);
        return *index;
    }

    void read(const OperatorHandle &op, const std::string &word, std::vector<Part> &rule)
    {
        if (word.rfind(RANDOM, 0) == 0) {
            random = argument_of(op, word.substr(std::strlen(RANDOM)));
            return;
        }
        const size_t bracket = std::min(word.find('['), word.size());
        const size_t end = std::min({bracket, word.find('*'), word.size()});
        Part &part = rule[static_cast<size_t>(argument_of(op, word.substr(0, end)))];
        part.role = word.back() == '*' ? Role::JOINED : Role::IN_FRONT;
        if (bracket == word.size())
            return;
        std::string condition = word.substr(bracket + 1, word.find(']') - bracket - 1);
        part.exactly = condition[0] == '=';
        condition = condition.substr(part.exactly ? 1 : 0);
        if (std::isdigit(static_cast<unsigned char>(condition[0])))
            part.dims = std::stoll(condition);
        else
            part.list = argument_of(op, condition);
    }

    static std::vector<Member> members_of(const std::vector<IValue> &arguments, int64_t level)
    {
        std::vector<Member> members;
        const auto add = [&](size_t argument, const Tensor &tensor) {
            auto [value, batch_dim] = at::functorch::unwrapTensorAtLevel(tensor, level);
            members.push_back({argument, std::move(value), batch_dim});
        };
        for (size_t i = 0; i < arguments.size(); i++) {
            if (arguments[i].isTensor())
                add(i, arguments[i].toTensor());
            else if (arguments[i].isTensorList())
                for (const Tensor &tensor : arguments[i].toTensorVector())
                    add(i, tensor);
        }
        return members;
    }

    static bool writes(const OperatorHandle &op, const std::vector<IValue> &arguments)
    {
        for (size_t i = 0; i < arguments.size(); i++)
            if (const c10::AliasInfo *alias = op.schema().arguments()[i].alias_info();
                alias && alias->isWrite() && !arguments[i].isNone())
                return true;
        return false;
    }

    static bool fits(const std::vector<Part> &rule, const OperatorHandle &op, const std::vector<IValue> &arguments,
                     const std::vector<Member> &members)
    {
        std::optional<int64_t> dim; // of all that get a batch
        for (const Member &member : members) {
            const Part &part = rule[member.argument];
            if (part.role == Role::WITHOUT_BATCH) {
                if (member.batch_dim)
                    return false;
                continue;
            }
            const int64_t least =
                part.list < 0 ? part.dims : 1 + static_cast<int64_t>(arguments[part.list].toSymIntVector().size());
            if (member.dim() < least || (part.exactly && member.dim() != least) ||
                dim.value_or(member.dim()) != member.dim())
                return false;
            if (writes(op, arguments) && !member.batch_dim)
                return false;
            dim = member.dim();
        }
        for (size_t i = 0; i < arguments.size(); i++)
            if (rule[i].role == Role::IN_FRONT && arguments[i].isNone() && !is_tensor(op, i))
                return false; // no dimension is the flattened tensor's only one
        return dim.has_value();
    }

    static bool is_tensor(const OperatorHandle &op, size_t argument)
    {
        return op.schema().arguments()[argument].type()->str().rfind("Tensor", 0) == 0;
    }

    // The dimensions, or sizes, of what has a batch now.
    static IValue shifted(const IValue &value, Role role, const c10::SymInt &batch, int64_t dim)
    {
        const auto shift = [](int64_t d) { return d < 0 ? d : d + 1; };
        if (value.isInt())
            return IValue(shift(value.toInt()));
        if (role == Role::JOINED) {
            std::vector<c10::SymInt> sizes = value.toSymIntVector();
            if (!sizes.empty())
                sizes[0] = sizes[0] * batch;
            return IValue(std::move(sizes));
        }
        std::vector<int64_t> dims = value.toIntVector();
        if (dims.empty())
            for (int64_t d = 0; d < dim; d++)
                dims.push_back(d);
        for (int64_t &d : dims)
            d = shift(d);
        return IValue(std::move(dims));
    }

    static Tensor with_batch_in_front(const Member &member, const c10::SymInt &batch)
    {
        if (member.batch_dim)
            return member.value.movedim(*member.batch_dim, 0);
        c10::SymDimVector sizes(member.value.sym_sizes());
        sizes.insert(sizes.begin(), batch);
        return member.value.unsqueeze(0).expand_symint(sizes);
    }

    static void call_once(const std::vector<Part> &rule, const OperatorHandle &op, const std::vector<IValue> &arguments,
                          const std::vector<Member> &members, const at::functorch::DynamicLayer &layer, Stack *stack)
    {
        const c10::SymInt batch = layer.batchSize();
        bool joined = false;
        int64_t dim = 0;
        size_t next = 0;
        const auto operand = [&](Role role) {
            const Member &member = members[next++];
            if (role == Role::WITHOUT_BATCH)
                return member.value;
            dim = member.dim();
            const Tensor tensor = with_batch_in_front(member, batch);
            if (role == Role::IN_FRONT)
                return tensor;
            joined = true;
            return tensor.flatten(0, 1);
        };
        for (size_t i = 0; i < arguments.size(); i++) {
            const IValue &argument = arguments[i];
            if (argument.isTensor()) {
                stack->emplace_back(operand(rule[i].role));
            } else if (argument.isTensorList()) {
                std::vector<Tensor> tensors;
                while (next < members.size() && members[next].argument == i)
                    tensors.push_back(operand(rule[i].role));
                stack->emplace_back(std::move(tensors));
            } else {
                const bool counts = rule[i].role != Role::WITHOUT_BATCH && !argument.isNone();
                stack->push_back(counts ? shifted(argument, rule[i].role, batch, dim) : argument);
            }
        }
        op.callBoxed(stack);
        for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
            const Tensor output = (*stack)[i].toTensor();
            const Tensor result = joined ? output.unflatten_symint(0, {batch, output.sym_size(0) / batch}) : output;
            (*stack)[i] = IValue(at::functorch::makeBatched(result, 0, layer.layerId()));
        }
    }

    // The arguments of a call, with each tensor replaced by what `choose` makes of it.
    template <typename Choose>
    static void push(const std::vector<IValue> &arguments, const std::vector<Member> &members, const Choose &choose,
                     Stack *stack)
    {
        size_t next = 0;
        for (size_t i = 0; i < arguments.size(); i++) {
            if (arguments[i].isTensor()) {
                stack->emplace_back(choose(members[next++]));
            } else if (arguments[i].isTensorList()) {
                std::vector<Tensor> tensors;
                while (next < members.size() && members[next].argument == i)
                    tensors.push_back(choose(members[next++]));
                stack->emplace_back(std::move(tensors));
            } else {
                stack->push_back(arguments[i]);
            }
        }
    }

    static void call_for_each(const OperatorHandle &op, const std::vector<IValue> &arguments,
                              const std::vector<Member> &members, const at::functorch::DynamicLayer &layer, bool same,
                              Stack *stack)
    {
        const int64_t batch = layer.batchSize().guard_int(__FILE__, __LINE__), level = layer.layerId();
        at::Generator generator;
        Tensor numbers; // that each slice draws
        if (same) {
            generator = at::globalContext().defaultGenerator(members[0].value.device());
            numbers = generator.get_state();
        }
        const size_t returns = op.schema().returns().size();
        std::vector<Stack> results;
        for (int64_t i = 0; i < batch; i++) {
            if (same)
                generator.set_state(numbers);
            Stack slice;
            const auto choose = [i](const Member &member) {
                return member.batch_dim ? member.value.select(*member.batch_dim, i) : member.value;
            };
            push(arguments, members, choose, &slice);
            op.callBoxed(&slice);
            results.push_back(std::move(slice));
        }
        const auto joined = [&](const auto &tensor_of) {
            std::vector<Tensor> slices;
            for (const Stack &result : results)
                slices.push_back(tensor_of(result));
            return slices[0].defined() ? at::functorch::makeBatched(at::stack(slices), 0, level) : Tensor();
        };
        for (size_t i = 0; i < returns; i++) {
            const IValue &one = results[0][i];
            if (one.isTensor()) {
                stack->emplace_back(joined([i](const Stack &result) { return result[i].toTensor(); }));
            } else if (one.isTensorList()) {
                std::vector<Tensor> tensors;
                for (size_t j = 0; j < one.toTensorVector().size(); j++)
                    tensors.push_back(joined([i, j](const Stack &result) { return result[i].toTensorVector()[j]; }));
                stack->emplace_back(std::move(tensors));
            } else {
                stack->push_back(one);
            }
        }
    }

    // Of no slices: what the op's fake kernel says of one.
    static void results_of_nothing(const OperatorHandle &op, const std::vector<IValue> &arguments,
                                   const std::vector<Member> &members, int64_t level, Stack *stack)
    {
        const auto on_meta = [](const Member &member) {
            c10::SymDimVector sizes(member.value.sym_sizes());
            if (member.batch_dim)
                sizes.erase(sizes.begin() + *member.batch_dim);
            return at::empty_symint(sizes, member.value.options().device(at::kMeta));
        };
        Stack results;
        push(arguments, members, on_meta, &results);
        op.callBoxed(&results);
        const auto of_none = [&](const Tensor &slice) {
            if (!slice.defined())
                return slice;
            c10::SymDimVector sizes(slice.sym_sizes());
            sizes.insert(sizes.begin(), 0);
            const at::TensorOptions options = slice.options().device(members[0].value.device());
            return at::functorch::makeBatched(at::empty_symint(sizes, options), 0, level);
        };
        for (IValue &result : results) {
            if (result.isTensor()) {
                result = IValue(of_none(result.toTensor()));
            } else if (result.isTensorList()) {
                std::vector<Tensor> tensors = result.toTensorVector();
                for (Tensor &tensor : tensors)
                    tensor = of_none(tensor);
                result = IValue(std::move(tensors));
            }
            stack->push_back(std::move(result));
        }
    }

    std::once_flag has_read;
    std::vector<std::vector<Part>> rules; // each of all arguments
    int random = -1;                      // the argument above 0 which the op draws numbers
};

} // namespace

void register_vmap(torch::Library &library, const char *name)
{
    static std::set<std::string> registered;
    if (registered.insert(name).second)
        library.impl(name, torch::dispatch(c10::DispatchKey::FuncTorchBatched,
                                           torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VmapKernel>())));
}

void register_vmap_rule(torch::Library &library, const char *name, const std::string &rule)
{
    vmap_rules()[name] = rule;
    // Numbers of each slice are drawn too where no tensor has a batch, by which the other key would be chosen.
    if (rule.rfind(RANDOM, 0) == 0)
        library.impl(name, torch::dispatch(c10::DispatchKey::FuncTorchVmapMode,
                                           torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VmapKernel>())));
}

} // namespace cuda_ops
