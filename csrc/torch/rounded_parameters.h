// Parameters in the half that autocast gives them, all of a model in one launch.
//
// A model under autocast rounds its float32 parameters layer by layer, a launch and two trips through the dispatcher
// each. But what the last pass under autocast rounded the next one will round too: the first of these parameters that is
// asked for has all of them rounded, in one launch.
//
// When a parameter is rounded anew is what PyTorch's own cache of casts says, of the same parameters (float32 leaves that
// require grad): once for each time that autocast is left, unless it was told to keep none. The copies hang on one of
// that cache's entries, and go with it. One that was written to since, by its version or by other memory, is not taken,
// nor one that was made on another stream. What neither shows is a write by way of `.data`, between the first layer's
// call and that of the layer in question.
#pragma once

#include <ATen/core/Tensor.h>

namespace cuda_ops
{

// The parameter rounded to `dtype`, with its strides and without a gradient. Undefined where it has to be cast by itself:
// autocast is not on or has another dtype, the parameter is none that it keeps casts of, or calls are traced, batched,
// counted or the like.
at::Tensor autocast_parameter(const at::Tensor &parameter, at::ScalarType dtype);

// What autocast makes of an op's argument: a rounded parameter, or at::autocast::cached_cast's. Differentiable where
// gradients are recorded.
at::Tensor autocast_argument(const at::Tensor &tensor, at::ScalarType dtype, c10::DeviceType device);

} // namespace cuda_ops
