/* Philox on neighbouring counters, side by side: by AVX-512 or AVX2 where they are, else as the compiler vectorises its ten
 * rounds. */
#ifndef CUDA_OPS_CPU_COMMON_PHILOX_BLOCK_H
#define CUDA_OPS_CPU_COMMON_PHILOX_BLOCK_H

#include "common/common.h"
#include "cuda_ops/cpu_isa.h"
#include "cuda_ops/philox.h"

#if CUDA_OPS_WITH_TARGETS
#include <immintrin.h>
#endif

/* Counters at a time. More than the compiler would unroll instead of vectorising. */
enum { PHILOX_BLOCK = 32 };

CUDA_OPS_SIMD static void philox_block_portable(uint32_t words[4 * PHILOX_BLOCK], uint64_t low, uint64_t quadruple,
                                                uint64_t seed)
{
    for (int i = 0; i < PHILOX_BLOCK; i++) {
        const uint64_t high = quadruple + (uint64_t)i;
        uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high, c3 = (uint32_t)(high >> 32);
        uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
        /* Only a body without a loop is vectorised over i. */
#pragma GCC unroll 10
        for (int round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
            cuda_ops_philox_round(&c0, &c1, &c2, &c3, key0, key1);
            key0 += CUDA_OPS_PHILOX_WEYL_0;
            key1 += CUDA_OPS_PHILOX_WEYL_1;
        }
        words[4 * i] = c0;
        words[4 * i + 1] = c1;
        words[4 * i + 2] = c2;
        words[4 * i + 3] = c3;
    }
}

#if CUDA_OPS_WITH_TARGETS
/* A word of four counters, each in the lower half of 64 bits. The upper halves hold what is left over: products take the
 * lower ones alone, of which they are the next round's words as they are. */
typedef struct philox_words {
    __m256i c0, c1, c2, c3;
} philox_words;

__attribute__((target("avx2"), always_inline)) static inline void philox_round_avx2(philox_words *w, __m256i key0,
                                                                                    __m256i key1)
{
    const __m256i product0 = _mm256_mul_epu32(w->c0, _mm256_set1_epi64x(CUDA_OPS_PHILOX_MULTIPLIER_0));
    const __m256i product1 = _mm256_mul_epu32(w->c2, _mm256_set1_epi64x(CUDA_OPS_PHILOX_MULTIPLIER_1));
    w->c0 = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), _mm256_xor_si256(w->c1, key0));
    w->c1 = product1;
    w->c2 = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), _mm256_xor_si256(w->c3, key1));
    w->c3 = product0;
}

/* The words of four counters, counter by counter. */
__attribute__((target("avx2"), always_inline)) static inline void philox_store_avx2(uint32_t *words,
                                                                                    const philox_words *w)
{
    const __m256i front = _mm256_blend_epi32(w->c0, _mm256_slli_epi64(w->c1, 32), 0xaa);
    const __m256i back = _mm256_blend_epi32(w->c2, _mm256_slli_epi64(w->c3, 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(front, back), odd = _mm256_unpackhi_epi64(front, back);
    _mm256_storeu_si256((__m256i *)words, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i *)(words + 8), _mm256_permute2x128_si256(even, odd, 0x31));
}

/* Sixteen counters at once: a round's products are done before the next one asks for them. */
__attribute__((target("avx2"))) static void philox_block_avx2(uint32_t words[4 * PHILOX_BLOCK], uint64_t low,
                                                              uint64_t quadruple, uint64_t seed)
{
    const __m256i first = _mm256_set1_epi64x((int64_t)low), second = _mm256_srli_epi64(first, 32);
    for (int i = 0; i < PHILOX_BLOCK; i += 16) {
        __m256i high = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)quadruple + i), _mm256_set_epi64x(3, 2, 1, 0));
        philox_words w[4];
#pragma GCC unroll 4
        for (int group = 0; group < 4; group++) {
            w[group] = (philox_words){first, second, high, _mm256_srli_epi64(high, 32)};
            high = _mm256_add_epi64(high, _mm256_set1_epi64x(4));
        }
        __m256i key0 = _mm256_set1_epi64x((int64_t)seed), key1 = _mm256_srli_epi64(key0, 32);
#pragma GCC unroll 10
        for (int round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
#pragma GCC unroll 4
            for (int group = 0; group < 4; group++)
                philox_round_avx2(&w[group], key0, key1);
            key0 = _mm256_add_epi32(key0, _mm256_set1_epi64x(CUDA_OPS_PHILOX_WEYL_0));
            key1 = _mm256_add_epi32(key1, _mm256_set1_epi64x(CUDA_OPS_PHILOX_WEYL_1));
        }
#pragma GCC unroll 4
        for (int group = 0; group < 4; group++)
            philox_store_avx2(words + 4 * (i + 4 * group), &w[group]);
    }
}

/* The same of eight counters to a vector, all of a block at once. */
__attribute__((target("avx512f"))) static void philox_block_avx512(uint32_t words[4 * PHILOX_BLOCK], uint64_t low,
                                                                   uint64_t quadruple, uint64_t seed)
{
    enum { GROUPS = PHILOX_BLOCK / 8 };
    const __m512i first = _mm512_set1_epi64((int64_t)low), second = _mm512_srli_epi64(first, 32);
    const __m512i multiplier0 = _mm512_set1_epi64(CUDA_OPS_PHILOX_MULTIPLIER_0);
    const __m512i multiplier1 = _mm512_set1_epi64(CUDA_OPS_PHILOX_MULTIPLIER_1);
    __m512i high = _mm512_add_epi64(_mm512_set1_epi64((int64_t)quadruple), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    __m512i c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS];
#pragma GCC unroll 4
    for (int group = 0; group < GROUPS; group++) {
        c0[group] = first, c1[group] = second, c2[group] = high, c3[group] = _mm512_srli_epi64(high, 32);
        high = _mm512_add_epi64(high, _mm512_set1_epi64(8));
    }
    __m512i key0 = _mm512_set1_epi64((int64_t)seed), key1 = _mm512_srli_epi64(key0, 32);
    enum { XOR_OF_THREE = 0x96 };
#pragma GCC unroll 10
    for (int round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; group++) {
            const __m512i product0 = _mm512_mul_epu32(c0[group], multiplier0);
            const __m512i product1 = _mm512_mul_epu32(c2[group], multiplier1);
            c0[group] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), c1[group], key0, XOR_OF_THREE);
            c2[group] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), c3[group], key1, XOR_OF_THREE);
            c1[group] = product1, c3[group] = product0;
        }
        key0 = _mm512_add_epi32(key0, _mm512_set1_epi64(CUDA_OPS_PHILOX_WEYL_0));
        key1 = _mm512_add_epi32(key1, _mm512_set1_epi64(CUDA_OPS_PHILOX_WEYL_1));
    }
    const __m512i lower = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                  upper = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
#pragma GCC unroll 4
    for (int group = 0; group < GROUPS; group++) {
        const __m512i front = _mm512_mask_blend_epi32(0xaaaa, c0[group], _mm512_slli_epi64(c1[group], 32));
        const __m512i back = _mm512_mask_blend_epi32(0xaaaa, c2[group], _mm512_slli_epi64(c3[group], 32));
        /* Counters 0, 2, 4, 6 and 1, 3, 5, 7, and then in their order. */
        const __m512i even = _mm512_unpacklo_epi64(front, back), odd = _mm512_unpackhi_epi64(front, back);
        _mm512_storeu_si512(words + 32 * group, _mm512_permutex2var_epi64(even, lower, odd));
        _mm512_storeu_si512(words + 32 * group + 16, _mm512_permutex2var_epi64(even, upper, odd));
    }
}
#endif

/* words[4 * i + j] = word j of Philox at counter (low, quadruple + i). */
static inline void philox_block(uint32_t words[4 * PHILOX_BLOCK], uint64_t low, uint64_t quadruple, uint64_t seed)
{
#if CUDA_OPS_WITH_TARGETS
    if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512) {
        philox_block_avx512(words, low, quadruple, seed);
        return;
    }
    if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX2) {
        philox_block_avx2(words, low, quadruple, seed);
        return;
    }
#endif
    philox_block_portable(words, low, quadruple, seed);
}

#endif
