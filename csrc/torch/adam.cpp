// adam for PyTorch: one step over a list of parameters, in place. Parameters, gradients and state may have any strides:
// what does not lie in memory in the order of its parameter goes through a copy.
#include "cuda_ops/adam.h"

#include <optional>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "loss.h"
#include "parameter_list.h"

namespace cuda_ops
{

// A parameter of the list with what belongs to it, dense and in one order. `largest`: undefined without amsgrad.
struct AdamEntry {
    Tensor param, grad, exp_avg, exp_avg_sq, largest;
};

static void check_adam_states(const char *name, const at::TensorList states, const at::TensorList params)
{
    TORCH_CHECK(states.size() == params.size(), "adam: expected as many ", name, " as params, ", params.size(),
                ", got ", states.size());
    const at::ScalarType type = params[0].scalar_type(), state_type = states[0].scalar_type();
    const bool half = is_half(type);
    TORCH_CHECK(state_type == type || (half && state_type == at::kFloat), "adam: expected ", name,
                " to have the dtype of params, ", c10::getDtypeNames(type).first, half ? ", or float32" : "", ", got ",
                c10::getDtypeNames(state_type).first);
    for (size_t i = 0; i < params.size(); i++) {
        check_like("adam", name, states[i], name, states[0]);
        check_same_device("adam", name, states[i], "params", params[i]);
        check_same_shape("adam", name, states[i], "params", params[i]);
    }
}

// Counters of steps are on the CPU, or with their parameters; of one dtype.
static void check_adam_steps(const at::TensorList steps, const at::TensorList params)
{
    TORCH_CHECK(steps.size() == params.size(), "adam: expected as many steps as params, ", params.size(), ", got ",
                steps.size());
    for (const Tensor &step : steps) {
        const at::ScalarType type = step.scalar_type();
        TORCH_CHECK(step.numel() == 1 && (type == at::kFloat || type == at::kDouble) &&
                        type == steps[0].scalar_type() && step.device() == steps[0].device() &&
                        (step.is_cpu() || step.device() == params[0].device()) && !step.is_neg(),
                    "adam: expected steps to be one float32 or float64 each, all of them on the CPU or on the device "
                    "of params, got ",
                    type, " of shape ", step.sizes(), " on ", step.device());
    }
}

static void check_adam_scalar(const char *name, const std::optional<Tensor> &scalar, const Tensor &param,
                              bool float64_too)
{
    if (!scalar)
        return;
    check_same_device("adam", name, *scalar, "params", param);
    const at::ScalarType type = scalar->scalar_type();
    TORCH_CHECK(scalar->numel() == 1 && (type == at::kFloat || (float64_too && type == at::kDouble)) &&
                    !scalar->is_neg(),
                "adam: expected ", name, " to be one float32", float64_too ? " or float64" : "", ", got ", type,
                " of shape ", scalar->sizes());
}

// Adds 1 to each counter, and returns the sums.
static std::vector<double> count_adam_steps(const at::TensorList steps)
{
    std::vector<double> numbers;
    numbers.reserve(steps.size());
    for (const Tensor &step : steps)
        numbers.push_back(step.scalar_type() == at::kFloat ? *step.data_ptr<float>() += 1
                                                           : *step.data_ptr<double>() += 1);
    return numbers;
}

static void adam_cpu(const std::vector<AdamEntry> &entries, const std::vector<double> &steps, double grad_scale,
                     const cuda_ops_adam_options &options, cuda_ops_dtype dtype)
{
    for (size_t i = 0; i < entries.size(); i++) {
        const AdamEntry &entry = entries[i];
        parallel_rows(
            "adam", entry.param.numel(), 1, ELEMENTWISE_GRAIN / 4, dtype,
            [&](void *param, void *grad, void *exp_avg, void *exp_avg_sq, void *largest, int64_t begin, int64_t end,
                cuda_ops_dtype type) {
                return cuda_ops_adam_cpu(param, grad, exp_avg, exp_avg_sq, largest, steps[i], grad_scale, &options,
                                         begin, end, type);
            },
            updates(entry.param), grad_scale != 1 ? updates(entry.grad) : reads(entry.grad), updates(entry.exp_avg),
            updates(entry.exp_avg_sq), updates(entry.largest));
    }
}

#ifdef CUDA_OPS_WITH_CUDA
static cuda_ops_status adam_cuda(const std::vector<AdamEntry> &entries, const at::TensorList step_counters,
                                 const std::vector<double> &steps, cuda_ops_adam_device_scalars scalars,
                                 const cuda_ops_adam_options &options, cuda_ops_dtype dtype, cuda_ops_dtype state_dtype)
{
    std::vector<void *> params, grads, exp_avgs, exp_avg_sqs, largest, counters;
    std::vector<int64_t> counts;
    for (const AdamEntry &entry : entries) {
        params.push_back(entry.param.data_ptr());
        grads.push_back(entry.grad.data_ptr());
        exp_avgs.push_back(entry.exp_avg.data_ptr());
        exp_avg_sqs.push_back(entry.exp_avg_sq.data_ptr());
        if (options.amsgrad)
            largest.push_back(entry.largest.data_ptr());
        counts.push_back(entry.param.numel());
    }
    const bool on_device = steps.empty();
    if (on_device)
        for (const Tensor &counter : step_counters)
            counters.push_back(counter.data_ptr());
    const int64_t count = static_cast<int64_t>(entries.size());
    const cuda_ops_adam_list list{params.data(),
                                  grads.data(),
                                  exp_avgs.data(),
                                  exp_avg_sqs.data(),
                                  options.amsgrad ? largest.data() : nullptr,
                                  counts.data(),
                                  on_device ? nullptr : steps.data(),
                                  on_device ? counters.data() : nullptr,
                                  count};
    const size_t bytes = cuda_ops_adam_workspace_cuda(count, on_device);
    const Tensor workspace = bytes > 0 ? empty_workspace(entries[0].param, bytes) : Tensor();
    return cuda_ops_adam_cuda(&list, &scalars, workspace.defined() ? workspace.data_ptr() : nullptr, &options, dtype,
                              state_dtype, current_stream("adam"));
}
#endif

static void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                  at::TensorList max_exp_avg_sqs, at::TensorList steps, const std::optional<Tensor> &device_lr,
                  const std::optional<Tensor> &grad_scale, const std::optional<Tensor> &found_inf, double lr,
                  double beta1, double beta2, double eps, double weight_decay, bool amsgrad, bool decoupled,
                  bool maximize, const std::optional<Tensor> &grad_norm, [[maybe_unused]] double max_grad_norm)
{
    TORCH_CHECK(grads.size() == params.size(), "adam: expected as many grads as params, ", params.size(), ", got ",
                grads.size());
    TORCH_CHECK(amsgrad || max_exp_avg_sqs.empty(), "adam: expected no max_exp_avg_sqs without amsgrad, got ",
                max_exp_avg_sqs.size());
    check_adam_steps(steps, params);
    if (params.empty())
        return;
    const cuda_ops_dtype dtype = check_dtype("adam", "params", params[0]);
    for (size_t i = 0; i < params.size(); i++) {
        check_like("adam", "params", params[i], "params[0]", params[0]);
        check_like("adam", "grads", grads[i], "params", params[i]);
        check_same_shape("adam", "grads", grads[i], "params", params[i]);
    }
    check_adam_states("exp_avgs", exp_avgs, params);
    check_adam_states("exp_avg_sqs", exp_avg_sqs, params);
    check_like("adam", "exp_avg_sqs", exp_avg_sqs[0], "exp_avgs", exp_avgs[0]);
    if (amsgrad) {
        check_adam_states("max_exp_avg_sqs", max_exp_avg_sqs, params);
        check_like("adam", "max_exp_avg_sqs", max_exp_avg_sqs[0], "exp_avgs", exp_avgs[0]);
    }
    TORCH_CHECK(!device_lr || params[0].is_cuda(), "adam: expected device_lr to be on a CUDA device, got ",
                device_lr->device());
    check_adam_scalar("device_lr", device_lr, params[0], true);
    check_adam_scalar("grad_scale", grad_scale, params[0], false);
    check_adam_scalar("found_inf", found_inf, params[0], false);
    check_adam_scalar("grad_norm", grad_norm, params[0], false);
    TORCH_CHECK_NOT_IMPLEMENTED(!grad_norm || params[0].is_cuda(), "adam: grad_norm is supported on CUDA alone, got ",
                                params[0].device());
    // Counters on the CPU have to know whether the step is made; those on the device find it there.
    const bool counters_on_device = steps[0].is_cuda();
    if (found_inf && !counters_on_device && found_inf->item<float>() != 0)
        return;
    const c10::OptionalDeviceGuard guard(at::device_of(params[0]));
    std::vector<AdamEntry> entries(params.size());
    for (size_t i = 0; i < params.size(); i++) {
        AdamEntry &entry = entries[i];
        entry.param = dense(params[i]);
        entry.grad = in_order_of(entry.param, grads[i]);
        entry.exp_avg = in_order_of(entry.param, exp_avgs[i]);
        entry.exp_avg_sq = in_order_of(entry.param, exp_avg_sqs[i]);
        if (amsgrad)
            entry.largest = in_order_of(entry.param, max_exp_avg_sqs[i]);
    }
    const cuda_ops_adam_options options{lr, beta1, beta2, eps, weight_decay, amsgrad, decoupled, maximize};
    const std::vector<double> numbers = counters_on_device ? std::vector<double>() : count_adam_steps(steps);
    if (params[0].is_cuda()) {
#ifdef CUDA_OPS_WITH_CUDA
        const auto pointer = [](const std::optional<Tensor> &scalar) {
            return scalar ? scalar->const_data_ptr<float>() : nullptr;
        };
        const auto type_of = [](const Tensor &scalar) {
            return scalar.scalar_type() == at::kDouble ? CUDA_OPS_FLOAT64 : CUDA_OPS_FLOAT32;
        };
        const cuda_ops_adam_device_scalars scalars{device_lr ? device_lr->const_data_ptr() : nullptr,
                                                   pointer(grad_scale),
                                                   pointer(found_inf),
                                                   device_lr ? type_of(*device_lr) : CUDA_OPS_FLOAT32,
                                                   type_of(steps[0]),
                                                   pointer(grad_norm),
                                                   max_grad_norm};
        const cuda_ops_dtype state_dtype = check_dtype("adam", "exp_avgs", exp_avgs[0]);
#endif
        CUDA_OPS_LAUNCH("adam", adam_cuda(entries, steps, numbers, scalars, options, dtype, state_dtype));
    } else {
        adam_cpu(entries, numbers, grad_scale ? grad_scale->item<float>() : 1.0, options, dtype);
    }

    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < params.size(); i++) {
        write_back(params[i], entries[i].param);
        write_back(exp_avgs[i], entries[i].exp_avg);
        write_back(exp_avg_sqs[i], entries[i].exp_avg_sq);
        write_back(steps[i], steps[i]);
        if (amsgrad)
            write_back(max_exp_avg_sqs[i], entries[i].largest);
        if (grad_scale)
            write_back(grads[i], entries[i].grad);
    }
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("adam_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
                "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, Tensor? device_lr, Tensor? grad_scale, "
                "Tensor? found_inf, float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, "
                "bool decoupled, bool maximize, Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()");
    CUDA_OPS_IMPLEMENT(library, "adam_", cuda_ops::adam_);
    CUDA_OPS_TAKES_NEGATIVE_VIEWS(library, "adam_");
}
