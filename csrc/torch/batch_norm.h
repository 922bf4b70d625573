// What batch_norm's glue shares with that of fused ops: a layer's parameters, its activation by name, and inference.
#pragma once

#include <limits>
#include <optional>
#include <string_view>

#include "checks.h"
#include "cuda_ops/batch_norm.h"
#include "running_statistics.h"

namespace cuda_ops
{

// weight or bias, contiguous; undefined if it is not given.
struct Parameters {
    Tensor weight, bias;
    cuda_ops_dtype dtype = CUDA_OPS_FLOAT32;

    // `of`: what each is of, in messages.
    Parameters(const char *op, const std::optional<Tensor> &given_weight, const std::optional<Tensor> &given_bias,
               const Tensor &input, int64_t channels, const char *of)
    {
        if (given_weight) {
            dtype = check_channel_values(op, "weight", *given_weight, input, channels, of);
            weight = given_weight->contiguous();
        }
        if (given_bias) {
            dtype = check_channel_values(op, "bias", *given_bias, input, channels, of);
            if (given_weight)
                check_like(op, "bias", *given_bias, "weight", *given_weight);
            bias = given_bias->contiguous();
        }
    }

    const void *weight_data() const
    {
        return weight.defined() ? weight.const_data_ptr() : nullptr;
    }
    const void *bias_data() const
    {
        return bias.defined() ? bias.const_data_ptr() : nullptr;
    }
};

// What batch_norm_act does with the normalised values.
inline cuda_ops_batch_norm_epilogue batch_norm_epilogue(const char *op, std::optional<std::string_view> activation)
{
    constexpr double NONE = std::numeric_limits<double>::quiet_NaN(); // no bound
    cuda_ops_batch_norm_epilogue epilogue{nullptr, CUDA_OPS_ACTIVATION_HARDTANH, NONE, NONE};
    if (activation == "relu")
        epilogue.first = 0;
    else if (activation == "relu6")
        epilogue.first = 0, epilogue.second = 6;
    else if (activation == "silu")
        epilogue.function = CUDA_OPS_ACTIVATION_SILU;
    else if (activation == "hardswish")
        epilogue.function = CUDA_OPS_ACTIVATION_HARDSWISH;
    else
        TORCH_CHECK_VALUE(!activation, op,
                          ": expected activation to be 'relu', 'relu6', 'silu', 'hardswish' or None, got '",
                          *activation, "'");
    return epilogue;
}

// f(batch_norm(input)) by running statistics; activation: as batch_norm_act takes it.
Tensor batch_norm_act_inference(const char *op, const Tensor &input, const std::optional<Tensor> &weight,
                                const std::optional<Tensor> &bias, const Tensor &running_mean,
                                const Tensor &running_var, std::optional<std::string_view> activation, double eps);

} // namespace cuda_ops
