// Split-K in conv2d: partial sums that blocks left in the workspace, added in the order of the splits. No atomics.
#ifndef CUDA_OPS_CONV2D_SPLIT_K_H
#define CUDA_OPS_CONV2D_SPLIT_K_H

#include <cuda_runtime.h>

#include "conv2d/paths.h"

// output[i] = sum over splits of partial[split][i]; partial is of the accumulation type.
cuda_ops_status conv2d_sum_splits(void *output, const void *partial, int64_t count, int64_t splits,
                                  cuda_ops_dtype dtype, cudaStream_t stream);

// The call's result = sum over splits of partial[split][o][tap][padded_channels], of which only the channels of a group
// count, and the outputs that the weight has; in the order that the sizes say.
cuda_ops_status conv2d_sum_weight_splits(const ConvCall &call, const float *partial, int64_t padded_channels,
                                         int64_t splits);

#endif
