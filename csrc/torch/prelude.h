// PyTorch's headers that much of the glue includes, for setup.py to compile once (a precompiled header) and not once a
// file. No file of ours includes this one: each names what it uses, and compiles without.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>
