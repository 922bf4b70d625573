// What the choice of a path of conv2d is made of, beside paths.h.
#ifndef CUDA_OPS_CONV2D_CHOICE_H
#define CUDA_OPS_CONV2D_CHOICE_H

#include "conv2d/paths.h"
#include "cuda_ops/gemm.h"

// The times that paths are expected to take for calls of one group that they support (times.cu); DBL_MAX where that is
// not known.
double conv2d_gemm_1x1_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_patches_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_im2col_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_few_channels_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_simt_expected_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_winograd_expected_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_padded_microseconds(const ConvCall &call, ConvDevice device); // padded.cu

// What few_channels' time is a sum of (times.cu).
static constexpr int CONV_FEW_TERMS = 7;
void conv2d_few_channels_terms(double (&terms)[CONV_FEW_TERMS], const ConvCall &call, ConvDevice device);

// Such a time of a path, less what it is off by in the mean of such calls (corrections.cu).
double conv2d_corrected_microseconds(int path, double microseconds, const ConvCall &call);

// Whether the device's memory is fast enough beside its multiply-adds (winograd/winograd.cu).
bool conv2d_winograd_is_cheap(ConvDevice device);

// The time that the path which takes the call is expected to take (conv2d.cu).
double conv2d_microseconds(const ConvCall &call, ConvDevice device);

// The products that paths hand to the GEMM, and whether gemm_1x1's are of contiguous images.
cuda_ops_gemm_problem conv2d_gemm_1x1_problem(const ConvCall &call);
cuda_ops_gemm_problem conv2d_patches_problem(const ConvCall &call);
cuda_ops_gemm_problem conv2d_im2col_problem(const ConvCall &call);
bool conv2d_gemm_1x1_is_by_image(const cuda_ops_conv2d_sizes &sizes);

#endif
