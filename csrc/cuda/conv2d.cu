#include "cuda_ops/conv2d.h"
