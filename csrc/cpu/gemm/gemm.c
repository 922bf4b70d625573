/* Matrix multiplication on one core. gemm/kernel.h holds the algorithm; this file compiles it once per instruction
 * set and element type, and picks the widest that the processor has.
 * CUDA_OPS_SIMD would not do: its clones share one body, whereas the micro-tile, and with it the layout of the packed
 * operands, depends on the width and the number of the vector registers. */
#include "gemm/single_thread.h"
#include "gemm/tiles.h"

#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/cpu_isa.h"
#include "cuda_ops/gemm_cpu.h"

/* A panel of b (BLOCK_DEPTH rows of two vectors, 24 KB) stays in the first-level cache, the packed block of a
 * (BLOCK_A_BYTES) in the second, and the packed block of b, wide enough for 2048 x 2048 floats, in the third. Where rows
 * come first (ROWS_FIRST) a tile's rows of a stay in the first-level cache, and b in the second. See gemm/kernel.h. */
enum { BLOCK_B_BYTES = 1 << 22 };
_Static_assert((1 << 20) + BLOCK_B_BYTES <= GEMM_WORKSPACE_BYTES, "the packed blocks fit the workspace");

/* a is read unpacked for at most FEW_TILES panels of b, or with rows at most CLOSE_BYTES apart: farther apart, at
 * powers of two, they would map to the same few cache sets. */
enum { FEW_TILES = 8, CLOSE_BYTES = 1024 };
/* Of b packed where rows of a come first: its block stays in the second-level cache, which is 1 MB or more where there
 * is AVX-512. */
#define ROWS_FIRST_B_BYTES (VECTOR_BYTES == 64 ? 1 << 20 : 1 << 19)
/* Up to so many rows the transposed product is computed if b is transposed. */
enum { TRANSPOSED_ROWS = 64 };
/* How a micro-kernel reads element p of row i of a: at a[i + p * a_stride]; at a[i * a_stride + p]; or a vector of copies
 * of it at a[i * LANES + p * a_stride]. */
enum factors { BY_COLUMNS, BY_ROWS, EXPANDED };
/* Prefetch distances in steps of p: for a (and a b that is being packed) ahead of its use, and for the output before
 * the end of the sum. */
enum { STEPS_AHEAD = 16, STEPS_LEFT = 64 };

#ifdef __GNUC__
#define NOINLINE __attribute__((noinline))
#define PREFETCH(address) __builtin_prefetch(address)
#define PREFETCH_FAR(address) __builtin_prefetch(address, 0, 2) /* into the second-level cache */
#define PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
#else
#define NOINLINE
#define PREFETCH(address) ((void)(address))
#define PREFETCH_FAR(address) ((void)(address))
#define PREFETCH_WRITE(address) ((void)(address))
#endif

/* target[l + q * target_stride] = source[q + l * source_stride], a block of 16 bytes by 16 bytes. */
#if defined(__GNUC__) && !defined(__clang__)
typedef float quad_f32 __attribute__((vector_size(16), aligned(4), may_alias));
typedef double quad_f64 __attribute__((vector_size(16), aligned(8), may_alias));
typedef int32_t index_f32 __attribute__((vector_size(16)));
typedef int64_t index_f64 __attribute__((vector_size(16)));

CUDA_OPS_INLINE void transpose_quad_f32(float *target, int64_t target_stride, const float *source,
                                        int64_t source_stride)
{
    const quad_f32 r0 = *(const quad_f32 *)source, r1 = *(const quad_f32 *)(source + source_stride);
    const quad_f32 r2 = *(const quad_f32 *)(source + 2 * source_stride);
    const quad_f32 r3 = *(const quad_f32 *)(source + 3 * source_stride);
    const index_f32 low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
    const quad_f32 low01 = __builtin_shuffle(r0, r1, low), high01 = __builtin_shuffle(r0, r1, high);
    const quad_f32 low23 = __builtin_shuffle(r2, r3, low), high23 = __builtin_shuffle(r2, r3, high);
    *(quad_f32 *)target = __builtin_shuffle(low01, low23, left);
    *(quad_f32 *)(target + target_stride) = __builtin_shuffle(low01, low23, right);
    *(quad_f32 *)(target + 2 * target_stride) = __builtin_shuffle(high01, high23, left);
    *(quad_f32 *)(target + 3 * target_stride) = __builtin_shuffle(high01, high23, right);
}

CUDA_OPS_INLINE void transpose_quad_f64(double *target, int64_t target_stride, const double *source,
                                        int64_t source_stride)
{
    const quad_f64 r0 = *(const quad_f64 *)source, r1 = *(const quad_f64 *)(source + source_stride);
    const index_f64 left = {0, 2}, right = {1, 3};
    *(quad_f64 *)target = __builtin_shuffle(r0, r1, left);
    *(quad_f64 *)(target + target_stride) = __builtin_shuffle(r0, r1, right);
}
#else
CUDA_OPS_INLINE void transpose_quad_f32(float *target, int64_t target_stride, const float *source,
                                        int64_t source_stride)
{
    for (int l = 0; l < 4; l++)
        for (int q = 0; q < 4; q++)
            target[l + q * target_stride] = source[q + l * source_stride];
}

CUDA_OPS_INLINE void transpose_quad_f64(double *target, int64_t target_stride, const double *source,
                                        int64_t source_stride)
{
    for (int l = 0; l < 2; l++)
        for (int q = 0; q < 2; q++)
            target[l + q * target_stride] = source[q + l * source_stride];
}
#endif

/* The portable versions of what transpose.h has for AVX2 and AVX-512. */
#define transpose_rows_f32_any transpose_quad_f32
#define transpose_rows_f64_any transpose_quad_f64

CUDA_OPS_INLINE void transpose_block_f32_any(void *block, const float *source, int64_t row)
{
    float transposed[16];
    transpose_quad_f32(transposed, 4, source, row);
    memcpy(block, transposed, sizeof(transposed));
}

CUDA_OPS_INLINE void transpose_block_f64_any(void *block, const double *source, int64_t row)
{
    double transposed[4];
    transpose_quad_f64(transposed, 2, source, row);
    memcpy(block, transposed, sizeof(transposed));
}

/* Any x86-64 or 64-bit Arm has 16 vector registers of 16 bytes: 8 accumulators, 2 of b, and scratch for the
 * products. */
#define VECTOR_BYTES 16
#define BLOCK_DEPTH 256
#define BLOCK_A_BYTES (3 << 16)
#define TILE_ROWS 4
#define TARGET(name) name##_any
#ifndef __aarch64__ /* whose multiply-adds take one element of a vector */
#define EXPANDS 1
#define ROWS_FIRST 1
#endif
#define MULTIPLY_ADD_F32(a, b, sum) ((a) * (b) + (sum))
#define MULTIPLY_ADD_F64(a, b, sum) ((a) * (b) + (sum))
#include "gemm/passes.h"

#if CUDA_OPS_WITH_TARGETS
#include "common/transpose.h"

/* Multiply-adds are intrinsics: left to the compiler, whether one is fused depends on the height of the tile and on the
 * version of GCC (which splits chains of them for some processors), and a row's bits would depend on the batch. */

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define VECTOR_BYTES 32 /* 16 registers: 12 accumulators, 2 of b, 1 of a */
#define TILE_ROWS 6
#define BLOCK_DEPTH 384
#define BLOCK_A_BYTES (3 << 16)
#define TARGET(name) name##_avx2
#define MULTIPLY_ADD_F32(a, b, sum)                                                                                    \
    (lane_vector_f32_avx2) _mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)(b), (__m256)(sum))
#define MULTIPLY_ADD_F64(a, b, sum)                                                                                    \
    (lane_vector_f64_avx2) _mm256_fmadd_pd(_mm256_set1_pd(a), (__m256d)(b), (__m256d)(sum))
#include "gemm/passes.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
#define VECTOR_BYTES 64 /* 32 registers: 24 accumulators, 2 of b; rows are a multiple of four for TRANSPOSE_QUAD */
#define TILE_ROWS 12
#define BLOCK_DEPTH 384
#define ROWS_FIRST 1
#define BLOCK_A_BYTES (1 << 20)
#define TARGET(name) name##_avx512
#define MULTIPLY_ADD_F32(a, b, sum)                                                                                    \
    (lane_vector_f32_avx512) _mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)(b), (__m512)(sum))
#define MULTIPLY_ADD_F64(a, b, sum)                                                                                    \
    (lane_vector_f64_avx512) _mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)(b), (__m512d)(sum))
#include "gemm/passes.h"
#pragma GCC pop_options
#endif

/* A product of a column and a row, such as a gradient of a weight of one row: nothing is packed or summed, and each
 * element is written as soon as it is known. Bound by the writing. */
#define DEFINE_OUTER(name, type)                                                                                       \
    CUDA_OPS_SIMD static void name(type *restrict output, int64_t output_row, const type *restrict a, int64_t a_row,   \
                                   const type *restrict b, int64_t m, int64_t n)                                       \
    {                                                                                                                  \
        for (int64_t i = 0; i < m; i++) {                                                                              \
            const type factor = a[i * a_row];                                                                          \
            for (int64_t j = 0; j < n; j++)                                                                            \
                output[i * output_row + j] = factor * b[j];                                                            \
        }                                                                                                              \
    }
DEFINE_OUTER(outer_f32, float)
DEFINE_OUTER(outer_f64, double)

void cuda_ops_gemm_f32(float *output, int64_t output_row, const float *a, int64_t a_row, int64_t a_column,
                       const float *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                       bool accumulate, void *workspace)
{
    if (k == 1 && b_column == 1 && !accumulate) {
        outer_f32(output, output_row, a, a_row, b, m, n);
        return;
    }
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        gemm_f32_avx512(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
    else if (isa == CUDA_OPS_CPU_AVX2)
        gemm_f32_avx2(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
    else
#endif
        gemm_f32_any(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
}

void cuda_ops_gemm_f64(double *output, int64_t output_row, const double *a, int64_t a_row, int64_t a_column,
                       const double *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                       bool accumulate, void *workspace)
{
    if (k == 1 && b_column == 1 && !accumulate) {
        outer_f64(output, output_row, a, a_row, b, m, n);
        return;
    }
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        gemm_f64_avx512(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
    else if (isa == CUDA_OPS_CPU_AVX2)
        gemm_f64_avx2(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
    else
#endif
        gemm_f64_any(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
}

int64_t cuda_ops_gemm_workspace_cpu(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_BFLOAT16 ? cuda_ops_gemm_bf16_workspace() : GEMM_WORKSPACE_BYTES;
}

cuda_ops_status cuda_ops_gemm_cpu(void *output, int64_t output_row, const void *a, int64_t a_row, int64_t a_column,
                                  const void *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                                  int accumulate, void *workspace, cuda_ops_dtype dtype)
{
    if (m < 0 || n < 0 || k < 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        cuda_ops_gemm_f32(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        cuda_ops_gemm_f64(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_BFLOAT16:
        cuda_ops_gemm_bf16(output, output_row, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

int cuda_ops_gemm_has_tiles_cpu(cuda_ops_dtype dtype)
{
    return is_half(dtype) && cuda_ops_has_tiles(dtype);
}

int64_t cuda_ops_gemm_tiles_workspace_cpu(void)
{
    return cuda_ops_tiles_workspace();
}

cuda_ops_status cuda_ops_gemm_tiles_cpu(void *output, int64_t output_row, const void *bias, const void *a,
                                        int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column,
                                        int64_t m, int64_t n, int64_t k, void *workspace, int relu,
                                        cuda_ops_dtype dtype, cuda_ops_dtype output_dtype)
{
    if (!cuda_ops_gemm_has_tiles_cpu(dtype) || (output_dtype != dtype && output_dtype != CUDA_OPS_FLOAT32))
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (m < 0 || n < 0 || k < 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    const struct tile_product product = {
        .a = {a, a_row, a_column},
        .b = {b, b_column, b_row},
        .output = {.data = output, .row = output_row, .dtype = output_dtype, .bias = bias, .relu = relu},
        .m = m,
        .n = n,
        .k = k,
        .dtype = dtype,
        .split = dtype == CUDA_OPS_FLOAT16};
    cuda_ops_multiply_tiles(&product, workspace);
    return CUDA_OPS_SUCCESS;
}
