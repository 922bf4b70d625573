// layer_norm, rms_norm, and both after an addition (add_layer_norm, add_rms_norm) for PyTorch: checks, allocation and
// the choice of backend.
#include "layer_norm.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "cpu_workspace.h"
#include "cuda_ops/dropout.h"
#include "dropout_state.h"
#include "empty.h"
#include "halves.h"
#include "parameters.h"
#include "vmap.h"

namespace cuda_ops
{

namespace
{

using OptionalTensor = std::optional<Tensor>;

at::TensorOptions rstd_options(const Tensor &input)
{
    return input.options().dtype(input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Dropout's mask, a bit an element, in bytes.
void check_takes_mask(const char *op, const Tensor &input, [[maybe_unused]] const NormShape &shape,
                      [[maybe_unused]] cuda_ops_dtype dtype)
{
    bool takes = false;
#ifdef CUDA_OPS_WITH_CUDA
    takes = input.is_cuda() && cuda_ops_layer_norm_takes_mask_cuda(shape.rows, shape.cols, dtype) != 0;
#endif
    TORCH_CHECK_NOT_IMPLEMENTED(takes, op,
                                ": expected input to be float16 or bfloat16 on CUDA, and its rows whole vectors of "
                                "eight that a block's registers hold, got ",
                                input.toString(), " of shape ", input.sizes());
}

} // namespace

Normalized norm_forward(const char *op, cuda_ops_norm norm, const Tensor &input, const Tensor *residual,
                        at::IntArrayRef normalized_shape, const OptionalTensor &weight, const OptionalTensor &bias,
                        double eps, double p, bool with_mask)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const NormShape shape(op, input, normalized_shape);
    NormParameters parameters(op, weight, bias, input, normalized_shape);
    if (residual) {
        check_like(op, "residual", *residual, "input", input);
        check_same_shape(op, "residual", *residual, "input", input);
        TORCH_CHECK(0.0 <= p && p <= 1.0, op, ": expected p to be between 0 and 1, got ", p);
    }
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    if (with_mask) {
        check_takes_mask(op, input, shape, dtype);
        for (Tensor *const parameter : {&parameters.weight, &parameters.bias})
            if (parameter->defined())
                *parameter = contiguous_vectors(*parameter);
    }
    const Tensor x = with_mask ? contiguous_vectors(input) : input.contiguous();
    const Tensor r = !residual ? Tensor() : with_mask ? contiguous_vectors(*residual) : residual->contiguous();
    [[maybe_unused]] const void *const weight_data = data_or_null(parameters.weight), *const bias_data =
                                                                                          data_or_null(parameters.bias);
    Normalized result;
    result.output = empty(x.sizes(), x.options());
    result.rstd = empty({shape.rows}, rstd_options(x));
    if (norm == CUDA_OPS_LAYER_NORM)
        result.mean = empty({shape.rows}, x.options().dtype(at::kDouble));
    if (residual) {
        result.sum = empty(x.sizes(), x.options());
        // Forward writes it, but of nothing.
        const auto options = x.options().dtype(at::kLong);
        result.state = shape.empty() ? at::zeros({p > 0.0 ? 2 : 0}, options) : empty({p > 0.0 ? 2 : 0}, options);
    }
    if (with_mask)
        result.mask = empty({shape.rows * shape.cols / 8}, x.options().dtype(at::kByte));
    double *const mean = result.mean.defined() ? result.mean.data_ptr<double>() : nullptr;
    if (shape.empty()) {
        result.rstd.zero_();
        if (mean)
            result.mean.zero_();
        return result;
    }
    if (x.is_cuda()) {
        if (!residual) {
            CUDA_OPS_LAUNCH(op, cuda_ops_layer_norm_forward_cuda(result.output.data_ptr(), mean, result.rstd.data_ptr(),
                                                                 x.const_data_ptr(), weight_data, bias_data, shape.rows,
                                                                 shape.cols, eps, norm, dtype, parameters.dtype,
                                                                 current_stream(op)));
            return result;
        }
        int64_t *const state = p > 0.0 ? result.state.data_ptr<int64_t>() : nullptr;
        (void)state; // not used in a build without CUDA
        if (with_mask) {
            CUDA_OPS_LAUNCH(op, cuda_ops_add_layer_norm_forward_mask_cuda(
                                    result.output.data_ptr(), result.sum.data_ptr(), mean, result.rstd.data_ptr(),
                                    state, result.mask.data_ptr<uint8_t>(), x.const_data_ptr(), r.const_data_ptr(),
                                    weight_data, bias_data, shape.rows, shape.cols, eps, p, draw_philox(x.device()),
                                    dtype, parameters.dtype, current_stream(op)));
            return result;
        }
        CUDA_OPS_LAUNCH(op, cuda_ops_add_layer_norm_forward_cuda(
                                result.output.data_ptr(), result.sum.data_ptr(), mean, result.rstd.data_ptr(), state,
                                x.const_data_ptr(), r.const_data_ptr(), weight_data, bias_data, shape.rows, shape.cols,
                                eps, norm, p, p > 0.0 ? draw_philox(x.device()) : cuda_ops_philox_state{}, dtype,
                                parameters.dtype, current_stream(op)));
        return result;
    }
    const Tensor w = widened(parameters.weight), b = widened(parameters.bias);
    cuda_ops_philox_state philox{};
    if (residual && p > 0.0) {
        philox = draw_philox(x.device());
        result.state.data_ptr<int64_t>()[0] = static_cast<int64_t>(philox.seed);
        result.state.data_ptr<int64_t>()[1] = static_cast<int64_t>(philox.offset);
    }
    parallel_rows(
        op, shape.rows, 1, shape.grain(), dtype,
        [&](void *output, void *sum, void *its_mean, void *rstd, const void *from, const void *added, int64_t begin,
            int64_t end, cuda_ops_dtype type) {
            double *const means = static_cast<double *>(its_mean);
            return residual ? cuda_ops_add_layer_norm_forward_cpu(output, sum, means, rstd, from, added,
                                                                  data_or_null(w), data_or_null(b), shape.cols, eps,
                                                                  norm, p, philox, begin, end, type)
                            : cuda_ops_layer_norm_forward_cpu(output, means, rstd, from, data_or_null(w),
                                                              data_or_null(b), shape.cols, eps, norm, begin, end, type);
        },
        writes(result.output, shape.cols), writes(result.sum, shape.cols), writes(result.mean), writes(result.rstd),
        reads(x, shape.cols), reads(r, shape.cols));
    return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor>
norm_backward(const char *op, cuda_ops_norm norm, const Tensor &grad_output, const OptionalTensor &grad_sum,
              const Tensor &input, at::IntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor *mean,
              const Tensor &rstd, std::optional<at::ScalarType> bias_type, std::array<bool, 4> wanted, Masked *masked)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const NormShape shape(op, input, normalized_shape);
    check_like(op, "grad_output", grad_output, "input", input);
    check_same_shape(op, "grad_output", grad_output, "input", input);
    if (grad_sum) {
        check_like(op, "grad_sum", *grad_sum, "input", input);
        check_same_shape(op, "grad_sum", *grad_sum, "input", input);
    }
    NormParameters parameters(op, weight, std::nullopt, input, normalized_shape);
    const auto check_statistic = [&](const char *name, const Tensor &tensor, at::ScalarType type) {
        TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.size(0) == shape.rows &&
                        tensor.device() == input.device(),
                    op, ": expected ", name, " to be what forward returned, got ", tensor.toString(), " of shape ",
                    tensor.sizes());
        return tensor.contiguous();
    };
    const Tensor m = mean ? check_statistic("mean", *mean, at::kDouble) : Tensor();
    const Tensor r = check_statistic("rstd", rstd, rstd_options(input).dtype().toScalarType());
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    if (masked) {
        check_takes_mask(op, input, shape, dtype);
        TORCH_CHECK(0.0 < masked->p && masked->p <= 1.0, op, ": expected p to be above 0 and at most 1, got ",
                    masked->p);
        TORCH_CHECK(masked->mask.scalar_type() == at::kByte && masked->mask.is_contiguous() &&
                        masked->mask.numel() == shape.rows * shape.cols / 8 && masked->mask.device() == input.device(),
                    op, ": expected mask to be what forward returned, got ", masked->mask.toString(), " of shape ",
                    masked->mask.sizes());
        if (parameters.weight.defined())
            parameters.weight = contiguous_vectors(parameters.weight);
    }
    const auto dense = [&](const Tensor &tensor) { return masked ? contiguous_vectors(tensor) : tensor.contiguous(); };
    const Tensor x = dense(input), g = dense(grad_output);
    const Tensor more = grad_sum ? dense(*grad_sum) : Tensor();
    const auto options = x.options().dtype(weight ? weight->scalar_type() : bias_type.value_or(input.scalar_type()));
    const std::array<int64_t, 1> none{0};
    Tensor grad_input = empty(wanted[0] ? x.sizes() : at::IntArrayRef(none), x.options());
    if (masked)
        masked->grad_dropped = empty(x.sizes(), x.options());
    Tensor grads[3];
    for (int which = 0; which < 3; which++) {
        const at::IntArrayRef sizes = wanted[1 + which] ? normalized_shape : at::IntArrayRef(none);
        grads[which] = shape.empty() ? at::zeros(sizes, options) : empty(sizes, options);
    }
    if (shape.empty())
        return {grad_input, grads[0], grads[1], grads[2]};
    [[maybe_unused]] void *const grad_input_data = wanted[0] ? grad_input.data_ptr() : nullptr;
    [[maybe_unused]] void *const grad_weight_data = wanted[1] ? grads[0].data_ptr() : nullptr;
    [[maybe_unused]] void *const grad_bias_data = wanted[2] ? grads[1].data_ptr() : nullptr;
    [[maybe_unused]] void *const grad_input_sums_data = wanted[3] ? grads[2].data_ptr() : nullptr;
    const bool sums = wanted[1] || wanted[2];
    const double *const mean_data = mean ? m.const_data_ptr<double>() : nullptr;
    const cuda_ops_dtype parameter_dtype = check_dtype(op, "grad_weight", grads[0]);
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        if (sums || wanted[3])
            workspace = empty_bytes(cuda_ops_layer_norm_workspace_cuda(shape.rows, shape.cols, dtype), x);
#endif
        void *const workspace_data = workspace.defined() ? workspace.data_ptr() : nullptr;
        (void)workspace_data;
        if (masked) {
            CUDA_OPS_LAUNCH(op, cuda_ops_layer_norm_backward_mask_cuda(
                                    grad_input_data, masked->grad_dropped.data_ptr(), grad_weight_data, grad_bias_data,
                                    workspace_data, g.const_data_ptr(), data_or_null(more), x.const_data_ptr(),
                                    data_or_null(parameters.weight), mean_data, r.const_data_ptr(),
                                    masked->mask.const_data_ptr<uint8_t>(), masked->p, shape.rows, shape.cols, dtype,
                                    parameter_dtype, current_stream(op)));
            return {grad_input, grads[0], grads[1], grads[2]};
        }
        CUDA_OPS_LAUNCH(op, cuda_ops_layer_norm_backward_cuda(
                                grad_input_data, grad_weight_data, grad_bias_data, grad_input_sums_data, workspace_data,
                                g.const_data_ptr(), data_or_null(more), x.const_data_ptr(),
                                data_or_null(parameters.weight), mean_data, r.const_data_ptr(), shape.rows, shape.cols,
                                norm, dtype, parameter_dtype, current_stream(op)));
        return {grad_input, grads[0], grads[1], grads[2]};
    }
    TORCH_CHECK(parameter_dtype == dtype || is_half(dtype), op,
                ": expected bias_dtype to be that of input on the CPU, got ",
                c10::toString(options.dtype().toScalarType()));
    const int64_t chunks = cuda_ops_layer_norm_chunks_cpu(shape.rows, shape.cols);
    void *const workspace =
        sums ? thread_workspace(cuda_ops_layer_norm_workspace_cpu(shape.rows, shape.cols)) : nullptr;
    const int64_t chunk_elements = std::max<int64_t>(1, shape.rows * shape.cols / chunks);
    const Tensor w = widened(parameters.weight);
    const int64_t chunk = cuda_ops_layer_norm_chunk_rows_cpu(shape.rows);
    parallel_ranges(
        op, chunks, std::max<int64_t>(1, ELEMENTWISE_GRAIN / 4 / chunk_elements), [&](int64_t begin, int64_t end) {
            return call_tiles(
                dtype, begin * chunk, std::min(end * chunk, shape.rows),
                [&](void *to, const void *grad, const void *added, const void *from, int64_t first, int64_t last,
                    cuda_ops_dtype type) {
                    return cuda_ops_layer_norm_backward_rows_cpu(to, workspace, grad, added, from, data_or_null(w),
                                                                 mean_data, r.const_data_ptr(), shape.rows, shape.cols,
                                                                 norm, first, last, type);
                },
                writes(wanted[0] ? grad_input : Tensor(), shape.cols), reads(g, shape.cols), reads(more, shape.cols),
                reads(x, shape.cols));
        });
    if (sums)
        parallel_elements(
            op, shape.cols, is_half(dtype) && parameter_dtype == CUDA_OPS_FLOAT32 ? CUDA_OPS_FLOAT32 : dtype,
            [&](void *to_weight, void *to_bias, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_layer_norm_backward_sums_cpu(to_weight, to_bias, workspace, shape.rows, shape.cols,
                                                             begin, end, type);
            },
            writes(wanted[1] ? grads[0] : Tensor()), writes(wanted[2] ? grads[1] : Tensor()));
    if (wanted[3])
        grads[2].copy_(grad_input.view({shape.rows, shape.cols})
                           .sum({0}, false, at::toOpMathType(input.scalar_type()))
                           .view(normalized_shape));
    return {grad_input, grads[0], grads[1], grads[2]};
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor &input, at::IntArrayRef normalized_shape,
                                                             const OptionalTensor &weight, const OptionalTensor &bias,
                                                             double eps)
{
    const Normalized n =
        norm_forward("layer_norm", CUDA_OPS_LAYER_NORM, input, nullptr, normalized_shape, weight, bias, eps, 0.0);
    return {n.output, n.mean, n.rstd};
}

static std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor &input, at::IntArrayRef normalized_shape,
                                                   const OptionalTensor &weight, double eps)
{
    const Normalized n =
        norm_forward("rms_norm", CUDA_OPS_RMS_NORM, input, nullptr, normalized_shape, weight, std::nullopt, eps, 0.0);
    return {n.output, n.rstd};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
add_layer_norm_forward(const Tensor &input, const Tensor &residual, at::IntArrayRef normalized_shape,
                       const OptionalTensor &weight, const OptionalTensor &bias, double eps, double p,
                       const OptionalTensor & /* call */)
{
    const Normalized n =
        norm_forward("add_layer_norm", CUDA_OPS_LAYER_NORM, input, &residual, normalized_shape, weight, bias, eps, p);
    return {n.output, n.sum, n.mean, n.rstd, n.state};
}

// The same, of p above 0, and dropout's mask for layer_norm_backward_mask.
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
add_layer_norm_forward_mask(const Tensor &input, const Tensor &residual, at::IntArrayRef normalized_shape,
                            const OptionalTensor &weight, const OptionalTensor &bias, double eps, double p)
{
    TORCH_CHECK(0.0 < p && p <= 1.0, "add_layer_norm: expected p to be above 0 and at most 1, got ", p);
    const Normalized n = norm_forward("add_layer_norm", CUDA_OPS_LAYER_NORM, input, &residual, normalized_shape, weight,
                                      bias, eps, p, true);
    return {n.output, n.sum, n.mean, n.rstd, n.state, n.mask};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> add_rms_norm_forward(const Tensor &input, const Tensor &residual,
                                                                       at::IntArrayRef normalized_shape,
                                                                       const OptionalTensor &weight, double eps,
                                                                       double p, const OptionalTensor & /* call */)
{
    const Normalized n = norm_forward("add_rms_norm", CUDA_OPS_RMS_NORM, input, &residual, normalized_shape, weight,
                                      std::nullopt, eps, p);
    return {n.output, n.sum, n.rstd, n.state};
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor &grad_output, const OptionalTensor &grad_sum,
                                                              const Tensor &input, at::IntArrayRef normalized_shape,
                                                              const OptionalTensor &weight, const Tensor &mean,
                                                              const Tensor &rstd, double /* eps: for its derivatives */,
                                                              std::optional<at::ScalarType> bias_type,
                                                              std::array<bool, 3> wanted)
{
    const auto [grad_input, grad_weight, grad_bias, sums] =
        norm_backward("layer_norm_backward", CUDA_OPS_LAYER_NORM, grad_output, grad_sum, input, normalized_shape,
                      weight, &mean, rstd, bias_type, {wanted[0], wanted[1], wanted[2], false});
    return {grad_input, grad_weight, grad_bias};
}

// All of them, and the sums over rows of grad_input: the gradient of a bias that was added to input.
static std::tuple<Tensor, Tensor, Tensor, Tensor>
layer_norm_backward_with_sums(const Tensor &grad_output, const OptionalTensor &grad_sum, const Tensor &input,
                              at::IntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor &mean,
                              const Tensor &rstd, std::optional<at::ScalarType> bias_type, bool with_weight,
                              bool with_bias)
{
    return norm_backward("layer_norm_backward", CUDA_OPS_LAYER_NORM, grad_output, grad_sum, input, normalized_shape,
                         weight, &mean, rstd, bias_type, {true, with_weight, with_bias, true});
}

// layer_norm_backward behind add_layer_norm_forward_mask: the gradients of the residual and of what dropout took, and those
// of the parameters.
static std::tuple<Tensor, Tensor, Tensor, Tensor>
layer_norm_backward_mask(const Tensor &grad_output, const OptionalTensor &grad_sum, const Tensor &input,
                         at::IntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor &mean,
                         const Tensor &rstd, const Tensor &mask, double p, std::optional<at::ScalarType> bias_type,
                         bool with_weight, bool with_bias)
{
    Masked masked{mask, p, Tensor()};
    const auto [grad_input, grad_weight, grad_bias, sums] =
        norm_backward("layer_norm_backward", CUDA_OPS_LAYER_NORM, grad_output, grad_sum, input, normalized_shape,
                      weight, &mean, rstd, bias_type, {true, with_weight, with_bias, false}, &masked);
    return {grad_input, masked.grad_dropped, grad_weight, grad_bias};
}

static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &grad_output, const OptionalTensor &grad_sum,
                                                    const Tensor &input, at::IntArrayRef normalized_shape,
                                                    const OptionalTensor &weight, const Tensor &rstd, double /* eps */,
                                                    std::array<bool, 2> wanted)
{
    const auto [grad_input, grad_weight, grad_bias, sums] =
        norm_backward("rms_norm_backward", CUDA_OPS_RMS_NORM, grad_output, grad_sum, input, normalized_shape, weight,
                      nullptr, rstd, std::nullopt, {wanted[0], wanted[1], false, false});
    return {grad_input, grad_weight};
}

// ---- composed of registered ops ------------------------------------------------------------------------------------

namespace
{

// What input adds to the sum, of a tangent or of a gradient of the sum: `values` with forward's mask.
Tensor dropped_as_forward(const Tensor &values, const Tensor &state, double p)
{
    using DropoutBackward = Tensor(const Tensor &, const Tensor &, double, c10::SymIntArrayRef);
    static const auto op = registered_op<DropoutBackward>("cuda_ops::dropout_backward");
    return p > 0.0 ? op.call(values, state, p, values.sym_strides()) : values;
}

// Of the gradient for the sum those for input and residual, and behind them those for the parameters.
std::vector<Tensor> gradients_of_sum(const Tensor &grad_sum, const Tensor &grad_weight, const Tensor &grad_bias,
                                     const Tensor &state, double p, std::array<bool, 4> wanted)
{
    std::vector<Tensor> grads;
    if (wanted[0])
        grads.push_back(dropped_as_forward(grad_sum, state, p));
    if (wanted[1])
        grads.push_back(grad_sum);
    if (wanted[2])
        grads.push_back(grad_weight);
    if (wanted[3])
        grads.push_back(grad_bias);
    return grads;
}

} // namespace

static std::vector<Tensor> add_layer_norm_gradients(const Tensor &grad_output, const OptionalTensor &grad_sum,
                                                    const Tensor &sum, c10::SymIntArrayRef normalized_shape,
                                                    const OptionalTensor &weight, const Tensor &mean,
                                                    const Tensor &rstd, const Tensor &state, double eps, double p,
                                                    std::optional<at::ScalarType> bias_type, std::array<bool, 4> wanted)
{
    check_normalized_shape("add_layer_norm", normalized_shape);
    const auto [grad, grad_weight, grad_bias] =
        layer_norm_backward_op().call(grad_output, grad_sum, sum, normalized_shape, weight, mean, rstd, eps, bias_type,
                                      {wanted[0] || wanted[1], wanted[2], wanted[3]});
    return gradients_of_sum(grad, grad_weight, grad_bias, state, p, wanted);
}

static std::vector<Tensor> add_rms_norm_gradients(const Tensor &grad_output, const OptionalTensor &grad_sum,
                                                  const Tensor &sum, c10::SymIntArrayRef normalized_shape,
                                                  const OptionalTensor &weight, const Tensor &rstd, const Tensor &state,
                                                  double eps, double p, std::array<bool, 3> wanted)
{
    check_normalized_shape("add_rms_norm", normalized_shape);
    const auto [grad, grad_weight] = rms_norm_backward_op().call(grad_output, grad_sum, sum, normalized_shape, weight,
                                                                 rstd, eps, {wanted[0] || wanted[1], wanted[2]});
    return gradients_of_sum(grad, grad_weight, Tensor(), state, p, {wanted[0], wanted[1], wanted[2], false});
}

// What output changes by where the input of the norm changes by `tangent`. The normalised value's derivative is
// symmetric, and so the gradient's kernel without weight.
static Tensor layer_norm_tangent(const Tensor &tangent, const Tensor &input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor &weight, const Tensor &mean, const Tensor &rstd, double eps)
{
    check_normalized_shape("layer_norm", normalized_shape);
    const Tensor change =
        std::get<0>(layer_norm_backward_op().call(tangent, std::nullopt, input, normalized_shape, std::nullopt, mean,
                                                  rstd, eps, std::nullopt, {true, false, false}));
    return weight ? (change * *weight).to(input.scalar_type()) : change;
}

static Tensor rms_norm_tangent(const Tensor &tangent, const Tensor &input, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor &weight, const Tensor &rstd, double eps)
{
    check_normalized_shape("rms_norm", normalized_shape);
    const Tensor change = std::get<0>(rms_norm_backward_op().call(tangent, std::nullopt, input, normalized_shape,
                                                                  std::nullopt, rstd, eps, {true, false}));
    return weight ? (change * *weight).to(input.scalar_type()) : change;
}

// A bias, as what it adds to an output of that size.
static Tensor expand_rows(const Tensor &values, c10::SymIntArrayRef size, at::ScalarType type)
{
    return values.to(type).expand_symint(size).clone();
}

// The tangent of the sum.
static Tensor sum_tangent(const OptionalTensor &tangent_input, const OptionalTensor &tangent_residual,
                          const Tensor &sum, const Tensor &state, double p)
{
    // Of their own strides they would not be those of the mask.
    const Tensor t = tangent_input ? dropped_as_forward(tangent_input->contiguous(), state, p) : Tensor();
    if (t.defined() && tangent_residual)
        return t + *tangent_residual;
    return t.defined()        ? (p > 0.0 ? t : t.clone())
           : tangent_residual ? tangent_residual->clone()
                              : sum.new_zeros_symint(sum.sym_sizes());
}

std::tuple<Tensor, Tensor>
add_layer_norm_tangents(const OptionalTensor &tangent_input, const OptionalTensor &tangent_residual,
                        const OptionalTensor &tangent_weight, const OptionalTensor &tangent_bias, const Tensor &sum,
                        c10::SymIntArrayRef normalized_shape, const OptionalTensor &weight, const Tensor &mean,
                        const Tensor &rstd, const Tensor &state, double eps, double p)
{
    using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor &, c10::SymIntArrayRef, const OptionalTensor &,
                                                       const OptionalTensor &, double);
    static const auto op = registered_op<Forward>("cuda_ops::layer_norm_forward");
    const Tensor t = sum_tangent(tangent_input, tangent_residual, sum, state, p);
    Tensor output = layer_norm_tangent(t, sum, normalized_shape, weight, mean, rstd, eps);
    if (tangent_weight)
        output = output + std::get<0>(op.call(sum, normalized_shape, tangent_weight, std::nullopt, eps));
    if (tangent_bias)
        output = output + tangent_bias->to(sum.scalar_type());
    return {output, t};
}

std::tuple<Tensor, Tensor> add_rms_norm_tangents(const OptionalTensor &tangent_input,
                                                 const OptionalTensor &tangent_residual,
                                                 const OptionalTensor &tangent_weight, const Tensor &sum,
                                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor &weight,
                                                 const Tensor &rstd, const Tensor &state, double eps, double p)
{
    using Forward = std::tuple<Tensor, Tensor>(const Tensor &, c10::SymIntArrayRef, const OptionalTensor &, double);
    static const auto op = registered_op<Forward>("cuda_ops::rms_norm_forward");
    const Tensor t = sum_tangent(tangent_input, tangent_residual, sum, state, p);
    Tensor output = rms_norm_tangent(t, sum, normalized_shape, weight, rstd, eps);
    if (tangent_weight)
        output = output + std::get<0>(op.call(sum, normalized_shape, tangent_weight, eps));
    return {output, t};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
                " -> (Tensor output, Tensor mean, Tensor rstd)");
    library.def("rms_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps)"
                " -> (Tensor output, Tensor rstd)");
    // `call`, which is not read, is for torch.compile, as dropout's.
    library.def("add_layer_norm_forward(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
                "Tensor? bias, float eps, float p, Tensor? call=None)"
                " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd, Tensor state)",
                {at::Tag::nondeterministic_seeded});
    library.def("add_rms_norm_forward(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
                "float eps, float p, Tensor? call=None)"
                " -> (Tensor output, Tensor sum, Tensor rstd, Tensor state)",
                {at::Tag::nondeterministic_seeded});
    library.def("layer_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor mean, Tensor rstd, float eps, ScalarType? bias_dtype, bool[3] wanted)"
                " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
    // Where nothing is differentiated further (cuda_ops/models/_gpt_ops.py).
    library.def("layer_norm_backward_with_sums(Tensor grad_output, Tensor? grad_sum, Tensor input, "
                "int[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, ScalarType? bias_dtype, "
                "bool with_weight, bool with_bias) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, "
                "Tensor grad_input_sums)");
    library.def("add_layer_norm_forward_mask(Tensor input, Tensor residual, int[] normalized_shape, Tensor? weight, "
                "Tensor? bias, float eps, float p)"
                " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd, Tensor state, Tensor mask)",
                {at::Tag::nondeterministic_seeded});
    library.def("layer_norm_backward_mask(Tensor grad_output, Tensor? grad_sum, Tensor input, int[] normalized_shape, "
                "Tensor? weight, Tensor mean, Tensor rstd, Tensor mask, float p, ScalarType? bias_dtype, "
                "bool with_weight, bool with_bias)"
                " -> (Tensor grad_input, Tensor grad_dropped, Tensor grad_weight, Tensor grad_bias)");
    library.def("rms_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor rstd, float eps, bool[2] wanted) -> (Tensor grad_input, Tensor grad_weight)");
    library.def("add_layer_norm_gradients(Tensor grad_output, Tensor? grad_sum, Tensor sum, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor mean, Tensor rstd, Tensor state, float eps, float p, ScalarType? bias_dtype, "
                "bool[4] wanted) -> Tensor[]",
                cuda_ops::add_layer_norm_gradients);
    library.def("add_rms_norm_gradients(Tensor grad_output, Tensor? grad_sum, Tensor sum, SymInt[] normalized_shape, "
                "Tensor? weight, Tensor rstd, Tensor state, float eps, float p, bool[3] wanted) -> Tensor[]",
                cuda_ops::add_rms_norm_gradients);
    library.def("layer_norm_tangent(Tensor tangent, Tensor input, SymInt[] normalized_shape, Tensor? weight, "
                "Tensor mean, Tensor rstd, float eps) -> Tensor",
                cuda_ops::layer_norm_tangent);
    library.def("rms_norm_tangent(Tensor tangent, Tensor input, SymInt[] normalized_shape, Tensor? weight, "
                "Tensor rstd, float eps) -> Tensor",
                cuda_ops::rms_norm_tangent);
    library.def(
        "add_layer_norm_tangents(Tensor? tangent_input, Tensor? tangent_residual, Tensor? tangent_weight, "
        "Tensor? tangent_bias, Tensor sum, SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, "
        "Tensor state, float eps, float p) -> (Tensor tangent_output, Tensor tangent_sum)",
        cuda_ops::add_layer_norm_tangents);
    library.def("add_rms_norm_tangents(Tensor? tangent_input, Tensor? tangent_residual, Tensor? tangent_weight, "
                "Tensor sum, SymInt[] normalized_shape, Tensor? weight, Tensor rstd, Tensor state, float eps, float p)"
                " -> (Tensor tangent_output, Tensor tangent_sum)",
                cuda_ops::add_rms_norm_tangents);
    library.def("expand_rows(Tensor values, SymInt[] size, ScalarType dtype) -> Tensor", cuda_ops::expand_rows);
    // cuda_ops/ops/_norm.py composes these of PyTorch's operations.
    library.def("layer_norm_backward_gradients(Tensor? grad_grad_input, Tensor? grad_grad_weight, "
                "Tensor? grad_grad_bias, Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight, "
                "float eps, bool[3] wanted) -> Tensor[]");
    library.def("rms_norm_backward_gradients(Tensor? grad_grad_input, Tensor? grad_grad_weight, Tensor grad_output, "
                "Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps, bool[3] wanted) -> Tensor[]");
    library.def("layer_norm_backward_tangents(Tensor? tangent_grad_output, Tensor? tangent_grad_sum, "
                "Tensor? tangent_input, Tensor? tangent_weight, Tensor grad_output, Tensor input, "
                "SymInt[] normalized_shape, Tensor? weight, float eps, ScalarType? bias_dtype, bool[3] wanted)"
                " -> (Tensor tangent_grad_input, Tensor tangent_grad_weight, Tensor tangent_grad_bias)");
    library.def("rms_norm_backward_tangents(Tensor? tangent_grad_output, Tensor? tangent_grad_sum, "
                "Tensor? tangent_input, Tensor? tangent_weight, Tensor grad_output, Tensor input, "
                "SymInt[] normalized_shape, Tensor? weight, float eps, bool[2] wanted)"
                " -> (Tensor tangent_grad_input, Tensor tangent_grad_weight)");
    CUDA_OPS_IMPLEMENT(library, "layer_norm_forward", cuda_ops::layer_norm_forward);
    CUDA_OPS_VMAP(library, "layer_norm_forward", "input[normalized_shape]*");
    CUDA_OPS_IMPLEMENT(library, "rms_norm_forward", cuda_ops::rms_norm_forward);
    CUDA_OPS_VMAP(library, "rms_norm_forward", "input[normalized_shape]*");
    CUDA_OPS_IMPLEMENT(library, "add_layer_norm_forward", cuda_ops::add_layer_norm_forward);
    CUDA_OPS_VMAP(library, "add_layer_norm_forward", "random p");
    CUDA_OPS_IMPLEMENT(library, "add_rms_norm_forward", cuda_ops::add_rms_norm_forward);
    CUDA_OPS_VMAP(library, "add_rms_norm_forward", "random p");
    CUDA_OPS_IMPLEMENT(library, "layer_norm_backward", cuda_ops::layer_norm_backward);
    CUDA_OPS_IMPLEMENT(library, "layer_norm_backward_with_sums", cuda_ops::layer_norm_backward_with_sums);
    CUDA_OPS_IMPLEMENT(library, "add_layer_norm_forward_mask", cuda_ops::add_layer_norm_forward_mask);
    CUDA_OPS_IMPLEMENT(library, "layer_norm_backward_mask", cuda_ops::layer_norm_backward_mask);
    CUDA_OPS_IMPLEMENT(library, "rms_norm_backward", cuda_ops::rms_norm_backward);
    // As PyTorch's, of which rms_norm is in none of autocast's lists.
    CUDA_OPS_AUTOCAST(library, "layer_norm_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_AUTOCAST(library, "add_layer_norm_forward", FLOAT32);

    CUDA_OPS_DERIVATIVES(
        library, "layer_norm_forward",
        {"input, weight, bias: layer_norm_backward(grad_output, none, input, normalized_shape, weight, mean, rstd, "
         "eps, "
         "bias.dtype, wanted)",
         "output <- layer_norm_tangent(tangent_input, input, normalized_shape, weight, mean, rstd, eps)",
         "output <- layer_norm_forward(input, normalized_shape, tangent_weight, none, eps)",
         "output <- expand_rows(tangent_bias, output.size, output.dtype)"});
    CUDA_OPS_DERIVATIVES(
        library, "rms_norm_forward",
        {"input, weight: rms_norm_backward(grad_output, none, input, normalized_shape, weight, rstd, eps, wanted)",
         "output <- rms_norm_tangent(tangent_input, input, normalized_shape, weight, rstd, eps)",
         "output <- rms_norm_forward(input, normalized_shape, tangent_weight, eps)"});
    CUDA_OPS_DERIVATIVES(
        library, "layer_norm_backward",
        {"grad_output, input, weight: layer_norm_backward_gradients(grad_grad_input, grad_grad_weight, grad_grad_bias, "
         "grad_output, input, normalized_shape, weight, eps, wanted)",
         "grad_sum: grad_grad_input",
         "grad_input, grad_weight, grad_bias <- layer_norm_backward_tangents(tangent_grad_output, tangent_grad_sum, "
         "tangent_input, tangent_weight, grad_output, input, normalized_shape, weight, eps, bias_dtype, wanted)"});
    CUDA_OPS_DERIVATIVES(
        library, "rms_norm_backward",
        {"grad_output, input, weight: rms_norm_backward_gradients(grad_grad_input, grad_grad_weight, grad_output, "
         "input, normalized_shape, weight, eps, wanted)",
         "grad_sum: grad_grad_input",
         "grad_input, grad_weight <- rms_norm_backward_tangents(tangent_grad_output, tangent_grad_sum, tangent_input, "
         "tangent_weight, grad_output, input, normalized_shape, weight, eps, wanted)"});
    CUDA_OPS_DERIVATIVES(
        library, "add_layer_norm_forward",
        {"input, residual, weight, bias: add_layer_norm_gradients(grad_output, grad_sum, sum, normalized_shape, "
         "weight, "
         "mean, rstd, state, eps, p, bias.dtype, wanted)",
         "output, sum <- add_layer_norm_tangents(tangent_input, tangent_residual, tangent_weight, tangent_bias, sum, "
         "normalized_shape, weight, mean, rstd, state, eps, p)"});
    CUDA_OPS_DERIVATIVES(library, "add_rms_norm_forward",
                         {"input, residual, weight: add_rms_norm_gradients(grad_output, grad_sum, sum, "
                          "normalized_shape, weight, rstd, state, eps, p, wanted)",
                          "output, sum <- add_rms_norm_tangents(tangent_input, tangent_residual, tangent_weight, sum, "
                          "normalized_shape, weight, rstd, state, eps, p)"});
}
