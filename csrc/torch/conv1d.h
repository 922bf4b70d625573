// Convolutions of one axis as conv2d's of images of one row: (N, C, L) is (N, C, 1, L), a view. Not (N, C, L, 1): the
// kernels' tiles run along rows. Where channels lie next to each other (a view of (N, L, C)), the image is channels_last.
#pragma once

#include <array>

#include "conv2d.h"

namespace cuda_ops
{

inline Tensor as_image(const Tensor &tensor)
{
    return tensor.unsqueeze(2);
}

inline std::array<int64_t, 4> as_image(at::IntArrayRef size)
{
    return {size[0], size[1], 1, size[2]};
}

// The parameters of that image's convolution, from those of conv1d.
struct ImageParameters {
    std::array<int64_t, 2> stride, dilation;
    std::array<int64_t, 4> padding;
    int64_t groups;

    explicit ImageParameters(const Conv2dParameters &of)
        : stride{1, of.stride[0]}, dilation{1, of.dilation[0]}, padding{0, 0, of.padding[0], of.padding[1]},
          groups(of.groups)
    {
    }

    operator Conv2dParameters() const
    {
        return {stride, padding, dilation, groups};
    }
};

} // namespace cuda_ops
