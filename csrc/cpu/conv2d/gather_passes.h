/* Compiles conv2d/gather.h for both element types, for the instruction set that gathered.c has switched to. */
#define REAL float
#define INDEX int32_t
#define FN(name) TARGET(name##_f32)
#define MULTIPLY_ADD MULTIPLY_ADD_F32
#ifdef LOAD_BITS_F32
#define LOAD_BITS LOAD_BITS_F32
#endif
#include "conv2d/gather.h"

#include "common/undef_real.h"
#undef INDEX
#define REAL double
#define INDEX int64_t
#define FN(name) TARGET(name##_f64)
#undef MULTIPLY_ADD
#define MULTIPLY_ADD MULTIPLY_ADD_F64
#ifdef LOAD_BITS_F64
#define LOAD_BITS LOAD_BITS_F64
#endif
#include "conv2d/gather.h"

#include "common/undef_real.h"
#undef INDEX
#undef VECTOR_BYTES
#undef TARGET
#undef MULTIPLY_ADD
#undef MULTIPLY_ADD_F32
#undef MULTIPLY_ADD_F64
#undef LOAD_BITS_F32
#undef LOAD_BITS_F64
