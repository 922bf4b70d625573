// What paths of conv2d ask the table of all of them (conv2d.cu).
#ifndef CUDA_OPS_CONV2D_CHOICE_H
#define CUDA_OPS_CONV2D_CHOICE_H

#include "conv2d/paths.h"

// The times that paths are expected to take where they support the call; others are in paths.h.
double conv2d_padded_microseconds(const ConvCall &call, ConvDevice device);
double conv2d_im2col_microseconds(const ConvCall &call, ConvDevice device);

// The time that the path which takes the call is expected to take; DBL_MAX where none does.
double conv2d_microseconds(const ConvCall &call, ConvDevice device);

#endif
