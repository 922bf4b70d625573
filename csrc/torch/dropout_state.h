// Where PyTorch's generators are, for ops that draw random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <optional>

#include "cuda_ops/philox.h"

namespace cuda_ops
{

// The next numbers of `generator`, or of the default one of `device`, for one call that takes `offset_step` of CUDA's
// offset, a multiple of 4 (dropout.cpp).
cuda_ops_philox_state draw_philox(c10::Device device, const std::optional<at::Generator> &generator = std::nullopt,
                                  uint64_t offset_step = 4);

} // namespace cuda_ops
