// Where PyTorch's generators are, for ops that drop elements.
#pragma once

#include <c10/core/Device.h>

#include "cuda_ops/philox.h"

namespace cuda_ops
{

// The next numbers of the default generator of `device`, for one call (dropout.cpp).
cuda_ops_philox_state draw_philox(c10::Device device);

} // namespace cuda_ops
