// Autograd in C++, for fused ops that run so shortly that an autograd.Function in Python would take the host longer
// than the op does. Their Functions differ from those under cuda_ops/ops only in the language: forward and backward
// call the registered ops, which have the fakes, and where gradients are to be differentiated further (create_graph) an
// op that Python registers composes them of the differentiable ops that are fused.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <vector>

#include "autograd.h"
#include "checks.h"

namespace cuda_ops
{

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// `input` in autocast's dtype if autocast is on for its device: for ops that take float32 parameters beside it. As in
// PyTorch, float64 is left alone. cuda_ops/_autocast.py is the same for the ops whose autograd is Python's; here it
// costs next to nothing where autocast is off.
inline Tensor autocast_input(const char *op, const Tensor &input)
{
    const c10::DeviceType device = input.device().type();
    if (device != c10::DeviceType::CPU && device != c10::DeviceType::CUDA) // PyTorch raises for what it does not know
        return input;
    if (C10_LIKELY(!at::autocast::is_autocast_enabled(device)) || !input.is_floating_point() ||
        input.scalar_type() == at::kDouble)
        return input;
    TORCH_CHECK_NOT_IMPLEMENTED(device != c10::DeviceType::CPU, op,
                                ": autocast on the CPU is not supported (the CPU backend computes in float32 and "
                                "float64)");
    return input.to(at::autocast::get_autocast_dtype(device));
}

inline std::optional<Tensor> or_none(const Tensor &tensor)
{
    return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

// For each of Function::apply's first N arguments, all tensors, whether its gradient is wanted. PyTorch counts only the
// arguments that are given, the defined ones of `tensors`.
template <size_t N>
std::array<bool, N> wanted_gradients(const AutogradContext *context, const variable_list &tensors)
{
    std::array<bool, N> wanted{};
    size_t given = 0;
    for (size_t i = 0; i < N; i++)
        wanted[i] = tensors[i].defined() && context->needs_input_grad(given++);
    return wanted;
}

// The wanted ones of `grads` in the places of their arguments, of which Function::apply has `arguments`. `grads` are
// one for each place, or, from Python, the wanted ones alone.
template <size_t N>
variable_list placed(const variable_list &grads, const std::array<bool, N> &wanted, size_t arguments)
{
    variable_list result(arguments);
    size_t next = 0;
    for (size_t i = 0; i < N; i++) {
        if (wanted[i])
            result[i] = grads[grads.size() == N ? i : next];
        next += wanted[i];
    }
    return result;
}

} // namespace cuda_ops
