/* Compiles conv2d/depthwise.h for each element type, for the instruction set that depthwise.c has switched to. */
#define REAL float
#define INDEX int32_t
#define FN(name) TARGET(name##_f32)
#include "conv2d/depthwise.h"

#include "common/undef_real.h"
#undef INDEX
#define REAL double
#define INDEX int64_t
#define FN(name) TARGET(name##_f64)
#include "conv2d/depthwise.h"

#include "common/undef_real.h"
#undef INDEX
#define REAL float
#define INDEX int32_t
#define HALF CUDA_OPS_BFLOAT16
#define FN(name) TARGET(name##_bf16)
#include "conv2d/depthwise.h"

#include "common/undef_real.h"
#undef INDEX
#undef HALF
#define REAL float
#define INDEX int32_t
#define HALF CUDA_OPS_FLOAT16
#define FN(name) TARGET(name##_f16)
#include "conv2d/depthwise.h"

#include "common/undef_real.h"
#undef INDEX
#undef HALF
#undef VECTOR_BYTES
#undef TARGET
