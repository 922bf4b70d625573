// layer_norm and rms_norm, and both after an addition, rounded to a half, for PyTorch: what conversion makes of a norm
// in autocast whose output is lowered right behind it. None of the ops is in autocast's lists.
#include <ATen/TensorOperators.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"
#include "layer_norm.h"

namespace cuda_ops
{

namespace
{

using OptionalTensor = std::optional<Tensor>;

// As the kernels in float32 take a parameter; `type`: the dtype of what is normalised.
OptionalTensor parameter_beside(const OptionalTensor &parameter, at::ScalarType type)
{
    const bool stays =
        !parameter || parameter->scalar_type() == type || (is_half(type) && parameter->scalar_type() == at::kFloat);
    return stays ? parameter : parameter->to(is_half(type) ? at::kFloat : type);
}

// Whether the kernels that round take what is normalised, in float32, beside tensors of this half.
bool rounds_in_kernel(const Tensor &normalized, const NormShape &shape, at::ScalarType half)
{
    bool rounds = false;
#ifdef CUDA_OPS_WITH_CUDA
    rounds = normalized.is_cuda() && normalized.scalar_type() == at::kFloat && is_half(half) && !shape.empty() &&
             cuda_ops_layer_norm_rounds_cuda(shape.rows, shape.cols) != 0;
#endif
    (void)normalized, (void)shape, (void)half;
    return rounds;
}

Tensor float_vectors(const OptionalTensor &parameter)
{
    return parameter ? contiguous_vectors(parameter->to(at::kFloat)) : Tensor();
}

} // namespace

// The norm of input, or of residual + input, computed in its own dtype or float32 and rounded to `half`.
static Normalized rounded_forward(const char *op, cuda_ops_norm norm, const Tensor &input, const Tensor *residual,
                                  at::IntArrayRef normalized_shape, const OptionalTensor &weight,
                                  const OptionalTensor &bias, double eps, at::ScalarType half)
{
    check_dtype(op, "input", input);
    if (residual) {
        check_dtype(op, "residual", *residual);
        check_same_device(op, "residual", *residual, "input", input);
        check_same_shape(op, "residual", *residual, "input", input);
    }
    TORCH_CHECK(is_half(half), op, ": expected dtype to be float16 or bfloat16, got ", c10::toString(half));
    const NormShape shape(op, input, normalized_shape);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const at::ScalarType type =
        residual ? c10::promoteTypes(input.scalar_type(), residual->scalar_type()) : input.scalar_type();
    const Tensor &normalized = residual ? *residual : input;
    const bool adds = !residual || (residual->scalar_type() == at::kFloat && input.scalar_type() == half);
    if (adds && rounds_in_kernel(normalized, shape, half)) {
        // Checked as they are, since a conversion would not say what was given.
        const NormParameters checked(op, parameter_beside(weight, type), parameter_beside(bias, type), normalized,
                                     normalized_shape);
        const Tensor w = float_vectors(weight), b = float_vectors(bias), x = contiguous_vectors(input);
        const Tensor r = residual ? contiguous_vectors(*residual) : Tensor();
        Normalized result;
        result.output = empty(x.sizes(), x.options().dtype(half));
        result.rstd = empty({shape.rows}, x.options().dtype(at::kFloat));
        if (norm == CUDA_OPS_LAYER_NORM)
            result.mean = empty({shape.rows}, x.options().dtype(at::kDouble));
        if (residual)
            result.sum = empty(x.sizes(), x.options().dtype(at::kFloat));
        CUDA_OPS_LAUNCH(
            op, cuda_ops_layer_norm_rounded_forward_cuda(
                    result.output.data_ptr(), residual ? result.sum.data_ptr<float>() : nullptr,
                    result.mean.defined() ? result.mean.data_ptr<double>() : nullptr, result.rstd.data_ptr<float>(),
                    x.const_data_ptr(), residual ? r.const_data_ptr<float>() : nullptr,
                    static_cast<const float *>(data_or_null(w)), static_cast<const float *>(data_or_null(b)),
                    shape.rows, shape.cols, eps, check_dtype(op, "output", result.output), current_stream(op)));
        return result;
    }
    const Tensor x = input.to(type), r = residual ? residual->to(type) : Tensor();
    Normalized result = norm_forward(op, norm, x, residual ? &r : nullptr, normalized_shape,
                                     parameter_beside(weight, type), parameter_beside(bias, type), eps, 0.0);
    result.output = result.output.to(half);
    return result;
}

static std::tuple<Tensor, Tensor, Tensor>
layer_norm_rounded_forward(const Tensor &input, at::IntArrayRef normalized_shape, const OptionalTensor &weight,
                           const OptionalTensor &bias, double eps, at::ScalarType dtype)
{
    const Normalized n = rounded_forward("layer_norm_rounded", CUDA_OPS_LAYER_NORM, input, nullptr, normalized_shape,
                                         weight, bias, eps, dtype);
    return {n.output, n.mean, n.rstd};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor>
add_layer_norm_rounded_forward(const Tensor &input, const Tensor &residual, at::IntArrayRef normalized_shape,
                               const OptionalTensor &weight, const OptionalTensor &bias, double eps,
                               at::ScalarType dtype)
{
    const Normalized n = rounded_forward("add_layer_norm_rounded", CUDA_OPS_LAYER_NORM, input, &residual,
                                         normalized_shape, weight, bias, eps, dtype);
    return {n.output, n.sum, n.mean, n.rstd};
}

static std::tuple<Tensor, Tensor> rms_norm_rounded_forward(const Tensor &input, at::IntArrayRef normalized_shape,
                                                           const OptionalTensor &weight, double eps,
                                                           at::ScalarType dtype)
{
    const Normalized n = rounded_forward("rms_norm_rounded", CUDA_OPS_RMS_NORM, input, nullptr, normalized_shape,
                                         weight, std::nullopt, eps, dtype);
    return {n.output, n.rstd};
}

static std::tuple<Tensor, Tensor, Tensor> add_rms_norm_rounded_forward(const Tensor &input, const Tensor &residual,
                                                                       at::IntArrayRef normalized_shape,
                                                                       const OptionalTensor &weight, double eps,
                                                                       at::ScalarType dtype)
{
    const Normalized n = rounded_forward("add_rms_norm_rounded", CUDA_OPS_RMS_NORM, input, &residual, normalized_shape,
                                         weight, std::nullopt, eps, dtype);
    return {n.output, n.sum, n.rstd};
}

// grad_addend: grad_input in `addend_type`, where that is wanted and another dtype. mean: NULL for rms_norm.
static std::tuple<Tensor, Tensor, Tensor, Tensor>
rounded_backward(const char *op, const Tensor &grad_output, const OptionalTensor &grad_sum, const Tensor &input,
                 at::IntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor *mean, const Tensor &rstd,
                 std::optional<at::ScalarType> bias_type, std::optional<at::ScalarType> addend_type,
                 std::array<bool, 3> wanted)
{
    check_dtype(op, "input", input);
    check_dtype(op, "grad_output", grad_output);
    check_same_device(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    const NormShape shape(op, input, normalized_shape);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const at::ScalarType type = input.scalar_type(), half = grad_output.scalar_type();
    const bool with_addend = addend_type && *addend_type != type;
    const at::ScalarType parameter_type = weight ? weight->scalar_type() : bias_type.value_or(type);
    TORCH_CHECK(!addend_type || wanted[0], op, ": expected addend_dtype to be None without grad_input");
    if (rounds_in_kernel(input, shape, half) && (!with_addend || *addend_type == half)) {
        const NormParameters checked(op, parameter_beside(weight, type), std::nullopt, input, normalized_shape);
        if (grad_sum) {
            check_like(op, "grad_sum", *grad_sum, "input", input);
            check_same_shape(op, "grad_sum", *grad_sum, "input", input);
        }
        for (const Tensor *const statistic : {mean, &rstd})
            TORCH_CHECK(!statistic || (statistic->scalar_type() == (statistic == mean ? at::kDouble : at::kFloat) &&
                                       statistic->dim() == 1 && statistic->size(0) == shape.rows &&
                                       statistic->device() == input.device()),
                        op, ": expected mean and rstd to be what forward returned, got ", statistic->toString(),
                        " of shape ", statistic->sizes());
        const Tensor x = contiguous_vectors(input), g = contiguous_vectors(grad_output), w = float_vectors(weight);
        const Tensor more = grad_sum ? contiguous_vectors(*grad_sum) : Tensor();
        const Tensor m = mean ? mean->contiguous() : Tensor();
        const Tensor r = rstd.contiguous();
        const auto like = [&](bool is_wanted, at::IntArrayRef sizes, at::ScalarType its_type) {
            return empty(is_wanted ? sizes : at::IntArrayRef({0}), x.options().dtype(its_type));
        };
        const Tensor grad_input = like(wanted[0], x.sizes(), type), grad_addend = like(with_addend, x.sizes(), half);
        const Tensor grad_weight = like(wanted[1], normalized_shape, at::kFloat);
        const Tensor grad_bias = like(wanted[2], normalized_shape, at::kFloat);
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        if (wanted[1] || wanted[2])
            workspace = empty_bytes(cuda_ops_layer_norm_rounded_workspace_cuda(shape.rows, shape.cols), x);
#endif
        CUDA_OPS_LAUNCH(op, cuda_ops_layer_norm_rounded_backward_cuda(
                                wanted[0] ? grad_input.data_ptr<float>() : nullptr,
                                with_addend ? grad_addend.data_ptr() : nullptr,
                                wanted[1] ? grad_weight.data_ptr<float>() : nullptr,
                                wanted[2] ? grad_bias.data_ptr<float>() : nullptr,
                                workspace.defined() ? workspace.data_ptr() : nullptr, g.const_data_ptr(),
                                static_cast<const float *>(data_or_null(more)), x.const_data_ptr<float>(),
                                static_cast<const float *>(data_or_null(w)),
                                static_cast<const double *>(data_or_null(m)), r.const_data_ptr<float>(), shape.rows,
                                shape.cols, check_dtype(op, "grad_output", grad_output), current_stream(op)));
        return {grad_input, grad_addend, grad_weight.to(parameter_type), grad_bias.to(parameter_type)};
    }
    const auto [grad_input, grad_weight, grad_bias, sums] =
        norm_backward(op, mean ? CUDA_OPS_LAYER_NORM : CUDA_OPS_RMS_NORM, grad_output.to(type), grad_sum, input,
                      normalized_shape, parameter_beside(weight, type), mean, rstd,
                      is_half(type) || parameter_type == type ? bias_type : std::optional(type),
                      {wanted[0], wanted[1], wanted[2], false});
    const Tensor grad_addend =
        with_addend ? grad_input.to(*addend_type) : empty({0}, input.options().dtype(addend_type.value_or(type)));
    return {grad_input, grad_addend, grad_weight.to(parameter_type), grad_bias.to(parameter_type)};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor>
layer_norm_rounded_backward(const Tensor &grad_output, const OptionalTensor &grad_sum, const Tensor &input,
                            at::IntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor &mean,
                            const Tensor &rstd, std::optional<at::ScalarType> bias_type,
                            std::optional<at::ScalarType> addend_type, std::array<bool, 3> wanted)
{
    return rounded_backward("layer_norm_rounded_backward", grad_output, grad_sum, input, normalized_shape, weight,
                            &mean, rstd, bias_type, addend_type, wanted);
}

static std::tuple<Tensor, Tensor, Tensor>
rms_norm_rounded_backward(const Tensor &grad_output, const OptionalTensor &grad_sum, const Tensor &input,
                          at::IntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor &rstd,
                          std::optional<at::ScalarType> addend_type, std::array<bool, 2> wanted)
{
    const auto [grad_input, grad_addend, grad_weight, grad_bias] =
        rounded_backward("rms_norm_rounded_backward", grad_output, grad_sum, input, normalized_shape, weight, nullptr,
                         rstd, std::nullopt, addend_type, {wanted[0], wanted[1], false});
    return {grad_input, grad_addend, grad_weight};
}

// The wanted gradients of add_layer_norm_rounded: of the kernel, or, where they are differentiated further, composed.
static std::vector<Tensor>
add_layer_norm_rounded_gradients(const Tensor &grad_output, const OptionalTensor &grad_sum, const Tensor &sum,
                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor &mean,
                                 const Tensor &rstd, double eps, std::optional<at::ScalarType> bias_type,
                                 at::ScalarType input_type, at::ScalarType residual_type, std::array<bool, 4> wanted)
{
    using Rounded = std::tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor &, const OptionalTensor &, const Tensor &, c10::SymIntArrayRef, const OptionalTensor &,
        const Tensor &, const Tensor &, std::optional<at::ScalarType>, std::optional<at::ScalarType>,
        std::array<bool, 3>);
    static const auto fused = registered_op<Rounded>("cuda_ops::layer_norm_rounded_backward");
    check_normalized_shape("add_layer_norm_rounded", normalized_shape);
    const at::ScalarType type = sum.scalar_type();
    const bool of_sum = wanted[0] || wanted[1];
    const at::ScalarType parameter_type = weight ? weight->scalar_type() : bias_type.value_or(type);
    Tensor grad, addend, grad_weight, grad_bias;
    if (is_differentiated_further({grad_output, grad_sum.value_or(Tensor()), sum, weight.value_or(Tensor())})) {
        std::tie(grad, grad_weight, grad_bias) = layer_norm_backward_op().call(
            grad_output.to(type), grad_sum, sum, normalized_shape, parameter_beside(weight, type), mean, rstd, eps,
            is_half(type) || parameter_type == type ? bias_type : std::optional(type), {of_sum, wanted[2], wanted[3]});
        grad_weight = grad_weight.to(parameter_type);
        grad_bias = grad_bias.to(parameter_type);
    } else {
        const bool with_addend = wanted[0] && input_type != type;
        std::tie(grad, addend, grad_weight, grad_bias) =
            fused.call(grad_output, grad_sum, sum, normalized_shape, weight, mean, rstd, bias_type,
                       with_addend ? std::optional(input_type) : std::nullopt, {of_sum, wanted[2], wanted[3]});
    }
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(addend.defined() && input_type != type ? addend : grad.to(input_type));
    if (wanted[1])
        grads.push_back(grad.to(residual_type));
    if (wanted[2])
        grads.push_back(grad_weight);
    if (wanted[3])
        grads.push_back(grad_bias);
    return grads;
}

static std::vector<Tensor>
layer_norm_rounded_gradients(const Tensor &grad_output, const Tensor &input, c10::SymIntArrayRef normalized_shape,
                             const OptionalTensor &weight, const Tensor &mean, const Tensor &rstd, double eps,
                             std::optional<at::ScalarType> bias_type, std::array<bool, 3> wanted)
{
    return add_layer_norm_rounded_gradients(grad_output, std::nullopt, input, normalized_shape, weight, mean, rstd, eps,
                                            bias_type, input.scalar_type(), input.scalar_type(),
                                            {false, wanted[0], wanted[1], wanted[2]});
}

// Likewise those of add_rms_norm_rounded.
static std::vector<Tensor> add_rms_norm_rounded_gradients(const Tensor &grad_output, const OptionalTensor &grad_sum,
                                                          const Tensor &sum, c10::SymIntArrayRef normalized_shape,
                                                          const OptionalTensor &weight, const Tensor &rstd, double eps,
                                                          at::ScalarType input_type, at::ScalarType residual_type,
                                                          std::array<bool, 3> wanted)
{
    using Rounded = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, const OptionalTensor &, const Tensor &,
                                                       c10::SymIntArrayRef, const OptionalTensor &, const Tensor &,
                                                       std::optional<at::ScalarType>, std::array<bool, 2>);
    static const auto fused = registered_op<Rounded>("cuda_ops::rms_norm_rounded_backward");
    check_normalized_shape("add_rms_norm_rounded", normalized_shape);
    const at::ScalarType type = sum.scalar_type();
    const bool of_sum = wanted[0] || wanted[1];
    Tensor grad, addend, grad_weight;
    if (is_differentiated_further({grad_output, grad_sum.value_or(Tensor()), sum, weight.value_or(Tensor())})) {
        std::tie(grad, grad_weight) =
            rms_norm_backward_op().call(grad_output.to(type), grad_sum, sum, normalized_shape,
                                        parameter_beside(weight, type), rstd, eps, {of_sum, wanted[2]});
        if (weight)
            grad_weight = grad_weight.to(weight->scalar_type());
    } else {
        const bool with_addend = wanted[0] && input_type != type;
        std::tie(grad, addend, grad_weight) =
            fused.call(grad_output, grad_sum, sum, normalized_shape, weight, rstd,
                       with_addend ? std::optional(input_type) : std::nullopt, {of_sum, wanted[2]});
    }
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(addend.defined() && input_type != type ? addend : grad.to(input_type));
    if (wanted[1])
        grads.push_back(grad.to(residual_type));
    if (wanted[2])
        grads.push_back(grad_weight);
    return grads;
}

static std::vector<Tensor> rms_norm_rounded_gradients(const Tensor &grad_output, const Tensor &input,
                                                      c10::SymIntArrayRef normalized_shape,
                                                      const OptionalTensor &weight, const Tensor &rstd, double eps,
                                                      std::array<bool, 2> wanted)
{
    return add_rms_norm_rounded_gradients(grad_output, std::nullopt, input, normalized_shape, weight, rstd, eps,
                                          input.scalar_type(), input.scalar_type(), {false, wanted[0], wanted[1]});
}

// Those of output and sum. Without an addition the sum is the input.
static std::tuple<Tensor, Tensor>
add_layer_norm_rounded_tangents(const OptionalTensor &tangent_input, const OptionalTensor &tangent_residual,
                                const OptionalTensor &tangent_weight, const OptionalTensor &tangent_bias,
                                const Tensor &sum, c10::SymIntArrayRef normalized_shape, const OptionalTensor &weight,
                                const Tensor &mean, const Tensor &rstd, double eps, at::ScalarType dtype)
{
    const at::ScalarType type = sum.scalar_type();
    const auto wide = [&](const OptionalTensor &tensor) {
        return tensor ? OptionalTensor(tensor->to(type)) : std::nullopt;
    };
    const auto [output, tangent] = add_layer_norm_tangents(
        wide(tangent_input), wide(tangent_residual), wide(tangent_weight), wide(tangent_bias), sum, normalized_shape,
        parameter_beside(weight, type), mean, rstd, sum.new_zeros({0}, at::kLong), eps, 0.0);
    return {output.to(dtype), tangent};
}

static Tensor layer_norm_rounded_tangent(const OptionalTensor &tangent_input, const OptionalTensor &tangent_weight,
                                         const OptionalTensor &tangent_bias, const Tensor &input,
                                         c10::SymIntArrayRef normalized_shape, const OptionalTensor &weight,
                                         const Tensor &mean, const Tensor &rstd, double eps, at::ScalarType dtype)
{
    return std::get<0>(add_layer_norm_rounded_tangents(tangent_input, std::nullopt, tangent_weight, tangent_bias, input,
                                                       normalized_shape, weight, mean, rstd, eps, dtype));
}

// Those of output and sum. Without an addition the sum is the input.
static std::tuple<Tensor, Tensor> add_rms_norm_rounded_tangents(const OptionalTensor &tangent_input,
                                                                const OptionalTensor &tangent_residual,
                                                                const OptionalTensor &tangent_weight, const Tensor &sum,
                                                                c10::SymIntArrayRef normalized_shape,
                                                                const OptionalTensor &weight, const Tensor &rstd,
                                                                double eps, at::ScalarType dtype)
{
    const at::ScalarType type = sum.scalar_type();
    const auto wide = [&](const OptionalTensor &tensor) {
        return tensor ? OptionalTensor(tensor->to(type)) : std::nullopt;
    };
    const auto [output, tangent] =
        add_rms_norm_tangents(wide(tangent_input), wide(tangent_residual), wide(tangent_weight), sum, normalized_shape,
                              parameter_beside(weight, type), rstd, sum.new_zeros({0}, at::kLong), eps, 0.0);
    return {output.to(dtype), tangent};
}

static Tensor rms_norm_rounded_tangent(const OptionalTensor &tangent_input, const OptionalTensor &tangent_weight,
                                       const Tensor &input, c10::SymIntArrayRef normalized_shape,
                                       const OptionalTensor &weight, const Tensor &rstd, double eps,
                                       at::ScalarType dtype)
{
    return std::get<0>(add_rms_norm_rounded_tangents(tangent_input, std::nullopt, tangent_weight, input,
                                                     normalized_shape, weight, rstd, eps, dtype));
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("layer_norm_rounded_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
                "float eps, ScalarType dtype) -> (Tensor output, Tensor mean, Tensor rstd)");
    library.def("add_layer_norm_rounded_forward(Tensor input, Tensor residual, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor? bias, float eps, ScalarType dtype)"
                " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
    library.def("layer_norm_rounded_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, "
                "SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, ScalarType? bias_dtype, "
                "ScalarType? addend_dtype, bool[3] wanted)"
                " -> (Tensor grad_input, Tensor grad_addend, Tensor grad_weight, Tensor grad_bias)");
    library.def("layer_norm_rounded_gradients(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor mean, Tensor rstd, float eps, ScalarType? bias_dtype, bool[3] wanted)"
                " -> Tensor[]",
                cuda_ops::layer_norm_rounded_gradients);
    library.def("add_layer_norm_rounded_gradients(Tensor grad_output, Tensor? grad_sum, Tensor sum, "
                "SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, float eps, "
                "ScalarType? bias_dtype, ScalarType input_dtype, ScalarType residual_dtype, bool[4] wanted)"
                " -> Tensor[]",
                cuda_ops::add_layer_norm_rounded_gradients);
    library.def("layer_norm_rounded_tangent(Tensor? tangent_input, Tensor? tangent_weight, Tensor? tangent_bias, "
                "Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, float eps, "
                "ScalarType dtype) -> Tensor",
                cuda_ops::layer_norm_rounded_tangent);
    library.def("add_layer_norm_rounded_tangents(Tensor? tangent_input, Tensor? tangent_residual, "
                "Tensor? tangent_weight, Tensor? tangent_bias, Tensor sum, SymInt[] normalized_shape, Tensor? weight, "
                "Tensor mean, Tensor rstd, float eps, ScalarType dtype)"
                " -> (Tensor tangent_output, Tensor tangent_sum)",
                cuda_ops::add_layer_norm_rounded_tangents);
    library.def("rms_norm_rounded_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps, "
                "ScalarType dtype) -> (Tensor output, Tensor rstd)");
    library.def("add_rms_norm_rounded_forward(Tensor input, Tensor residual, SymInt[] normalized_shape, "
                "Tensor? weight, float eps, ScalarType dtype) -> (Tensor output, Tensor sum, Tensor rstd)");
    library.def("rms_norm_rounded_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, "
                "SymInt[] normalized_shape, Tensor? weight, Tensor rstd, ScalarType? addend_dtype, bool[2] wanted)"
                " -> (Tensor grad_input, Tensor grad_addend, Tensor grad_weight)");
    library.def("rms_norm_rounded_gradients(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor rstd, float eps, bool[2] wanted) -> Tensor[]",
                cuda_ops::rms_norm_rounded_gradients);
    library.def("add_rms_norm_rounded_gradients(Tensor grad_output, Tensor? grad_sum, Tensor sum, "
                "SymInt[] normalized_shape, Tensor? weight, Tensor rstd, float eps, ScalarType input_dtype, "
                "ScalarType residual_dtype, bool[3] wanted) -> Tensor[]",
                cuda_ops::add_rms_norm_rounded_gradients);
    library.def("rms_norm_rounded_tangent(Tensor? tangent_input, Tensor? tangent_weight, Tensor input, "
                "SymInt[] normalized_shape, Tensor? weight, Tensor rstd, float eps, ScalarType dtype) -> Tensor",
                cuda_ops::rms_norm_rounded_tangent);
    library.def("add_rms_norm_rounded_tangents(Tensor? tangent_input, Tensor? tangent_residual, "
                "Tensor? tangent_weight, Tensor sum, SymInt[] normalized_shape, Tensor? weight, Tensor rstd, "
                "float eps, ScalarType dtype) -> (Tensor tangent_output, Tensor tangent_sum)",
                cuda_ops::add_rms_norm_rounded_tangents);
    CUDA_OPS_IMPLEMENT(library, "rms_norm_rounded_forward", cuda_ops::rms_norm_rounded_forward);
    CUDA_OPS_IMPLEMENT(library, "add_rms_norm_rounded_forward", cuda_ops::add_rms_norm_rounded_forward);
    CUDA_OPS_IMPLEMENT(library, "rms_norm_rounded_backward", cuda_ops::rms_norm_rounded_backward);
    CUDA_OPS_DERIVATIVES(
        library, "rms_norm_rounded_forward",
        {"input, weight: rms_norm_rounded_gradients(grad_output, input, normalized_shape, weight, rstd, eps, wanted)",
         "output <- rms_norm_rounded_tangent(tangent_input, tangent_weight, input, normalized_shape, weight, rstd, "
         "eps, dtype)"});
    CUDA_OPS_DERIVATIVES(
        library, "add_rms_norm_rounded_forward",
        {"input, residual, weight: add_rms_norm_rounded_gradients(grad_output, grad_sum, sum, normalized_shape, "
         "weight, rstd, eps, input.dtype, residual.dtype, wanted)",
         "output, sum <- add_rms_norm_rounded_tangents(tangent_input, tangent_residual, tangent_weight, sum, "
         "normalized_shape, weight, rstd, eps, dtype)"});
    CUDA_OPS_IMPLEMENT(library, "layer_norm_rounded_forward", cuda_ops::layer_norm_rounded_forward);
    CUDA_OPS_IMPLEMENT(library, "add_layer_norm_rounded_forward", cuda_ops::add_layer_norm_rounded_forward);
    CUDA_OPS_IMPLEMENT(library, "layer_norm_rounded_backward", cuda_ops::layer_norm_rounded_backward);
    CUDA_OPS_DERIVATIVES(
        library, "layer_norm_rounded_forward",
        {"input, weight, bias: layer_norm_rounded_gradients(grad_output, input, normalized_shape, weight, mean, rstd, "
         "eps, bias.dtype, wanted)",
         "output <- layer_norm_rounded_tangent(tangent_input, tangent_weight, tangent_bias, input, normalized_shape, "
         "weight, mean, rstd, eps, dtype)"});
    CUDA_OPS_DERIVATIVES(
        library, "add_layer_norm_rounded_forward",
        {"input, residual, weight, bias: add_layer_norm_rounded_gradients(grad_output, grad_sum, sum, "
         "normalized_shape, weight, mean, rstd, eps, bias.dtype, input.dtype, residual.dtype, wanted)",
         "output, sum <- add_layer_norm_rounded_tangents(tangent_input, tangent_residual, tangent_weight, "
         "tangent_bias, sum, normalized_shape, weight, mean, rstd, eps, dtype)"});
}
