// swiglu and geglu for PyTorch: checks, allocation and the choice of backend, in one place for both; then each with its
// schemas and derivatives. Without a value, gate and value are the halves of the one tensor's last dimension.
#include "cuda_ops/gated.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "elements.h"
#include "empty.h"
#include "vmap.h"

namespace cuda_ops
{

namespace
{

struct GatedFunction {
    const char *op;
    cuda_ops_gate function;
    const char *activation; // the op of the gate alone
};

GatedFunction swiglu_function()
{
    return {"swiglu", CUDA_OPS_GATE_SILU, "silu"};
}

GatedFunction geglu_function(std::string_view approximate)
{
    TORCH_CHECK(approximate == "none" || approximate == "tanh",
                "geglu: expected approximate to be 'none' or 'tanh', got '", approximate, "'");
    return {"geglu", approximate == "tanh" ? CUDA_OPS_GATE_GELU_TANH : CUDA_OPS_GATE_GELU, "gelu"};
}

// What is asked of a gate without a value of its own, and of one with it.
void check_gated(const char *op, const Tensor &gate, const std::optional<Tensor> &value)
{
    if (value) {
        check_like(op, "value", *value, "gate", gate);
        check_same_shape(op, "value", *value, "gate", gate);
    } else
        TORCH_CHECK(gate.dim() >= 1 && gate.sym_size(-1) % 2 == 0, op,
                    ": expected gate to have an even last dimension, of gate and value, got shape ", gate.sym_sizes());
}

// The same of a tangent or gradient of the gate.
void check_like_gate(const char *op, const char *argument, const Tensor &tensor, const Tensor &gate)
{
    check_like(op, argument, tensor, "gate", gate);
    TORCH_CHECK(tensor.sym_sizes() == gate.sym_sizes(), op, ": expected ", argument, " to have the shape of gate, ",
                gate.sym_sizes(), ", got ", tensor.sym_sizes());
}

// The arguments as the kernels read them: `held` keeps the memory.
struct GatedInputs {
    Tensor first, second; // gate and value; or the tensor of both, and none
    const char *gate = nullptr, *value = nullptr;
    int64_t rows = 1, cols = 0, stride = 0;

    GatedInputs(const char *op, const Tensor &given, const std::optional<Tensor> &given_value)
    {
        check_gated(op, given, given_value);
        if (given_value) {
            first = dense(given);
            second = dense_like(*given_value, first);
            cols = stride = first.numel();
            gate = static_cast<const char *>(first.const_data_ptr());
            value = static_cast<const char *>(second.const_data_ptr());
            return;
        }
        first = given.contiguous();
        stride = first.size(-1);
        cols = stride / 2;
        rows = stride == 0 ? 0 : first.numel() / stride;
        gate = static_cast<const char *>(first.const_data_ptr());
        value = gate + cols * first.element_size();
    }

    // As output is: [..., cols], or like gate.
    Tensor empty_output() const
    {
        if (second.defined())
            return empty_like_dense(first);
        at::DimVector sizes(first.sizes().begin(), first.sizes().end());
        sizes.back() = cols;
        return empty(sizes, first.options());
    }

    int64_t count() const
    {
        return rows * cols;
    }

    // What the CPU goes along: elements, or rows of that many columns' parts where gate and value are in one tensor.
    int64_t row(int64_t parts) const
    {
        return second.defined() ? 1 : parts * cols;
    }

    // The value's place beside a gate on the CPU, whose kernels take float32, float64 and bfloat16.
    const void *value_of(const void *gate_data, const void *value_data, cuda_ops_dtype dtype) const
    {
        const int64_t bytes = dtype == CUDA_OPS_FLOAT64    ? sizeof(double)
                              : dtype == CUDA_OPS_BFLOAT16 ? sizeof(uint16_t)
                                                           : sizeof(float);
        return second.defined() ? value_data : static_cast<const char *>(gate_data) + cols * bytes;
    }
};

Tensor gated_forward(const GatedFunction &f, const Tensor &gate, const std::optional<Tensor> &value)
{
    const cuda_ops_dtype dtype = check_dtype(f.op, "gate", gate);
    const c10::OptionalDeviceGuard guard(at::device_of(gate));
    const GatedInputs in(f.op, gate, value);
    Tensor output = in.empty_output();
    if (in.count() == 0)
        return output;
    if (gate.is_cuda())
        CUDA_OPS_LAUNCH(f.op, cuda_ops_gated_forward_cuda(output.data_ptr(), in.gate, in.value, in.rows, in.cols,
                                                          in.stride, f.function, dtype, current_stream(f.op)));
    else {
        const auto kernel = [&](void *to, const void *from_gate, const void *from_value, int64_t begin, int64_t end,
                                cuda_ops_dtype type) {
            return cuda_ops_gated_forward_cpu(to, from_gate, in.value_of(from_gate, from_value, type), in.cols,
                                              in.stride, begin, end, f.function, type);
        };
        if (dtype == CUDA_OPS_BFLOAT16)
            parallel_stored_elements(f.op, in.count(), dtype, kernel, writes(output), reads(in.first),
                                     reads(in.second));
        else
            parallel_rows(f.op, in.count(), in.row(1), ELEMENTWISE_GRAIN, dtype, kernel, writes(output, in.row(1)),
                          reads(in.first, in.row(2)), reads(in.second));
    }
    return output;
}

// The second gradient has no elements where the first is that of both halves.
std::tuple<Tensor, Tensor> gated_backward(const GatedFunction &f, const Tensor &grad_output, const Tensor &gate,
                                          const std::optional<Tensor> &value)
{
    const std::string name = std::string(f.op) + "_backward";
    const char *const op = name.c_str();
    const cuda_ops_dtype dtype = check_dtype(op, "gate", gate);
    const c10::OptionalDeviceGuard guard(at::device_of(gate));
    const GatedInputs in(op, gate, value);
    check_like(op, "grad_output", grad_output, "gate", gate);
    at::DimVector expected(gate.sizes().begin(), gate.sizes().end());
    if (!value)
        expected.back() = in.cols;
    TORCH_CHECK(grad_output.sizes() == at::IntArrayRef(expected), op,
                ": expected grad_output to have the shape of the output, ", at::IntArrayRef(expected), ", got ",
                grad_output.sizes());
    const Tensor g = value ? dense_like(grad_output, in.first) : grad_output.contiguous();
    Tensor grad_gate = empty_like_dense(in.first);
    Tensor grad_value = value ? empty_like_dense(in.second) : empty({0}, in.first.options());
    if (in.count() == 0)
        return {grad_gate, grad_value};
    [[maybe_unused]] void *const to_value =
        value ? grad_value.data_ptr() : static_cast<char *>(grad_gate.data_ptr()) + in.cols * g.element_size();
    if (gate.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_gated_backward_cuda(grad_gate.data_ptr(), to_value, g.const_data_ptr(), in.gate,
                                                         in.value, in.rows, in.cols, in.stride, f.function, dtype,
                                                         current_stream(op)));
    else {
        const auto kernel = [&](void *to_gate, void *to_its_value, const void *grad, const void *from_gate,
                                const void *from_value, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_gated_backward_cpu(to_gate, const_cast<void *>(in.value_of(to_gate, to_its_value, type)),
                                               grad, from_gate, in.value_of(from_gate, from_value, type), in.cols,
                                               in.stride, begin, end, f.function, type);
        };
        const Tensor to_other = value ? grad_value : Tensor();
        if (dtype == CUDA_OPS_BFLOAT16)
            parallel_stored_elements(op, in.count(), dtype, kernel, writes(grad_gate), writes(to_other), reads(g),
                                     reads(in.first), reads(in.second));
        else
            parallel_rows(op, in.count(), in.row(1), ELEMENTWISE_GRAIN, dtype, kernel, writes(grad_gate, in.row(2)),
                          writes(to_other), reads(g, in.row(1)), reads(in.first, in.row(2)), reads(in.second));
    }
    return {grad_gate, grad_value};
}

// Derivatives of the derivatives, composed of the gate's own ops: f(x), u f'(x), u v f''(x).
template <typename... Parameters>
struct GateOf {
    const GatedFunction f;
    std::tuple<Parameters...> parameters;

    template <typename... Tensors>
    Tensor call(const char *suffix, const Tensors &...tensors) const
    {
        const std::string name = std::string("cuda_ops::") + f.activation + suffix;
        return std::apply(
            [&](auto... p) {
                return registered_op<Tensor(const Tensors &..., Parameters...)>(name.c_str()).call(tensors..., p...);
            },
            parameters);
    }
    Tensor value(const Tensor &x) const
    {
        return call("_forward", x);
    }
    Tensor slope(const Tensor &u, const Tensor &x) const
    {
        return call("_backward", u, x);
    }
    Tensor second(const Tensor &u, const Tensor &v, const Tensor &x) const
    {
        return call("_backward_input", u, v, x);
    }
};

std::pair<Tensor, Tensor> gate_and_value(const Tensor &gate, const std::optional<Tensor> &value)
{
    if (value)
        return {gate, *value};
    const std::vector<Tensor> halves = gate.chunk(2, -1);
    return {halves[0], halves[1]};
}

// Of gated_backward, by gradients of its two results, for grad_output, gate and value; the wanted ones.
template <typename... Parameters>
std::vector<Tensor> gated_gradients(const GateOf<Parameters...> &f, const std::optional<Tensor> &grad_gate,
                                    const std::optional<Tensor> &grad_value, const Tensor &g, const Tensor &gate,
                                    const std::optional<Tensor> &value, const std::array<bool, 3> &wanted)
{
    const std::string name = std::string(f.f.op) + "_gradients";
    check_gated(name.c_str(), gate, value);
    if (grad_gate)
        check_like_gate(name.c_str(), "grad_gate", *grad_gate, gate);
    const auto [a, b] = gate_and_value(gate, value);
    std::optional<Tensor> u = grad_gate, w = grad_value;
    if (!value) {
        u.reset();
        w.reset();
        if (grad_gate) {
            const std::vector<Tensor> halves = grad_gate->chunk(2, -1);
            u = halves[0];
            w = halves[1];
        }
    }
    const auto sum = [](const Tensor &x, const Tensor &y) {
        return x.defined() && y.defined() ? x + y : x.defined() ? x : y;
    };
    const bool wants_gate = wanted[1], wants_halves = !value && wants_gate;
    Tensor of_g, of_a, of_b;
    if (wanted[0])
        of_g = sum(u ? f.slope(*u * b, a) : Tensor(), w ? *w * f.value(a) : Tensor());
    if (wants_gate)
        of_a = sum(u ? f.second(*u, g * b, a) : Tensor(), w ? f.slope(*w * g, a) : Tensor());
    if (wanted[2] || wants_halves)
        of_b = u ? f.slope(*u * g, a) : at::zeros_like(b);
    if (wants_halves)
        of_a = at::cat({of_a.defined() ? of_a : at::zeros_like(a), of_b}, -1);
    std::vector<Tensor> result;
    if (wanted[0])
        result.push_back(of_g.defined() ? of_g : at::zeros_like(g));
    if (wants_gate)
        result.push_back(of_a.defined() ? of_a : at::zeros_like(gate));
    if (wanted[2])
        result.push_back(of_b);
    return result;
}

// The tangent of the output by that of gate, or of both halves.
template <typename... Parameters>
Tensor gated_tangent(const GateOf<Parameters...> &f, const Tensor &tangent, const Tensor &gate,
                     const std::optional<Tensor> &value)
{
    const std::string name = std::string(f.f.op) + "_tangent";
    check_gated(name.c_str(), gate, value);
    check_like_gate(name.c_str(), "tangent", tangent, gate);
    const auto [a, b] = gate_and_value(gate, value);
    if (value)
        return f.slope(tangent * b, a);
    const std::vector<Tensor> t = tangent.chunk(2, -1);
    return f.slope(t[0] * b, a) + f.value(a) * t[1];
}

// Those of gated_backward's results by the tangent of gate, or of both halves; and by that of value.
template <typename... Parameters>
std::tuple<Tensor, Tensor> gated_backward_tangents(const GateOf<Parameters...> &f, const Tensor &tangent,
                                                   const Tensor &g, const Tensor &gate,
                                                   const std::optional<Tensor> &value)
{
    const std::string name = std::string(f.f.op) + "_backward_tangents";
    check_gated(name.c_str(), gate, value);
    check_like_gate(name.c_str(), "tangent", tangent, gate);
    const auto [a, b] = gate_and_value(gate, value);
    const auto [t, s] = gate_and_value(tangent, value); // the second is used without a value alone
    Tensor of_a = f.second(t, g * b, a), of_b = f.slope(t * g, a);
    if (value)
        return {of_a, of_b};
    of_a = of_a + f.slope(s * g, a);
    return {at::cat({of_a, of_b}, -1), at::empty({0}, g.options())};
}

// The ops of one of the two, to be registered.
template <auto function, typename... Parameters>
struct GatedOps {
    typedef std::optional<Tensor> Optional;

    static GateOf<Parameters...> gate_of(Parameters... parameters)
    {
        return {function(parameters...), {parameters...}};
    }
    static Tensor forward(const Tensor &gate, const Optional &value, Parameters... parameters)
    {
        return gated_forward(function(parameters...), gate, value);
    }
    static std::tuple<Tensor, Tensor> backward(const Tensor &grad_output, const Tensor &gate, const Optional &value,
                                               Parameters... parameters)
    {
        return gated_backward(function(parameters...), grad_output, gate, value);
    }
    static std::vector<Tensor> gradients(const Optional &grad_gate, const Optional &grad_value,
                                         const Tensor &grad_output, const Tensor &gate, const Optional &value,
                                         Parameters... parameters, std::array<bool, 3> wanted)
    {
        return gated_gradients(gate_of(parameters...), grad_gate, grad_value, grad_output, gate, value, wanted);
    }
    static Tensor tangent(const Tensor &tangent, const Tensor &gate, const Optional &value, Parameters... parameters)
    {
        return gated_tangent(gate_of(parameters...), tangent, gate, value);
    }
    static std::tuple<Tensor, Tensor> backward_tangents(const Tensor &tangent, const Tensor &grad_output,
                                                        const Tensor &gate, const Optional &value,
                                                        Parameters... parameters)
    {
        return gated_backward_tangents(gate_of(parameters...), tangent, grad_output, gate, value);
    }
    static Tensor backward_tangent_value(const Tensor &tangent, const Tensor &grad_output, const Tensor &gate,
                                         Parameters... parameters)
    {
        return gate_of(parameters...).slope(tangent * grad_output, gate);
    }
};

} // namespace

} // namespace cuda_ops

// The schemas and derivatives of one; `types` and `names` are those of the parameters.
#define GATED_OPS(library, Ops, name, types, names)                                                                    \
    do {                                                                                                               \
        library.def(name "_forward(Tensor gate, Tensor? value" types ") -> (Tensor output)");                          \
        library.def(name "_backward(Tensor grad_output, Tensor gate, Tensor? value" types                              \
                         ") -> (Tensor grad_gate, Tensor grad_value)");                                                \
        library.def(name "_gradients(Tensor? grad_gate, Tensor? grad_value, Tensor grad_output, Tensor gate, Tensor? " \
                         "value" types ", bool[3] wanted) -> Tensor[]",                                                \
                    Ops::gradients);                                                                                   \
        library.def(name "_tangent(Tensor tangent, Tensor gate, Tensor? value" types ") -> Tensor", Ops::tangent);     \
        library.def(name "_backward_tangents(Tensor tangent, Tensor grad_output, Tensor gate, Tensor? value" types     \
                         ") -> (Tensor, Tensor)",                                                                      \
                    Ops::backward_tangents);                                                                           \
        library.def(name "_backward_tangent_value(Tensor tangent, Tensor grad_output, Tensor gate" types               \
                         ") -> Tensor",                                                                                \
                    Ops::backward_tangent_value);                                                                      \
        CUDA_OPS_IMPLEMENT(library, name "_forward", Ops::forward);                                                    \
        CUDA_OPS_IMPLEMENT(library, name "_backward", Ops::backward);                                                  \
        CUDA_OPS_VMAP(library, name "_forward", "gate[1], value");                                                     \
        CUDA_OPS_DERIVATIVES(library, name "_forward",                                                                 \
                             {"gate, value: " name "_backward(grad_output, gate, value" names ")",                     \
                              "output <- " name "_tangent(tangent_gate, gate, value" names ")",                        \
                              "output <- " name "_forward(gate, tangent_value" names ")"});                            \
        CUDA_OPS_DERIVATIVES(                                                                                          \
            library, name "_backward",                                                                                 \
            {"grad_output, gate, value: " name                                                                         \
             "_gradients(grad_grad_gate, grad_grad_value, grad_output, gate, value" names ", wanted)",                 \
             "grad_gate, grad_value <- " name "_backward(tangent_grad_output, gate, value" names ")",                  \
             "grad_gate, grad_value <- " name "_backward_tangents(tangent_gate, grad_output, gate, value" names ")",   \
             "grad_gate <- " name "_backward_tangent_value(tangent_value, grad_output, gate" names ")"});              \
    } while (false)

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    typedef cuda_ops::GatedOps<cuda_ops::swiglu_function> Swiglu;
    typedef cuda_ops::GatedOps<cuda_ops::geglu_function, std::string_view> Geglu;
    GATED_OPS(library, Swiglu, "swiglu", "", "");
    GATED_OPS(library, Geglu, "geglu", ", str approximate", ", approximate");
}
#undef GATED_OPS
