// What the paths of conv2d share: how one is called, and the table's rows. conv2d.cu holds the table and the choice.
#ifndef CUDA_OPS_CONV2D_PATHS_H
#define CUDA_OPS_CONV2D_PATHS_H

#include <cuda_runtime.h>
#include <stddef.h>

#include "common/paths.h"
#include "cuda_ops/conv2d.h"

// One product as a launcher gets it: `result` is what the pass makes, and the tensor of that name among the others is
// NULL. conv2d.cu has checked the sizes, and that the result is not empty.
struct ConvCall {
    cuda_ops_conv2d_pass pass;
    void *result;
    const void *input, *weight, *output; // output: grad_output in the backward passes
    const void *bias;                    // forward alone; may be NULL
    void *workspace;
    cuda_ops_conv2d_sizes sizes;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

typedef Device ConvDevice;

// A path is a way to make one, two or all three of the products. Its file ends with the functions of its row:
//   supports   whether it can make this product, or why not. Sees the call's pointers too (alignment), which are NULL
//   where only
//              the sizes are asked about; NULL counts as aligned.
//   is_fast    whether it is the one to take where several can; NULL: wherever it can.
//   workspace  bytes, aligned to 256; NULL: none.
struct ConvPath {
    cuda_ops_conv2d_path number;
    const char *name, *file, *kernels; // cuda_ops_path_report's
    Answer (*supports)(const ConvCall &call, ConvDevice device);
    Answer (*is_fast)(const ConvCall &call, ConvDevice device);
    size_t (*workspace)(const ConvCall &call, ConvDevice device);
    cuda_ops_status (*launch)(const ConvCall &call, ConvDevice device);
};

// What several rows answer.
static constexpr Answer CONV_NEEDS_TENSOR_CORES = {"takes float16 and bfloat16, and float32 where TF32 is allowed"};
static constexpr Answer CONV_NEEDS_ONE_GROUP = {"takes one group"};
static constexpr Answer CONV_NEEDS_CHANNELS_LAST = {"input and output are not both channels_last"};
static constexpr Answer CONV_NEEDS_VECTORS = {"a pixel's channels are not whole aligned vectors of 16 bytes"};
static constexpr Answer CONV_IS_EMPTY = {"there are no channels, or no images"};
static constexpr Answer CONV_IS_LARGE = {"a size is beyond its limits"};

// Tensor cores of Hopper, all channels_last (conv2d/sm90/sm90.cu).
Answer conv2d_sm90_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_sm90_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_sm90(const ConvCall &call, ConvDevice device);

// The same for few channels (conv2d/sm90_halo/sm90_halo.cu).
Answer conv2d_sm90_halo_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_sm90_halo_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_sm90_halo_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_sm90_halo(const ConvCall &call, ConvDevice device);

// Tensor cores by mma.sync, all channels_last (conv2d/mma/mma.cu).
Answer conv2d_mma_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_mma_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_mma(const ConvCall &call, ConvDevice device);

// 1x1 convolutions as one matrix multiplication (conv2d/gemm_1x1.cu).
Answer conv2d_gemm_1x1_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_gemm_1x1_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_gemm_1x1_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_gemm_1x1(const ConvCall &call, ConvDevice device);

// One to four input channels (conv2d/few_channels/forward_sm80.cu).
Answer conv2d_few_channels_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_few_channels_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_few_channels_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels(const ConvCall &call, ConvDevice device);

// A group for each input channel (conv2d/depthwise/forward_backward_input.cu).
Answer conv2d_depthwise_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_depthwise_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_depthwise_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_depthwise(const ConvCall &call, ConvDevice device);

#endif
