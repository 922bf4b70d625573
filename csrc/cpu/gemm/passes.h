/* One instruction set's passes over gemm/kernel.h: float and double. No include guard: gemm.c includes it once for each
 * set, with VECTOR_BYTES, TILE_ROWS, BLOCK_DEPTH, BLOCK_A_BYTES, TARGET and MULTIPLY_ADD_* defined, and ROWS_FIRST and
 * EXPANDS where they are to be; all end here. */
#define REAL float
#define FN(name) TARGET(name##_f32)
#define TRANSPOSE_QUAD transpose_quad_f32
#define TRANSPOSE_ROWS TARGET(transpose_rows_f32)
#define TRANSPOSE_BLOCK TARGET(transpose_block_f32)
#define MULTIPLY_ADD MULTIPLY_ADD_F32
#define COPIES(value) ((FN(lane_vector)){(value), (value), (value), (value)}) /* in vectors of 16 bytes */
#include "gemm/kernel.h"
#define REAL double
#define FN(name) TARGET(name##_f64)
#define TRANSPOSE_QUAD transpose_quad_f64
#define TRANSPOSE_ROWS TARGET(transpose_rows_f64)
#define TRANSPOSE_BLOCK TARGET(transpose_block_f64)
#define MULTIPLY_ADD MULTIPLY_ADD_F64
#define COPIES(value) ((FN(lane_vector)){(value), (value)})
#include "gemm/kernel.h"
#undef VECTOR_BYTES
#undef TILE_ROWS
#undef BLOCK_DEPTH
#undef BLOCK_A_BYTES
#undef TARGET
#undef MULTIPLY_ADD_F32
#undef MULTIPLY_ADD_F64
#undef EXPANDS
#undef ROWS_FIRST
