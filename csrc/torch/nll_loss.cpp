// nll_loss for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/nll_loss.h"

#include "autograd.h"
#include "empty.h"
#include "loss.h"

namespace cuda_ops
{

static IndexErrors nll_loss_index_errors("nll_loss");

// The loss and total_weight, which is empty without a reduction.
static std::tuple<Tensor, Tensor> nll_loss_forward(const Tensor &input, const Tensor &target,
                                                   const std::optional<Tensor> &weight, int64_t reduction_number,
                                                   int64_t ignore_index)
{
    const char *op = "nll_loss";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const LossShape shape = loss_shape(op, input);
    check_class_indices(op, target, input, shape);
    check_class_weight(op, weight, input, shape);
    const cuda_ops_reduction reduction = check_reduction(op, reduction_number);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = input.contiguous(), t = as_indices(target);
    const Tensor w = weight ? weight->contiguous() : Tensor();
    Tensor loss = empty_loss(x, shape, reduction), total_weight = empty_total_weight(x, reduction);
    if (shape.columns() == 0) {
        fill_loss_of_nothing(loss, total_weight, reduction);
        return {loss, total_weight};
    }
    const int64_t *indices = t.const_data_ptr<int64_t>();
    if (x.is_cuda()) {
        cuda_ops_index_error *error = nll_loss_index_errors.record();
        const Tensor workspace =
            empty_workspace(x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_nll_loss_workspace_cuda(shape.outer, shape.inner)));
        CUDA_OPS_LAUNCH(op, cuda_ops_nll_loss_forward_cuda(loss.data_ptr(), total_weight.data_ptr(),
                                                           workspace.data_ptr(), error, x.const_data_ptr(), indices,
                                                           pointer_or_null(w), shape.outer, shape.classes, shape.inner,
                                                           ignore_index, reduction, dtype, current_stream(op)));
        nll_loss_index_errors.check_now(error);
        return {loss, total_weight};
    }
    check_targets_cpu(op, t, shape, ignore_index);
    const Tensor class_weight = widened(w),
                 wide_loss = reduction == CUDA_OPS_REDUCTION_NONE ? float32_like(loss) : loss;
    void *losses = reduction == CUDA_OPS_REDUCTION_NONE ? wide_loss.data_ptr() : nullptr;
    reduce_columns_cpu(op, loss, total_weight, shape, reduction, dtype,
                       [&](double *partial, int64_t begin, int64_t end) {
                           return cuda_ops_nll_loss_forward_cpu(losses, partial, x.const_data_ptr(), indices,
                                                                pointer_or_null(class_weight), shape.classes,
                                                                shape.inner, begin, end, ignore_index, dtype);
                       });
    round_back(loss, wide_loss);
    return {loss, total_weight};
}

static Tensor nll_loss_backward(const Tensor &grad_output, const Tensor &input, const Tensor &target,
                                const std::optional<Tensor> &weight, const Tensor &total_weight,
                                int64_t reduction_number, int64_t ignore_index)
{
    const char *op = "nll_loss_backward";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    const LossShape shape = loss_shape(op, input);
    check_class_indices(op, target, input, shape);
    check_class_weight(op, weight, input, shape);
    const cuda_ops_reduction reduction = check_reduction(op, reduction_number);
    check_grad_output(op, grad_output, input, shape, reduction);
    check_total_weight(op, total_weight, input, reduction);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor g = grad_output.contiguous(), t = as_indices(target);
    const Tensor w = weight ? weight->contiguous() : Tensor();
    Tensor grad_input = empty(input.sizes(), input.options());
    if (grad_input.numel() == 0)
        return grad_input;
    const int64_t *indices = t.const_data_ptr<int64_t>();
    if (input.is_cuda()) {
        nll_loss_index_errors.record(); // raises what forward found, if it is known by now
        CUDA_OPS_LAUNCH(op, cuda_ops_nll_loss_backward_cuda(grad_input.data_ptr(), g.const_data_ptr(), indices,
                                                            pointer_or_null(w), total_weight.const_data_ptr(),
                                                            shape.outer, shape.classes, shape.inner, ignore_index,
                                                            reduction, dtype, current_stream(op)));
    } else {
        const Tensor class_weight = widened(w), grad = widened(g);
        parallel_ranges(op, shape.columns(), columns_per_task(shape), [&](int64_t begin, int64_t end) {
            return cuda_ops_nll_loss_backward_cpu(
                grad_input.data_ptr(), grad.const_data_ptr(), indices, pointer_or_null(class_weight),
                total_weight.const_data_ptr(), shape.classes, shape.inner, begin, end, ignore_index, reduction, dtype);
        });
    }
    return grad_input;
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("nll_loss_forward(Tensor input, Tensor target, Tensor? weight, int reduction, int ignore_index) "
                "-> (Tensor output, Tensor total_weight)");
    library.def("nll_loss_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
                "Tensor total_weight, int reduction, int ignore_index) -> (Tensor grad_input)");
    CUDA_OPS_IMPLEMENT(library, "nll_loss_forward", cuda_ops::nll_loss_forward);
    CUDA_OPS_IMPLEMENT(library, "nll_loss_backward", cuda_ops::nll_loss_backward);
    CUDA_OPS_AUTOCAST(library, "nll_loss_forward", FLOAT32);
    // The loss is linear in its input: grad_input is linear in grad_output, does not depend on the input, and its
    // gradient is the loss again.
    CUDA_OPS_DERIVATIVES(library, "nll_loss_forward",
                         {"input: nll_loss_backward(grad_output, input, target, weight, total_weight, reduction, "
                          "ignore_index)",
                          "output <- nll_loss_forward(tangent_input, target, weight, reduction, ignore_index)"});
    CUDA_OPS_DERIVATIVES(
        library, "nll_loss_backward",
        {"grad_output: nll_loss_forward(grad_grad_input, target, weight, reduction, ignore_index)",
         "grad_input <- nll_loss_backward(tangent_grad_output, input, target, weight, total_weight, reduction, "
         "ignore_index)"});
}
