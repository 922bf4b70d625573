// Reductions for PyTorch: sum, mean, prod, norm, amax, amin, argmax, argmin, var, std over any dimensions. Checks, the
// dimensions as the kernels see them, allocation and the choice of backend; and the gradients, of PyTorch's ops, which
// are differentiable further.
#include "cuda_ops/reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymFloat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "cpu_workspace.h"
#include "empty.h"
#include "halves.h"
#include "vmap.h"

namespace cuda_ops
{

namespace
{

using Dims = at::IntArrayRef;
using Type = std::optional<at::ScalarType>;

// Which dimensions are reduced; no dimensions in the list are all. A tensor without dimensions is one of one element.
std::vector<bool> reduced_dims(const char *op, c10::SymIntArrayRef shape, Dims dims)
{
    const auto rank = static_cast<int64_t>(shape.size());
    const int64_t bound = std::max<int64_t>(rank, 1);
    std::vector<bool> reduced(static_cast<size_t>(bound), dims.empty());
    for (const int64_t dim : dims) {
        TORCH_CHECK_INDEX(-bound <= dim && dim < bound, op, ": expected dim to be in [", -bound, ", ", bound - 1,
                          "] for an input of shape ", shape, ", got ", dim);
        const auto wrapped = static_cast<size_t>(dim < 0 ? dim + bound : dim);
        TORCH_CHECK(!reduced[wrapped], op, ": expected dim to name each dimension once, got ", dims);
        reduced[wrapped] = true;
    }
    reduced.resize(static_cast<size_t>(rank));
    return reduced;
}

// A tensor's memory as [batch, outer, cols, inner], and the kept dimensions in the order in which results lie.
struct ReductionLayout {
    Tensor input;
    cuda_ops_reduction_sizes sizes{1, 1, 1, 1};
    std::vector<int64_t> kept;

    // `dense_input`: dense in some order of dimensions.
    ReductionLayout(const Tensor &dense_input, const std::vector<bool> &reduced) : input(dense_input)
    {
        std::vector<int64_t> order;
        for (int64_t d = 0; d < input.dim(); d++)
            if (input.size(d) != 1)
                order.push_back(d);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return input.stride(a) > input.stride(b); });
        if (!fit(order, reduced)) {
            // More than two runs of reduced dimensions: they are moved to the end.
            std::stable_partition(order.begin(), order.end(),
                                  [&](int64_t d) { return !reduced[static_cast<size_t>(d)]; });
            std::vector<int64_t> all = order;
            for (int64_t d = 0; d < input.dim(); d++)
                if (input.size(d) == 1)
                    all.push_back(d);
            input = input.permute(all).contiguous();
            fit(order, reduced, dense_input.sizes());
        }
        for (const int64_t d : order)
            if (!reduced[static_cast<size_t>(d)])
                kept.push_back(d);
    }

  private:
    bool fit(const std::vector<int64_t> &order, const std::vector<bool> &reduced, Dims given = {})
    {
        std::vector<std::pair<bool, int64_t>> runs; // from the outermost on
        for (const int64_t d : order) {
            const bool is_reduced = reduced[static_cast<size_t>(d)];
            const int64_t size = given.empty() ? input.size(d) : given[static_cast<size_t>(d)];
            if (runs.empty() || runs.back().first != is_reduced)
                runs.emplace_back(is_reduced, 1);
            runs.back().second *= size;
        }
        sizes = {1, 1, 1, 1};
        if (!runs.empty() && !runs.back().first) {
            sizes.inner = runs.back().second;
            runs.pop_back();
        }
        int64_t *const places[] = {&sizes.cols, &sizes.outer, &sizes.batch};
        if (runs.size() > 3)
            return false;
        for (size_t i = 0; i < runs.size(); i++) // from the innermost on: reduced, kept, reduced
            *places[i] = runs[runs.size() - 1 - i].second;
        return true;
    }
};

std::vector<int64_t> result_sizes(const Tensor &input, const std::vector<bool> &reduced, bool keepdim)
{
    std::vector<int64_t> sizes;
    for (size_t d = 0; d < reduced.size(); d++)
        if (!reduced[d])
            sizes.push_back(input.size(static_cast<int64_t>(d)));
        else if (keepdim)
            sizes.push_back(1);
    return sizes;
}

bool is_index(cuda_ops_reduction_kind kind)
{
    return kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
}

Tensor reduce(const char *op, const Tensor &given, Dims dims, bool keepdim, cuda_ops_reduction_kind kind,
              double parameter = 0, Type type = std::nullopt)
{
    const at::ScalarType to = type.value_or(given.scalar_type());
    TORCH_CHECK_NOT_IMPLEMENTED(!type || at::isFloatingType(to), op, ": expected dtype to be floating point, got ", to);
    // Kernels read halves and write float32; other casts are made first, as PyTorch does.
    const bool widens = at::isReducedFloatingType(given.scalar_type()) && to == at::kFloat;
    const Tensor input = to == given.scalar_type() || widens ? given : given.to(to);
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const std::vector<bool> reduced = reduced_dims(op, input.sym_sizes(), dims);
    const std::vector<int64_t> shape = result_sizes(input, reduced, keepdim);
    const auto options = input.options().dtype(is_index(kind) ? at::kLong : to);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    bool has_elements = true; // in the dimensions that are reduced
    for (size_t d = 0; d < reduced.size(); d++)
        has_elements = has_elements && (!reduced[d] || input.size(static_cast<int64_t>(d)) > 0);
    int64_t results = 1;
    for (const int64_t size : shape)
        results *= size;
    if (!has_elements && results > 0) {
        TORCH_CHECK_INDEX(kind < CUDA_OPS_AMAX || kind > CUDA_OPS_ARGMIN, op,
                          ": expected the dimensions that are reduced to have elements, got an input of shape ",
                          input.sizes());
        TORCH_CHECK(kind != CUDA_OPS_NORM || !std::isinf(parameter), op,
                    ": expected elements, of which p = ", parameter, " has a norm, got an input of shape ",
                    input.sizes());
    }
    Tensor output = empty(shape, options);
    if (results == 0)
        return output;
    cuda_ops_reduction_sizes sizes{1, results, 0, 1};
    std::vector<int64_t> kept;
    Tensor x = input;
    if (has_elements) {
        // The index among all elements is that of their order.
        const ReductionLayout layout(is_index(kind) && dims.empty() ? input.contiguous() : dense(input), reduced);
        sizes = layout.sizes, kept = layout.kept, x = layout.input;
    }
    const bool in_order = std::is_sorted(kept.begin(), kept.end());
    if (!in_order) {
        std::vector<int64_t> lying;
        for (const int64_t d : kept)
            lying.push_back(input.size(d));
        output = empty(lying, options);
    }
    const cuda_ops_dtype output_dtype = is_index(kind) ? dtype : check_dtype(op, "output", output);
    if (x.is_cuda()) {
        Tensor workspace;
#ifdef CUDA_OPS_WITH_CUDA
        workspace = empty_bytes(cuda_ops_reduction_workspace_cuda(sizes, dtype), x);
#endif
        (void)output_dtype;
        CUDA_OPS_LAUNCH(op, cuda_ops_reduction_cuda(output.data_ptr(), workspace.data_ptr(), x.const_data_ptr(), sizes,
                                                    kind, parameter, dtype, output_dtype, current_stream(op)));
    } else {
        void *const workspace = thread_workspace(cuda_ops_reduction_workspace_cpu(sizes));
        const int64_t units = cuda_ops_reduction_units_cpu(sizes);
        const int64_t unit_elements = std::max<int64_t>(1, x.numel() / std::max<int64_t>(1, units));
        parallel_ranges(op, units, std::max<int64_t>(1, ELEMENTWISE_GRAIN / unit_elements),
                        [&](int64_t begin, int64_t end) {
                            return cuda_ops_reduction_accumulate_cpu(workspace, x.const_data_ptr(), sizes, kind,
                                                                     parameter, begin, end, dtype);
                        });
        parallel_rows(
            op, results, 1, ELEMENTWISE_GRAIN / 8, dtype,
            [&](void *to, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_reduction_finish_cpu(to, workspace, sizes, kind, parameter, begin, end, type);
            },
            writes(output));
    }
    if (in_order)
        return output;
    // From the order in which they lie to that of the dimensions.
    std::vector<int64_t> places(kept.size());
    for (size_t i = 0; i < kept.size(); i++)
        places[static_cast<size_t>(std::count_if(kept.begin(), kept.end(), [&](int64_t d) { return d < kept[i]; }))] =
            static_cast<int64_t>(i);
    return output.permute(places).contiguous().view(shape);
}

// ---- gradients -----------------------------------------------------------------------------------------------------

// A result with the reduced dimensions of its input again, of one element each.
Tensor restored(const Tensor &result, const std::vector<bool> &reduced, bool keepdim)
{
    Tensor tensor = result;
    for (size_t d = 0; d < reduced.size() && !keepdim; d++)
        if (reduced[d])
            tensor = tensor.unsqueeze(static_cast<int64_t>(d));
    return tensor;
}

Tensor restored_like(const Tensor &result, const Tensor &input, Dims dims, bool keepdim)
{
    return restored(result, reduced_dims("reduction", input.sym_sizes(), dims), keepdim);
}

c10::SymInt reduced_count(const char *op, const Tensor &input, Dims dims)
{
    const std::vector<bool> reduced = reduced_dims(op, input.sym_sizes(), dims);
    c10::SymInt count = 1;
    for (size_t d = 0; d < reduced.size(); d++)
        if (reduced[d])
            count = count * input.sym_size(static_cast<int64_t>(d));
    return count;
}

// What an input of that size gets of a gradient that all its elements share.
Tensor expanded(const char *op, const Tensor &grad, c10::SymIntArrayRef size, Dims dims, bool keepdim,
                at::ScalarType type, bool divides)
{
    const auto rank = static_cast<int64_t>(size.size());
    const std::vector<bool> reduced = reduced_dims(op, size, dims);
    const auto kept = std::count(reduced.begin(), reduced.end(), false);
    TORCH_CHECK(grad.dim() == (keepdim ? rank : kept), op,
                ": expected grad_output to have the dimensions of the output, ", keepdim ? rank : kept, ", got shape ",
                grad.sym_sizes());
    Tensor values = restored(grad, reduced, keepdim);
    if (divides) {
        c10::SymInt count = 1;
        for (size_t d = 0; d < reduced.size(); d++)
            if (reduced[d])
                count = count * size[d];
        // Of no elements nothing is the mean, and what it is divided by does not matter.
        values = values / c10::Scalar(count.max(1));
    }
    return values.to(type).expand_symint(size);
}

// The largest or smallest elements share the gradient; where there is a NaN, the result is one, and NaNs share it.
Tensor extreme_slope(const Tensor &input, const Tensor &result, Dims dims, bool nan_is_it = false)
{
    const Tensor is_it =
        nan_is_it ? (input == result).logical_or(at::isnan(input).logical_and(at::isnan(result))) : input == result;
    return is_it.to(result.scalar_type()) / is_it.sum(dims, /*keepdim=*/true);
}

Tensor prod_slope(const Tensor &input, Dims dims)
{
    // The product of all others, without a division by zeros: of those before and of those behind.
    const std::vector<bool> reduced = reduced_dims("prod", input.sym_sizes(), dims);
    if (input.dim() == 0)
        return at::ones_like(input);
    std::vector<int64_t> order, places(reduced.size());
    for (const bool wanted : {false, true})
        for (size_t d = 0; d < reduced.size(); d++)
            if (reduced[d] == wanted)
                order.push_back(static_cast<int64_t>(d));
    for (size_t i = 0; i < order.size(); i++)
        places[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    // Of halves in float32: their products would be rounded at each factor.
    const Tensor moved = (is_half(input.scalar_type()) ? input.to(at::kFloat) : input).permute(order);
    const Tensor rows = moved.flatten(std::count(reduced.begin(), reduced.end(), false), -1);
    if (rows.sym_numel() == 0)
        return at::ones_like(input);
    const Tensor ones = at::ones_like(rows.narrow(-1, 0, 1));
    const auto others_before = [&](const Tensor &values) {
        return at::cat({ones, values.narrow_symint(-1, 0, values.sym_size(-1) - 1)}, -1).cumprod(-1);
    };
    const Tensor others = others_before(rows) * others_before(rows.flip({-1})).flip({-1});
    return others.reshape_symint(moved.sym_sizes()).permute(places).to(input.scalar_type());
}

Tensor norm_slope(const Tensor &input, const Tensor &result, double p, Dims dims)
{
    const Tensor sign = input.sgn();
    if (p == 0)
        return at::zeros_like(input);
    if (p == 1)
        return sign;
    if (std::isinf(p))
        return sign * extreme_slope(input.abs(), result, dims, true);
    // 0 where all elements are.
    const Tensor is_zero = result == 0, divisor = at::where(is_zero, at::ones_like(result), result);
    if (p == 2) // not by 1 / divisor, which underflows where a norm is large
        return at::where(is_zero, at::zeros_like(input), input / divisor);
    const Tensor factor = at::where(is_zero, at::zeros_like(result), divisor.pow(1 - p));
    const Tensor size = at::where(input == 0, at::ones_like(input), input.abs()); // its sign is 0
    return sign * size.pow(p - 1) * factor;
}

// Of var and std, but for what scaled_as_var multiplies the gradient by.
Tensor var_slope(const Tensor &input, Dims dims)
{
    using Mean = Tensor(const Tensor &, Dims, bool, Type);
    static const auto op = registered_op<Mean>("cuda_ops::mean_forward");
    const at::ScalarType type = at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
    return input - op.call(input, dims, true, type);
}

// In PyTorch's order, by which a divisor of 0 makes infinities or NaN.
Tensor scaled_as_var(cuda_ops_reduction_kind kind, const Tensor &grad, const Tensor &input, const Tensor &result,
                     Dims dims, double correction)
{
    if (kind != CUDA_OPS_VAR && kind != CUDA_OPS_STD)
        return grad;
    if (input.sym_numel() == 0) // whose slopes are none: a sum over them is 0, also where the divisor is
        return grad;
    const c10::SymFloat divisor = c10::SymFloat(reduced_count("reduction", input, dims)) - correction;
    const Tensor scaled = grad * c10::Scalar(c10::SymFloat(2.0) / divisor);
    if (kind == CUDA_OPS_VAR)
        return scaled;
    const Tensor is_zero = result == 0, twice = 2 * at::where(is_zero, at::ones_like(result), result);
    return at::where(is_zero, at::zeros_like(scaled), scaled / twice);
}

// The gradient of the result by each element of input, which is cast to the type of the result.
Tensor slope_of(cuda_ops_reduction_kind kind, const Tensor &given, const Tensor &output, Dims dims, bool keepdim,
                double parameter)
{
    const Tensor input = given.to(output.scalar_type());
    const Tensor result = restored_like(output, input, dims, keepdim);
    switch (kind) {
    case CUDA_OPS_PROD:
        return prod_slope(input, dims);
    case CUDA_OPS_NORM:
        return norm_slope(input, result, parameter, dims);
    case CUDA_OPS_VAR:
    case CUDA_OPS_STD:
        return var_slope(input, dims);
    default:
        return extreme_slope(input, result, dims);
    }
}

Tensor composed_backward(const Tensor &grad_output, const Tensor &input, const Tensor &output, int64_t kind,
                         std::optional<double> parameter, Dims dims, bool keepdim)
{
    const auto which = static_cast<cuda_ops_reduction_kind>(kind);
    const double number = parameter.value_or(0);
    const Tensor slope = slope_of(which, input, output, dims, keepdim, number);
    const Tensor grad = restored_like(grad_output, input, dims, keepdim);
    const Tensor result = restored_like(output, input, dims, keepdim);
    return (slope * scaled_as_var(which, grad, input, result, dims, number)).to(input.scalar_type());
}

// A kernel's, or none where there is no kernel for the call.
Tensor backward_on_cpu(const char *op, const Tensor &grad_output, const Tensor &given, const Tensor &output,
                       cuda_ops_reduction_kind kind, double parameter, Dims dims, const std::vector<bool> &reduced)
{
    // Of double, the product of a row has no wider type.
    if (given.numel() == 0 || grad_output.scalar_type() != given.scalar_type() ||
        output.scalar_type() != given.scalar_type() || (kind == CUDA_OPS_PROD && given.scalar_type() == at::kDouble))
        return {};
    const Tensor input = dense(given);
    const ReductionLayout layout(input, reduced);
    const cuda_ops_reduction_sizes sizes = layout.sizes;
    if (!layout.input.is_same(input) || !std::is_sorted(layout.kept.begin(), layout.kept.end()) ||
        !cuda_ops_reduction_has_backward_cpu(sizes, kind, parameter))
        return {};
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const Tensor g = widened(grad_output).contiguous(), result = widened(output).contiguous();
    const bool has_mean = kind == CUDA_OPS_VAR || kind == CUDA_OPS_STD;
    const Tensor mean = has_mean ? reduce(op, input, dims, true, CUDA_OPS_MEAN, 0, g.scalar_type()) : g;
    const bool has_rows = kind == CUDA_OPS_PROD || kind == CUDA_OPS_AMAX || kind == CUDA_OPS_AMIN;
    const int64_t outputs = sizes.outer * sizes.inner;
    const std::unique_ptr<double[]> factors(new double[3 * outputs]);
    const auto find_factors = [&](const void *x, int64_t begin, int64_t end, cuda_ops_dtype type) {
        return cuda_ops_reduction_backward_factors_cpu(factors.get(), g.const_data_ptr(), result.const_data_ptr(),
                                                       mean.const_data_ptr(), x, sizes, kind, parameter, begin, end,
                                                       type);
    };
    if (has_rows)
        parallel_rows(op, outputs, 1, std::max<int64_t>(1, ELEMENTWISE_GRAIN / sizes.cols), dtype, find_factors,
                      reads(input, sizes.cols));
    else
        check_status(op, find_factors(nullptr, 0, outputs, is_half(dtype) ? CUDA_OPS_FLOAT32 : dtype));
    const double *const products = factors.get() + 2 * outputs;
    if (kind == CUDA_OPS_PROD && !std::all_of(products, products + outputs, [](double p) { return std::isfinite(p); }))
        return {};
    Tensor grad_input = empty_like_dense(input);
    parallel_elements(
        op, input.numel(), dtype,
        [&](void *to, const void *x, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_reduction_backward_cpu(to, x, factors.get(), sizes, kind, begin, end, type);
        },
        writes(grad_input), reads(input));
    return grad_input;
}

} // namespace

static Tensor reduction_backward_cpu(const Tensor &grad_output, const Tensor &input, const Tensor &output, int64_t kind,
                                     std::optional<double> parameter, Dims dims, bool keepdim)
{
    const char *const op = "reduction_backward_cpu";
    check_dtype(op, "input", input);
    const std::vector<bool> reduced = reduced_dims(op, input.sym_sizes(), dims);
    const std::vector<int64_t> shape = result_sizes(input, reduced, keepdim);
    for (const Tensor &tensor : {grad_output, output}) {
        check_dtype(op, "grad_output and output", tensor);
        TORCH_CHECK(tensor.is_cpu() && tensor.sizes() == c10::IntArrayRef(shape), op,
                    ": expected grad_output and output on the CPU, of shape ", shape, ", got ", tensor.device(),
                    " and shape ", tensor.sizes());
    }
    const auto which = static_cast<cuda_ops_reduction_kind>(kind);
    const Tensor grad_input =
        backward_on_cpu(op, grad_output, input, output, which, parameter.value_or(0), dims, reduced);
    return grad_input.defined() ? grad_input
                                : composed_backward(grad_output, input, output, kind, parameter, dims, keepdim);
}

// kind: a cuda_ops_reduction_kind. output: what forward returned, which some kinds do not look at.
static Tensor reduction_backward(const Tensor &grad_output, const Tensor &input, const Tensor &output, int64_t kind,
                                 std::optional<double> parameter, Dims dims, bool keepdim)
{
    if (!input.is_cpu() || is_differentiated_further({grad_output, input, output}))
        return composed_backward(grad_output, input, output, kind, parameter, dims, keepdim);
    static const auto op = registered_op<Tensor(const Tensor &, const Tensor &, const Tensor &, int64_t,
                                                std::optional<double>, Dims, bool)>("cuda_ops::reduction_backward_cpu");
    return op.call(grad_output, input, output, kind, parameter, dims, keepdim);
}

static Tensor reduction_tangent(const Tensor &tangent, const Tensor &input, const Tensor &output, int64_t kind,
                                std::optional<double> parameter, Dims dims, bool keepdim)
{
    const auto which = static_cast<cuda_ops_reduction_kind>(kind);
    const double number = parameter.value_or(0);
    const Tensor sums = (slope_of(which, input, output, dims, keepdim, number) * tangent).sum(dims, keepdim);
    return scaled_as_var(which, sums, input, output, dims, number).to(output.scalar_type());
}

static Tensor sum_forward(const Tensor &input, Dims dim, bool keepdim, Type dtype)
{
    return reduce("sum", input, dim, keepdim, CUDA_OPS_SUM, 0, dtype);
}

static Tensor mean_forward(const Tensor &input, Dims dim, bool keepdim, Type dtype)
{
    return reduce("mean", input, dim, keepdim, CUDA_OPS_MEAN, 0, dtype);
}

static Tensor prod_forward(const Tensor &input, Dims dim, bool keepdim, Type dtype)
{
    return reduce("prod", input, dim, keepdim, CUDA_OPS_PROD, 0, dtype);
}

static Tensor vector_norm_forward(const Tensor &input, double p, Dims dim, bool keepdim, Type dtype)
{
    // The square of a tiny element is 0; of one alone the norm is its absolute value.
    if (p == 2 && reduced_count("norm", input, dim) == 1)
        p = std::numeric_limits<double>::infinity();
    return reduce("norm", input, dim, keepdim, CUDA_OPS_NORM, p, dtype);
}

static Tensor amax_forward(const Tensor &input, Dims dim, bool keepdim)
{
    return reduce("amax", input, dim, keepdim, CUDA_OPS_AMAX);
}

static Tensor amin_forward(const Tensor &input, Dims dim, bool keepdim)
{
    return reduce("amin", input, dim, keepdim, CUDA_OPS_AMIN);
}

static Tensor argmax_forward(const Tensor &input, std::optional<int64_t> dim, bool keepdim)
{
    return reduce("argmax", input, dim ? Dims(*dim) : Dims(), keepdim, CUDA_OPS_ARGMAX);
}

static Tensor argmin_forward(const Tensor &input, std::optional<int64_t> dim, bool keepdim)
{
    return reduce("argmin", input, dim ? Dims(*dim) : Dims(), keepdim, CUDA_OPS_ARGMIN);
}

static Tensor var_forward(const Tensor &input, Dims dim, double correction, bool keepdim)
{
    return reduce("var", input, dim, keepdim, CUDA_OPS_VAR, correction);
}

static Tensor std_forward(const Tensor &input, Dims dim, double correction, bool keepdim)
{
    return reduce("std", input, dim, keepdim, CUDA_OPS_STD, correction);
}

// Views: nothing is computed but, for the mean, a division of what is small.
static Tensor sum_backward(const Tensor &grad_output, c10::SymIntArrayRef size, Dims dim, bool keepdim,
                           at::ScalarType dtype)
{
    return expanded("sum_backward", grad_output, size, dim, keepdim, dtype, false);
}

static Tensor mean_backward(const Tensor &grad_output, c10::SymIntArrayRef size, Dims dim, bool keepdim,
                            at::ScalarType dtype)
{
    return expanded("mean_backward", grad_output, size, dim, keepdim, dtype, true);
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    // No dimensions in `dim` are all.
    library.def("sum_forward(Tensor input, int[] dim, bool keepdim, ScalarType? dtype) -> (Tensor output)");
    library.def("mean_forward(Tensor input, int[] dim, bool keepdim, ScalarType? dtype) -> (Tensor output)");
    library.def("prod_forward(Tensor input, int[] dim, bool keepdim, ScalarType? dtype) -> (Tensor output)");
    library.def("norm_forward(Tensor input, float p, int[] dim, bool keepdim, ScalarType? dtype) -> (Tensor output)");
    library.def("amax_forward(Tensor input, int[] dim, bool keepdim) -> (Tensor output)");
    library.def("amin_forward(Tensor input, int[] dim, bool keepdim) -> (Tensor output)");
    library.def("argmax_forward(Tensor input, int? dim, bool keepdim) -> (Tensor output)");
    library.def("argmin_forward(Tensor input, int? dim, bool keepdim) -> (Tensor output)");
    library.def("var_forward(Tensor input, int[] dim, float correction, bool keepdim) -> (Tensor output)");
    library.def("std_forward(Tensor input, int[] dim, float correction, bool keepdim) -> (Tensor output)");
    library.def("sum_backward(Tensor grad_output, SymInt[] size, int[] dim, bool keepdim, ScalarType dtype) -> Tensor",
                cuda_ops::sum_backward);
    library.def("mean_backward(Tensor grad_output, SymInt[] size, int[] dim, bool keepdim, ScalarType dtype) -> Tensor",
                cuda_ops::mean_backward);
    library.def("reduction_backward(Tensor grad_output, Tensor input, Tensor output, int kind, float? parameter, "
                "int[] dim, bool keepdim) -> Tensor",
                cuda_ops::reduction_backward);
    library.def("reduction_backward_cpu(Tensor grad_output, Tensor input, Tensor output, int kind, float? parameter, "
                "int[] dim, bool keepdim) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "reduction_backward_cpu", cuda_ops::reduction_backward_cpu);
    library.def("reduction_tangent(Tensor tangent, Tensor input, Tensor output, int kind, float? parameter, int[] dim, "
                "bool keepdim) -> Tensor",
                cuda_ops::reduction_tangent);
    CUDA_OPS_IMPLEMENT(library, "sum_forward", cuda_ops::sum_forward);
    CUDA_OPS_VMAP(library, "sum_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "mean_forward", cuda_ops::mean_forward);
    CUDA_OPS_VMAP(library, "mean_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "prod_forward", cuda_ops::prod_forward);
    CUDA_OPS_VMAP(library, "prod_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "norm_forward", cuda_ops::vector_norm_forward);
    CUDA_OPS_VMAP(library, "norm_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "amax_forward", cuda_ops::amax_forward);
    CUDA_OPS_VMAP(library, "amax_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "amin_forward", cuda_ops::amin_forward);
    CUDA_OPS_VMAP(library, "amin_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "argmax_forward", cuda_ops::argmax_forward);
    CUDA_OPS_IMPLEMENT(library, "argmin_forward", cuda_ops::argmin_forward);
    CUDA_OPS_IMPLEMENT(library, "var_forward", cuda_ops::var_forward);
    CUDA_OPS_VMAP(library, "var_forward", "input[1], dim");
    CUDA_OPS_IMPLEMENT(library, "std_forward", cuda_ops::std_forward);
    CUDA_OPS_VMAP(library, "std_forward", "input[1], dim");
    // As PyTorch's.
    CUDA_OPS_AUTOCAST(library, "sum_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_AUTOCAST(library, "prod_forward", FLOAT32);
    CUDA_OPS_AUTOCAST(library, "norm_forward", FLOAT32_ON_CUDA);
    CUDA_OPS_DERIVATIVES(library, "sum_forward",
                         {"input: sum_backward(grad_output, input.size, dim, keepdim, input.dtype)",
                          "output <- sum_forward(tangent_input, dim, keepdim, dtype)"});
    CUDA_OPS_DERIVATIVES(library, "mean_forward",
                         {"input: mean_backward(grad_output, input.size, dim, keepdim, input.dtype)",
                          "output <- mean_forward(tangent_input, dim, keepdim, dtype)"});
    // The numbers are those of cuda_ops_reduction_kind.
    static_assert(CUDA_OPS_PROD == 2 && CUDA_OPS_NORM == 3 && CUDA_OPS_AMAX == 4 && CUDA_OPS_AMIN == 5 &&
                  CUDA_OPS_VAR == 8 && CUDA_OPS_STD == 9);
    const char *const of_extreme[] = {
        "input: reduction_backward(grad_output, input, output, 4, none, dim, keepdim)",
        "output <- reduction_tangent(tangent_input, input, output, 4, none, dim, keepdim)"};
    for (const char *name : {"amax_forward", "amin_forward"})
        CUDA_OPS_DERIVATIVES(library, name, {of_extreme[0], of_extreme[1]});
    CUDA_OPS_DERIVATIVES(library, "prod_forward",
                         {"input: reduction_backward(grad_output, input, output, 2, none, dim, keepdim)",
                          "output <- reduction_tangent(tangent_input, input, output, 2, none, dim, keepdim)"});
    CUDA_OPS_DERIVATIVES(library, "norm_forward",
                         {"input: reduction_backward(grad_output, input, output, 3, p, dim, keepdim)",
                          "output <- reduction_tangent(tangent_input, input, output, 3, p, dim, keepdim)"});
    CUDA_OPS_DERIVATIVES(library, "var_forward",
                         {"input: reduction_backward(grad_output, input, output, 8, correction, dim, keepdim)",
                          "output <- reduction_tangent(tangent_input, input, output, 8, correction, dim, keepdim)"});
    CUDA_OPS_DERIVATIVES(library, "std_forward",
                         {"input: reduction_backward(grad_output, input, output, 9, correction, dim, keepdim)",
                          "output <- reduction_tangent(tangent_input, input, output, 9, correction, dim, keepdim)"});
}
