// The losses of elements for PyTorch: checks, allocation and the choice of backend, in one place for all of them; then
// each with its schemas and derivatives.
#include "cuda_ops/pointwise_loss.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <string>
#include <vector>

#include "autograd.h"
#include "empty.h"
#include "loss.h"

namespace cuda_ops
{

namespace
{

typedef std::optional<Tensor> OptionalFactor;

// Which loss, what messages call it, and its parameter.
struct PointwiseLoss {
    const char *op;
    cuda_ops_pointwise_loss loss;
    double parameter;
};

PointwiseLoss mse_function(double)
{
    return {"mse_loss", CUDA_OPS_POINTWISE_LOSS_MSE, 0};
}

PointwiseLoss l1_function(double)
{
    return {"l1_loss", CUDA_OPS_POINTWISE_LOSS_L1, 0};
}

PointwiseLoss smooth_l1_function(double beta)
{
    TORCH_CHECK(beta >= 0, "smooth_l1_loss: expected beta to be at least 0, got ", beta);
    return {"smooth_l1_loss", beta == 0 ? CUDA_OPS_POINTWISE_LOSS_L1 : CUDA_OPS_POINTWISE_LOSS_SMOOTH_L1, beta};
}

PointwiseLoss huber_function(double delta)
{
    TORCH_CHECK(delta > 0, "huber_loss: expected delta to be above 0, got ", delta);
    return {"huber_loss", CUDA_OPS_POINTWISE_LOSS_HUBER, delta};
}

PointwiseLoss bce_function(double)
{
    return {"binary_cross_entropy_with_logits", CUDA_OPS_POINTWISE_LOSS_BCE_WITH_LOGITS, 0};
}

// The parameter says whether the target is a logarithm.
PointwiseLoss kl_function(double log_target)
{
    return {"kl_div", log_target == 0 ? CUDA_OPS_POINTWISE_LOSS_KL_DIV : CUDA_OPS_POINTWISE_LOSS_KL_DIV_OF_LOG, 0};
}

// A factor as the kernels read it, for an input that is contiguous; `kept` holds its memory.
cuda_ops_loss_factor factor_of(Tensor &kept, const char *op, const char *argument, const OptionalFactor &factor,
                               const Tensor &input)
{
    if (!factor)
        return {nullptr, 1, 1};
    check_like(op, argument, *factor, "input", input);
    TORCH_CHECK(at::is_expandable_to(factor->sizes(), input.sizes()), op, ": expected ", argument,
                " to be of a shape that broadcasts to that of input, ", input.sizes(), ", got ", factor->sizes());
    kept = factor->contiguous();
    // The dimensions from the first to the last that is not broadcast, if all between them are the input's.
    const int64_t missing = input.dim() - factor->dim();
    int64_t first = input.dim(), last = -1;
    for (int64_t d = missing; d < input.dim(); d++)
        if (factor->size(d - missing) != 1) {
            first = std::min(first, d);
            last = d;
        }
    cuda_ops_loss_factor result = {kept.const_data_ptr(), 1, 1};
    if (last < 0)
        return result;
    for (int64_t d = first; d <= last; d++) {
        if (factor->size(d - missing) != input.size(d)) {
            kept = factor->expand(input.sizes()).contiguous();
            return {kept.const_data_ptr(), 1, 0};
        }
        result.size *= input.size(d);
    }
    for (int64_t d = last + 1; d < input.dim(); d++)
        result.inner *= input.size(d);
    if (result.size * result.inner == input.numel())
        result.size = 0;
    return result;
}

// The arguments as the kernels read them.
struct LossInputs {
    cuda_ops_dtype dtype;
    Tensor x, t, kept_weight, kept_pos_weight;
    cuda_ops_loss_factors factors;

    LossInputs(const char *op, const Tensor &input, const Tensor &target, const OptionalFactor &weight,
               const OptionalFactor &pos_weight)
        : dtype(check_dtype(op, "input", input))
    {
        check_like(op, "target", target, "input", input);
        check_same_shape(op, "target", target, "input", input);
        const bool any = weight || pos_weight; // whose place is counted in the order of the elements
        x = any ? input.contiguous() : dense(input);
        t = any ? target.contiguous() : dense_like(target, x);
        factors = {factor_of(kept_weight, op, "weight", weight, x),
                   factor_of(kept_pos_weight, op, "pos_weight", pos_weight, x)};
    }
};

// Elements of one task of the CPU's threads, whatever their number.
constexpr int64_t LOSS_TASK = 16384;

Tensor pointwise_loss_forward(const PointwiseLoss &f, const Tensor &input, const Tensor &target,
                              const OptionalFactor &weight, const OptionalFactor &pos_weight, int64_t reduction_number)
{
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const LossInputs in(f.op, input, target, weight, pos_weight);
    const cuda_ops_reduction reduction = check_reduction(f.op, reduction_number);
    const bool each = reduction == CUDA_OPS_REDUCTION_NONE;
    const int64_t count = in.x.numel();
    Tensor loss = each ? empty_like_dense(in.x) : empty(at::IntArrayRef{}, in.x.options());
    if (count == 0) {
        if (!each)
            loss.fill_(reduction == CUDA_OPS_REDUCTION_MEAN ? std::numeric_limits<double>::quiet_NaN() : 0.0);
        return loss;
    }
    if (in.x.is_cuda()) {
        const Tensor workspace =
            empty_workspace(in.x, each ? 0 : CUDA_OPS_WORKSPACE_BYTES(cuda_ops_pointwise_loss_workspace_cuda(count)));
        CUDA_OPS_LAUNCH(f.op, cuda_ops_pointwise_loss_forward_cuda(
                                  loss.data_ptr(), workspace.data_ptr(), in.x.const_data_ptr(), in.t.const_data_ptr(),
                                  &in.factors, count, f.loss, f.parameter, reduction, in.dtype, current_stream(f.op)));
        return loss;
    }
    if (is_cpu_half(in.x) && (weight || pos_weight)) // as a whole, with the factors
        return in_float32(pointwise_loss_forward, f, in.x, in.t, weight, pos_weight, reduction_number)
            .to(in.x.scalar_type());
    const int64_t tasks = (count + LOSS_TASK - 1) / LOSS_TASK;
    std::vector<double> partials(each ? 0 : 2 * tasks);
    parallel_ranges(f.op, tasks, 2, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            double *const partial = each ? nullptr : &partials[2 * task];
            const cuda_ops_status status = call_rows(
                in.dtype, task * LOSS_TASK, std::min((task + 1) * LOSS_TASK, count),
                [&](void *to, const void *x, const void *t, int64_t first, int64_t last, cuda_ops_dtype type) {
                    return cuda_ops_pointwise_loss_forward_cpu(to, partial, x, t, &in.factors, first, last, f.loss,
                                                               f.parameter, type);
                },
                writes(each ? loss : Tensor()), reads(in.x), reads(in.t));
            if (status != CUDA_OPS_SUCCESS)
                return status;
        }
        return cuda_ops_status{CUDA_OPS_SUCCESS};
    });
    double number = 0; // of the elements, which the C API's second stage writes, in either dtype
    if (!each) {
        const Tensor sum = float32_like(loss);
        check_status(f.op, cuda_ops_loss_reduce_cpu(sum.data_ptr(), &number, partials.data(), tasks, reduction,
                                                    check_dtype(f.op, "loss", sum)));
        round_back(loss, sum);
    }
    return loss;
}

Tensor pointwise_loss_backward(const PointwiseLoss &f, const Tensor &grad_output, const Tensor &input,
                               const Tensor &target, const OptionalFactor &weight, const OptionalFactor &pos_weight,
                               int64_t reduction_number, bool by_target)
{
    const std::string name = std::string(f.op) + "_backward";
    const char *const op = name.c_str();
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const LossInputs in(op, input, target, weight, pos_weight);
    const cuda_ops_reduction reduction = check_reduction(op, reduction_number);
    const bool each = reduction == CUDA_OPS_REDUCTION_NONE;
    check_like(op, "grad_output", grad_output, "input", input);
    const at::IntArrayRef expected = each ? input.sizes() : at::IntArrayRef();
    TORCH_CHECK(grad_output.sizes() == expected, op, ": expected grad_output to have the shape of the loss, ", expected,
                ", got ", grad_output.sizes());
    const int64_t count = in.x.numel();
    const Tensor g = each ? dense_like(grad_output, in.x) : dense(grad_output);
    Tensor gradient = empty_like_dense(in.x);
    if (count == 0)
        return gradient;
    if (in.x.is_cuda()) {
        CUDA_OPS_LAUNCH(op, cuda_ops_pointwise_loss_backward_cuda(gradient.data_ptr(), g.const_data_ptr(),
                                                                  in.x.const_data_ptr(), in.t.const_data_ptr(),
                                                                  &in.factors, count, f.loss, f.parameter, by_target,
                                                                  reduction, in.dtype, current_stream(op)));
        return gradient;
    }
    if (is_cpu_half(in.x) && (weight || pos_weight))
        return in_float32(pointwise_loss_backward, f, g, in.x, in.t, weight, pos_weight, reduction_number, by_target)
            .to(in.x.scalar_type());
    const Tensor shared = each ? Tensor() : widened(g); // by all elements
    parallel_elements(
        op, count, in.dtype,
        [&](void *to, const void *grad, const void *x, const void *t, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_pointwise_loss_backward_cpu(to, each ? grad : shared.const_data_ptr(), x, t, &in.factors,
                                                        count, begin, end, f.loss, f.parameter, by_target, reduction,
                                                        type);
        },
        writes(gradient), reads(each ? g : Tensor()), reads(in.x), reads(in.t));
    return gradient;
}

// The second derivatives, of PyTorch's ops, which are differentiable further; by input, by target, or by one and the
// other.
Tensor second_derivative(const PointwiseLoss &f, const Tensor &x, const Tensor &t, const OptionalFactor &pos_weight,
                         bool of_target, bool by_target)
{
    const double sign = of_target == by_target ? 1 : -1; // of a distance's
    const bool both_input = !of_target && !by_target, both_target = of_target && by_target;
    switch (f.loss) {
    case CUDA_OPS_POINTWISE_LOSS_MSE:
        return at::full_like(x, 2 * sign);
    case CUDA_OPS_POINTWISE_LOSS_L1:
        return at::zeros_like(x);
    case CUDA_OPS_POINTWISE_LOSS_SMOOTH_L1:
        return (at::abs(x - t) < f.parameter).to(x.scalar_type()) * (sign / f.parameter);
    case CUDA_OPS_POINTWISE_LOSS_HUBER:
        return (at::abs(x - t) < f.parameter).to(x.scalar_type()) * sign;
    case CUDA_OPS_POINTWISE_LOSS_BCE_WITH_LOGITS: {
        const Tensor other = at::sigmoid(-x);
        if (both_input)
            return (pos_weight ? (*pos_weight - 1) * t + 1 : at::full_like(t, 1)) * other * at::sigmoid(x);
        if (both_target)
            return at::zeros_like(x);
        return pos_weight ? -(*pos_weight * other + at::sigmoid(x)) : at::full_like(x, -1);
    }
    case CUDA_OPS_POINTWISE_LOSS_KL_DIV:
        return both_input ? at::zeros_like(x) : both_target ? 1 / t : at::full_like(x, -1);
    default: // the divergence of a logarithm
        return both_input ? at::zeros_like(x) : both_target ? at::exp(t) * (t - x + 2) : -at::exp(t);
    }
}

// The ops of one of these, to be registered; `name`: its name for the dispatcher.
template <auto function>
struct LossOps {
    static Tensor forward(const Tensor &input, const Tensor &target, const OptionalFactor &weight,
                          const OptionalFactor &pos_weight, int64_t reduction, double parameter)
    {
        return pointwise_loss_forward(function(parameter), input, target, weight, pos_weight, reduction);
    }
    static Tensor backward(const Tensor &grad_output, const Tensor &input, const Tensor &target,
                           const OptionalFactor &weight, const OptionalFactor &pos_weight, int64_t reduction,
                           double parameter, bool by_target)
    {
        return pointwise_loss_backward(function(parameter), grad_output, input, target, weight, pos_weight, reduction,
                                       by_target);
    }
    // The loss's change with `tangent` of input or target: backward's products, reduced as the loss is.
    static Tensor tangent(const Tensor &tangent, const Tensor &input, const Tensor &target,
                          const OptionalFactor &weight, const OptionalFactor &pos_weight, int64_t reduction,
                          double parameter, bool by_target)
    {
        const std::string name = std::string("cuda_ops::") + function(parameter).op + "_backward";
        const auto op = registered_op<Tensor(const Tensor &, const Tensor &, const Tensor &, const OptionalFactor &,
                                             const OptionalFactor &, int64_t, double, bool)>(name.c_str());
        const Tensor each =
            op.call(tangent, input, target, weight, pos_weight, CUDA_OPS_REDUCTION_NONE, parameter, by_target);
        if (reduction == CUDA_OPS_REDUCTION_NONE)
            return each;
        const Tensor sum = each.sum();
        // Of a mean over nothing the gradient has no part in anything: 0, as of PyTorch's backward.
        return reduction == CUDA_OPS_REDUCTION_MEAN ? sum.div(at::Scalar(input.sym_numel().max(1))) : sum;
    }
    static Tensor second(const Tensor &grad, const Tensor &grad_output, const Tensor &input, const Tensor &target,
                         const OptionalFactor &weight, const OptionalFactor &pos_weight, int64_t reduction,
                         double parameter, bool of_target, bool by_target)
    {
        Tensor result = grad * grad_output *
                        second_derivative(function(parameter), input, target, pos_weight, of_target, by_target);
        if (weight)
            result = result * *weight;
        return reduction == CUDA_OPS_REDUCTION_MEAN ? result.div(at::Scalar(input.sym_numel().max(1))) : result;
    }
};

} // namespace

} // namespace cuda_ops

#define LOSS_SOURCES "input, target, weight, pos_weight, reduction, parameter"
#define LOSS_ARGUMENTS "Tensor input, Tensor target, Tensor? weight, Tensor? pos_weight, int reduction, float parameter"
#define LOSS_OPS(library, Ops, name)                                                                                   \
    do {                                                                                                               \
        library.def(name "_forward(" LOSS_ARGUMENTS ") -> (Tensor output)");                                           \
        library.def(name "_backward(Tensor grad_output, " LOSS_ARGUMENTS ", bool by_target) -> (Tensor gradient)");    \
        library.def(name "_tangent(Tensor tangent, " LOSS_ARGUMENTS ", bool by_target) -> Tensor", Ops::tangent);      \
        library.def(name "_second(Tensor grad, Tensor grad_output, " LOSS_ARGUMENTS                                    \
                         ", bool of_target, bool by_target) -> Tensor",                                                \
                    Ops::second);                                                                                      \
        CUDA_OPS_IMPLEMENT(library, name "_forward", Ops::forward);                                                    \
        CUDA_OPS_IMPLEMENT(library, name "_backward", Ops::backward);                                                  \
        CUDA_OPS_AUTOCAST(library, name "_forward", FLOAT32);                                                          \
        CUDA_OPS_DERIVATIVES(library, name "_forward",                                                                 \
                             {"input: " name "_backward(grad_output, " LOSS_SOURCES ", false)",                        \
                              "target: " name "_backward(grad_output, " LOSS_SOURCES ", true)",                        \
                              "weight, pos_weight: not differentiable",                                                \
                              "output <- " name "_tangent(tangent_input, " LOSS_SOURCES ", false)",                    \
                              "output <- " name "_tangent(tangent_target, " LOSS_SOURCES ", true)"});                  \
        CUDA_OPS_DERIVATIVES(                                                                                          \
            library, name "_backward",                                                                                 \
            {"grad_output: " name "_tangent(grad_gradient, " LOSS_SOURCES ", by_target)",                              \
             "input: " name "_second(grad_gradient, grad_output, " LOSS_SOURCES ", by_target, false)",                 \
             "target: " name "_second(grad_gradient, grad_output, " LOSS_SOURCES ", by_target, true)",                 \
             "weight, pos_weight: not differentiable",                                                                 \
             "gradient <- " name "_backward(tangent_grad_output, " LOSS_SOURCES ", by_target)",                        \
             "gradient <- " name "_second(tangent_input, grad_output, " LOSS_SOURCES ", by_target, false)",            \
             "gradient <- " name "_second(tangent_target, grad_output, " LOSS_SOURCES ", by_target, true)"});          \
    } while (false)

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    using namespace cuda_ops;
    LOSS_OPS(library, LossOps<mse_function>, "mse_loss");
    LOSS_OPS(library, LossOps<l1_function>, "l1_loss");
    LOSS_OPS(library, LossOps<smooth_l1_function>, "smooth_l1_loss");
    LOSS_OPS(library, LossOps<huber_function>, "huber_loss");
    LOSS_OPS(library, LossOps<bce_function>, "binary_cross_entropy_with_logits");
    LOSS_OPS(library, LossOps<kl_function>, "kl_div");
}
#undef LOSS_OPS
#undef LOSS_ARGUMENTS
#undef LOSS_SOURCES
