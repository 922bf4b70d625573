// Split-K in conv2d: partial sums that blocks left in the workspace, added in the order of the splits. No atomics.
#ifndef CUDA_OPS_CONV2D_SPLIT_K_H
#define CUDA_OPS_CONV2D_SPLIT_K_H

#include <cuda_runtime.h>

#include "cuda_ops/conv2d.h"

// output[i] = sum over splits of partial[split][i]; partial is of the accumulation type.
cuda_ops_status conv2d_sum_splits(void *output, const void *partial, int64_t count, int64_t splits,
                                  cuda_ops_dtype dtype, cudaStream_t stream);

// weight = sum over splits of partial[split][o][tap][padded_channels], of which only the channels of a group count;
// weight in the order that the sizes say.
cuda_ops_status conv2d_sum_weight_splits(void *weight, const float *partial, const cuda_ops_conv2d_sizes &sizes,
                                         int64_t padded_channels, int64_t splits, cuda_ops_dtype dtype,
                                         cudaStream_t stream);

#endif
