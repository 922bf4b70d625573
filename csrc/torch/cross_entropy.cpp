// cross_entropy for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/cross_entropy.h"

#include <limits>

#include "autograd.h"
#include "empty.h"
#include "loss.h"

namespace cuda_ops
{

static IndexErrors cross_entropy_index_errors("cross_entropy");

// The arguments of forward and backward, checked, and dense where a kernel reads them.
struct CrossEntropy {
    cuda_ops_dtype dtype;
    LossShape shape;
    cuda_ops_reduction reduction;
    bool has_probabilities;
    Tensor input, target, weight;

    // One of the two is null.
    const int64_t *indices() const
    {
        return has_probabilities ? nullptr : target.const_data_ptr<int64_t>();
    }
    const void *probabilities() const
    {
        return has_probabilities ? target.const_data_ptr() : nullptr;
    }
};

// A floating-point target holds class probabilities, an integer one class indices.
static void check_target(const char *op, const Tensor &target, const Tensor &input, const LossShape &shape,
                         int64_t ignore_index)
{
    const auto dtype = [&] { return c10::getDtypeNames(target.scalar_type()).first; };
    const bool same_shape = target.sizes() == input.sizes();
    if (!target.is_floating_point()) {
        TORCH_CHECK(!same_shape, op, ": expected target, which has the shape of input, to hold class probabilities in ",
                    "floating point, got ", dtype());
        check_class_indices(op, target, input, shape);
        return;
    }
    TORCH_CHECK(same_shape, op, ": expected target to be int64 of shape ", at::IntArrayRef(shape.loss_sizes),
                " (class indices) or floating point of shape ", input.sizes(), " (class probabilities), got ", dtype(),
                " of shape ", target.sizes());
    check_like(op, "target", target, "input", input);
    TORCH_CHECK(ignore_index < 0, op, ": expected ignore_index to be negative with class probabilities, ",
                "which have no index to ignore, got ", ignore_index);
}

static CrossEntropy check(const char *op, const Tensor &input, const Tensor &target,
                          const std::optional<Tensor> &weight, int64_t reduction, int64_t ignore_index,
                          double label_smoothing)
{
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const LossShape shape = loss_shape(op, input);
    check_target(op, target, input, shape, ignore_index);
    check_class_weight(op, weight, input, shape);
    TORCH_CHECK(0 <= label_smoothing && label_smoothing <= 1, op, ": expected label_smoothing to be in [0, 1], got ",
                label_smoothing);
    const bool has_probabilities = target.is_floating_point();
    return {dtype,
            shape,
            check_reduction(op, reduction),
            has_probabilities,
            input.contiguous(),
            has_probabilities ? target.contiguous() : as_indices(target),
            weight ? weight->contiguous() : Tensor()};
}

// The loss, the statistics of each column that backward needs, and total_weight, which is empty without a reduction.
static std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward(const Tensor &input, const Tensor &target,
                                                                const std::optional<Tensor> &weight, int64_t reduction,
                                                                int64_t ignore_index, double label_smoothing)
{
    const char *op = "cross_entropy";
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const CrossEntropy p = check(op, input, target, weight, reduction, ignore_index, label_smoothing);
    const LossShape &shape = p.shape;
    Tensor loss = empty_loss(p.input, shape, p.reduction), total_weight = empty_total_weight(p.input, p.reduction);
    Tensor statistics = empty({3, shape.columns()}, p.input.options().dtype(accumulate_dtype(input)));
    const auto results = [&]() -> std::tuple<Tensor, Tensor, Tensor> {
        // As in PyTorch, which divides label_smoothing by the number of classes.
        if (!p.has_probabilities && shape.classes == 0 && label_smoothing > 0)
            loss.fill_(std::numeric_limits<double>::quiet_NaN());
        return {loss, statistics, total_weight};
    };
    // Without classes there are no probabilities, and PyTorch's mean over them is 0 / 0.
    if (shape.columns() == 0 || (p.has_probabilities && shape.classes == 0)) {
        fill_loss_of_nothing(loss, total_weight, p.reduction);
        statistics.zero_();
        return results();
    }
    if (p.input.is_cuda()) {
        cuda_ops_index_error *error = cross_entropy_index_errors.record();
        const Tensor workspace = empty_workspace(
            p.input,
            CUDA_OPS_WORKSPACE_BYTES(cuda_ops_cross_entropy_workspace_cuda(shape.outer, shape.classes, shape.inner)));
        CUDA_OPS_LAUNCH(op, cuda_ops_cross_entropy_forward_cuda(
                                loss.data_ptr(), statistics.data_ptr(), total_weight.data_ptr(), workspace.data_ptr(),
                                error, p.input.const_data_ptr(), p.indices(), p.probabilities(),
                                pointer_or_null(p.weight), shape.outer, shape.classes, shape.inner, ignore_index,
                                label_smoothing, p.reduction, p.dtype, current_stream(op)));
        cross_entropy_index_errors.check_now(error);
        return results();
    }
    if (!p.has_probabilities)
        check_targets_cpu(op, p.target, shape, ignore_index);
    if (is_cpu_half(p.input) && shape.inner != 1) { // as a whole: a task may end within a row
        const auto [result, its_statistics, total] =
            in_float32(cross_entropy_forward, p.input, target, weight, reduction, ignore_index, label_smoothing);
        return {result.to(p.input.scalar_type()), its_statistics, total};
    }
    const Tensor class_weight = widened(p.weight);
    const Tensor losses = p.reduction == CUDA_OPS_REDUCTION_NONE ? loss : Tensor();
    reduce_columns_cpu(op, loss, total_weight, shape, p.reduction, p.dtype,
                       [&](double *partial, int64_t begin, int64_t end) {
                           return call_rows(
                               p.dtype, begin, end,
                               [&](void *to, void *its_statistics, const void *x, const void *classes,
                                   const void *probabilities, int64_t first, int64_t last, cuda_ops_dtype type) {
                                   return cuda_ops_cross_entropy_forward_cpu(
                                       to, partial, its_statistics, x, static_cast<const int64_t *>(classes),
                                       probabilities, pointer_or_null(class_weight), shape.columns(), shape.classes,
                                       shape.inner, first, last, ignore_index, label_smoothing, type);
                               },
                               writes(losses), writes(statistics), reads(p.input, shape.classes),
                               reads(p.has_probabilities ? Tensor() : p.target),
                               reads(p.has_probabilities ? p.target : Tensor(), shape.classes));
                       });
    return results();
}

static Tensor cross_entropy_backward(const Tensor &grad_output, const Tensor &input, const Tensor &target,
                                     const std::optional<Tensor> &weight, const Tensor &statistics,
                                     const Tensor &total_weight, int64_t reduction, int64_t ignore_index,
                                     double label_smoothing)
{
    const char *op = "cross_entropy_backward";
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const CrossEntropy p = check(op, input, target, weight, reduction, ignore_index, label_smoothing);
    const LossShape &shape = p.shape;
    check_grad_output(op, grad_output, input, shape, p.reduction);
    check_total_weight(op, total_weight, input, p.reduction);
    check_same_device(op, "statistics", statistics, "input", input);
    TORCH_CHECK(statistics.scalar_type() == accumulate_dtype(input) && statistics.is_contiguous() &&
                    statistics.dim() == 2 && statistics.size(0) == 3 && statistics.size(1) == shape.columns(),
                op, ": expected statistics to be those of forward, [3, ", shape.columns(), "], got ",
                statistics.sizes());
    const Tensor g = grad_output.contiguous();
    Tensor grad_input = empty(p.input.sizes(), p.input.options());
    if (grad_input.numel() == 0)
        return grad_input;
    if (p.input.is_cuda()) {
        cross_entropy_index_errors.record(); // raises what forward found, if it is known by now
        CUDA_OPS_LAUNCH(op, cuda_ops_cross_entropy_backward_cuda(
                                grad_input.data_ptr(), g.const_data_ptr(), p.input.const_data_ptr(), p.indices(),
                                p.probabilities(), pointer_or_null(p.weight), statistics.const_data_ptr(),
                                total_weight.const_data_ptr(), shape.outer, shape.classes, shape.inner, ignore_index,
                                label_smoothing, p.reduction, p.dtype, current_stream(op)));
    } else {
        const bool each = p.reduction == CUDA_OPS_REDUCTION_NONE;
        const Tensor class_weight = widened(p.weight), shared = widened(g);
        const int64_t row = shape.classes * shape.inner;
        parallel_rows(
            op, shape.columns(), shape.inner, columns_per_task(shape), p.dtype,
            [&](void *to, const void *grad, const void *x, const void *classes, const void *probabilities,
                const void *its_statistics, int64_t begin, int64_t end, cuda_ops_dtype type) {
                return cuda_ops_cross_entropy_backward_cpu(
                    to, each ? grad : shared.const_data_ptr(), x, static_cast<const int64_t *>(classes), probabilities,
                    pointer_or_null(class_weight), its_statistics, total_weight.const_data_ptr(), shape.columns(),
                    shape.classes, shape.inner, begin, end, ignore_index, label_smoothing, p.reduction, type);
            },
            writes(grad_input, row), reads(each ? g : Tensor(), shape.inner), reads(p.input, row),
            reads(p.has_probabilities ? Tensor() : p.target, shape.inner),
            reads(p.has_probabilities ? p.target : Tensor(), row), reads(statistics, shape.inner));
    }
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int reduction, int ignore_index, "
                "float label_smoothing) -> (Tensor output, Tensor statistics, Tensor total_weight)");
    library.def("cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
                "Tensor statistics, Tensor total_weight, int reduction, int ignore_index, float label_smoothing) "
                "-> (Tensor grad_input)");
    // Composed of differentiable ops by cuda_ops/ops/cross_entropy.py.
    library.def("cross_entropy_tangent(Tensor tangent, Tensor input, Tensor target, Tensor? weight, "
                "Tensor total_weight, int reduction, int ignore_index, float label_smoothing) -> Tensor");
    library.def("cross_entropy_share_gradients(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
                "Tensor total_weight, int reduction, float label_smoothing, bool[2] wanted) -> Tensor[]");
    library.def("cross_entropy_share_tangent(Tensor? tangent_target, Tensor? tangent_weight, Tensor input, "
                "Tensor target, Tensor? weight, int reduction, float label_smoothing) -> Tensor");
    library.def("cross_entropy_backward_gradients(Tensor grad_grad_input, Tensor grad_output, Tensor input, "
                "Tensor target, Tensor? weight, Tensor total_weight, int reduction, int ignore_index, "
                "float label_smoothing, bool[4] wanted) -> Tensor[]");
    library.def("cross_entropy_backward_input(Tensor tangent, Tensor grad_output, Tensor input, Tensor target, "
                "Tensor? weight, Tensor total_weight, int reduction, int ignore_index, float label_smoothing) "
                "-> Tensor");
    library.def("cross_entropy_backward_share(Tensor? tangent_target, Tensor? tangent_weight, Tensor grad_output, "
                "Tensor input, Tensor target, Tensor? weight, Tensor total_weight, int reduction, "
                "float label_smoothing) -> Tensor");
    CUDA_OPS_IMPLEMENT(library, "cross_entropy_forward", cuda_ops::cross_entropy_forward);
    CUDA_OPS_IMPLEMENT(library, "cross_entropy_backward", cuda_ops::cross_entropy_backward);
    CUDA_OPS_AUTOCAST(library, "cross_entropy_forward", FLOAT32);
    // statistics and total_weight are for backward only, and are functions of the other arguments. Class indices, and
    // weights beside them, have no gradients (the functional refuses such weights).
    CUDA_OPS_DERIVATIVES(
        library, "cross_entropy_forward",
        {"input: cross_entropy_backward(grad_output, input, target, weight, statistics, total_weight, reduction, "
         "ignore_index, label_smoothing)",
         "target, weight: cross_entropy_share_gradients(grad_output, input, target, weight, total_weight, reduction, "
         "label_smoothing, wanted)",
         "output <- cross_entropy_tangent(tangent_input, input, target, weight, total_weight, reduction, ignore_index, "
         "label_smoothing)",
         "output <- cross_entropy_share_tangent(tangent_target, none, input, target, weight, reduction, "
         "label_smoothing)",
         "output <- cross_entropy_share_tangent(none, tangent_weight, input, target, weight, reduction, "
         "label_smoothing)"});
    CUDA_OPS_DERIVATIVES(
        library, "cross_entropy_backward",
        {"grad_output, input, target, weight: cross_entropy_backward_gradients(grad_grad_input, grad_output, input, "
         "target, weight, total_weight, reduction, ignore_index, label_smoothing, wanted)",
         "grad_input <- cross_entropy_backward(tangent_grad_output, input, target, weight, statistics, total_weight, "
         "reduction, ignore_index, label_smoothing)",
         "grad_input <- cross_entropy_backward_input(tangent_input, grad_output, input, target, weight, total_weight, "
         "reduction, ignore_index, label_smoothing)",
         "grad_input <- cross_entropy_backward_share(tangent_target, none, grad_output, input, target, weight, "
         "total_weight, reduction, label_smoothing)",
         "grad_input <- cross_entropy_backward_share(none, tangent_weight, grad_output, input, target, weight, "
         "total_weight, reduction, label_smoothing)"});
}
