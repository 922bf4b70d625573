/* What several of the C11 kernels use.
 *
 * C has no templates, so a kernel file that serves float and double includes itself twice:
 *
 *     #ifndef REAL                        first pass: the public part
 *     #include "common/common.h"
 *     #define REAL float
 *     #define FN(name) name##_f32
 *     #include "square.c"                 second pass: the kernels, for float
 *
 *     #include "common/undef_real.h"      apart, so that clang-format does not sort it before the pass
 *     #define REAL double
 *     #define FN(name) name##_f64
 *     #include "square.c"                 third pass: the kernels, for double
 *
 *     #include "common/undef_real.h"
 *     ... public functions that switch on the dtype ...
 *     #else
 *     ... static void FN(forward)(REAL *restrict output, ...) ...
 *     #endif
 */
#ifndef CUDA_OPS_CPU_COMMON_COMMON_H
#define CUDA_OPS_CPU_COMMON_COMMON_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda_ops/core.h"

/* CUDA_OPS_SIMD in front of a function makes the compiler emit it once per instruction set and pick one when the
 * library is loaded, so that one build runs on every x86-64 and still uses AVX-512 where there is AVX-512. Functions
 * that it calls are vectorised for the same set only if they are inlined into it (CUDA_OPS_INLINE). Sanitizers start
 * before the loader can choose, so that their builds do without. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&               \
    !defined(CUDA_OPS_NO_CLONES)
/* Levels and features, never models such as arch=haswell: a clone for a model is picked on that very model alone, and
 * every other processor, newer ones too, would get the default. */
#if __GNUC__ >= 12
#define CUDA_OPS_SIMD __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CUDA_OPS_SIMD __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define CUDA_OPS_SIMD
#endif
#define CUDA_OPS_INLINE static inline __attribute__((always_inline))

/* Whether files that are compiled once per instruction set, by `#pragma GCC target`, have more than the portable one;
 * cpu_isa.h tells which to run. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(CUDA_OPS_NO_CLONES)
#define CUDA_OPS_WITH_TARGETS 1
#define CUDA_OPS_WITH_AVX512_BF16 (__GNUC__ >= 10)
#define CUDA_OPS_WITH_AMX (__GNUC__ >= 11)
#else
#define CUDA_OPS_WITH_TARGETS 0
#define CUDA_OPS_WITH_AVX512_BF16 0
#define CUDA_OPS_WITH_AMX 0
#endif

static inline int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
