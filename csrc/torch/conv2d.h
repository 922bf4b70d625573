// The convolution and its gradients, for fused ops. The ops that conv2d.cpp registers are made of them.
#pragma once

#include <optional>

#include "checks.h"
#include "cuda_ops/conv2d.h"

namespace cuda_ops
{

// A convolution's parameters as the ops take them. padding is {top, bottom, left, right}.
struct Conv2dParameters {
    at::IntArrayRef stride, padding, dilation;
    int64_t groups;
};

inline bool is_channels_last(const Tensor &tensor)
{
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

inline at::MemoryFormat memory_format(bool channels_last)
{
    return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// Checks what the shapes of input and weight must satisfy, and returns the sizes of the convolution, without layouts. Of
// one axis: shapes and parameters are those of conv1d, and the sizes those of an image of one row.
cuda_ops_conv2d_sizes check_conv2d_sizes(const char *op, at::IntArrayRef input, at::IntArrayRef weight,
                                         const Conv2dParameters &parameters, size_t axes = 2);

// What sizes, strides, paddings and dilations have to be below.
constexpr int64_t CONV2D_LIMIT = int64_t(1) << 30;
void check_conv2d_limit(const char *op, size_t axes, int64_t value);
void check_conv2d_parameters(const char *op, size_t axes, const Conv2dParameters &parameters);

// The largest tile of output that float32 may be computed in by Winograd's algorithm on CUDA: the environment's
// CUDA_OPS_CONV2D_WINOGRAD, read at each call; 4 without it, since PyTorch's own convolutions take it too.
int conv2d_winograd_tile(const char *op);

// `op` is the name in error messages. All tensors are of one dtype and device. bias of backward_input, which makes it
// a transposed convolution: contiguous, a value for each channel of grad_input, or undefined.
Tensor conv2d_forward(const char *op, const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias,
                      const Conv2dParameters &parameters, bool channels_last,
                      cuda_ops_conv2d_activation activation = CUDA_OPS_CONV2D_NONE);
// Whether conv2d_forward of such an input and weight, of whatever dtype the latter is now, takes that activation.
bool conv2d_applies(const char *op, const Tensor &input, const Tensor &weight, const Conv2dParameters &parameters,
                    bool channels_last, cuda_ops_conv2d_activation activation);
Tensor conv2d_backward_input(const char *op, const Tensor &grad_output, const Tensor &weight,
                             at::IntArrayRef input_size, bool channels_last, const Conv2dParameters &parameters,
                             const Tensor &bias = Tensor());
Tensor conv2d_backward_weight(const char *op, const Tensor &grad_output, const Tensor &input,
                              at::IntArrayRef weight_size, bool channels_last, const Conv2dParameters &parameters);

} // namespace cuda_ops
