/* Transposition of a few rows, as long as a vector, within the 16 bytes of each lane: 8 shuffles for 4 rows of floats
 * however long the vector, where squares of 16 bytes by 16 bytes take as many each.
 *
 *     target[i + q * target_stride] = source[q + i * source_stride]    for q < the vector's elements, and i < 4 rows of
 *                                                                      floats or 2 of doubles */
#ifndef CUDA_OPS_CPU_COMMON_TRANSPOSE_H
#define CUDA_OPS_CPU_COMMON_TRANSPOSE_H

#include <immintrin.h>

#include "common/common.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
CUDA_OPS_INLINE void transpose_rows_f32_avx2(float *target, int64_t target_stride, const float *source,
                                             int64_t source_stride)
{
    const __m256 r0 = _mm256_loadu_ps(source), r1 = _mm256_loadu_ps(source + source_stride);
    const __m256 r2 = _mm256_loadu_ps(source + 2 * source_stride), r3 = _mm256_loadu_ps(source + 3 * source_stride);
    const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(r0, r1));
    const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(r0, r1));
    const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(r2, r3));
    const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(r2, r3));
    const __m256d turned[4] = {_mm256_unpacklo_pd(low01, low23), _mm256_unpackhi_pd(low01, low23),
                               _mm256_unpacklo_pd(high01, high23), _mm256_unpackhi_pd(high01, high23)};
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++, target += target_stride) {
        const __m256 t = _mm256_castpd_ps(turned[q]);
        _mm_storeu_ps(target, _mm256_extractf128_ps(t, 0));
        _mm_storeu_ps(target + 4 * target_stride, _mm256_extractf128_ps(t, 1));
    }
}

CUDA_OPS_INLINE void transpose_rows_f64_avx2(double *target, int64_t target_stride, const double *source,
                                             int64_t source_stride)
{
    const __m256d r0 = _mm256_loadu_pd(source), r1 = _mm256_loadu_pd(source + source_stride);
    const __m256d low = _mm256_unpacklo_pd(r0, r1), high = _mm256_unpackhi_pd(r0, r1);
    _mm_storeu_pd(target, _mm256_extractf128_pd(low, 0));
    _mm_storeu_pd(target + target_stride, _mm256_extractf128_pd(high, 0));
    _mm_storeu_pd(target + 2 * target_stride, _mm256_extractf128_pd(low, 1));
    _mm_storeu_pd(target + 3 * target_stride, _mm256_extractf128_pd(high, 1));
}

/* block[q] = { source[l * row + q] for every lane l }: a square of rows as long as a vector, in registers. Of the rows
 * 16 bytes at a time are brought into the lanes where they belong, and the rest is shuffles within the 16 bytes. A row
 * is done with before the next ones are loaded, since rows a power of two apart share few places of the cache. */
CUDA_OPS_INLINE __m256 quads_f32_avx2(const float *source, int64_t step)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(source)), _mm_loadu_ps(source + step), 1);
}

CUDA_OPS_INLINE void transpose_square_f32_avx2(void *square, const float *source, int64_t row)
{
    __m256 *const block = square;
    __m256 rows[2][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++)
            rows[c][r] = quads_f32_avx2(source + r * row + 4 * c, 4 * row);
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
        const __m256 low01 = _mm256_unpacklo_ps(rows[c][0], rows[c][1]);
        const __m256 high01 = _mm256_unpackhi_ps(rows[c][0], rows[c][1]);
        const __m256 low23 = _mm256_unpacklo_ps(rows[c][2], rows[c][3]);
        const __m256 high23 = _mm256_unpackhi_ps(rows[c][2], rows[c][3]);
        block[4 * c] = _mm256_shuffle_ps(low01, low23, 0x44);
        block[4 * c + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
        block[4 * c + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
        block[4 * c + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
    }
}

CUDA_OPS_INLINE __m256d quads_f64_avx2(const double *source, int64_t step)
{
    return _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(source)), _mm_loadu_pd(source + step), 1);
}

CUDA_OPS_INLINE void transpose_square_f64_avx2(void *square, const double *source, int64_t row)
{
    __m256d *const block = square;
    __m256d rows[2][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++)
            rows[c][r] = quads_f64_avx2(source + r * row + 2 * c, 2 * row);
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
        block[2 * c] = _mm256_unpacklo_pd(rows[c][0], rows[c][1]);
        block[2 * c + 1] = _mm256_unpackhi_pd(rows[c][0], rows[c][1]);
    }
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
CUDA_OPS_INLINE void transpose_rows_f32_avx512(float *target, int64_t target_stride, const float *source,
                                               int64_t source_stride)
{
    const __m512 r0 = _mm512_loadu_ps(source), r1 = _mm512_loadu_ps(source + source_stride);
    const __m512 r2 = _mm512_loadu_ps(source + 2 * source_stride), r3 = _mm512_loadu_ps(source + 3 * source_stride);
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
    const __m512d turned[4] = {_mm512_unpacklo_pd(low01, low23), _mm512_unpackhi_pd(low01, low23),
                               _mm512_unpacklo_pd(high01, high23), _mm512_unpackhi_pd(high01, high23)};
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++, target += target_stride) {
        const __m512 t = _mm512_castpd_ps(turned[q]);
        _mm_storeu_ps(target, _mm512_extractf32x4_ps(t, 0));
        _mm_storeu_ps(target + 4 * target_stride, _mm512_extractf32x4_ps(t, 1));
        _mm_storeu_ps(target + 8 * target_stride, _mm512_extractf32x4_ps(t, 2));
        _mm_storeu_ps(target + 12 * target_stride, _mm512_extractf32x4_ps(t, 3));
    }
}

CUDA_OPS_INLINE void transpose_rows_f64_avx512(double *target, int64_t target_stride, const double *source,
                                               int64_t source_stride)
{
    const __m512d r0 = _mm512_loadu_pd(source), r1 = _mm512_loadu_pd(source + source_stride);
    const __m512d low = _mm512_unpacklo_pd(r0, r1), high = _mm512_unpackhi_pd(r0, r1);
    _mm_storeu_pd(target, _mm512_extractf64x2_pd(low, 0));
    _mm_storeu_pd(target + target_stride, _mm512_extractf64x2_pd(high, 0));
    _mm_storeu_pd(target + 2 * target_stride, _mm512_extractf64x2_pd(low, 1));
    _mm_storeu_pd(target + 3 * target_stride, _mm512_extractf64x2_pd(high, 1));
    _mm_storeu_pd(target + 4 * target_stride, _mm512_extractf64x2_pd(low, 2));
    _mm_storeu_pd(target + 5 * target_stride, _mm512_extractf64x2_pd(high, 2));
    _mm_storeu_pd(target + 6 * target_stride, _mm512_extractf64x2_pd(low, 3));
    _mm_storeu_pd(target + 7 * target_stride, _mm512_extractf64x2_pd(high, 3));
}

CUDA_OPS_INLINE __m512 quads_f32_avx512(const float *source, int64_t step)
{
    __m512 row = _mm512_castps128_ps512(_mm_loadu_ps(source));
    row = _mm512_insertf32x4(row, _mm_loadu_ps(source + step), 1);
    row = _mm512_insertf32x4(row, _mm_loadu_ps(source + 2 * step), 2);
    return _mm512_insertf32x4(row, _mm_loadu_ps(source + 3 * step), 3);
}

CUDA_OPS_INLINE void transpose_square_f32_avx512(void *square, const float *source, int64_t row)
{
    __m512 *const block = square;
    __m512 rows[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            rows[c][r] = quads_f32_avx512(source + r * row + 4 * c, 4 * row);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 low01 = _mm512_unpacklo_ps(rows[c][0], rows[c][1]);
        const __m512 high01 = _mm512_unpackhi_ps(rows[c][0], rows[c][1]);
        const __m512 low23 = _mm512_unpacklo_ps(rows[c][2], rows[c][3]);
        const __m512 high23 = _mm512_unpackhi_ps(rows[c][2], rows[c][3]);
        block[4 * c] = _mm512_shuffle_ps(low01, low23, 0x44);
        block[4 * c + 1] = _mm512_shuffle_ps(low01, low23, 0xee);
        block[4 * c + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
        block[4 * c + 3] = _mm512_shuffle_ps(high01, high23, 0xee);
    }
}

CUDA_OPS_INLINE __m512d quads_f64_avx512(const double *source, int64_t step)
{
    __m512d row = _mm512_castpd128_pd512(_mm_loadu_pd(source));
    row = _mm512_insertf64x2(row, _mm_loadu_pd(source + step), 1);
    row = _mm512_insertf64x2(row, _mm_loadu_pd(source + 2 * step), 2);
    return _mm512_insertf64x2(row, _mm_loadu_pd(source + 3 * step), 3);
}

CUDA_OPS_INLINE void transpose_square_f64_avx512(void *square, const double *source, int64_t row)
{
    __m512d *const block = square;
    __m512d rows[4][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            rows[c][r] = quads_f64_avx512(source + r * row + 2 * c, 2 * row);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        block[2 * c] = _mm512_unpacklo_pd(rows[c][0], rows[c][1]);
        block[2 * c + 1] = _mm512_unpackhi_pd(rows[c][0], rows[c][1]);
    }
}
#pragma GCC pop_options

#endif
