// What the paths of conv2d share: how one is called, and the table's rows. conv2d.cu holds the table and the choice.
#ifndef CUDA_OPS_CONV2D_PATHS_H
#define CUDA_OPS_CONV2D_PATHS_H

#include <cuda_runtime.h>
#include <stddef.h>

#include "common/paths.h"
#include "cuda_ops/conv2d.h"
#include "cuda_ops/gemm.h"

// One call of a launcher. `result` is the tensor that the pass computes, whose own name among the others is NULL.
// conv2d.cu has checked the sizes, and that the result is not empty.
struct ConvCall {
    cuda_ops_conv2d_pass pass;
    void *result;
    const void *input, *weight, *output; // output: grad_output in the backward passes
    const void *bias;                    // forward alone; may be NULL
    void *workspace;
    cuda_ops_conv2d_sizes sizes;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
    int64_t weight_outs, weight_channels; // of a group, where images are copied with more (padded.cu); 0: the sizes'
};

typedef Device ConvDevice;

// A path is a kernel, or a family of kernels, for one, two or all three of the products. Its file ends with its row's
// functions:
//   supports   whether it can compute this product, or why not. Alignment is read from the call's pointers; NULL, where only the
//              sizes are asked about, counts as aligned. Only simt's is asked about sizes of 0.
//   is_fast    whether to prefer it to the rows below, of what it supports; a NULL function: always.
//   applies    whether forward's epilogue applies the sizes' activation, which is not NONE; a NULL function: it has
//              none.
//   workspace  bytes, aligned to 256; a NULL function: none.
//   launch     the product; CUDA_OPS_INVALID_ARGUMENT where it cannot after all, and then the next row is tried.
struct ConvPath {
    cuda_ops_conv2d_path number;
    const char *name, *file, *kernels; // cuda_ops_path_report's
    Answer (*supports)(const ConvCall &call, ConvDevice device);
    Answer (*is_fast)(const ConvCall &call, ConvDevice device);
    bool (*applies)(const ConvCall &call);
    size_t (*workspace)(const ConvCall &call, ConvDevice device);
    cuda_ops_status (*launch)(const ConvCall &call, ConvDevice device);
};

// What several rows answer.
static inline bool conv2d_applies_all(const ConvCall &)
{
    return true;
}
// The activation as the epilogues of products have it.
static inline cuda_ops_gemm_activation conv2d_gemm_activation(const ConvCall &call)
{
    switch (call.sizes.activation) {
    case CUDA_OPS_CONV2D_RELU:
        return CUDA_OPS_GEMM_RELU;
    case CUDA_OPS_CONV2D_RELU6:
        return CUDA_OPS_GEMM_RELU6;
    case CUDA_OPS_CONV2D_HARDSWISH:
        return CUDA_OPS_GEMM_HARDSWISH;
    case CUDA_OPS_CONV2D_SILU:
        return CUDA_OPS_GEMM_SILU;
    default:
        return CUDA_OPS_GEMM_NONE;
    }
}
static constexpr Answer CONV_NEEDS_TENSOR_CORES = {"takes float16 and bfloat16, and float32 where TF32 is allowed"};
static constexpr Answer CONV_NEEDS_ONE_GROUP = {"takes one group"};
static constexpr Answer CONV_NEEDS_CHANNELS_LAST = {"input and output are not both channels_last"};
static constexpr Answer CONV_NEEDS_VECTORS = {"a pixel's channels are not whole aligned vectors of 16 bytes"};
static constexpr Answer CONV_NEEDS_GROUPS_OF_VECTORS = {"a group's channels are not whole aligned vectors of 16 bytes"};
static constexpr Answer CONV_IS_LARGE = {"a size is beyond its limits"};

// Implicit GEMM on CUDA cores, takes everything (simt.cu).
Answer conv2d_simt_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_simt_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_simt(const ConvCall &call, ConvDevice device);

// Implicit GEMM by TMA im2col and wgmma on Hopper, channels_last (sm90/sm90.cu).
Answer conv2d_sm90_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_sm90_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_sm90(const ConvCall &call, ConvDevice device);

// The same for few channels: a tile with its halo is copied once for all taps (sm90_halo/sm90_halo.cu).
Answer conv2d_sm90_halo_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_sm90_halo_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_sm90_halo_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_sm90_halo(const ConvCall &call, ConvDevice device);

// Implicit GEMM by mma.sync, channels_last (mma/mma.cu).
Answer conv2d_mma_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_mma_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_mma(const ConvCall &call, ConvDevice device);

// Groups of few channels by mma.sync, and by wgmma on Hopper, channels_last (grouped/grouped.cu).
Answer conv2d_grouped_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_grouped_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_grouped_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_grouped(const ConvCall &call, ConvDevice device);

// The four before, of copies whose channels are whole vectors (padded.cu).
Answer conv2d_padded_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_padded_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_padded_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_padded(const ConvCall &call, ConvDevice device);

// 1x1 convolutions as one matrix multiplication (gemm_1x1.cu).
Answer conv2d_gemm_1x1_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_gemm_1x1_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_gemm_1x1_workspace(const ConvCall &call, ConvDevice device);
bool conv2d_gemm_1x1_applies(const ConvCall &call);
cuda_ops_status conv2d_gemm_1x1(const ConvCall &call, ConvDevice device);

// 3x3 kernels in float32 by Winograd's algorithm (winograd/winograd.cu).
Answer conv2d_winograd_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_winograd_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_winograd_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_winograd(const ConvCall &call, ConvDevice device);

// By way of the input's columns in memory, in float32 (im2col.cu).
Answer conv2d_im2col_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_im2col_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_im2col_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_im2col(const ConvCall &call, ConvDevice device);

// Few channels in 16 bits, by way of the input's patches as rows of a matrix (patches/patches.cu).
Answer conv2d_patches_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_patches_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_patches_workspace(const ConvCall &call, ConvDevice device);
bool conv2d_patches_applies(const ConvCall &call);
cuda_ops_status conv2d_patches(const ConvCall &call, ConvDevice device);

// The times that paths are expected to take; simt's in float32 and the halves, Winograd's in float32. Of other paths than
// simt, where they support the call.
double conv2d_winograd_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_simt_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_sm90_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_sm90_halo_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_mma_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_grouped_microseconds(const ConvCall &call, ConvDevice device);

// One to four input channels (few_channels/forward_sm80.cu).
Answer conv2d_few_channels_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_few_channels_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_few_channels_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels(const ConvCall &call, ConvDevice device);

// A group for each input channel (depthwise/forward_backward_input.cu).
Answer conv2d_depthwise_supports(const ConvCall &call, ConvDevice device);
Answer conv2d_depthwise_is_fast(const ConvCall &call, ConvDevice device);
size_t conv2d_depthwise_workspace(const ConvCall &call, ConvDevice device);
bool conv2d_depthwise_applies(const ConvCall &call);
cuda_ops_status conv2d_depthwise(const ConvCall &call, ConvDevice device);

#endif
