/* Compiles conv2d/depthwise.h for both element types, for the instruction set that depthwise.c has switched to. */
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
#undef VECTOR_BYTES
#undef TARGET
