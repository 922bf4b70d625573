/* Compiles conv2d_kernel.h for both element types, for the instruction set that conv2d.c has switched to. */
#define REAL float
#define FN(name) TARGET(name##_f32)
#include "conv2d_kernel.h"
#include "undef_real.h"
#define REAL double
#define FN(name) TARGET(name##_f64)
#include "conv2d_kernel.h"
#include "undef_real.h"
#undef VECTOR_BYTES
#undef VECTORS
#undef TARGET
