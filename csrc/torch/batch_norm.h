// batch_norm with running statistics, for fused ops.
#pragma once

#include <optional>
#include <string_view>

#include "checks.h"

namespace cuda_ops
{

// f(batch_norm(input)); activation: as batch_norm_act takes it.
Tensor batch_norm_act_inference(const char *op, const Tensor &input, const std::optional<Tensor> &weight,
                                const std::optional<Tensor> &bias, const Tensor &running_mean,
                                const Tensor &running_var, std::optional<std::string_view> activation, double eps);

} // namespace cuda_ops
