// The activation functions for PyTorch: checks, allocation and the choice of backend, in one place for all of them; then
// each with its schemas and derivatives.
#include "cuda_ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/le.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <string>
#include <string_view>

#include "autograd.h"
#include "checks.h"
#include "elements.h"
#include "empty.h"
#include "vmap.h"

namespace cuda_ops
{

namespace
{

// Which function, what messages call it, and its parameters as activation.h lists them.
struct Activation {
    const char *op;
    cuda_ops_activation function;
    double first = 0, second = 0;
};

// hardtanh's bounds as the dtype has them, so that the output tells, by being one of them, that the input was beyond.
Activation as_in(const Activation &f, cuda_ops_dtype dtype)
{
    if (f.function != CUDA_OPS_ACTIVATION_HARDTANH)
        return f;
    const auto rounded = [dtype](double value) -> double {
        const float single = static_cast<float>(value);
        return dtype == CUDA_OPS_FLOAT16    ? static_cast<float>(at::Half(single))
               : dtype == CUDA_OPS_BFLOAT16 ? static_cast<float>(at::BFloat16(single))
               : dtype == CUDA_OPS_FLOAT32  ? single
                                            : value;
    };
    return {f.op, f.function, rounded(f.first), rounded(f.second)};
}

// output may be x itself.
void launch_activation(const Activation &activation, const Tensor &output, const Tensor &x, cuda_ops_dtype dtype)
{
    const Activation f = as_in(activation, dtype);
    if (x.numel() == 0)
        return;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(f.op,
                        cuda_ops_activation_forward_cuda(output.data_ptr(), x.const_data_ptr(), x.numel(), f.function,
                                                         f.first, f.second, dtype, current_stream(f.op)));
    else
        parallel_stored_elements(
            f.op, x.numel(), dtype,
            [&](void *to, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_activation_forward_cpu(to, from, begin, end, f.function, f.first, f.second, type);
            },
            writes(output), reads(x));
}

Tensor activation_forward(const Activation &f, const Tensor &input)
{
    const cuda_ops_dtype dtype = check_dtype(f.op, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    Tensor output = empty_like_dense(x);
    launch_activation(f, output, x, dtype);
    return output;
}

void activation_inplace(const Activation &f, Tensor &input)
{
    const cuda_ops_dtype dtype = check_dtype(f.op, "input", input);
    check_written(f.op, "input", input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    launch_activation(f, x, x, dtype);
    // Its elements did not lie in one block, or as their negatives, and x is a copy.
    if (!x.is_same(input))
        input.copy_(x);
    // What saved the old values for its backward is to notice.
    input.unsafeGetTensorImpl()->bump_version();
}

// saved_name: what the schema calls it, input or output.
Tensor activation_backward(const Activation &activation, const Tensor &grad_output, const Tensor &saved,
                           const char *saved_name)
{
    const std::string name = std::string(activation.op) + "_backward";
    const char *const op = name.c_str();
    const cuda_ops_dtype dtype = check_dtype(op, saved_name, saved);
    const Activation f = as_in(activation, dtype);
    check_like(op, "grad_output", grad_output, saved_name, saved);
    check_same_shape(op, "grad_output", grad_output, saved_name, saved);
    const c10::OptionalDeviceGuard guard(at::device_of(saved));
    const Tensor x = dense(saved), g = dense_like(grad_output, x);
    Tensor grad_input = empty_like_dense(x);
    if (x.numel() == 0)
        return grad_input;
    if (x.is_cuda())
        CUDA_OPS_LAUNCH(op, cuda_ops_activation_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(),
                                                              x.const_data_ptr(), x.numel(), f.function, f.first,
                                                              f.second, dtype, current_stream(op)));
    else
        parallel_stored_elements(
            op, x.numel(), dtype,
            [&](void *to, const void *grad, const void *from, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_activation_backward_cpu(to, grad, from, begin, end, f.function, f.first, f.second,
                                                        type);
            },
            writes(grad_input), reads(g), reads(x));
    return grad_input;
}

// Each function as an Activation, of the parameters that its schemas have.

Activation gelu_activation(std::string_view approximate)
{
    TORCH_CHECK(approximate == "none" || approximate == "tanh",
                "gelu: expected approximate to be 'none' or 'tanh', got '", approximate, "'");
    return {"gelu", approximate == "tanh" ? CUDA_OPS_ACTIVATION_GELU_TANH : CUDA_OPS_ACTIVATION_GELU};
}

Activation silu_activation()
{
    return {"silu", CUDA_OPS_ACTIVATION_SILU};
}

Activation sigmoid_activation()
{
    return {"sigmoid", CUDA_OPS_ACTIVATION_SIGMOID};
}

Activation tanh_activation()
{
    return {"tanh", CUDA_OPS_ACTIVATION_TANH};
}

Activation elu_activation(double alpha)
{
    return {"elu", CUDA_OPS_ACTIVATION_ELU, alpha};
}

// By its output, which tells the sign of the input only if alpha is not negative; likewise leaky_relu.
Activation elu_of_output(double alpha)
{
    TORCH_CHECK(alpha >= 0, "elu: expected alpha to be at least 0 in place, where a gradient is wanted, got ", alpha);
    return {"elu", CUDA_OPS_ACTIVATION_ELU_OUTPUT, alpha};
}

Activation leaky_relu_activation(double negative_slope)
{
    return {"leaky_relu", CUDA_OPS_ACTIVATION_LEAKY_RELU, negative_slope};
}

Activation leaky_relu_of_output(double negative_slope)
{
    TORCH_CHECK(negative_slope >= 0,
                "leaky_relu: expected negative_slope to be at least 0 in place, where a gradient is wanted, got ",
                negative_slope);
    return leaky_relu_activation(negative_slope);
}

Activation softplus_activation(double beta, double threshold)
{
    return {"softplus", CUDA_OPS_ACTIVATION_SOFTPLUS, beta, threshold};
}

Activation hardtanh_activation(double min_val, double max_val)
{
    return {"hardtanh", CUDA_OPS_ACTIVATION_HARDTANH, min_val, max_val};
}

Activation relu6_activation()
{
    return {"relu6", CUDA_OPS_ACTIVATION_HARDTANH, 0, 6};
}

Activation hardsigmoid_activation()
{
    return {"hardsigmoid", CUDA_OPS_ACTIVATION_HARDSIGMOID};
}

Activation hardswish_activation()
{
    return {"hardswish", CUDA_OPS_ACTIVATION_HARDSWISH};
}

Activation mish_activation()
{
    return {"mish", CUDA_OPS_ACTIVATION_MISH};
}

// The ops of one of these, to be registered.
template <auto function, typename... Parameters>
struct Ops {
    static Tensor forward(const Tensor &input, Parameters... parameters)
    {
        return activation_forward(function(parameters...), input);
    }
    static void inplace(Tensor &input, Parameters... parameters)
    {
        activation_inplace(function(parameters...), input);
    }
    static Tensor backward(const Tensor &grad_output, const Tensor &input, Parameters... parameters)
    {
        return activation_backward(function(parameters...), grad_output, input, "input");
    }
    static Tensor backward_by_output(const Tensor &grad_output, const Tensor &output, Parameters... parameters)
    {
        return activation_backward(function(parameters...), grad_output, output, "output");
    }
};

// Second derivatives, for <name>_backward_<saved>(grad, grad_output, saved), grad * grad_output * second(saved). They are
// composed of PyTorch's ops, which are differentiable further; of near numbers no difference is taken here either.

Tensor gelu_second(const Tensor &input, std::string_view approximate)
{
    // Beyond, it is 0 in every dtype, and powers of what is there would be infinities times 0.
    const Tensor x = at::clamp(input, -40, 40);
    if (gelu_activation(approximate).function == CUDA_OPS_ACTIVATION_GELU)
        return at::exp(-0.5 * x * x) * (2 - x * x) * 0.39894228040143267794;
    // Of x s(z), z = a x + b x^3: s' (2 z' + x z'' + x z'^2 (1 - 2 s)).
    const double a = 1.59576912160573071176, b = 0.07135481627260024627;
    const Tensor square = x * x, z = x * (a + b * square), slope = a + 3 * b * square;
    const Tensor s = at::sigmoid(z), other = at::sigmoid(-z);
    return s * other * (2 * slope + 6 * b * square + x * slope * slope * (other - s));
}

Tensor silu_second(const Tensor &x)
{
    const Tensor s = at::sigmoid(x), other = at::sigmoid(-x);
    return s * other * (2 + x * (other - s));
}

Tensor sigmoid_second(const Tensor &output)
{
    return 1 - 2 * output;
}

Tensor tanh_second(const Tensor &output)
{
    return -2 * output;
}

Tensor elu_second(const Tensor &x, double alpha)
{
    return at::where(x < 0, alpha * at::exp(at::clamp_max(x, 0)), at::zeros_like(x));
}

Tensor elu_second_of_output(const Tensor &output, double)
{
    return at::lt(output, 0).to(output.scalar_type());
}

Tensor softplus_second(const Tensor &x, double beta, double threshold)
{
    const Tensor z = x * beta;
    return at::where(z > threshold, at::zeros_like(x), beta * at::sigmoid(z) * at::sigmoid(-z));
}

Tensor hardswish_second(const Tensor &x)
{
    return at::lt(at::abs(x), 3).to(x.scalar_type()) * (1.0 / 3);
}

// Of x t, t = tanh(log(1 + e^x)), by s = sigmoid(x) and o = sigmoid(-x): t = s (1 + o) / (1 + o^2), and
// 1 - t^2 = 4 o^2 / (1 + o^2)^2.
Tensor mish_second(const Tensor &x)
{
    const Tensor s = at::sigmoid(x), o = at::sigmoid(-x), sum = 1 + o * o;
    const Tensor t = s * (1 + o) / sum;
    return 4 * o * o / (sum * sum) * s * (2 + x * (o - 2 * t * s));
}

template <auto second, typename... Parameters>
Tensor backward_saved(const Tensor &grad, const Tensor &grad_output, const Tensor &saved, Parameters... parameters)
{
    if (saved.scalar_type() == at::kHalf || saved.scalar_type() == at::kBFloat16) { // rounded once, as by kernels
        const Tensor product = grad.to(at::kFloat) * grad_output.to(at::kFloat);
        return (product * second(saved.to(at::kFloat), parameters...)).to(saved.scalar_type());
    }
    return grad * grad_output * second(saved, parameters...);
}

} // namespace

} // namespace cuda_ops

// The derivatives of <name>_forward by <name>_backward(grad_output, saved, parameters), and those of that. It is linear
// in grad_output, whose gradient is the same product again; LINEAR_BACKWARD where that is all,
// since the second derivative is 0 wherever there is one.
#define FORWARD_DERIVATIVES(library, name, saved, parameters)                                                          \
    CUDA_OPS_DERIVATIVES(library, name "_forward",                                                                     \
                         {"input: " name "_backward(grad_output, " saved parameters ")",                               \
                          "output <- " name "_backward(tangent_input, " saved parameters ")"})
#define LINEAR_BACKWARD(library, name, saved, parameters)                                                              \
    CUDA_OPS_DERIVATIVES(library, name,                                                                                \
                         {"grad_output: " name "(grad_grad_input, " saved parameters ")",                              \
                          "grad_input <- " name "(tangent_grad_output, " saved parameters ")"})
#define BACKWARD_DERIVATIVES(library, name, saved, parameters)                                                         \
    CUDA_OPS_DERIVATIVES(library, name,                                                                                \
                         {"grad_output: " name "(grad_grad_input, " saved parameters ")",                              \
                          saved ": " name "_" saved "(grad_grad_input, grad_output, " saved parameters ")",            \
                          "grad_input <- " name "(tangent_grad_output, " saved parameters ")",                         \
                          "grad_input <- " name "_" saved "(tangent_" saved ", grad_output, " saved parameters ")"})

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<gelu_activation, std::string_view> Gelu;
    library.def("gelu_forward(Tensor input, str approximate) -> (Tensor output)");
    library.def("gelu_backward(Tensor grad_output, Tensor input, str approximate) -> (Tensor grad_input)");
    library.def("gelu_backward_input(Tensor grad, Tensor grad_output, Tensor input, str approximate) -> Tensor",
                backward_saved<gelu_second, std::string_view>);
    CUDA_OPS_IMPLEMENT(library, "gelu_forward", Gelu::forward);
    CUDA_OPS_VMAP(library, "gelu_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "gelu_backward", Gelu::backward);
    CUDA_OPS_VMAP(library, "gelu_backward", "grad_output, input");
    FORWARD_DERIVATIVES(library, "gelu", "input", ", approximate");
    BACKWARD_DERIVATIVES(library, "gelu_backward", "input", ", approximate");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<silu_activation> Silu;
    library.def("silu_forward(Tensor input) -> (Tensor output)");
    library.def("silu_inplace(Tensor(a!) input) -> ()");
    library.def("silu_backward(Tensor grad_output, Tensor input) -> (Tensor grad_input)");
    library.def("silu_backward_input(Tensor grad, Tensor grad_output, Tensor input) -> Tensor",
                backward_saved<silu_second>);
    CUDA_OPS_IMPLEMENT(library, "silu_forward", Silu::forward);
    CUDA_OPS_VMAP(library, "silu_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "silu_inplace", Silu::inplace);
    CUDA_OPS_VMAP(library, "silu_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "silu_inplace");
    CUDA_OPS_IMPLEMENT(library, "silu_backward", Silu::backward);
    CUDA_OPS_VMAP(library, "silu_backward", "grad_output, input");
    FORWARD_DERIVATIVES(library, "silu", "input", "");
    CUDA_OPS_DERIVATIVES(library, "silu_inplace", {"input: silu_backward(grad_output, input)"});
    BACKWARD_DERIVATIVES(library, "silu_backward", "input", "");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<sigmoid_activation> Sigmoid;
    library.def("sigmoid_forward(Tensor input) -> (Tensor output)");
    library.def("sigmoid_backward(Tensor grad_output, Tensor output) -> (Tensor grad_input)");
    library.def("sigmoid_backward_output(Tensor grad, Tensor grad_output, Tensor output) -> Tensor",
                backward_saved<sigmoid_second>);
    CUDA_OPS_IMPLEMENT(library, "sigmoid_forward", Sigmoid::forward);
    CUDA_OPS_VMAP(library, "sigmoid_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "sigmoid_backward", Sigmoid::backward_by_output);
    CUDA_OPS_VMAP(library, "sigmoid_backward", "grad_output, output");
    FORWARD_DERIVATIVES(library, "sigmoid", "output", "");
    BACKWARD_DERIVATIVES(library, "sigmoid_backward", "output", "");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<tanh_activation> Tanh;
    library.def("tanh_forward(Tensor input) -> (Tensor output)");
    library.def("tanh_backward(Tensor grad_output, Tensor output) -> (Tensor grad_input)");
    library.def("tanh_backward_output(Tensor grad, Tensor grad_output, Tensor output) -> Tensor",
                backward_saved<tanh_second>);
    CUDA_OPS_IMPLEMENT(library, "tanh_forward", Tanh::forward);
    CUDA_OPS_VMAP(library, "tanh_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "tanh_backward", Tanh::backward_by_output);
    CUDA_OPS_VMAP(library, "tanh_backward", "grad_output, output");
    FORWARD_DERIVATIVES(library, "tanh", "output", "");
    BACKWARD_DERIVATIVES(library, "tanh_backward", "output", "");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<elu_activation, double> Elu;
    library.def("elu_forward(Tensor input, float alpha) -> (Tensor output)");
    library.def("elu_inplace(Tensor(a!) input, float alpha) -> ()");
    library.def("elu_backward(Tensor grad_output, Tensor input, float alpha) -> (Tensor grad_input)");
    library.def("elu_inplace_backward(Tensor grad_output, Tensor output, float alpha) -> (Tensor grad_input)");
    library.def("elu_backward_input(Tensor grad, Tensor grad_output, Tensor input, float alpha) -> Tensor",
                backward_saved<elu_second, double>);
    library.def("elu_inplace_backward_output(Tensor grad, Tensor grad_output, Tensor output, float alpha) -> Tensor",
                backward_saved<elu_second_of_output, double>);
    CUDA_OPS_IMPLEMENT(library, "elu_forward", Elu::forward);
    CUDA_OPS_VMAP(library, "elu_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "elu_inplace", Elu::inplace);
    CUDA_OPS_VMAP(library, "elu_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "elu_inplace");
    CUDA_OPS_IMPLEMENT(library, "elu_backward", Elu::backward);
    CUDA_OPS_VMAP(library, "elu_backward", "grad_output, input");
    typedef Ops<elu_of_output, double> EluOfOutput;
    CUDA_OPS_IMPLEMENT(library, "elu_inplace_backward", EluOfOutput::backward_by_output);
    CUDA_OPS_VMAP(library, "elu_inplace_backward", "grad_output, output");
    FORWARD_DERIVATIVES(library, "elu", "input", ", alpha");
    CUDA_OPS_DERIVATIVES(library, "elu_inplace", {"input: elu_inplace_backward(grad_output, output, alpha)"});
    BACKWARD_DERIVATIVES(library, "elu_backward", "input", ", alpha");
    BACKWARD_DERIVATIVES(library, "elu_inplace_backward", "output", ", alpha");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<leaky_relu_activation, double> LeakyRelu;
    library.def("leaky_relu_forward(Tensor input, float negative_slope) -> (Tensor output)");
    library.def("leaky_relu_inplace(Tensor(a!) input, float negative_slope) -> ()");
    library.def("leaky_relu_backward(Tensor grad_output, Tensor input, float negative_slope) -> (Tensor grad_input)");
    library.def(
        "leaky_relu_inplace_backward(Tensor grad_output, Tensor output, float negative_slope) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "leaky_relu_forward", LeakyRelu::forward);
    CUDA_OPS_VMAP(library, "leaky_relu_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "leaky_relu_inplace", LeakyRelu::inplace);
    CUDA_OPS_VMAP(library, "leaky_relu_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "leaky_relu_inplace");
    CUDA_OPS_IMPLEMENT(library, "leaky_relu_backward", LeakyRelu::backward);
    CUDA_OPS_VMAP(library, "leaky_relu_backward", "grad_output, input");
    typedef Ops<leaky_relu_of_output, double> LeakyReluOfOutput;
    CUDA_OPS_IMPLEMENT(library, "leaky_relu_inplace_backward", LeakyReluOfOutput::backward_by_output);
    CUDA_OPS_VMAP(library, "leaky_relu_inplace_backward", "grad_output, output");
    FORWARD_DERIVATIVES(library, "leaky_relu", "input", ", negative_slope");
    CUDA_OPS_DERIVATIVES(library, "leaky_relu_inplace",
                         {"input: leaky_relu_inplace_backward(grad_output, output, negative_slope)"});
    LINEAR_BACKWARD(library, "leaky_relu_backward", "input", ", negative_slope");
    LINEAR_BACKWARD(library, "leaky_relu_inplace_backward", "output", ", negative_slope");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<softplus_activation, double, double> Softplus;
    library.def("softplus_forward(Tensor input, float beta, float threshold) -> (Tensor output)");
    library.def(
        "softplus_backward(Tensor grad_output, Tensor input, float beta, float threshold) -> (Tensor grad_input)");
    library.def(
        "softplus_backward_input(Tensor grad, Tensor grad_output, Tensor input, float beta, float threshold) -> Tensor",
        backward_saved<softplus_second, double, double>);
    CUDA_OPS_IMPLEMENT(library, "softplus_forward", Softplus::forward);
    CUDA_OPS_VMAP(library, "softplus_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "softplus_backward", Softplus::backward);
    CUDA_OPS_VMAP(library, "softplus_backward", "grad_output, input");
    CUDA_OPS_AUTOCAST(library, "softplus_forward", FLOAT32_ON_CUDA);
    FORWARD_DERIVATIVES(library, "softplus", "input", ", beta, threshold");
    BACKWARD_DERIVATIVES(library, "softplus_backward", "input", ", beta, threshold");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<hardtanh_activation, double, double> Hardtanh;
    library.def("hardtanh_forward(Tensor input, float min_val, float max_val) -> (Tensor output)");
    library.def("hardtanh_inplace(Tensor(a!) input, float min_val, float max_val) -> ()");
    library.def(
        "hardtanh_backward(Tensor grad_output, Tensor output, float min_val, float max_val) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "hardtanh_forward", Hardtanh::forward);
    CUDA_OPS_VMAP(library, "hardtanh_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "hardtanh_inplace", Hardtanh::inplace);
    CUDA_OPS_VMAP(library, "hardtanh_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "hardtanh_inplace");
    CUDA_OPS_IMPLEMENT(library, "hardtanh_backward", Hardtanh::backward_by_output);
    CUDA_OPS_VMAP(library, "hardtanh_backward", "grad_output, output");
    FORWARD_DERIVATIVES(library, "hardtanh", "output", ", min_val, max_val");
    CUDA_OPS_DERIVATIVES(library, "hardtanh_inplace",
                         {"input: hardtanh_backward(grad_output, output, min_val, max_val)"});
    LINEAR_BACKWARD(library, "hardtanh_backward", "output", ", min_val, max_val");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<relu6_activation> Relu6;
    library.def("relu6_forward(Tensor input) -> (Tensor output)");
    library.def("relu6_inplace(Tensor(a!) input) -> ()");
    library.def("relu6_backward(Tensor grad_output, Tensor output) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "relu6_forward", Relu6::forward);
    CUDA_OPS_VMAP(library, "relu6_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "relu6_inplace", Relu6::inplace);
    CUDA_OPS_VMAP(library, "relu6_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "relu6_inplace");
    CUDA_OPS_IMPLEMENT(library, "relu6_backward", Relu6::backward_by_output);
    CUDA_OPS_VMAP(library, "relu6_backward", "grad_output, output");
    FORWARD_DERIVATIVES(library, "relu6", "output", "");
    CUDA_OPS_DERIVATIVES(library, "relu6_inplace", {"input: relu6_backward(grad_output, output)"});
    LINEAR_BACKWARD(library, "relu6_backward", "output", "");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<hardsigmoid_activation> Hardsigmoid;
    library.def("hardsigmoid_forward(Tensor input) -> (Tensor output)");
    library.def("hardsigmoid_inplace(Tensor(a!) input) -> ()");
    library.def("hardsigmoid_backward(Tensor grad_output, Tensor input) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "hardsigmoid_forward", Hardsigmoid::forward);
    CUDA_OPS_VMAP(library, "hardsigmoid_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "hardsigmoid_inplace", Hardsigmoid::inplace);
    CUDA_OPS_VMAP(library, "hardsigmoid_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "hardsigmoid_inplace");
    CUDA_OPS_IMPLEMENT(library, "hardsigmoid_backward", Hardsigmoid::backward);
    CUDA_OPS_VMAP(library, "hardsigmoid_backward", "grad_output, input");
    FORWARD_DERIVATIVES(library, "hardsigmoid", "input", "");
    CUDA_OPS_DERIVATIVES(library, "hardsigmoid_inplace", {"input: hardsigmoid_backward(grad_output, input)"});
    LINEAR_BACKWARD(library, "hardsigmoid_backward", "input", "");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<hardswish_activation> Hardswish;
    library.def("hardswish_forward(Tensor input) -> (Tensor output)");
    library.def("hardswish_inplace(Tensor(a!) input) -> ()");
    library.def("hardswish_backward(Tensor grad_output, Tensor input) -> (Tensor grad_input)");
    library.def("hardswish_backward_input(Tensor grad, Tensor grad_output, Tensor input) -> Tensor",
                backward_saved<hardswish_second>);
    CUDA_OPS_IMPLEMENT(library, "hardswish_forward", Hardswish::forward);
    CUDA_OPS_VMAP(library, "hardswish_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "hardswish_inplace", Hardswish::inplace);
    CUDA_OPS_VMAP(library, "hardswish_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "hardswish_inplace");
    CUDA_OPS_IMPLEMENT(library, "hardswish_backward", Hardswish::backward);
    CUDA_OPS_VMAP(library, "hardswish_backward", "grad_output, input");
    FORWARD_DERIVATIVES(library, "hardswish", "input", "");
    CUDA_OPS_DERIVATIVES(library, "hardswish_inplace", {"input: hardswish_backward(grad_output, input)"});
    BACKWARD_DERIVATIVES(library, "hardswish_backward", "input", "");
}

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    typedef Ops<mish_activation> Mish;
    library.def("mish_forward(Tensor input) -> (Tensor output)");
    library.def("mish_inplace(Tensor(a!) input) -> ()");
    library.def("mish_backward(Tensor grad_output, Tensor input) -> (Tensor grad_input)");
    library.def("mish_backward_input(Tensor grad, Tensor grad_output, Tensor input) -> Tensor",
                backward_saved<mish_second>);
    CUDA_OPS_IMPLEMENT(library, "mish_forward", Mish::forward);
    CUDA_OPS_VMAP(library, "mish_forward", "input");
    CUDA_OPS_IMPLEMENT(library, "mish_inplace", Mish::inplace);
    CUDA_OPS_VMAP(library, "mish_inplace", "input");
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "mish_inplace");
    CUDA_OPS_IMPLEMENT(library, "mish_backward", Mish::backward);
    CUDA_OPS_VMAP(library, "mish_backward", "grad_output, input");
    FORWARD_DERIVATIVES(library, "mish", "input", "");
    CUDA_OPS_DERIVATIVES(library, "mish_inplace", {"input: mish_backward(grad_output, input)"});
    BACKWARD_DERIVATIVES(library, "mish_backward", "input", "");
}

#undef FORWARD_DERIVATIVES
#undef LINEAR_BACKWARD
#undef BACKWARD_DERIVATIVES
