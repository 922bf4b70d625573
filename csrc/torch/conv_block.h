// conv_bn_relu_pool's path on the CPU, computed by the C API's conv_block.h. What it keeps for backward has a layout of
// its own: conv_output, argmax and maximum have the op's sizes; statistics are the mean and the variance of each
// channel, then, with one input channel, the moments of the taps.
#pragma once

#include <optional>

#include "checks.h"
#include "cuda_ops/conv2d.h"
#include "cuda_ops/conv_block.h"
#include "cuda_ops/pool2d.h"

namespace cuda_ops
{

// The block's sizes, without the input's layout, where it supports this convolution and pooling, whatever the batch.
std::optional<cuda_ops_conv_block_sizes> conv_block_sizes(const cuda_ops_conv2d_sizes &conv,
                                                          const cuda_ops_pool2d &pool, cuda_ops_dtype dtype);

// How many values `statistics` has.
int64_t conv_block_statistics(const cuda_ops_conv_block_sizes &sizes);

struct ConvBlock {
    cuda_ops_conv_block_sizes sizes;
    Tensor input, weight, bias, norm_weight,
        norm_bias; // all but input float32, contiguous, the last three maybe undefined
    double eps;

    // input: in either memory format; the others as the op gets them.
    ConvBlock(const cuda_ops_conv_block_sizes &sizes, const Tensor &input, const Tensor &weight,
              const std::optional<Tensor> &bias, const Tensor &norm_weight, const Tensor &norm_bias, double eps);

    // mean and variance of the batch, and the moments, into statistics; the convolution into conv_output.
    void convolve(const char *op, const Tensor &conv_output, const Tensor &statistics);
    // After convolve. argmax and maximum: undefined, or both kept.
    void pool(const char *op, const Tensor &output, const Tensor &argmax, const Tensor &maximum,
              const Tensor &conv_output, const double *mean, const double *variance);
    // grad_output in the memory format of output; grad_input undefined where it is not wanted, else in the memory
    // format of input; grad_weight contiguous. The gradients of parameters are float32.
    void backward(const char *op, const Tensor &grad_input, const Tensor &grad_weight, const Tensor &grad_norm_weight,
                  const Tensor &grad_norm_bias, const Tensor &grad_output, const Tensor &conv_output,
                  const Tensor &argmax, const Tensor &maximum, const Tensor &statistics);

  private:
    cuda_ops_conv_block_plan plan{};
    Tensor prepared;

    Tensor bytes(size_t count) const;
    void prepare(const char *op, bool backward);
};

} // namespace cuda_ops
