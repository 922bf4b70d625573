// Images as the tensor-core paths of conv2d read them: channels_last, each group's channels whole vectors of 16 bytes.
#ifndef CUDA_OPS_CONV2D_PAD_CHANNELS_H
#define CUDA_OPS_CONV2D_PAD_CHANNELS_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda_ops/core.h"

// to[image][pixel][group][padded] = from[image][pixel][group][channels], or, unless channels_last,
// from[image][group][channels][pixel]. The channels that `from` does not have are zero. `padded` channels are whole
// vectors, and `to` is aligned to them; `from` may begin at any element.
struct ChannelPadding {
    int64_t images, pixels, groups, channels, padded;
    int channels_last;
};
bool conv2d_can_pad_channels(const ChannelPadding &padding);
cuda_ops_status conv2d_pad_channels(void *to, const void *from, const ChannelPadding &padding, int64_t element_size,
                                    cudaStream_t stream);

#endif
