// The parser of derivatives: lines of text, in the language of autograd.h, to what autograd.cpp runs.
#include "derivatives.h"

#include <cctype>
#include <map>

namespace cuda_ops::autograd
{

namespace
{

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

    // The index of an argument among the differentiable ones.
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
            static const std::map<std::string, Attribute> attributes{{"mT", Attribute::MATRIX_TRANSPOSE},
                                                                     {"size", Attribute::SIZE},
                                                                     {"plane", Attribute::PLANE},
                                                                     {"stride", Attribute::STRIDE},
                                                                     {"dtype", Attribute::DTYPE},
                                                                     {"channels_last", Attribute::CHANNELS_LAST},
                                                                     {"channels_last_1d", Attribute::CHANNELS_LAST_1D}};
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

} // namespace

Derivatives parse_derivatives(const OperatorHandle &op, const std::vector<std::string> &lines)
{
    return Parser(op, lines).parse();
}

std::vector<std::string> called_ops(const std::string &line)
{
    std::vector<std::string> names;
    for (size_t end = line.find('('); end != std::string::npos; end = line.find('(', end + 1)) {
        const size_t begin = line.find_last_of(" :", end) + 1;
        if (begin < 2 || line.compare(begin - 2, 2, "::") != 0)
            names.push_back(line.substr(begin, end - begin));
    }
    return names;
}

} // namespace cuda_ops::autograd
