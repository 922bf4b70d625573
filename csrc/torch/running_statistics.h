// Running statistics of a batch normalisation, which training updates in place.
#pragma once

#include <optional>

#include "checks.h"
#include "cuda_ops/conv_bn_relu_pool.h"
#include "halves.h"
#include "parameters.h"

namespace cuda_ops
{

// A value for each channel: a parameter or statistic.
inline cuda_ops_dtype check_channel_values(const char *op, const char *argument, const Tensor &tensor,
                                           const Tensor &input, int64_t channels, const char *of)
{
    TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == channels, op, ": expected ", argument,
                " to have one element for each ", of, ", ", channels, ", got shape ", tensor.sizes());
    return check_parameter(op, argument, tensor, input);
}

// The running statistics as the kernels update them. Those that are not contiguous are updated in a copy.
struct RunningStatistics {
    Tensor given_mean, given_variance, given_batches, mean, variance, batches;
    cuda_ops_running_statistics statistics{nullptr, nullptr, CUDA_OPS_FLOAT32, nullptr, 0.0};

    RunningStatistics(const char *op, const std::optional<Tensor> &running_mean,
                      const std::optional<Tensor> &running_var, const std::optional<Tensor> &num_batches_tracked,
                      double momentum, const Tensor &input, int64_t channels, const char *of)
    {
        statistics.momentum = momentum;
        TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(), op,
                          ": expected running_mean and running_var to be both None or neither");
        if (running_mean) {
            statistics.dtype = check_channel_values(op, "running_mean", *running_mean, input, channels, of);
            check_channel_values(op, "running_var", *running_var, input, channels, of);
            check_like(op, "running_var", *running_var, "running_mean", *running_mean);
            given_mean = *running_mean, given_variance = *running_var;
            mean = dense(given_mean), variance = dense(given_variance);
            statistics.mean = mean.data_ptr();
            statistics.variance = variance.data_ptr();
        }
        if (num_batches_tracked) {
            check_same_device(op, "num_batches_tracked", *num_batches_tracked, "input", input);
            TORCH_CHECK(num_batches_tracked->scalar_type() == at::kLong && num_batches_tracked->numel() == 1, op,
                        ": expected num_batches_tracked to be one int64, got ", num_batches_tracked->toString(),
                        " of shape ", num_batches_tracked->sizes());
            given_batches = *num_batches_tracked;
            batches = dense(given_batches);
            statistics.batches = batches.data_ptr<int64_t>();
        }
    }

    // On the CPU, after a batch of `count` values for each of the channels.
    void update_cpu(const char *op, const double *batch_mean, const double *batch_variance, int64_t channels,
                    int64_t count) const
    {
        const Tensor new_mean = widened(mean), new_variance = widened(variance);
        check_status(op, cuda_ops_batch_norm_update_cpu(
                             new_mean.data_ptr(), new_variance.data_ptr(), batch_mean, batch_variance, channels, count,
                             statistics.momentum, is_half(statistics.dtype) ? CUDA_OPS_FLOAT32 : statistics.dtype));
        round_back(mean, new_mean);
        round_back(variance, new_variance);
    }

    // For paths whose kernels do not count batches. (By an op: on CUDA the pointer is not the host's.)
    void count_batch() const
    {
        if (batches.defined() && batches.is_cpu())
            *statistics.batches += 1;
        else if (batches.defined())
            batches.add_(1);
    }

    void finish() const
    {
        const std::pair<Tensor, Tensor> written[] = {
            {mean, given_mean}, {variance, given_variance}, {batches, given_batches}};
        for (const auto &[updated, given] : written) {
            if (!given.defined())
                continue;
            if (!updated.is_same(given))
                given.copy_(updated);
            given.unsafeGetTensorImpl()->bump_version(); // so that autograd notices
        }
    }
};

} // namespace cuda_ops
