// linear_cross_entropy for PyTorch: checks, allocation and the choice of backend. Loss and gradients come from one op,
// since they come from one kernel; on the CPU the glue goes through chunks of rows.
#include "cuda_ops/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>

#include <array>
#include <limits>
#include <tuple>

#include "autograd.h"
#include "empty.h"
#include "linear.h"
#include "loss.h"
#include "parameters.h"

namespace cuda_ops
{

static IndexErrors linear_cross_entropy_index_errors("linear_cross_entropy");

// The leading dimensions are flattened: the kernels see rows.
struct LinearCrossEntropy {
    cuda_ops_dtype dtype, parameter_dtype;
    int64_t rows, in_features, classes;
    cuda_ops_reduction reduction;
    Tensor input, weight, bias, target, row_scale; // contiguous; the last three may be undefined
};

static LinearCrossEntropy check(const char *op, const Tensor &input, const Tensor &weight, const Tensor &target,
                                const std::optional<Tensor> &bias, const std::optional<Tensor> &row_scale,
                                int64_t reduction, double label_smoothing, double z_loss, double softcap)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_parameter(op, "weight", weight, input);
    check_dim(op, "weight", weight, 2, 2);
    TORCH_CHECK(input.dim() >= 1, op, ": expected input to have at least 1 dimension, got a scalar");
    TORCH_CHECK(input.size(-1) == weight.size(1), op,
                ": expected the last dimension of input to be the in_features of weight, ", weight.size(1),
                " (weight has shape ", weight.sizes(), "), got input of shape ", input.sizes());
    if (bias) {
        check_like(op, "bias", *bias, "weight", weight);
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": expected bias to have shape [",
                    weight.size(0), "], the classes of weight, got ", bias->sizes());
    }
    check_same_device(op, "target", target, "input", input);
    TORCH_CHECK(target.scalar_type() == at::kLong || target.scalar_type() == at::kByte, op,
                ": expected target to be int64 (or uint8) for class indices, got ",
                c10::getDtypeNames(target.scalar_type()).first);
    const at::IntArrayRef leading = input.sizes().slice(0, input.dim() - 1);
    TORCH_CHECK_VALUE(target.sizes() == leading, op, ": expected target to have shape ", leading,
                      " for an input of shape ", input.sizes(), ", got ", target.sizes());
    if (row_scale) {
        check_like(op, "row_scale", *row_scale, "weight", weight);
        check_same_shape(op, "row_scale", *row_scale, "target", target);
    }
    TORCH_CHECK(0 <= label_smoothing && label_smoothing <= 1, op, ": expected label_smoothing to be in [0, 1], got ",
                label_smoothing);
    TORCH_CHECK(z_loss >= 0, op, ": expected z_loss to be at least 0, got ", z_loss);
    TORCH_CHECK(softcap >= 0, op, ": expected logit_softcap to be at least 0, got ", softcap);
    return {dtype,
            check_dtype(op, "weight", weight),
            target.numel(),
            weight.size(1),
            weight.size(0),
            check_reduction(op, reduction),
            input.contiguous(),
            weight.contiguous(),
            bias ? bias->contiguous() : Tensor(),
            as_indices(target),
            row_scale ? row_scale->contiguous() : Tensor()};
}

// What forward leaves the gradient of weight in: bfloat16 loses no range, so that nothing longer need be kept.
static at::ScalarType weight_gradient_dtype(const Tensor &input, const Tensor &weight)
{
    return weight.scalar_type() == at::kBFloat16 ? at::kBFloat16 : accumulate_dtype(input);
}

// Bytes of a chunk's logits: a part of the last-level cache with few classes, at most 64 MB with very many.
static int64_t chunk_rows_cpu(int64_t classes)
{
    const int64_t per_row = std::max<int64_t>(classes, 1);
    return std::max<int64_t>(std::min<int64_t>((int64_t{1} << 19) / per_row, 4096),
                             std::clamp<int64_t>((int64_t{1} << 23) / per_row, 1, 256));
}

struct Gradients {
    Tensor input, weight, bias; // undefined where not wanted

    bool any() const
    {
        return input.defined() || weight.defined() || bias.defined();
    }
};

// The address of element `element`; null if `tensor` is undefined.
static void *at_element(const Tensor &tensor, int64_t element)
{
    return tensor.defined() ? static_cast<char *>(tensor.data_ptr()) + element * tensor.element_size() : nullptr;
}

static void forward_cpu(const char *op, const LinearCrossEntropy &p, const Tensor &loss, const Tensor &total_weight,
                        const Gradients &gradients, int64_t ignore_index, double label_smoothing, double z_loss,
                        double softcap)
{
    const bool reduced = p.reduction != CUDA_OPS_REDUCTION_NONE;
    const int64_t chunk = std::min(p.rows, chunk_rows_cpu(p.classes));
    const LossShape shape{1, p.classes, 1, {}};
    const int64_t task = columns_per_task(shape), tasks_in_chunk = (chunk + task - 1) / task;
    const int64_t chunks = (p.rows + chunk - 1) / chunk;
    const Tensor logits = empty({chunk, p.classes}, p.input.options());
    std::vector<double> partials(reduced ? 2 * tasks_in_chunk * chunks : 0); // zero where a chunk has fewer tasks
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t first = c * chunk, rows = std::min(chunk, p.rows - first);
        const void *input = at_element(p.input, first * p.in_features);
        parallel_blocks(op, rows, p.classes, p.in_features, rows >= p.classes,
                        [&](cuda_ops_linear_block block, void *workspace) {
                            return cuda_ops_linear_forward_cpu(logits.data_ptr(), input, p.weight.const_data_ptr(),
                                                               pointer_or_null(p.bias), workspace, rows, p.in_features,
                                                               p.classes, block, p.dtype);
                        });
        parallel_ranges(op, (rows + task - 1) / task, 1, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) {
                const cuda_ops_status status = cuda_ops_linear_cross_entropy_rows_cpu(
                    logits.data_ptr(), reduced ? nullptr : at_element(loss, first),
                    reduced ? &partials[2 * (c * tasks_in_chunk + t)] : nullptr,
                    p.target.const_data_ptr<int64_t>() + first, at_element(p.row_scale, first), p.classes, t * task,
                    std::min((t + 1) * task, rows), ignore_index, label_smoothing, z_loss, softcap, gradients.any(),
                    p.dtype);
                if (status != CUDA_OPS_SUCCESS)
                    return status;
            }
            return cuda_ops_status{CUDA_OPS_SUCCESS};
        });
        if (gradients.input.defined() && p.in_features > 0)
            parallel_blocks(op, rows, p.in_features, p.classes, rows >= p.in_features,
                            [&](cuda_ops_linear_block block, void *workspace) {
                                return cuda_ops_linear_backward_input_cpu(
                                    at_element(gradients.input, first * p.in_features), logits.const_data_ptr(),
                                    p.weight.const_data_ptr(), workspace, rows, p.in_features, p.classes, block,
                                    p.dtype);
                            });
        // By rows where there are enough: each thread sums its rows for bias. With few rows one thread does.
        if (gradients.weight.defined() || gradients.bias.defined())
            parallel_blocks(op, p.classes, std::max<int64_t>(p.in_features, 1), rows, p.classes >= p.in_features,
                            [&](cuda_ops_linear_block block, void *workspace) {
                                block.column_end = std::min(block.column_end, p.in_features);
                                return cuda_ops_linear_cross_entropy_weight_cpu(
                                    at_element(gradients.weight, 0), at_element(gradients.bias, 0),
                                    logits.const_data_ptr(), input, workspace, rows, p.in_features, p.classes, block,
                                    c > 0, p.dtype);
                            });
    }
    if (reduced)
        check_status(op, cuda_ops_loss_reduce_cpu(loss.data_ptr(), total_weight.data_ptr(), partials.data(),
                                                  tasks_in_chunk * chunks, p.reduction, p.dtype));
}

// The loss; total_weight, without elements where there is no reduction; and the wanted gradients (the others have no
// elements) of the sum over rows of row_scale * loss, before a mean's division.
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
linear_cross_entropy_forward(const Tensor &input, const Tensor &weight, const Tensor &target,
                             const std::optional<Tensor> &bias, const std::optional<Tensor> &row_scale,
                             int64_t reduction, int64_t ignore_index, double label_smoothing, double z_loss,
                             double logit_softcap, bool with_input, bool with_weight, bool with_bias)
{
    const char *const op = "linear_cross_entropy";
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const LinearCrossEntropy p =
        check(op, input, weight, target, bias, row_scale, reduction, label_smoothing, z_loss, logit_softcap);
    const bool reduced = p.reduction != CUDA_OPS_REDUCTION_NONE;
    const at::TensorOptions sums = p.input.options().dtype(accumulate_dtype(input));
    Tensor loss = empty(reduced ? at::IntArrayRef{} : target.sizes(), p.weight.options());
    Tensor total_weight = empty_total_weight(p.input, p.reduction);
    const auto gradient = [](bool wanted, at::IntArrayRef sizes, const at::TensorOptions &options) {
        return wanted ? empty(sizes, options) : empty({0}, options);
    };
    Tensor grad_input = gradient(with_input, input.sizes(), p.input.options());
    Tensor grad_weight = gradient(with_weight, weight.sizes(), sums.dtype(weight_gradient_dtype(input, weight)));
    Tensor grad_bias = gradient(with_bias, {p.classes}, sums);
    const auto results = [&] {
        // As in PyTorch, which divides label_smoothing by the number of classes.
        if (p.classes == 0 && label_smoothing > 0)
            loss.fill_(std::numeric_limits<double>::quiet_NaN());
        return std::make_tuple(loss, total_weight, grad_input, grad_weight, grad_bias);
    };
    if (p.rows == 0) {
        fill_loss_of_nothing(loss, total_weight, p.reduction);
        grad_weight.zero_();
        grad_bias.zero_();
        return results();
    }
    const Gradients gradients{with_input ? grad_input : Tensor(), with_weight ? grad_weight : Tensor(),
                              with_bias ? grad_bias : Tensor()};
    if (p.input.is_cuda()) {
        cuda_ops_index_error *error = linear_cross_entropy_index_errors.record();
        const Tensor workspace =
            empty_workspace(p.input, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_linear_cross_entropy_workspace_cuda(
                                         p.rows, p.in_features, p.classes, label_smoothing, z_loss, logit_softcap,
                                         gradients.any(), p.dtype, p.parameter_dtype)));
        CUDA_OPS_LAUNCH(op, cuda_ops_linear_cross_entropy_cuda(
                                loss.data_ptr(), total_weight.data_ptr(), at_element(gradients.input, 0),
                                at_element(gradients.weight, 0), at_element(gradients.bias, 0), workspace.data_ptr(),
                                error, p.input.const_data_ptr(), p.weight.const_data_ptr(), pointer_or_null(p.bias),
                                p.target.const_data_ptr<int64_t>(), pointer_or_null(p.row_scale), p.rows, p.in_features,
                                p.classes, ignore_index, label_smoothing, z_loss, logit_softcap, p.reduction, p.dtype,
                                p.parameter_dtype, current_stream(op)));
        linear_cross_entropy_index_errors.check_now(error);
        return results();
    }
    if (is_cpu_half(p.input)) {
        const auto [result, total, to_input, to_weight, to_bias] =
            in_float32(linear_cross_entropy_forward, p.input, p.weight, p.target, bias, row_scale, reduction,
                       ignore_index, label_smoothing, z_loss, logit_softcap, with_input, with_weight, with_bias);
        return {result.to(loss.scalar_type()), total, to_input.to(grad_input.scalar_type()),
                to_weight.to(grad_weight.scalar_type()), to_bias};
    }
    check_targets_cpu(op, p.target, {1, p.classes, 1, {}}, ignore_index);
    forward_cpu(op, p, loss, total_weight, gradients, ignore_index, label_smoothing, z_loss, logit_softcap);
    return results();
}

// Forward's gradients times grad_output, divided by total_weight for a mean. Those of the parameters have the dtype of
// grad_output.
static std::tuple<Tensor, Tensor, Tensor>
linear_cross_entropy_scale(const Tensor &grad_output, const Tensor &total_weight, const Tensor &grad_input,
                           const Tensor &grad_weight, const Tensor &grad_bias, int64_t reduction)
{
    const char *const op = "linear_cross_entropy_scale";
    const c10::OptionalDeviceGuard guard(at::device_of(grad_output));
    const cuda_ops_dtype dtype = check_dtype(op, "grad_input", grad_input);
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "grad_output", grad_output);
    check_parameter(op, "grad_output", grad_output, grad_input);
    const cuda_ops_reduction kind = check_reduction(op, reduction);
    TORCH_CHECK(grad_output.numel() == 1 && kind != CUDA_OPS_REDUCTION_NONE, op,
                ": expected grad_output to be a single element, got shape ", grad_output.sizes());
    check_total_weight(op, total_weight, grad_input, kind);
    const std::pair<const Tensor &, at::ScalarType> sums[] = {
        {grad_weight, weight_gradient_dtype(grad_input, grad_output)}, {grad_bias, accumulate_dtype(grad_input)}};
    for (const auto &[sum, wanted] : sums) {
        check_same_device(op, "grad_weight and grad_bias", sum, "grad_output", grad_output);
        TORCH_CHECK(sum.scalar_type() == wanted, op, ": expected grad_weight and grad_bias to be those of forward, ",
                    c10::getDtypeNames(wanted).first, ", got ", c10::getDtypeNames(sum.scalar_type()).first);
    }
    if (is_cpu_half(grad_input)) {
        const auto [to_input, to_weight, to_bias] = in_float32(linear_cross_entropy_scale, grad_output, total_weight,
                                                               grad_input, grad_weight, grad_bias, reduction);
        const at::ScalarType type = grad_output.scalar_type();
        return {to_input.to(grad_input.scalar_type()), to_weight.to(type), to_bias.to(type)};
    }
    const Tensor x = grad_input.contiguous(), w = grad_weight.contiguous(), b = grad_bias.contiguous();
    Tensor output_input = empty(x.sizes(), x.options());
    Tensor output_weight = empty(w.sizes(), grad_output.options());
    Tensor output_bias = empty(b.sizes(), grad_output.options());
    if (x.is_cuda()) {
        linear_cross_entropy_index_errors.record(); // raises what forward found, if it is known by now
        CUDA_OPS_LAUNCH(op, cuda_ops_linear_cross_entropy_scale_cuda(
                                output_input.data_ptr(), output_weight.data_ptr(), output_bias.data_ptr(),
                                x.const_data_ptr(), w.const_data_ptr(), b.const_data_ptr(),
                                grad_output.const_data_ptr(), total_weight.const_data_ptr(), x.numel(), w.numel(),
                                b.numel(), kind, dtype, parameter_dtype, current_stream(op)));
    } else {
        const std::pair<const Tensor &, const Tensor &> arrays[] = {
            {output_input, x}, {output_weight, w}, {output_bias, b}};
        for (const auto &[to, from] : arrays)
            parallel_ranges(op, from.numel(), ELEMENTWISE_GRAIN, [&, to = to, from = from](int64_t begin, int64_t end) {
                return cuda_ops_linear_cross_entropy_scale_cpu(to.data_ptr(), from.const_data_ptr(),
                                                               grad_output.const_data_ptr(),
                                                               total_weight.const_data_ptr(), begin, end, kind, dtype);
            });
    }
    (void)parameter_dtype;
    return {output_input, output_weight, output_bias};
}

// The ops that linear_cross_entropy fuses, which are differentiable any number of times.
struct LinearCrossEntropyParts {
    using Linear = Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &);
    using Product = Tensor(const Tensor &, const Tensor &);
    using Losses = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, const Tensor &, const std::optional<Tensor> &,
                                                      int64_t, int64_t, double);
    using LossBackward = Tensor(const Tensor &, const Tensor &, const Tensor &, const std::optional<Tensor> &,
                                const Tensor &, const Tensor &, int64_t, int64_t, double);
    using LossTangent = Tensor(const Tensor &, const Tensor &, const Tensor &, const std::optional<Tensor> &,
                               const Tensor &, int64_t, int64_t, double);
    c10::TypedOperatorHandle<Linear> linear = registered_op<Linear>("cuda_ops::linear_forward");
    c10::TypedOperatorHandle<Product> backward_input = registered_op<Product>("cuda_ops::linear_backward_input");
    c10::TypedOperatorHandle<Product> backward_weight = registered_op<Product>("cuda_ops::linear_backward_weight");
    c10::TypedOperatorHandle<Tensor(const Tensor &)> backward_bias =
        registered_op<Tensor(const Tensor &)>("cuda_ops::linear_backward_bias");
    c10::TypedOperatorHandle<Losses> losses = registered_op<Losses>("cuda_ops::cross_entropy_forward");
    c10::TypedOperatorHandle<LossBackward> loss_backward =
        registered_op<LossBackward>("cuda_ops::cross_entropy_backward");
    c10::TypedOperatorHandle<LossTangent> loss_tangent = registered_op<LossTangent>("cuda_ops::cross_entropy_tangent");

    static const LinearCrossEntropyParts &get()
    {
        static const LinearCrossEntropyParts parts;
        return parts;
    }
};

// [..., columns] as rows; a single row stays one.
static Tensor rows_alone(const Tensor &tensor)
{
    return tensor.dim() > 2 ? tensor.flatten(0, -2) : tensor;
}

// logits with their cap, and what a cap's gradient is multiplied by; undefined without.
static std::pair<Tensor, Tensor> capped_logits(const Tensor &logits, double softcap)
{
    if (softcap == 0)
        return {logits, Tensor()};
    const Tensor ratio = (logits / softcap).tanh();
    return {ratio * softcap, 1 - ratio * ratio};
}

// What the rows' z_loss * logsumexp^2 change by with the logits: the softmax, and what it is multiplied by, with the
// mean's divisor. Logits of ignored rows, of which nothing may come, are taken for zeros.
static std::pair<Tensor, Tensor> z_loss_slope(const Tensor &logits, const Tensor &target, const Tensor &total_weight,
                                              double z_loss, int64_t reduction, int64_t ignore_index)
{
    const Tensor counts = target != ignore_index;
    const Tensor x = logits.masked_fill(counts.logical_not().unsqueeze(-1), 0), lse = x.logsumexp(-1, true);
    Tensor factor = 2 * z_loss * counts.to(x.scalar_type()).unsqueeze(-1) * lse;
    if (reduction == CUDA_OPS_REDUCTION_MEAN)
        factor = factor / total_weight.to(x.scalar_type()).clamp_min(1); // of nothing there is no gradient
    return {(x - lse).exp(), factor};
}

static std::vector<Tensor> linear_cross_entropy_composed(const Tensor &grad_output, const Tensor &input,
                                                         const Tensor &weight, const Tensor &target,
                                                         const std::optional<Tensor> &bias, int64_t reduction,
                                                         int64_t ignore_index, double label_smoothing, double z_loss,
                                                         double softcap, std::array<bool, 3> wanted)
{
    const LinearCrossEntropyParts &ops = LinearCrossEntropyParts::get();
    const Tensor x = rows_alone(input).to(weight.scalar_type());
    const Tensor t = target.dim() > 1 ? target.flatten() : target;
    const Tensor g = grad_output.dim() > 1 ? grad_output.flatten() : grad_output;
    const auto [logits, slope] = capped_logits(ops.linear.call(x, weight, bias), softcap);
    const auto [loss, statistics, total_weight] =
        ops.losses.call(logits, t, std::nullopt, reduction, ignore_index, label_smoothing);
    Tensor grad = ops.loss_backward.call(g, logits, t, std::nullopt, statistics, total_weight, reduction, ignore_index,
                                         label_smoothing);
    if (z_loss > 0) {
        const auto [softmax, factor] = z_loss_slope(logits, t, total_weight, z_loss, reduction, ignore_index);
        grad = grad + softmax * factor * g.unsqueeze(-1);
    }
    if (slope.defined())
        grad = grad * slope;
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(
            ops.backward_input.call(grad, weight).reshape_symint(input.sym_sizes()).to(input.scalar_type()));
    if (wanted[1])
        grads.push_back(ops.backward_weight.call(grad, x));
    if (wanted[2])
        grads.push_back(ops.backward_bias.call(grad));
    return grads;
}

// The wanted gradients of input, weight and bias. Where the loss has a reduction: those that forward computed, scaled
// by grad_output; else forward is run again with grad_output, one value a row, as row_scale. Composed of linear and
// cross_entropy where they are differentiated further.
static std::vector<Tensor> linear_cross_entropy_gradients(const Tensor &grad_output, const Tensor &input,
                                                          const Tensor &weight, const Tensor &target,
                                                          const std::optional<Tensor> &bias, const Tensor &total_weight,
                                                          const Tensor &grad_input, const Tensor &grad_weight,
                                                          const Tensor &grad_bias, int64_t reduction,
                                                          int64_t ignore_index, double label_smoothing, double z_loss,
                                                          double logit_softcap, std::array<bool, 3> wanted)
{
    if (is_differentiated_further({grad_output, input, weight, bias.value_or(Tensor())}))
        return linear_cross_entropy_composed(grad_output, input, weight, target, bias, reduction, ignore_index,
                                             label_smoothing, z_loss, logit_softcap, wanted);
    std::array<Tensor, 3> all;
    if (reduction == CUDA_OPS_REDUCTION_NONE) {
        static const auto again =
            registered_op<decltype(linear_cross_entropy_forward)>("cuda_ops::linear_cross_entropy_forward");
        const auto results = again.call(input, weight, target, bias, grad_output, reduction, ignore_index,
                                        label_smoothing, z_loss, logit_softcap, wanted[0], wanted[1], wanted[2]);
        const at::ScalarType dtype = weight.scalar_type();
        all = {std::get<2>(results), std::get<3>(results).to(dtype), std::get<4>(results).to(dtype)};
    } else {
        static const auto scale =
            registered_op<decltype(linear_cross_entropy_scale)>("cuda_ops::linear_cross_entropy_scale");
        std::tie(all[0], all[1], all[2]) =
            scale.call(grad_output, total_weight, grad_input, grad_weight, grad_bias, reduction);
    }
    std::vector<Tensor> grads;
    for (size_t i = 0; i < all.size(); i++)
        if (wanted[i])
            grads.push_back(std::move(all[i]));
    return grads;
}

// output's tangent from that of one of tangent_input, tangent_weight and tangent_bias.
static Tensor linear_cross_entropy_tangent(const std::optional<Tensor> &tangent_input,
                                           const std::optional<Tensor> &tangent_weight,
                                           const std::optional<Tensor> &tangent_bias, const Tensor &input,
                                           const Tensor &weight, const Tensor &target,
                                           const std::optional<Tensor> &bias, const Tensor &total_weight,
                                           int64_t reduction, int64_t ignore_index, double label_smoothing,
                                           double z_loss, double logit_softcap)
{
    const char *const op = "linear_cross_entropy_tangent";
    const LinearCrossEntropyParts &ops = LinearCrossEntropyParts::get();
    const at::ScalarType dtype = weight.scalar_type();
    const Tensor x = rows_alone(input).to(dtype);
    const auto [logits, slope] = capped_logits(ops.linear.call(x, weight, bias), logit_softcap);
    Tensor tangent = tangent_bias     ? tangent_bias->expand_as(logits)
                     : tangent_weight ? ops.linear.call(x, *tangent_weight, std::nullopt)
                                      : ops.linear.call(rows_alone(required(op, "a tangent", tangent_input)).to(dtype),
                                                        weight, std::nullopt);
    const Tensor t = target.dim() > 1 ? target.flatten() : target;
    if (slope.defined())
        tangent = tangent * slope;
    Tensor loss = ops.loss_tangent.call(tangent, logits, t, std::nullopt, total_weight.to(dtype), reduction,
                                        ignore_index, label_smoothing);
    if (z_loss > 0) {
        const auto [softmax, factor] = z_loss_slope(logits, t, total_weight, z_loss, reduction, ignore_index);
        const Tensor of_rows = (softmax * factor * tangent).sum(-1);
        loss = loss + (reduction == CUDA_OPS_REDUCTION_NONE ? of_rows : of_rows.sum());
    }
    return reduction == CUDA_OPS_REDUCTION_NONE ? loss.reshape_symint(target.sym_sizes()) : loss;
}

// The op with the wanted gradients, which forward computes along with the loss while it has the logits.
static Tensor linear_cross_entropy(const Tensor &input, const Tensor &weight, const Tensor &target,
                                   const std::optional<Tensor> &bias, int64_t reduction, int64_t ignore_index,
                                   double label_smoothing, double z_loss, double logit_softcap)
{
    static const auto op =
        registered_op<decltype(linear_cross_entropy_forward)>("cuda_ops::linear_cross_entropy_forward");
    const bool now = at::GradMode::is_enabled() && reduction != CUDA_OPS_REDUCTION_NONE;
    return std::get<0>(op.call(input, weight, target, bias, std::nullopt, reduction, ignore_index, label_smoothing,
                               z_loss, logit_softcap, now && input.requires_grad(), now && weight.requires_grad(),
                               now && bias && bias->requires_grad()));
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias, int reduction, "
                "int ignore_index, float label_smoothing, float z_loss=0., float logit_softcap=0.) -> (Tensor output)",
                cuda_ops::linear_cross_entropy);
    library.def("linear_cross_entropy_gradients(Tensor grad_output, Tensor input, Tensor weight, Tensor target, "
                "Tensor? bias, Tensor total_weight, Tensor grad_input, Tensor grad_weight, Tensor grad_bias, "
                "int reduction, int ignore_index, float label_smoothing, float z_loss, float logit_softcap, "
                "bool[3] wanted) -> Tensor[]",
                cuda_ops::linear_cross_entropy_gradients);
    library.def("linear_cross_entropy_tangent(Tensor? tangent_input, Tensor? tangent_weight, Tensor? tangent_bias, "
                "Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor total_weight, int reduction, "
                "int ignore_index, float label_smoothing, float z_loss, float logit_softcap) -> Tensor",
                cuda_ops::linear_cross_entropy_tangent);
    library.def("linear_cross_entropy_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, "
                "Tensor? row_scale, int reduction, int ignore_index, float label_smoothing, float z_loss, "
                "float logit_softcap, bool with_input, bool with_weight, bool with_bias) -> (Tensor output, Tensor "
                "total_weight, Tensor grad_input, "
                "Tensor grad_weight, Tensor grad_bias)");
    library.def("linear_cross_entropy_scale(Tensor grad_output, Tensor total_weight, Tensor grad_input, "
                "Tensor grad_weight, Tensor grad_bias, int reduction) -> (Tensor, Tensor, Tensor)");
    CUDA_OPS_IMPLEMENT(library, "linear_cross_entropy_forward", cuda_ops::linear_cross_entropy_forward);
    CUDA_OPS_IMPLEMENT(library, "linear_cross_entropy_scale", cuda_ops::linear_cross_entropy_scale);
    cuda_ops::register_kernels_of_all_ops(library, "linear_cross_entropy");
    CUDA_OPS_AUTOCAST(library, "linear_cross_entropy", INPUT_ONLY);
    CUDA_OPS_DERIVATIVES(
        library, "linear_cross_entropy_forward",
        {"input, weight, bias: linear_cross_entropy_gradients(grad_output, input, weight, target, bias, total_weight, "
         "grad_input, grad_weight, grad_bias, reduction, ignore_index, label_smoothing, z_loss, logit_softcap, wanted)",
         "output <- linear_cross_entropy_tangent(tangent_input, none, none, input, weight, target, bias, total_weight, "
         "reduction, ignore_index, label_smoothing, z_loss, logit_softcap)",
         "output <- linear_cross_entropy_tangent(none, tangent_weight, none, input, weight, target, bias, "
         "total_weight, reduction, ignore_index, label_smoothing, z_loss, logit_softcap)",
         "output <- linear_cross_entropy_tangent(none, none, tangent_bias, input, weight, target, bias, total_weight, "
         "reduction, ignore_index, label_smoothing, z_loss, logit_softcap)"});
}
