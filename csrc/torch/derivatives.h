// An op's derivatives, parsed from the lines that autograd.h describes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace cuda_ops::autograd
{

using c10::IValue;
using c10::OperatorHandle;

enum class Kind { LITERAL, ARGUMENT, RETURN, GRADIENT, TANGENT, WANTED, WANTS };
enum class Attribute { TENSOR, MATRIX_TRANSPOSE, SIZE, PLANE, STRIDE, DTYPE, CHANNELS_LAST, CHANNELS_LAST_1D };

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

// An op's derivatives.
struct Derivatives {
    std::string node_name;
    std::vector<int> arguments; // that are differentiable: indices in the schema
    std::vector<int> returns;   // likewise; of an in-place op, `written`
    std::vector<int> constants; // arguments that must have no gradient
    int written = -1;           // the differentiable argument that the op writes into, if it does
    std::vector<Derivative> derivatives;
    std::vector<Slot> tensors, values;
    std::vector<Tangent> tangents;
};

inline bool has(const std::vector<int> &indices, int index)
{
    return std::find(indices.begin(), indices.end(), index) != indices.end();
}

// Reads the derivatives of one op. An error in them is an internal error.
Derivatives parse_derivatives(const OperatorHandle &op, const std::vector<std::string> &lines);

// The ops of cuda_ops that a line calls.
std::vector<std::string> called_ops(const std::string &line);

} // namespace cuda_ops::autograd
