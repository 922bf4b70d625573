// layer_scale_add for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/layer_scale_add.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "cuda_ops/scale_channels.h"
#include "elements.h"
#include "empty.h"

namespace cuda_ops
{

namespace
{

using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<at::ScalarType>;

// The dimension of the input that weight, which broadcasts to it, has elements for; that of one element has any. -1
// without a weight.
int64_t scaled_dim(const char *op, const OptionalTensor &weight, const Tensor &input)
{
    if (!weight)
        return -1;
    int64_t found = -1;
    bool fits = weight->dim() <= input.dim() && input.dim() > 0;
    for (int64_t i = 1; fits && i <= weight->dim(); i++) {
        const int64_t size = weight->size(-i);
        if (size == 1)
            continue;
        fits = found < 0 && size == input.size(-i);
        found = input.dim() - i;
    }
    TORCH_CHECK(fits, op, ": expected weight to have one size above 1, that of a dimension of input, ", input.sizes(),
                ", with which it broadcasts, got ", weight->sizes());
    return found < 0 ? input.dim() - 1 : found;
}

// How the kernels see tensors of a shape: rows and columns, and whose of them weight's and row_scale's elements are.
struct ScaledRows {
    int64_t rows, cols, channels, image_rows;
    bool as_they_are; // whether they are those of the tensor's own strides, else those of a contiguous one

    // `laid_out`: as which the others will be laid out.
    ScaledRows(const Tensor &laid_out, const OptionalTensor &weight, int64_t dim, bool with_row_scale)
    {
        const int64_t count = laid_out.numel(), images = laid_out.dim() > 0 ? laid_out.size(0) : 1;
        const bool is_dense = laid_out.is_non_overlapping_and_dense();
        const bool images_outermost = images > 0 && (images == 1 || laid_out.stride(0) == count / images);
        if (!weight) {
            as_they_are = is_dense && (!with_row_scale || images_outermost);
            rows = images, cols = images > 0 ? count / images : 0, channels = 0, image_rows = 1;
            return;
        }
        const int64_t size = weight->numel();
        as_they_are = is_dense && dim > 0 && images_outermost && size > 1 && laid_out.stride(dim) == 1;
        int64_t inner = 1;
        if (!as_they_are)
            for (int64_t d = dim + 1; d < laid_out.dim(); d++)
                inner *= laid_out.size(d);
        // A weight of one element is that of each row.
        const bool by_column = inner == 1 && size > 1;
        cols = by_column ? size : size == 1 ? laid_out.size(dim) * inner : inner;
        rows = cols > 0 ? count / cols : 0;
        channels = by_column ? 0 : size;
        image_rows = images > 0 ? std::max<int64_t>(1, rows / images) : 1;
    }

    Tensor lay_out(const Tensor &tensor) const
    {
        return as_they_are ? tensor : tensor.contiguous();
    }
};

Tensor row_factors(const char *op, const OptionalTensor &row_scale, const Tensor &input, int64_t dim,
                   at::ScalarType type)
{
    if (!row_scale)
        return Tensor();
    TORCH_CHECK(input.dim() > 0 && dim != 0, op,
                ": expected input to have rows in front of the dimension that weight scales, got shape ",
                input.sizes());
    TORCH_CHECK(row_scale->dim() == 1 && row_scale->size(0) == input.size(0), op,
                ": expected row_scale to have one element for each row of input, [", input.size(0), "], got ",
                row_scale->sizes());
    check_dtype(op, "row_scale", *row_scale);
    check_same_device(op, "row_scale", *row_scale, "input", input);
    return row_scale->to(type == at::kDouble ? at::kDouble : at::kFloat).contiguous();
}

const void *scale_data(const Tensor &tensor)
{
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// Whether the kernels take input and residual of these dtypes, or else both as the sum.
bool takes_mixed(at::ScalarType sum, at::ScalarType input, at::ScalarType residual)
{
    return sum == at::kFloat && is_half(input) && (residual == at::kFloat || residual == input);
}

// What broadcasts to input as row_scale does.
Tensor rows_as(const Tensor &row_scale, const Tensor &tensor)
{
    c10::SymDimVector sizes(static_cast<size_t>(tensor.dim()), 1);
    sizes[0] = row_scale.sym_size(0);
    return row_scale.view_symint(sizes);
}

} // namespace

static std::tuple<Tensor, Tensor> layer_scale_add_forward(const Tensor &input, const Tensor &residual,
                                                          const OptionalTensor &weight, const OptionalTensor &row_scale,
                                                          OptionalType copy_type)
{
    const char *const op = "layer_scale_add";
    check_dtype(op, "input", input);
    check_dtype(op, "residual", residual);
    check_same_device(op, "residual", residual, "input", input);
    check_same_shape(op, "residual", residual, "input", input);
    at::ScalarType type = c10::promoteTypes(input.scalar_type(), residual.scalar_type());
    if (weight) {
        check_dtype(op, "weight", *weight);
        check_same_device(op, "weight", *weight, "input", input);
        type = c10::promoteTypes(type, weight->scalar_type());
    }
    const int64_t dim = scaled_dim(op, weight, input);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor factors = row_factors(op, row_scale, input, dim, type);
    const ScaledRows shape(input, weight, dim, row_scale.has_value());
    Tensor x = shape.lay_out(dense(input));
    Tensor r = dense_like(residual, x);
    const bool mixed = x.is_cuda() && takes_mixed(type, x.scalar_type(), r.scalar_type());
    if (!mixed) {
        x = x.to(type);
        r = r.to(type);
    }
    const Tensor w = weight ? weight->to(type).contiguous() : Tensor();
    const Tensor sum = empty_strided(x.sizes(), x.strides(), x.options().dtype(type));
    TORCH_CHECK(!copy_type || c10::isFloatingType(*copy_type), op, ": expected copy_dtype to be floating point, got ",
                *copy_type);
    const bool with_copy = copy_type && mixed && *copy_type == x.scalar_type();
    Tensor copy = with_copy ? empty_like_dense(x) : empty({0}, x.options().dtype(copy_type.value_or(type)));
    if (x.numel() > 0) {
        const cuda_ops_dtype dtype = check_dtype(op, "input", sum);
        if (x.is_cuda()) {
            CUDA_OPS_LAUNCH(op, cuda_ops_layer_scale_add_forward_cuda(
                                    sum.data_ptr(), with_copy ? copy.data_ptr() : nullptr, x.const_data_ptr(),
                                    r.const_data_ptr(), scale_data(w), scale_data(factors), shape.rows, shape.cols,
                                    shape.channels, shape.image_rows, dtype, check_dtype(op, "input", x),
                                    check_dtype(op, "residual", r), current_stream(op)));
        } else {
            const Tensor scales = widened(w);
            parallel_stored_elements(
                op, x.numel(), dtype,
                [&](void *to, const void *from, const void *added, int64_t begin, int64_t end, cuda_ops_dtype type) {
                    return cuda_ops_layer_scale_add_forward_cpu(to, from, added, scale_data(scales),
                                                                scale_data(factors), shape.cols, shape.channels,
                                                                shape.image_rows, begin, end, type);
                },
                writes(sum), reads(x), reads(r));
        }
    }
    if (copy_type && !with_copy)
        copy = *copy_type == type ? sum.clone() : sum.to(*copy_type);
    return {sum, copy};
}

// grad_weight of the CPU's, in the dtype that it is computed in: what scale_channels has for each image is added up.
static Tensor weight_sums_cpu(const char *op, const Tensor &grad, const Tensor &input, const Tensor &factors,
                              const ScaledRows &shape)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const bool stored = dtype == CUDA_OPS_BFLOAT16; // as the kernel takes it
    const Tensor g = stored ? grad : widened(grad), x = stored ? input : widened(input);
    const bool by_column = shape.channels == 0;
    const int64_t outer = by_column ? shape.rows / shape.image_rows : shape.rows;
    const int64_t count = by_column ? shape.image_rows : shape.cols, inner = by_column ? shape.cols : 1;
    const Tensor ones = at::ones({outer, inner}, x.options().dtype(is_half(dtype) ? at::kFloat : x.scalar_type()));
    Tensor sums = at::empty_like(ones);
    const int64_t units = cuda_ops_scale_channels_units_cpu(outer, inner);
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / x.numel());
    parallel_ranges(op, units, grain, [&](int64_t begin, int64_t end) {
        return cuda_ops_scale_channels_backward_cpu(nullptr, sums.data_ptr(), g.const_data_ptr(), x.const_data_ptr(),
                                                    ones.const_data_ptr(), count, inner, CUDA_OPS_CHANNEL_GATE_NONE,
                                                    begin, end, dtype == CUDA_OPS_FLOAT16 ? CUDA_OPS_FLOAT32 : dtype);
    });
    if (factors.defined())
        sums = sums.view({factors.numel(), -1}) * factors.view({-1, 1});
    return sums.view({-1, by_column ? inner : shape.channels}).sum(0);
}

// `input` is read for grad_weight alone.
static std::tuple<Tensor, Tensor, Tensor>
layer_scale_add_backward(const OptionalTensor &grad_sum, const OptionalTensor &grad_copy, const OptionalTensor &input,
                         const OptionalTensor &weight, const OptionalTensor &row_scale, at::ScalarType input_type,
                         at::ScalarType residual_type, at::ScalarType sum_type, std::array<bool, 3> wanted)
{
    const char *const op = "layer_scale_add_backward";
    TORCH_CHECK(grad_sum || grad_copy, op, ": expected grad_sum or grad_copy to be a Tensor, got None");
    const Tensor &given = grad_sum ? *grad_sum : *grad_copy;
    if (grad_sum && grad_copy) {
        check_same_shape(op, "grad_copy", *grad_copy, "grad_sum", *grad_sum);
        check_same_device(op, "grad_copy", *grad_copy, "grad_sum", *grad_sum);
    }
    TORCH_CHECK(!wanted[2] || (weight && input), op,
                ": expected weight and input for the gradient of weight, got None");
    const int64_t dim = scaled_dim(op, weight, given);
    if (wanted[2]) {
        check_same_shape(op, "input", *input, "grad_sum", given);
        check_same_device(op, "input", *input, "grad_sum", given);
    }
    if (weight)
        check_same_device(op, "weight", *weight, "grad_sum", given);
    const c10::OptionalDeviceGuard guard(at::device_of(given));
    const Tensor factors = row_factors(op, row_scale, given, dim, sum_type);
    const Tensor &leading = wanted[2] ? *input : given;
    const ScaledRows shape(leading, weight, dim, row_scale.has_value());
    const bool mixed = given.is_cuda() && takes_mixed(sum_type, input_type, residual_type);
    // As which the kernels take input and residual, and give their gradients.
    const at::ScalarType x_type = mixed ? input_type : sum_type, r_type = mixed ? residual_type : sum_type;
    const Tensor layout = shape.lay_out(dense(leading));
    const Tensor x = wanted[2] ? layout.to(x_type) : Tensor();
    Tensor g = grad_sum ? dense_like(*grad_sum, layout).to(sum_type) : Tensor();
    Tensor c = grad_copy ? dense_like(*grad_copy, layout).to(x_type) : Tensor();
    const Tensor w = weight ? weight->to(sum_type).contiguous() : Tensor();
    const auto like = [&](bool is_wanted, at::ScalarType type) {
        const auto options = layout.options().dtype(type);
        return is_wanted ? empty_strided(layout.sizes(), layout.strides(), options) : empty({0}, options);
    };
    Tensor grad_input = like(wanted[0], x_type), grad_residual = like(wanted[1], r_type);
    Tensor grad_weight = w.defined() && wanted[2] ? at::zeros_like(w) : empty({0}, layout.options().dtype(sum_type));
    if (layout.numel() > 0) {
        // Of channels that lie innermost the kernel has the sums too.
        const bool sums_in_kernel = wanted[2] && shape.channels == 0 && layout.is_cuda();
        const cuda_ops_dtype dtype = check_dtype(op, "grad_sum", like(false, sum_type));
        [[maybe_unused]] void *const to_input = wanted[0] ? grad_input.data_ptr() : nullptr;
        [[maybe_unused]] void *const to_residual = wanted[1] ? grad_residual.data_ptr() : nullptr;
        if (layout.is_cuda()) {
            Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
            if (sums_in_kernel)
                workspace = empty_bytes(cuda_ops_layer_scale_add_workspace_cuda(shape.rows, shape.cols, dtype), layout);
#endif
            CUDA_OPS_LAUNCH(op, cuda_ops_layer_scale_add_backward_cuda(
                                    to_input, to_residual, sums_in_kernel ? grad_weight.data_ptr() : nullptr,
                                    workspace.defined() ? workspace.data_ptr() : nullptr, scale_data(g), scale_data(c),
                                    sums_in_kernel ? x.const_data_ptr() : nullptr, scale_data(w), scale_data(factors),
                                    shape.rows, shape.cols, shape.channels, shape.image_rows, dtype,
                                    check_dtype(op, "input", grad_input), check_dtype(op, "residual", grad_residual),
                                    current_stream(op)));
        } else {
            g = g.defined() ? c.defined() ? g + c : g : c;
            if (wanted[1])
                grad_residual.copy_(g);
            if (wanted[0]) {
                const Tensor from = dense_like(g, grad_input), scales = widened(w);
                parallel_stored_elements(
                    op, layout.numel(), dtype,
                    [&](void *to, const void *grad, int64_t begin, int64_t end, cuda_ops_dtype type) {
                        return cuda_ops_layer_scale_add_backward_cpu(to, grad, scale_data(scales), scale_data(factors),
                                                                     shape.cols, shape.channels, shape.image_rows,
                                                                     begin, end, type);
                    },
                    writes(grad_input), reads(from));
            }
        }
        if (wanted[2] && layout.is_cpu()) {
            grad_weight.copy_(weight_sums_cpu(op, g, x, factors, shape).view(w.sizes()));
        } else if (wanted[2] && !sums_in_kernel) {
            const at::ScalarType wide = sum_type == at::kDouble ? at::kDouble : at::kFloat;
            Tensor all = g.defined() ? g.to(wide) : Tensor();
            if (layout.is_cuda() && c.defined())
                all = all.defined() ? all + c : c.to(wide);
            all = all * x;
            if (factors.defined())
                all = all * rows_as(factors, all);
            grad_weight.copy_(all.sum_to_size(w.sizes()));
        }
    }
    return {grad_input.to(input_type), grad_residual.to(residual_type),
            weight ? grad_weight.to(weight->scalar_type()) : grad_weight};
}

// The wanted gradients of input, residual and weight: of the kernel, or, where they are differentiated further,
// composed of PyTorch's ops.
static std::vector<Tensor> layer_scale_add_gradients(const Tensor &grad_sum, const OptionalTensor &given_grad_copy,
                                                     const OptionalTensor &input, const OptionalTensor &weight,
                                                     const OptionalTensor &row_scale, at::ScalarType input_type,
                                                     at::ScalarType residual_type, OptionalType copy_type,
                                                     std::array<bool, 3> wanted)
{
    TORCH_CHECK(!wanted[2] || (input && weight),
                "layer_scale_add_gradients: expected input and weight to be Tensors where weight's gradient is wanted");
    std::vector<Tensor> grads;
    const Tensor none;
    const at::ScalarType sum_type = grad_sum.scalar_type();
    // Without a copy what stands for it has no elements.
    const OptionalTensor grad_copy = copy_type ? given_grad_copy : std::nullopt;
    if (is_differentiated_further({grad_sum, grad_copy.value_or(none), input.value_or(none), weight.value_or(none)})) {
        const Tensor g = grad_copy ? grad_sum + *grad_copy : grad_sum;
        const Tensor scaled = row_scale ? g * rows_as(*row_scale, g).to(sum_type) : g;
        if (wanted[0])
            grads.push_back((weight ? scaled * *weight : scaled).to(input_type));
        if (wanted[1])
            grads.push_back(g.to(residual_type));
        if (wanted[2])
            grads.push_back((scaled * *input).sum_to_size_symint(weight->sym_sizes()).to(weight->scalar_type()));
        return grads;
    }
    static const auto fused = registered_op<decltype(layer_scale_add_backward)>("cuda_ops::layer_scale_add_backward");
    // The gradient of the residual is that of the sum, where nothing is added to that.
    const bool passed_on = wanted[1] && !grad_copy && residual_type == sum_type;
    const bool nothing_scaled = !weight && !row_scale && input_type == sum_type && passed_on;
    if (nothing_scaled || (!wanted[0] && !wanted[2] && passed_on)) {
        if (wanted[0])
            grads.push_back(grad_sum);
        grads.push_back(grad_sum);
        return grads;
    }
    const auto [grad_input, grad_residual, grad_weight] =
        fused.call(grad_sum, grad_copy, input, weight, row_scale, input_type, residual_type, sum_type,
                   {wanted[0], wanted[1] && !passed_on, wanted[2]});
    if (wanted[0])
        grads.push_back(grad_input);
    if (wanted[1])
        grads.push_back(passed_on ? grad_sum : grad_residual);
    if (wanted[2])
        grads.push_back(grad_weight);
    return grads;
}

// Those of sum and copy.
static std::tuple<Tensor, Tensor>
layer_scale_add_tangents(const OptionalTensor &tangent_input, const OptionalTensor &tangent_residual,
                         const OptionalTensor &tangent_weight, const Tensor &input, const OptionalTensor &weight,
                         const OptionalTensor &row_scale, const Tensor &sum, OptionalType copy_type)
{
    Tensor tangent = at::zeros_like(sum);
    if (tangent_residual)
        tangent = tangent + *tangent_residual;
    Tensor of_branch;
    if (tangent_input)
        of_branch = weight ? *tangent_input * *weight : *tangent_input;
    if (tangent_weight)
        of_branch = of_branch.defined() ? of_branch + input * *tangent_weight : input * *tangent_weight;
    if (of_branch.defined() && row_scale)
        of_branch = of_branch * rows_as(*row_scale, sum);
    if (of_branch.defined())
        tangent = tangent + of_branch;
    tangent = tangent.to(sum.scalar_type());
    return {tangent, copy_type ? tangent.to(*copy_type, false, true) : sum.new_zeros({0})};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("layer_scale_add_forward(Tensor input, Tensor residual, Tensor? weight, Tensor? row_scale, "
                "ScalarType? copy_dtype) -> (Tensor sum, Tensor copy)");
    library.def("layer_scale_add_backward(Tensor? grad_sum, Tensor? grad_copy, Tensor? input, Tensor? weight, "
                "Tensor? row_scale, ScalarType input_dtype, ScalarType residual_dtype, ScalarType sum_dtype, "
                "bool[3] wanted) -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight)");
    library.def("layer_scale_add_gradients(Tensor grad_sum, Tensor? grad_copy, Tensor? input, Tensor? weight, "
                "Tensor? row_scale, ScalarType input_dtype, ScalarType residual_dtype, ScalarType? copy_dtype, "
                "bool[3] wanted) -> Tensor[]",
                cuda_ops::layer_scale_add_gradients);
    library.def("layer_scale_add_tangents(Tensor? tangent_input, Tensor? tangent_residual, Tensor? tangent_weight, "
                "Tensor input, Tensor? weight, Tensor? row_scale, Tensor sum, ScalarType? copy_dtype)"
                " -> (Tensor tangent_sum, Tensor tangent_copy)",
                cuda_ops::layer_scale_add_tangents);
    CUDA_OPS_IMPLEMENT(library, "layer_scale_add_forward", cuda_ops::layer_scale_add_forward);
    CUDA_OPS_IMPLEMENT(library, "layer_scale_add_backward", cuda_ops::layer_scale_add_backward);
    CUDA_OPS_DERIVATIVES(
        library, "layer_scale_add_forward",
        {"input, residual, weight: layer_scale_add_gradients(grad_sum, grad_copy, input if weight, weight, row_scale, "
         "input.dtype, residual.dtype, copy_dtype, wanted)",
         "row_scale: not differentiable",
         "sum, copy <- layer_scale_add_tangents(tangent_input, tangent_residual, tangent_weight, input, weight, "
         "row_scale, sum, copy_dtype)"});
}
