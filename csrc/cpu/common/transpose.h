/* Transposition in vector registers, by AVX2 and by AVX-512. Data cross the 128-bit lanes of a vector only in loads and
 * stores of 16 bytes; all shuffles are within lanes.
 *
 *   transpose_rows_<type>_<isa>:    target[i + q * target_stride] = source[q + i * source_stride]
 *       for a vector of q, and i < 4 rows of float or 2 of double: 8 or 2 shuffles whatever the vector's length
 *   transpose_block_<type>_<isa>:   block[q] = { source[l * row + q] for every l }
 *       for as many rows as a vector has elements, as vectors in registers */
#ifndef CUDA_OPS_CPU_COMMON_TRANSPOSE_H
#define CUDA_OPS_CPU_COMMON_TRANSPOSE_H

#include <immintrin.h>

#include "common/common.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
/* The vector whose lane i is the 16 bytes at source + i * step, and the opposite. */
CUDA_OPS_INLINE __m256 load_lanes_f32_avx2(const float *source, int64_t step)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(source)), _mm_loadu_ps(source + step), 1);
}

CUDA_OPS_INLINE __m256d load_lanes_f64_avx2(const double *source, int64_t step)
{
    return _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(source)), _mm_loadu_pd(source + step), 1);
}

CUDA_OPS_INLINE void store_lanes_f32_avx2(float *target, int64_t step, __m256 value)
{
    _mm_storeu_ps(target, _mm256_extractf128_ps(value, 0));
    _mm_storeu_ps(target + step, _mm256_extractf128_ps(value, 1));
}

CUDA_OPS_INLINE void store_lanes_f64_avx2(double *target, int64_t step, __m256d value)
{
    _mm_storeu_pd(target, _mm256_extractf128_pd(value, 0));
    _mm_storeu_pd(target + step, _mm256_extractf128_pd(value, 1));
}

#define TARGET(name) name##_avx2
#define MM(name) _mm256_##name
#define VECTOR_F32 __m256
#define VECTOR_F64 __m256d
#include "common/transpose_isa.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
CUDA_OPS_INLINE __m512 load_lanes_f32_avx512(const float *source, int64_t step)
{
    __m512 value = _mm512_castps128_ps512(_mm_loadu_ps(source));
    value = _mm512_insertf32x4(value, _mm_loadu_ps(source + step), 1);
    value = _mm512_insertf32x4(value, _mm_loadu_ps(source + 2 * step), 2);
    return _mm512_insertf32x4(value, _mm_loadu_ps(source + 3 * step), 3);
}

CUDA_OPS_INLINE __m512d load_lanes_f64_avx512(const double *source, int64_t step)
{
    __m512d value = _mm512_castpd128_pd512(_mm_loadu_pd(source));
    value = _mm512_insertf64x2(value, _mm_loadu_pd(source + step), 1);
    value = _mm512_insertf64x2(value, _mm_loadu_pd(source + 2 * step), 2);
    return _mm512_insertf64x2(value, _mm_loadu_pd(source + 3 * step), 3);
}

CUDA_OPS_INLINE void store_lanes_f32_avx512(float *target, int64_t step, __m512 value)
{
    _mm_storeu_ps(target, _mm512_extractf32x4_ps(value, 0));
    _mm_storeu_ps(target + step, _mm512_extractf32x4_ps(value, 1));
    _mm_storeu_ps(target + 2 * step, _mm512_extractf32x4_ps(value, 2));
    _mm_storeu_ps(target + 3 * step, _mm512_extractf32x4_ps(value, 3));
}

CUDA_OPS_INLINE void store_lanes_f64_avx512(double *target, int64_t step, __m512d value)
{
    _mm_storeu_pd(target, _mm512_extractf64x2_pd(value, 0));
    _mm_storeu_pd(target + step, _mm512_extractf64x2_pd(value, 1));
    _mm_storeu_pd(target + 2 * step, _mm512_extractf64x2_pd(value, 2));
    _mm_storeu_pd(target + 3 * step, _mm512_extractf64x2_pd(value, 3));
}

#define TARGET(name) name##_avx512
#define MM(name) _mm512_##name
#define VECTOR_F32 __m512
#define VECTOR_F64 __m512d
#include "common/transpose_isa.h"
#pragma GCC pop_options

#endif
