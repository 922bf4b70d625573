/* Transposes 16 x 16 words in AVX-512's registers. Included by files that are compiled if CUDA_OPS_WITH_TARGETS. */
#ifndef CUDA_OPS_CPU_COMMON_TRANSPOSE_16_H
#define CUDA_OPS_CPU_COMMON_TRANSPOSE_16_H

#include <immintrin.h>

#include "common/common.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,fma")

/* to[j * to_row + i] = from[i * from_row + j], i and j below 16. They may be the same memory. */
CUDA_OPS_INLINE void transpose_16(uint32_t *to, int64_t to_row, const uint32_t *from, int64_t from_row)
{
    __m512i x[16], y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        x[i] = _mm512_loadu_si512(from + i * from_row);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    /* x[4 g + q]: in its quarter c rows 4 g to 4 g + 3 of column 4 c + q. */
#pragma GCC unroll 4
    for (int g = 0; g < 16; g += 4) {
        x[g] = _mm512_unpacklo_epi64(y[g], y[g + 2]);
        x[g + 1] = _mm512_unpackhi_epi64(y[g], y[g + 2]);
        x[g + 2] = _mm512_unpacklo_epi64(y[g + 1], y[g + 3]);
        x[g + 3] = _mm512_unpackhi_epi64(y[g + 1], y[g + 3]);
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        const __m512i even = _mm512_shuffle_i32x4(x[q], x[4 + q], 0x88),
                      odd = _mm512_shuffle_i32x4(x[q], x[4 + q], 0xdd);
        const __m512i even_last = _mm512_shuffle_i32x4(x[8 + q], x[12 + q], 0x88);
        const __m512i odd_last = _mm512_shuffle_i32x4(x[8 + q], x[12 + q], 0xdd);
        _mm512_storeu_si512(to + q * to_row, _mm512_shuffle_i32x4(even, even_last, 0x88));
        _mm512_storeu_si512(to + (8 + q) * to_row, _mm512_shuffle_i32x4(even, even_last, 0xdd));
        _mm512_storeu_si512(to + (4 + q) * to_row, _mm512_shuffle_i32x4(odd, odd_last, 0x88));
        _mm512_storeu_si512(to + (12 + q) * to_row, _mm512_shuffle_i32x4(odd, odd_last, 0xdd));
    }
}

#pragma GCC pop_options

#endif
