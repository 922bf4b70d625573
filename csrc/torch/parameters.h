// What fused ops check of a layer's parameters.
#pragma once

#include "checks.h"
#include "halves.h"

namespace cuda_ops
{

// Checks a parameter or statistic: input's dtype, or float32 beside a float16 or bfloat16 input. Returns its dtype.
inline cuda_ops_dtype check_parameter(const char *op, const char *argument, const Tensor &tensor, const Tensor &input)
{
    check_same_device(op, argument, tensor, "input", input);
    if (!is_half(input.scalar_type()) || tensor.scalar_type() != at::kFloat)
        check_like(op, argument, tensor, "input", input);
    return check_dtype(op, argument, tensor);
}

} // namespace cuda_ops
